"""Answers about images are those of mlx-lm's model with the features in place of its embeddings, in any batch."""

from __future__ import annotations

import dataclasses
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.core.engine.constraint import Constraint
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.part import Room
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import FinishReason, Priority, SequenceStatus
from mlxpaged.core.step import FIRST_CONTENT_ID
from mlxpaged.engine import sizes
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.features import Feature
from mlxpaged.models.loader import ServedModel
from mlxpaged.models.sharding import Share
from mlxpaged.parts.images import image_encoder
from mlxpaged.parts.images.image_encoder import IMAGES, NO_IMAGES, ImageEncoder, ImageStats
from mlxpaged.parts.memory.pool_resizer import PoolResizer
from mlxpaged.parts.ranks.ranks import Ranks
from mlxpaged.parts.ranks.shared_runner import SharedRunner
from mlxpaged.vision.blocks import LEAST, MOST, Phase, pace
from mlxpaged.vision.image import PromptImage
from mlxpaged.vision.tower import Tower
from tests.engine.helpers import make_core, part_of
from tests.engine.seeing import PatchTower, expected_answer, image, load_seeing, shown
from tests.models.architectures import make_architecture
from tests.support import make_adapter

Prompt = tuple[list[int], tuple[PromptImage, ...]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_architecture(tmp_path_factory.mktemp("seeing") / "m", "llama")


@pytest.fixture
def seeing(path: Path) -> tuple[ServedModel, PatchTower]:
    return load_seeing(path)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 250) for _ in range(length)]


WIDE, TALL, LARGE = image(1, 64, 32), image(2, 24, 72), image(3, 80, 80)

PROMPTS: list[Prompt] = [
    shown(text(1, 5), WIDE, text(2, 6)),
    shown(text(3, 3), TALL, text(4, 4), LARGE, text(5, 5)),
    shown(text(6, 4)),
    shown(text(7, 70)),
    shown(LARGE, text(8, 3), WIDE, text(9, 1)),
    shown(text(10, 40), TALL, text(11, 30)),
    shown(WIDE, WIDE, text(12, 2)),
]


def request(name: str, prompt: Prompt, fork_of: str | None = None, **params: Any) -> Request:
    options = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | params
    tokens, images = prompt
    return Request(name, tokens, SamplingParams(**options), time.monotonic(), fork_of=fork_of, images=images)


def finish(core: EngineCore) -> dict[str, RequestOutput]:
    """The last output of each request, with all its tokens."""
    last: dict[str, RequestOutput] = {}
    while core.has_work():
        for output in core.step():
            before = last[output.request_id].token_ids if output.request_id in last else ()
            last[output.request_id] = output._replace(token_ids=before + output.token_ids)
    return last


def answers(core: EngineCore, prompts: Sequence[Prompt], **params: Any) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        core.add(request(f"{i}", prompt, **params))
    last = finish(core)
    assert all(output.error is None for output in last.values())
    return [list(last[f"{i}"].token_ids) for i in range(len(prompts))]


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    return [expected_answer(path, *prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [7, 32, 2048])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.rotated("models")
def test_a_mixed_batch(
    seeing: tuple[ServedModel, PatchTower], expected: list[list[int]], chunk: int, caching: bool
) -> None:
    core = make_core(seeing[0], max_num_batched_tokens=chunk, max_num_seqs=7, prefix_caching=caching)
    assert answers(core, PROMPTS) == expected


def test_each_alone(seeing: tuple[ServedModel, PatchTower], expected: list[list[int]]) -> None:
    core = make_core(seeing[0], prefix_caching=False)
    assert [answers(core, [prompt])[0] for prompt in PROMPTS] == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_num_batched_tokens": 18, "max_num_seqs": 7}, "--max-num-batched-tokens 19 allows that"),
        ({"batch_invariant": True}, "--batch-invariant computes each token by itself"),
    ],
    ids=["step", "batch-invariant"],
)
def test_an_engine_that_cannot_compute_images_whole_takes_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], reason: str
) -> None:
    path = make_architecture(tmp_path / "m", "gemma3_text")
    core = make_core(load_seeing(path, mutual="all")[0], **options)
    assert core.part(ImageEncoder) is None
    assert reason in core.served.missing[Feature.IMAGES]
    assert reason in caplog.text
    assert answers(core, [PROMPTS[3]]) == [expected_answer(path, *PROMPTS[3])]


def test_other_images_give_other_answers(path: Path, expected: list[list[int]]) -> None:
    """Without this, the tests above would prove little."""
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        if prompt[1]:
            changed = tuple(
                PromptImage(each.digest, each.pixels[::-1, ::-1].copy(), each.positions) for each in prompt[1]
            )
            assert expected_answer(path, prompt[0], changed) != answer


def test_a_conversation_encodes_each_image_once(path: Path, seeing: tuple[ServedModel, PatchTower]) -> None:
    """8 turns with 3 images: each turn computes its new tokens and at most a block."""
    served, tower = seeing
    core = make_core(served)
    parts: list[Sequence[int] | PromptImage] = []
    computed = 0
    for turn in range(8):
        new: list[Sequence[int] | PromptImage] = [text(100 + turn, 20)]
        if turn in (0, 3, 4):
            new.append(image(50 + turn, 48, 48))
        new.append(text(200 + turn, 9))
        parts += new
        prompt = shown(*parts)
        [answer] = answers(core, [prompt])
        assert answer == expected_answer(path, *prompt)
        total = core.scheduler.stats().prompt_tokens_total - core.scheduler.stats().prefix_hit_tokens_total
        assert total - computed <= len(shown(*new)[0]) + 16 + 32
        computed = total
        parts.append(answer)
    assert len(tower.calls) == 3


def test_an_image_that_the_prefix_cache_covers_is_not_encoded(
    seeing: tuple[ServedModel, PatchTower], expected: list[list[int]]
) -> None:
    served, tower = seeing
    core = make_core(served)
    prompt = shown(text(1, 5), WIDE, text(2, 60))
    images = part_of(core, ImageEncoder).images
    first = answers(core, [prompt])
    images.budget = 0
    images.evict()
    assert answers(core, [prompt]) == first
    assert len(tower.calls) == 1


def test_another_image_of_this_size_is_not_found_in_the_prefix_cache(
    path: Path, seeing: tuple[ServedModel, PatchTower]
) -> None:
    served, _ = seeing
    core = make_core(served)
    for seed in (1, 2):
        prompt = shown(text(1, 32), image(seed, 64, 64), text(2, 40))
        core.add(request("r", prompt))
        output = finish(core)["r"]
        assert list(output.token_ids) == expected_answer(path, *prompt)
        assert output.num_cached_tokens == (0 if seed == 1 else 32)


def test_one_image_of_many_requests_is_encoded_once(seeing: tuple[ServedModel, PatchTower]) -> None:
    served, tower = seeing
    core = make_core(served, blocks=200)
    got = answers(core, [shown(text(1, 5), LARGE, text(2 + i, 6)) for i in range(16)])
    assert tower.calls == [(1, 80, 80, 3)]
    assert len(got) == 16
    features = 100 * tower.weights.shape[1] * 4
    assert core.stats().of(NO_IMAGES) == ImageStats(encoded_total=1, feature_bytes=features)


def test_images_of_one_size_are_encoded_together(seeing: tuple[ServedModel, PatchTower]) -> None:
    served, tower = seeing
    answers(make_core(served), [shown(image(60 + i, 40, 40), text(i, 4)) for i in range(5)])
    assert tower.calls == [(5, 40, 40, 3)]


@pytest.mark.parametrize("swap_blocks", [0, 40])
def test_preemption(seeing: tuple[ServedModel, PatchTower], expected: list[list[int]], swap_blocks: int) -> None:
    core = make_core(seeing[0], blocks=14, swap_blocks=swap_blocks, prefix_caching=False)
    assert preempted_answers(core, PROMPTS) == expected


def preempted_answers(core: EngineCore, prompts: Sequence[Prompt], **params: Any) -> list[list[int]]:
    """With a running sequence that loses its blocks in every fourth step."""
    for i, prompt in enumerate(prompts):
        core.add(request(f"{i}", prompt, **params))
    last: dict[str, list[int]] = {f"{i}": [] for i in range(len(prompts))}
    steps = 0
    while core.has_work():
        steps += 1
        if steps % 4 == 0 and core.scheduler.running:
            victim = next(iter(core.scheduler.running))
            core.scheduler.recompute(victim)
        for output in core.step():
            assert output.error is None
            last[output.request_id] += output.token_ids
    return list(last.values())


def test_forks(path: Path, seeing: tuple[ServedModel, PatchTower]) -> None:
    served, _ = seeing
    core = make_core(served)
    core.add(request("a", PROMPTS[1]))
    core.add(request("b", PROMPTS[1], fork_of="a"))
    last = finish(core)
    wanted = expected_answer(path, *PROMPTS[1])
    assert [list(last[name].token_ids) for name in "ab"] == [wanted, wanted]


@pytest.mark.parametrize("budget", [0, 2**28])
def test_forks_wait_with_their_parent_for_images_that_take_several_steps(
    path: Path, seeing: tuple[ServedModel, PatchTower], monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setattr(image_encoder, "MOST_SECONDS", 0.0)  # one part between two steps
    core = make_core(seeing[0], blocks=10)
    images = part_of(core, ImageEncoder).images
    images.budget = budget
    assert part_of(core, PoolResizer).room is Room.NEVER
    core.add(request("a", PROMPTS[1]))
    core.add(request("b", PROMPTS[1], fork_of="a"))
    for _ in range(20):
        if core.scheduler.held[IMAGES]:
            core.step()
            assert core.pause() == 0.0
    assert not core.scheduler.held[IMAGES]
    assert list(finish(core)["b"].token_ids) == expected_answer(path, *PROMPTS[1])


def test_an_image_is_encoded_without_a_pause_while_a_request_waits_for_memory(
    seeing: tuple[ServedModel, PatchTower], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_encoder, "MOST_SECONDS", 0.0)  # one part between two steps
    monkeypatch.setattr(sizes, "START_TOKENS", 64)
    core = make_core(seeing[0])
    monkeypatch.setattr(core.runner, "free_memory", lambda: 0)
    core.add(request("large", shown(text(1, 300))))
    core.add(request("sees", PROMPTS[0]))
    while core.scheduler.held[IMAGES]:
        core.step()
        assert core.pause() == 0.0
    core.abort("large")
    assert finish(core)["sees"].finish_reason is FinishReason.LENGTH


def test_features_that_were_dropped_are_made_again(
    seeing: tuple[ServedModel, PatchTower], expected: list[list[int]]
) -> None:
    """A budget of nothing keeps only what prompts need at the moment."""
    served, tower = seeing
    core = make_core(served, prefix_caching=False)
    images = part_of(core, ImageEncoder).images
    images.budget = 0
    assert [answers(core, [prompt])[0] for prompt in (*PROMPTS, *PROMPTS)] == expected * 2
    assert len(tower.calls) > 6


def test_features_are_dropped_though_the_other_ranks_are_lost(seeing: tuple[ServedModel, PatchTower]) -> None:
    """So that all requests can be ended. The next step raises RankLostError."""
    core = make_core(seeing[0])
    answers(core, [PROMPTS[0]])
    images = part_of(core, ImageEncoder).images
    assert images.nbytes > 0

    def fail(message: bytes) -> None:
        raise ConnectionError("no rank is there")

    group: Any = Share(0, 2)
    SharedRunner(Ranks(group, fail), images, seeing[0], 8, 32, "gather", inputs=[images]).lead()
    images.budget = 0
    images.evict()
    assert images.nbytes == 0


def test_an_image_that_cannot_be_encoded_ends_its_requests_alone(
    seeing: tuple[ServedModel, PatchTower], expected: list[list[int]]
) -> None:
    served, tower = seeing
    bad = image(9, 64, 32)
    tower.faulty = int(bad.pixels[0, 0, 0])
    core = make_core(served)
    core.add(request("text", PROMPTS[3]))
    core.add(request("good", PROMPTS[0]))  # of the same size
    core.add(request("bad", shown(text(1, 5), bad, text(2, 5))))
    last = finish(core)
    assert [list(last[name].token_ids) for name in ("text", "good")] == [expected[3], expected[0]]
    assert last["bad"].finish_reason is FinishReason.ERROR
    assert "this image cannot be encoded" in str(last["bad"].error)


def test_a_request_that_is_cancelled_before_its_image_is_encoded(
    seeing: tuple[ServedModel, PatchTower], expected: list[list[int]]
) -> None:
    served, tower = seeing
    core = make_core(served)
    core.add(request("gone", PROMPTS[1]))
    core.add(request("stays", PROMPTS[0]))
    core.cancel(["gone"])
    assert list(finish(core)["stays"].token_ids) == expected[0]
    assert tower.calls == [(1, 32, 64, 3)]


def test_an_image_of_a_request_that_is_cancelled_meanwhile_is_given_up(
    seeing: tuple[ServedModel, PatchTower], expected: list[list[int]]
) -> None:
    served, tower = seeing
    tower.parts = 50
    config = EngineConfig(max_step_ms=0, kv_cache_bytes=10**7)
    core = build_engine(config, served, clock=lambda: 0.2 * tower.steps)  # each part is longer than it may be
    core.add(request("gone", shown(LARGE, text(1, 3))))
    core.step()
    core.cancel(["gone"])
    assert not core.has_work()
    steps = tower.steps
    core.add(request("stays", PROMPTS[0]))
    assert list(finish(core)["stays"].token_ids) == expected[0]
    assert (steps, tower.steps) == (1, 1 + 50)


def test_prompts_of_adapters(path: Path, tmp_path: Path) -> None:
    """In one batch with those of the model alone."""
    adapters = [AdapterPath(name, make_adapter(path, tmp_path / name, seed)) for seed, name in enumerate(("a", "b"))]
    served, _ = load_seeing(path, adapters=adapters)
    core = make_core(served, blocks=200, max_num_batched_tokens=40, max_num_seqs=12)
    paths: dict[str | None, Path | None] = {None: None} | dict(adapters)
    wanted = {}
    for i, prompt in enumerate(PROMPTS[:5]):
        for name, directory in paths.items():
            core.add(dataclasses.replace(request(f"{i} {name}", prompt), adapter=name))
            wanted[f"{i} {name}"] = expected_answer(path, *prompt, adapter=directory)
    assert {name: list(output.token_ids) for name, output in finish(core).items()} == wanted
    assert wanted["0 None"] != wanted["0 a"] != wanted["0 b"]


def test_penalties_and_log_probabilities(seeing: tuple[ServedModel, PatchTower]) -> None:
    core = make_core(seeing[0])
    params = {"repetition_penalty": 1.3, "repetition_context_size": 20, "presence_penalty": 0.5, "logprobs": 2}
    for output in answers(core, PROMPTS, **params):
        assert len(output) == 16
        assert max(output) < FIRST_CONTENT_ID


def test_a_grammar_beside_images(seeing: tuple[ServedModel, PatchTower], expected: list[list[int]]) -> None:
    """Each prompt with and without a grammar, in one batch. An answer within the grammar depends on its image."""
    core = make_core(seeing[0], blocks=200, max_num_seqs=16)
    letters = Constraint("regex", "[a-z]{12}")
    changed = shown(text(1, 5), image(9, 64, 32), text(2, 6))
    for i, prompt in enumerate([*PROMPTS, changed]):
        core.add(request(f"free {i}", prompt))
        core.add(request(f"held {i}", prompt, constraint=letters, max_tokens=20, ignore_eos=False))
    texts: dict[str, str] = {}
    tokens: dict[str, list[int]] = {}
    while core.has_work():
        for output in core.step():
            assert output.error is None
            texts[output.request_id] = texts.get(output.request_id, "") + output.text
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    held = [texts[f"held {i}"] for i in range(len(PROMPTS) + 1)]
    assert all(re.fullmatch(letters.text, each) for each in held)
    assert held[0] != held[-1]
    assert [tokens[f"free {i}"] for i in range(len(PROMPTS))] == expected


def test_priorities_of_requests_with_images(seeing: tuple[ServedModel, PatchTower], expected: list[list[int]]) -> None:
    """The image of the urgent one is encoded first, and all answers are the same as without priorities."""
    served, tower = seeing
    core = make_core(served, blocks=14, prefix_caching=False, max_num_seqs=2)
    order = [Priority.LOW, Priority.NORMAL, Priority.LOW, Priority.NORMAL, Priority.HIGH]
    core.submit(
        [
            dataclasses.replace(request(f"{i}", prompt), priority=priority)
            for i, (prompt, priority) in enumerate(zip(PROMPTS[:5], order, strict=True))
        ]
    )
    last = finish(core)
    assert [list(last[f"{i}"].token_ids) for i in range(5)] == expected[:5]
    assert tower.calls[0][1:] == LARGE.pixels.shape
    assert next(iter(last)) == "4"


def test_a_model_without_a_tower_refuses_images(path: Path) -> None:
    from mlxpaged.models.loader import load_model

    core = make_core(load_model(str(path)))
    [refused] = core.submit([request("r", PROMPTS[0])])
    assert "takes no images" in str(refused.error)


@pytest.mark.parametrize(
    ("plain", "step", "parts"), [(0.0, 0.0, 1), (0.05, 0.05, 1), (0.1, 0.1, 2), (0.1, 0.14, 1), (5.0, 5.0, 3)]
)
def test_streams_go_on_while_an_image_is_encoded(
    seeing: tuple[ServedModel, PatchTower], plain: float, step: float, parts: int
) -> None:
    """A step and the encoder's work after it take 1.75 times as long as a step without the encoder, if a part takes no
    longer than that allows. A part takes 0.03 s here, and the work at most 0.1 s. If steps get longer beside the
    encoder, it works less."""
    served, tower = seeing
    tower.parts = 40
    now = 0.0
    core = build_engine(
        EngineConfig(max_step_ms=0, kv_cache_bytes=10**7), served, clock=lambda: now + 0.03 * tower.steps
    )
    core.add(request("stream", PROMPTS[2], max_tokens=100))
    for _ in range(12):
        core.step()
        now += plain
    core.add(request("image", shown(LARGE, text(1, 3)), max_tokens=1))
    busy = []
    while core.has_work():
        before = tower.steps
        tokens = [output for output in core.step() if output.request_id == "stream" and output.token_ids]
        now += step
        if tower.steps > before:
            busy.append((tower.steps - before, len(tokens)))
    assert busy[1:-1] == [(parts, 1)] * (len(busy) - 2)
    assert len(busy) >= 40 // 4


class SlowBlocks(Tower):
    """Computes three blocks of 1,024 patches before the features of another tower. seconds: what they have taken, with
    those of a patch in a block's two phases."""

    def __init__(self, tower: PatchTower, of_heads: float, of_rest: float) -> None:
        super().__init__()
        self.tower, self.seconds = tower, 0.0
        self.of_patch: dict[Phase, float] = {"heads": of_heads, "rest": of_rest}

    def encode(self, pixels: mx.array) -> Iterator[mx.array]:
        for _ in range(3):
            for phase, seconds in self.of_patch.items():
                for some in pace.slices(phase, 1024, 1):
                    self.seconds += seconds * (some.stop - some.start)
                    yield pixels
        yield from self.tower.encode(pixels)


@pytest.mark.parametrize(("of_heads", "of_rest"), [(5e-5, 1e-3), (1e-4, 3e-4)])
def test_eight_streams_keep_their_pace_while_eight_images_are_encoded(
    seeing: tuple[ServedModel, PatchTower], of_heads: float, of_rest: float
) -> None:
    """A step takes 0.1 s. The parts of a block's second phase take up to 20 times as long as those before them."""
    served, tower = seeing
    tower.parts = 1
    slow = SlowBlocks(tower, of_heads, of_rest)
    assert served.vision is not None
    served = dataclasses.replace(served, vision=dataclasses.replace(served.vision, tower=slow))
    now = 0.0
    config = EngineConfig(max_step_ms=0, kv_cache_bytes=10**8, max_num_seqs=16)
    core = build_engine(config, served, clock=lambda: now + slow.seconds)
    for i in range(8):
        core.add(request(f"stream {i}", PROMPTS[2], max_tokens=1000))
    for _ in range(12):
        core.step()
        now += 0.1
    parts = [image(10 + i, 80, 80) for i in range(8)]
    core.add(request("images", shown(*parts, text(1, 3)), max_tokens=1))
    gaps, last = [], core.clock()
    while core.scheduler.held[IMAGES]:
        outputs = core.step()
        now += 0.1
        assert sum(bool(output.token_ids) for output in outputs) == 8
        gaps.append(core.clock() - last)
        last = core.clock()
    assert max(gaps) <= 0.2
    assert statistics.mean(gaps[:-1]) > 0.14, "the time that it has is used"
    assert len(tower.calls) == 8 or tower.calls == [(8, 80, 80, 3)]


@pytest.mark.parametrize(("options", "smaller"), [({}, True), ({"batch_invariant": True}, False)], ids=str)
def test_parts_of_an_encoding_may_get_smaller(
    seeing: tuple[ServedModel, PatchTower], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], smaller: bool
) -> None:
    """Those of a batch-invariant engine have one size, whatever other engines of the process have made of it."""
    monkeypatch.setattr(pace, "patches", dict.fromkeys(pace.patches, MOST if smaller else LEAST))
    served, tower = seeing
    config = EngineConfig(max_step_ms=0, kv_cache_bytes=10**7, **options)
    core = build_engine(config, served, clock=lambda: 0.2 * tower.steps)
    core.add(request("r", PROMPTS[0]))
    finish(core)
    assert (min(pace.patches.values()) < MOST) is smaller


def test_status_counts_a_request_that_waits_for_its_image(seeing: tuple[ServedModel, PatchTower]) -> None:
    core = make_core(seeing[0])
    core.add(request("r", PROMPTS[0]))
    assert core.scheduler.stats().waiting == 1
    assert [sequence.status for sequence in core.scheduler.sequences.values()] == [SequenceStatus.WAITING]
    finish(core)


def test_requests_that_share_no_blocks_share_no_features(seeing: tuple[ServedModel, PatchTower]) -> None:
    served, tower = seeing
    core = make_core(served)
    for i, salt in enumerate([("a",), ("b",), ("a",)]):
        core.add(dataclasses.replace(request(f"{i}", PROMPTS[0]), cache_salt=salt))
    finish(core)
    assert tower.calls == [(2, 32, 64, 3)]


def test_a_request_that_waits_for_its_image_is_in_the_status(seeing: tuple[ServedModel, PatchTower]) -> None:
    core = make_core(seeing[0])
    core.add(request("text", PROMPTS[2]))
    core.add(request("image", PROMPTS[0]))
    assert [each.request_id for each in core.status().waiting] == ["text", "image"]
    finish(core)
