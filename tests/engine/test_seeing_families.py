"""Each family that sees answers token for token as mlx-lm's model does with the features in place of its embeddings.

The towers are stand-ins. What the families' own towers compute is shown in tests/vision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from mlxpaged.core.scheduling.block_manager import WORTH_A_COPY
from mlxpaged.models.loader import ServedModel
from mlxpaged.vision.image import PromptImage
from mlxpaged.vision.positions import Axes
from tests.engine.helpers import make_core
from tests.engine.seeing import Fault, Mutual, PatchTower, expected_answer, image, load_seeing, shown
from tests.engine.test_images import Prompt, answers, finish, preempted_answers, request, text
from tests.models.architectures import make_architecture

BLOCK = 32

NUM_TOKENS = 10
"""Of an answer."""


@dataclass(frozen=True)
class Family:
    """architecture: of its text model. axes, num_deep, mutual: see Vision. hits: where those of the prefix cache end,
    at checkpoints if layers keep states, and nowhere if the model runs once per sequence."""

    architecture: str
    axes: Axes | None = None
    num_deep: int = 0
    mutual: Mutual = "none"
    hits: Literal["blocks", "checkpoints", "nowhere"] = "blocks"

    def answer(self, path: Path, prompt: Prompt, without: Fault = "") -> list[int]:
        options = {"axes": self.axes, "num_deep": self.num_deep, "mutual": self.mutual}
        return expected_answer(path, *prompt, num_tokens=NUM_TOKENS, **options, without=without)  # type: ignore[arg-type]

    @property
    def chunks(self) -> tuple[int, int]:
        """Tokens of a step. Where images are whole, a step has room for the largest and a token of each other row."""
        return (5, 24) if self.mutual == "none" else (19, 24)


INTERLEAVED, SECTIONS = Axes((4, 2, 2), interleaved=True), Axes((4, 2, 2), interleaved=False)

FAMILIES = {
    "qwen2_vl": Family("qwen2_vl", SECTIONS),  # and Qwen2.5-VL
    "qwen3_vl": Family("qwen3_vl", INTERLEAVED, num_deep=2),
    "qwen3_vl_moe": Family("qwen3_vl_moe", INTERLEAVED, num_deep=2),
    "qwen3_5": Family("qwen3_5", Axes((1, 1, 0), interleaved=True), hits="checkpoints"),
    "prism": Family("prism_hadamard_qwen35", Axes((1, 1, 0), interleaved=True), hits="checkpoints"),
    "gemma3": Family("gemma3", mutual="all"),
    "gemma3n": Family("gemma3n"),
    "gemma4": Family("gemma4", mutual="windows"),
    "gemma4-E": Family("gemma4"),
    "mistral3": Family("mistral3"),
    "pixtral": Family("pixtral"),
    "lfm2-vl": Family("lfm2-vl", hits="checkpoints"),
    "kimi_vl": Family("kimi_vl"),
    "kimi_k25": Family("kimi_k25"),
    "kimi_k3": Family("kimi_k3", hits="checkpoints"),
    "minimax_m3_vl": Family("minimax_m3_vl", hits="nowhere"),
    "muse_glimmer": Family("muse_glimmer"),
    "llama4": Family("llama4", hits="nowhere"),
}

QUICK = ("qwen3_vl", "qwen3_5", "gemma4")
"""Those that are tested with each change: positions of their own and deep features, states, and masks."""

SMALL, TALL, WIDE = image(1, 32, 24), image(2, 24, 32), image(3, 40, 16)
"""None has more than 12 tokens, which is the window of the tiny models."""

PROMPTS: list[Prompt] = [
    shown(text(1, 5), SMALL, text(2, 6)),
    shown(text(3, 3), TALL, text(4, 4), WIDE, text(5, 5)),
    shown(text(6, 4)),
    shown(text(7, 70)),
    shown(WIDE, text(8, 3), SMALL, text(9, 1)),
    shown(text(10, 25), TALL, text(11, 40)),
    shown(SMALL, SMALL, text(12, 2)),
]

HITS: dict[str, Prompt] = {
    "before": shown(text(20, BLOCK + 2), SMALL, text(21, 5)),
    "inside": shown(text(22, BLOCK - 6), SMALL, text(23, 5)),
    "after": shown(text(24, 8), SMALL, text(25, BLOCK)),
}
"""Prompts whose last whole block ends before their image, inside it, or after it."""


@dataclass(frozen=True)
class Case:
    family: Family
    path: Path
    expected: list[list[int]]

    def load(self) -> tuple[ServedModel, PatchTower]:
        return load_seeing(self.path, self.family.axes, self.family.num_deep, self.family.mutual)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in QUICK else [pytest.mark.models]) for name in FAMILIES],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family = FAMILIES[request.param]
    path = make_architecture(tmp_path_factory.mktemp("family") / "m", family.architecture)
    return Case(family, path, [family.answer(path, prompt) for prompt in PROMPTS])


def test_each_alone_then_from_the_prefix_cache(case: Case) -> None:
    """One image, two of different sizes, one twice, and none."""
    served, tower = case.load()
    core = make_core(served)
    assert [answers(core, [prompt], max_tokens=NUM_TOKENS)[0] for prompt in PROMPTS] == case.expected
    calls = len(tower.calls)
    assert answers(core, PROMPTS, max_tokens=NUM_TOKENS) == case.expected
    assert len(tower.calls) == calls


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.rotated("models")
def test_a_batch_of_seven_in_steps_of_few_tokens(case: Case, size: int) -> None:
    chunk = case.family.chunks[size]
    core = make_core(case.load()[0], max_num_batched_tokens=chunk, max_num_seqs=min(7, chunk))
    assert answers(core, PROMPTS, max_tokens=NUM_TOKENS) == case.expected


@pytest.mark.parametrize("where", HITS)
@pytest.mark.rotated("models")
def test_a_hit(case: Case, where: str) -> None:
    prompt = HITS[where]
    positions = prompt[1][0].positions
    expected = case.family.answer(case.path, prompt)
    core = make_core(case.load()[0])
    cached = []
    for _ in range(2):
        core.add(request("r", prompt, max_tokens=NUM_TOKENS))
        output = finish(core)["r"]
        assert list(output.token_ids) == expected
        cached.append(output.num_cached_tokens)
    end = {"nowhere": 0, "checkpoints": BLOCK, "blocks": len(prompt[0]) - 1}[case.family.hits]
    if case.family.hits == "blocks":  # an image that is not whole in the next block is not copied, nor are three tokens
        end = min([each for each in positions if each >= BLOCK] + [end])
        end = end if end - BLOCK >= BLOCK / WORTH_A_COPY else BLOCK
    assert cached == [0, end]
    before, after = positions[0] >= BLOCK, positions[-1] < BLOCK
    assert where == ("before" if before else "after" if after else "inside")


@pytest.mark.parametrize("swap_blocks", [0, 40], ids=["recompute", "swap"])
@pytest.mark.rotated("models")
def test_preemption(case: Case, swap_blocks: int) -> None:
    sizes = {"max_num_batched_tokens": case.family.chunks[-1], "max_num_seqs": 7}
    core = make_core(case.load()[0], blocks=24, swap_blocks=swap_blocks, prefix_caching=False, **sizes)
    assert preempted_answers(core, PROMPTS, max_tokens=NUM_TOKENS) == case.expected


@pytest.mark.parametrize("number", [1, 4])
def test_a_fork(case: Case, number: int) -> None:
    core = make_core(case.load()[0])
    core.add(request("a", PROMPTS[number], max_tokens=NUM_TOKENS))
    core.add(request("b", PROMPTS[number], fork_of="a", max_tokens=NUM_TOKENS))
    last = finish(core)
    assert [list(last[name].token_ids) for name in "ab"] == [case.expected[number]] * 2


@pytest.mark.parametrize("tuning", ["paged", "matrix", "contiguous"])
@pytest.mark.models
def test_the_kernels_of_a_mac(case: Case, tuning: str, metal: None) -> None:
    """Rows that see the keys after theirs have a variant of the kernels, which other models do without."""
    if case.family.mutual == "none":
        pytest.skip("its images are causal")
    options = {"attention_backend": "metal", "attention_tuning": tuning}
    core = make_core(case.load()[0], max_num_batched_tokens=case.family.chunks[-1], max_num_seqs=7, **options)
    assert core.runner.backend == "metal"
    assert answers(core, PROMPTS, max_tokens=NUM_TOKENS) == case.expected


def test_answers_depend_on_all_of_it(case: Case) -> None:
    """Without this, the tests above would prove little: references with reversed images, and without what the family
    needs in addition to features, give other answers to prompts with images, and the same to those of text."""
    family, path = case.family, case.path
    references = {
        "reversed": [family.answer(path, (tokens, reversed_(images))) for tokens, images in PROMPTS],
    }
    if family.axes is not None:
        plain = dataclasses.replace(family, axes=None)
        references["plain positions"] = [plain.answer(path, prompt) for prompt in PROMPTS]
        references["delta"] = [family.answer(path, prompt, "delta") for prompt in PROMPTS]
    if family.num_deep:
        references["deepstack"] = [family.answer(path, prompt, "deepstack") for prompt in PROMPTS]
    if family.mutual != "none":
        references["masks"] = [family.answer(path, prompt, "masks") for prompt in PROMPTS]
    changed = {
        name: [i for i, found in enumerate(answered) if found != case.expected[i]]
        for name, answered in references.items()
    }
    assert all(PROMPTS[i][1] for each in changed.values() for i in each)
    assert all(len(each) >= 2 for each in changed.values()), changed


def reversed_(images: Sequence[PromptImage]) -> tuple[PromptImage, ...]:
    return tuple(dataclasses.replace(each, pixels=each.pixels[::-1, ::-1].copy()) for each in images)
