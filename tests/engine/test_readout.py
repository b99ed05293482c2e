"""The probabilities of whole answers equal those of mlx-lm's contiguous caches, however the engine computes them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from mlxpaged.api.generation import readout_waves
from mlxpaged.api.generation.readout_waves import EngineRow, ReadoutPrompt, waves_of
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.readout import Readout, ReadoutRow, RowReading, has_prefix, log_sum_exp, normalized
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from tests.engine.hybrid import Hybrid, Run, TinyModel, run
from tests.metal_on_cpu.fixtures import metal
from tests.models.architectures import ARCHITECTURES, VOCAB_SIZE, random_weights
from tests.support import make_tiny_model

__all__ = ["metal"]

TOLERANCE = 1e-4
FAMILIES = {
    "dense": "llama",
    "windowed": "gemma3_text",
    "latent": "deepseek_v3",
    "mixture": "mixtral",
}
"""Architectures by what is special about their caches; the recurrent one is `Hybrid`."""
PREFIX = [(7 * i) % 91 + 16 for i in range(45)]
QUESTIONS = [[100, 101, 102], [103, 104, 105, 106, 107], [108], [109, 110]]
END = (250, 251)
ANSWERS = {
    "single tokens": [[20], [21], [22]],
    "equal first tokens": [[20, 30], [20, 31], [20, 32, 33], [21]],
    "of several tokens": [[20, 30, 40, 50], [21, 31, 41], [22, 32]],
    "one a prefix of another": [[20], [20, 30], [20, 30, 40], [21]],
    "a hundred": [[20 + i // 10, 40 + i % 10] for i in range(100)],
}


@pytest.fixture(scope="module", params=[*FAMILIES, "recurrent"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path = tmp_path_factory.mktemp(request.param) / "model"
    if request.param == "recurrent":
        return Hybrid(path, num_layers=2)
    name = FAMILIES[request.param]
    architecture = ARCHITECTURES[name]
    weights = partial(random_weights, embedding=architecture.embedding)
    return TinyModel(
        make_tiny_model(path, name, architecture.seed, weights, **{"vocab_size": VOCAB_SIZE} | architecture.config)
    )


def expected(model: TinyModel, prompt: list[int], answers: list[list[int]]) -> list[float]:
    """Each answer alone, in a contiguous cache of mlx-lm. Answers that are prefixes of others end with a token of
    END."""
    ends = has_prefix(map(tuple, answers))
    found = []
    for answer in answers:
        logits = model.plain(mx.array([[*prompt, *answer]]), cache=make_prompt_cache(model.plain))[0]
        rows = np.array(logits.astype(mx.float32), dtype=np.float64)[len(prompt) - 1 :]
        logprobs = rows - np.logaddexp.reduce(rows, axis=-1, keepdims=True)
        total = sum(logprobs[i, token] for i, token in enumerate(answer))
        found.append(total + np.logaddexp.reduce(logprobs[len(answer), list(END)]) if ends else total)
    return [float(each) for each in found]


def requests_of(name: str, prompt: list[int], readout: Readout) -> list[Request]:
    arrived = time.monotonic()
    return [
        Request(f"{name}-{i}", [*prompt, *row.path], row.params(len(prompt)), arrived, timeline=True)
        for i, row in enumerate(readout.rows)
    ]


def reading_of(outputs: list[RequestOutput]) -> RowReading:
    assert outputs[-1].error is None, outputs[-1].error
    [sampled] = [logprobs for output in outputs for logprobs in output.logprobs]
    return RowReading.of(sampled, outputs[0].prompt_logprobs)


def read(done: Run, name: str, readout: Readout) -> list[float]:
    return readout.log_probabilities([reading_of(done.outputs[f"{name}-{i}"]) for i in range(len(readout.rows))])


def check(model: TinyModel, core: EngineCore, kinds: list[str], questions: list[list[int]], *others: Request) -> Run:
    """Ask these questions about PREFIX together."""
    asked = {
        f"{kind}-{i}": ([*PREFIX, *question], Readout(ANSWERS[kind], END))
        for kind in kinds
        for i, question in enumerate(questions)
    }
    rows = [request for name, (prompt, readout) in asked.items() for request in requests_of(name, prompt, readout)]
    done = run(core, [*others, *rows])
    for name, (prompt, readout) in asked.items():
        answers = [list(answer) for answer in readout.answers]
        np.testing.assert_allclose(read(done, name, readout), expected(model, prompt, answers), atol=TOLERANCE)
    return done


@pytest.fixture
def waves() -> Iterator[None]:
    """Every wave that saves a token."""
    with mock.patch.object(readout_waves, "LEAST_SAVED", 1):
        yield


def check_in_waves(model: TinyModel, core: EngineCore, kinds: list[str], questions: list[list[int]]) -> list[Run]:
    """Ask these questions about PREFIX, each row from where what it shares ends."""
    prompts = [
        ReadoutPrompt([*PREFIX, *question], Readout(ANSWERS[kind], END), shared=PREFIX)
        for kind in kinds
        for question in questions
    ]
    done, readings = list[Run](), [list[RowReading]() for _ in prompts]
    for wave in waves_of(prompts, core.scheduler.config.block_size):
        done.append(run(core, list(map(request_of, range(len(wave)), wave))))
        for number, row in enumerate(wave):
            if row.reads:
                readings[row.prompts[0]].append(reading_of(done[-1].outputs[f"{number}"]))
    for prompt, found in zip(prompts, readings, strict=True):
        answers = [list(answer) for answer in prompt.readout.answers]
        probabilities = prompt.readout.log_probabilities(found)
        np.testing.assert_allclose(probabilities, expected(model, prompt.token_ids, answers), atol=TOLERANCE)
    return done


def request_of(number: int, row: EngineRow) -> Request:
    return Request(f"{number}", row.token_ids, row.params, time.monotonic())


@pytest.mark.usefixtures("waves")
@pytest.mark.parametrize("kind", ANSWERS)
def test_probabilities_are_exact_in_waves(model: TinyModel, kind: str) -> None:
    check_in_waves(model, model.engine(max_num_seqs=40), [kind], QUESTIONS)


@pytest.mark.usefixtures("waves")
def test_no_token_is_computed_twice(model: TinyModel) -> None:
    """States go on after whole blocks only."""
    if isinstance(model, Hybrid):
        pytest.skip("has states")
    core = model.engine(max_num_seqs=40)
    asked = check_in_waves(model, core, ["of several tokens"], QUESTIONS)
    paths = [row.path for row in Readout(ANSWERS["of several tokens"], END).rows]
    questions = sum(map(len, QUESTIONS)), len(QUESTIONS) * sum(map(len, paths))
    assert [each.num_computed() for each in asked] == [len(PREFIX), *questions]
    again = check_in_waves(model, core, ["of several tokens"], QUESTIONS)
    assert [each.num_computed() for each in again] == [1, len(QUESTIONS), questions[1]]


@pytest.mark.usefixtures("waves")
def test_waves_with_preemptions_are_exact(model: TinyModel) -> None:
    core = model.engine(max_num_batched_tokens=4, max_num_seqs=4)
    recompute_once(core)
    check_in_waves(model, core, ["of several tokens", "one a prefix of another"], QUESTIONS[:2])
    assert core.scheduler.stats().preemptions_total > 0


@pytest.mark.usefixtures("waves")
def test_waves_in_a_small_pool_are_exact(model: TinyModel) -> None:
    core = model.engine(num_blocks=24, max_num_seqs=8)
    check_in_waves(model, core, ["equal first tokens", "of several tokens"], QUESTIONS)


@pytest.mark.usefixtures("waves")
@pytest.mark.parametrize("options", [{"kv_cache_dtype": "int8"}, {"batch_invariant": True}])
def test_waves_read_what_single_rows_read(tmp_path: Path, options: dict[str, Any]) -> None:
    """With a quantized cache, mlx-lm's contiguous one is another oracle."""
    model = TinyModel(make_tiny_model(tmp_path / "llama", "llama", vocab_size=VOCAB_SIZE))
    prompts = [
        ReadoutPrompt([*PREFIX, *each], Readout(ANSWERS["of several tokens"]), shared=PREFIX) for each in QUESTIONS
    ]

    def found(least: int) -> list[list[float]]:
        core, readings = model.engine(max_num_seqs=40, **options), [list[RowReading]() for _ in prompts]
        with mock.patch.object(readout_waves, "LEAST_SAVED", least):
            for wave in waves_of(prompts, core.scheduler.config.block_size):
                done = run(core, list(map(request_of, range(len(wave)), wave)))
                for number, row in enumerate(wave):
                    if row.reads:
                        readings[row.prompts[0]].append(reading_of(done.outputs[f"{number}"]))
        return [prompt.readout.log_probabilities(each) for prompt, each in zip(prompts, readings, strict=True)]

    np.testing.assert_allclose(found(1), found(10**6), atol=TOLERANCE)


@pytest.mark.parametrize("kind", ANSWERS)
def test_probabilities_are_exact_alone(model: TinyModel, kind: str) -> None:
    check(model, model.engine(), [kind], QUESTIONS[:1])


def test_probabilities_are_exact_in_one_batch_with_others_that_generate(model: TinyModel) -> None:
    other = Request("other", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), 0.0)
    kinds = ["single tokens", "equal first tokens", "of several tokens", "one a prefix of another"]
    done = check(model, model.engine(max_num_seqs=40), kinds, QUESTIONS, other)
    assert done.tokens("other") == model.answer([5, 6, 7], 12).tokens


def test_a_stream_has_a_token_in_every_step_beside_a_readout(model: TinyModel) -> None:
    core = model.engine(max_num_batched_tokens=24)
    stream = Request("stream", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), 0.0)
    run_steps(core, stream, 3)
    done = check(model, core, ["single tokens", "equal first tokens"], QUESTIONS)
    beside = [step for step in done.batches if any(row.request_id.startswith(("single", "equal")) for row in step.rows)]
    with_stream = [step for step in beside if any(row.request_id == "stream" for row in step.rows)]
    assert with_stream == beside[: len(with_stream)]
    assert len(with_stream) > 5


def test_the_input_is_computed_once_for_all_questions(model: TinyModel) -> None:
    core = model.engine(max_num_seqs=40)
    done = check(model, core, ["single tokens"], QUESTIONS)
    block = core.scheduler.config.block_size
    tails = sum(len(PREFIX) % block + len(question) for question in QUESTIONS)
    assert done.num_computed() <= len(PREFIX) - len(PREFIX) % block + tails
    again = check(model, core, ["equal first tokens"], QUESTIONS)
    assert all(outputs[-1].num_cached_tokens >= len(PREFIX) - len(PREFIX) % block for outputs in again.outputs.values())


def test_all_rows_of_all_questions_run_in_one_step_after_the_input(tmp_path: Path) -> None:
    model = TinyModel(make_tiny_model(tmp_path / "llama", "llama", vocab_size=VOCAB_SIZE))
    core = model.engine(max_num_seqs=64)
    run(core, [Request("input", [*PREFIX, 99], SamplingParams(max_tokens=1), 0.0)])
    done = check(model, core, ["single tokens", "equal first tokens"], QUESTIONS)
    [step] = [each for each in done.batches if each.rows]
    assert len(step.rows) == (1 + 3) * len(QUESTIONS), "1 for single tokens, 3 nodes for equal first tokens"


def test_a_preemption_changes_no_probability(model: TinyModel) -> None:
    core = model.engine(max_num_batched_tokens=16)
    recompute_once(core)
    check(model, core, ["of several tokens", "one a prefix of another"], QUESTIONS[:2])
    assert core.scheduler.stats().preemptions_total > 0


def run_steps(core: EngineCore, request: Request, count: int) -> None:
    core.add(request)
    for _ in range(count):
        core.step()


def recompute_once(core: EngineCore) -> None:
    """Every running row of a readout is preempted in its second step, when a part of its prompt is computed."""
    schedule, seen = core.scheduler.schedule, set[int]()

    def preempting() -> Any:
        for sequence in list(core.scheduler.running):
            halfway = 0 < sequence.num_computed_tokens < sequence.num_prompt_tokens
            if halfway and sequence.sequence_id not in seen:
                seen.add(sequence.sequence_id)
                core.scheduler.recompute(sequence)
        return schedule()

    core.scheduler.schedule = preempting  # type: ignore[method-assign]


@pytest.mark.more
@pytest.mark.usefixtures("metal")
@pytest.mark.parametrize("model", ["dense"], indirect=True)
def test_the_metal_kernels_give_the_same_probabilities(model: TinyModel) -> None:
    kinds = ["equal first tokens", "one a prefix of another"]
    core = model.engine(attention_backend="metal", attention_tuning="default", block_size=32, max_num_seqs=40)
    check(model, core, kinds, QUESTIONS[:2])
    with mock.patch.object(readout_waves, "LEAST_SAVED", 1):
        check_in_waves(model, core, kinds, QUESTIONS[2:])
    assert core.runner.backend == "metal"


# -- the trie -----------------------------------------------------------------------------------------------------


def distribution(path: tuple[int, ...], size: int) -> list[float]:
    """A conditional distribution of the next token, which depends on the whole path."""
    return normalized([math.sin(3 * hash((path, token)) % 1009) * 2 for token in range(size)])


def readings_of(rows: list[ReadoutRow], size: int) -> list[RowReading]:
    def logprob(path: tuple[int, ...], token: int) -> float:
        return math.log(distribution(path, size)[token])

    return [
        RowReading(
            tuple(logprob(row.path[:i], row.path[i]) for i in range(row.first, len(row.path))),
            tuple(logprob(row.path, token) for token in row.candidates),
        )
        for row in rows
    ]


SIZE, STOP = 5, 4
answers_of_tokens = st.lists(
    st.lists(st.integers(0, STOP - 1), min_size=1, max_size=5).map(tuple), min_size=1, max_size=12, unique=True
)


@given(answers_of_tokens)
def test_an_answer_has_the_product_along_its_tokens(answers: list[tuple[int, ...]]) -> None:
    readout = Readout(answers, [STOP])
    found = readout.log_probabilities(readings_of(readout.rows, SIZE))
    for answer, total in zip(answers, found, strict=True):
        path = (*answer, STOP) if has_prefix(answers) else answer
        assert total == pytest.approx(sum(math.log(distribution(path[:i], SIZE)[path[i]]) for i in range(len(path))))


@given(answers_of_tokens)
def test_answers_exclude_each_other(answers: list[tuple[int, ...]]) -> None:
    """Their probabilities sum to at most 1, because no text is counted for two of them."""
    readout = Readout(answers, [STOP])
    assert sum(map(math.exp, readout.log_probabilities(readings_of(readout.rows, SIZE)))) <= 1 + 1e-9


@given(answers_of_tokens)
def test_no_probability_is_read_twice_and_no_row_is_longer_than_needed(answers: list[tuple[int, ...]]) -> None:
    rows = Readout(answers, [STOP]).rows
    read_edges = [
        edge
        for row in rows
        for edge in (
            *(row.path[: i + 1] for i in range(row.first, len(row.path))),
            *((*row.path, token) for token in row.candidates),
        )
    ]
    assert len(read_edges) == len(set(read_edges))
    nodes = {(), *(answers if has_prefix(answers) else (answer[:-1] for answer in answers))}
    assert rows[0].path == ()
    assert {row.path for row in rows} == nodes


@given(answers_of_tokens)
def test_a_prefix_is_found(answers: list[tuple[int, ...]]) -> None:
    pairs = itertools.permutations(answers, 2)
    assert has_prefix(answers) == any(longer[: len(shorter)] == shorter for shorter, longer in pairs)


def test_answers_of_one_token_are_one_row() -> None:
    assert Readout([[5], [6], [7]], [9]).rows == [ReadoutRow((), 0, (5, 6, 7))]


def test_an_end_that_a_longer_answer_goes_on_with_ends_no_answer() -> None:
    """Text models without a template end an answer with a line, and an answer may have several lines."""
    readout = Readout([[1], [1, STOP, 2]], [STOP, 3])
    found = readout.log_probabilities(readings_of(readout.rows, SIZE))
    first, after = distribution((), SIZE), distribution((1,), SIZE)
    assert found[0] == pytest.approx(math.log(first[1] * after[3]))


@pytest.mark.parametrize(
    ("answers", "ends", "message"),
    [
        ([[1], []], [9], "at least one token"),
        ([[1], [2], [1]], [9], "the same tokens"),
        ([[1], [1, 2]], [], "no token ends it"),
        ([[1], [1, 2]], [2], "no token ends it"),
    ],
)
def test_answers_that_cannot_be_told_apart_are_refused(answers: list[list[int]], ends: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Readout(answers, ends)


def test_probabilities_are_normalized_over_the_answers_however_small_they_are() -> None:
    assert normalized([-2000.0, -2000.0 + math.log(3)]) == pytest.approx([0.25, 0.75])
    assert normalized([-math.inf, -1.0]) == [0.0, 1.0]
    assert log_sum_exp([]) == -math.inf
    with pytest.raises(ValueError, match="no answer has a probability"):
        normalized([-math.inf, -math.inf])
