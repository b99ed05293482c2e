"""Answers that repeat themselves are ended, and others are not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.core.engine.constraint import Constraint
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.core.text.answer_parser import AnswerForm
from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.parts.drafting.drafting import Drafting
from mlxpaged.parts.repetition.loop_end import COPIES, DATA_PATIENCE, LEAST_TOKENS, NO_LOOPS, PATIENCE
from tests.engine.helpers import part_of
from tests.engine.llama import make_core, run, submit, tokens
from tests.engine.test_drafting import as_many

pytestmark = pytest.mark.usefixtures("overlaps")

TOOLS = AnswerForm(thinking=False, tools=({"function": {"name": "f"}},), one_call=False, form=None, goes_on=False)
ON = {"end_loops": "on"}
LINE = "the cat sat on the mat and looked at the dog. "
MOST = 3000


@pytest.fixture(scope="module")
def demo() -> ServedModel:
    return load_model("demo")


def encoded(demo: ServedModel, text: str) -> list[int]:
    return demo.tokenizer.encode(text, add_special_tokens=False)


def dictated(demo: ServedModel, answer: str | Sequence[int], **options: Any) -> EngineCore:
    """An engine whose model writes this answer to every prompt, and then its end."""
    core = make_core(demo, **{"kv_cache_bytes": 30_000_000} | options)
    answer = encoded(demo, answer) if isinstance(answer, str) else answer
    said = [*answer, min(demo.tokenizer.eos_token_ids)]

    def forward(batch: Any, *_: Any) -> mx.array:
        rows = [row for row in batch.rows if row.samples]
        places = []
        for row in rows:
            end = row.context_len - core.scheduler.sequences[row.sequence_id].num_prompt_tokens
            places += range(end - row.num_sampled + 1, end + 1)
        logits = np.zeros((max(1, len(places)), demo.vocab_size), np.float32)
        for i, place in enumerate(places):
            logits[i, said[min(place, len(said) - 1)]] = 100.0
        return mx.array(logits)

    core.runner.forward = forward  # type: ignore[method-assign]
    return core


def answered(core: EngineCore, prompt: Sequence[int] = (5, 6, 7), **params: Any) -> list[RequestOutput]:
    submit(core, "a", list(prompt), **{"max_tokens": MOST, "ignore_eos": False} | params)
    return run(core)["a"]


def text_of(outputs: Sequence[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


@pytest.mark.parametrize("period", [1, 2, 3, 5, 17, 60, 200])
def test_a_loop_ends_within_sixty_tokens_of_its_fourth_copy(demo: ServedModel, period: int) -> None:
    drawn = np.random.default_rng(period).permuted(np.arange(70, 300)).tolist()
    before, unit = drawn[:23], drawn[23 : 23 + period]
    core = dictated(demo, before + unit * (MOST // period), **ON)
    outputs = answered(core)
    made = tokens(outputs)
    assert made == (before + unit * MOST)[: len(made)]
    fourth = len(before) + COPIES * period
    assert max(fourth, LEAST_TOKENS) <= len(made) <= max(fourth + 60, LEAST_TOKENS)
    assert text_of(outputs) == demo.tokenizer.decode(made)
    last = outputs[-1]
    assert (last.finish_reason, last.error, last.num_output_tokens) == (FinishReason.STOP, None, len(made))
    assert last.stop_cause is not None
    name, *shown = last.stop_cause.split("; ")
    found = {key: int(value) for key, value in (each.split("=") for each in shown)}
    assert name == "repetition"
    assert found["copies"] == found["tokens"] // found["period"]
    assert period % found["period"] == 0, "it is the shortest one"
    assert core.stats().of(NO_LOOPS) == (1, found["tokens"])
    assert core.scheduler.pool.usage().used == 0


def is_ended(demo: ServedModel, mode: str, **params: Any) -> bool:
    outputs = answered(dictated(demo, LINE * 40, end_loops=mode), **{"max_tokens": 300} | params)
    return outputs[-1].stop_cause is not None


def test_auto_ends_loops_of_requests_with_tools_and_a_request_decides_for_itself(demo: ServedModel) -> None:
    assert not is_ended(demo, "auto")
    assert is_ended(demo, "auto", answer_form=TOOLS)
    assert not is_ended(demo, "auto", answer_form=TOOLS, end_loops=False)
    assert is_ended(demo, "on")
    assert not is_ended(demo, "on", end_loops=False)
    assert not is_ended(demo, "off", answer_form=TOOLS)
    assert is_ended(demo, "off", end_loops=True)


def test_a_request_for_a_number_of_tokens_gets_them(demo: ServedModel) -> None:
    assert not is_ended(demo, "on", ignore_eos=True)
    assert is_ended(demo, "on", ignore_eos=True, end_loops=True)
    assert not is_ended(demo, "on", min_tokens=300)
    outputs = answered(dictated(demo, LINE * 40, **ON), min_tokens=280, max_tokens=300)
    assert outputs[-1].num_output_tokens == 280
    assert outputs[-1].stop_cause is not None


def test_three_copies_and_copies_with_something_new_are_no_loop(demo: ServedModel) -> None:
    length = len(encoded(demo, LINE))
    assert 3 * length > LEAST_TOKENS, "only the copies are too few"
    texts = [
        LINE * 3,
        "".join(f"{number}. {LINE}\n" for number in range(30)),
        "".join(f"{LINE}{chr(97 + number)} " for number in range(20)),
        (LINE * 3 + "Then a horse came along. ") * 3,
    ]
    for text in texts:
        outputs = answered(dictated(demo, text, **ON))
        assert text_of(outputs) == text
        assert outputs[-1].stop_cause is None


def test_drafts_give_the_same_answer_up_to_the_end_of_the_loop(demo: ServedModel) -> None:
    plain = answered(dictated(demo, LINE * 60, **ON))
    core = dictated(demo, LINE * 60, speculative="ngram", **ON)
    part_of(core, Drafting).budget.lengths = as_many
    drafted = answered(core)
    assert drafted[-1].num_accepted > 50
    assert drafted[-1].stop_cause is not None
    assert len(tokens(plain)) <= len(tokens(drafted)) <= len(tokens(plain)) + 8
    assert tokens(drafted)[: len(tokens(plain))] == tokens(plain)
    assert text_of(drafted) == demo.tokenizer.decode(tokens(drafted))


def test_of_several_answers_only_those_that_loop_end(demo: ServedModel) -> None:
    core = dictated(demo, LINE * 20, **ON)
    for name, ends in (("a", None), ("b", False), ("c", None)):
        params = SamplingParams(temperature=0.0, max_tokens=400, end_loops=ends, logprobs=0)
        core.add(Request(name, [5, 6, 7] * 30, params, 0.0, fork_of=None if name == "a" else "a"))
    outputs = run(core)
    causes = {name: found[-1].stop_cause is not None for name, found in outputs.items()}
    assert causes == {"a": True, "b": False, "c": True}
    for found in outputs.values():
        assert sum(len(each.logprobs) for each in found) == len(tokens(found)) == found[-1].num_output_tokens


def test_what_a_stop_string_holds_back_is_sent_at_the_end_of_a_loop(demo: ServedModel) -> None:
    outputs = answered(dictated(demo, LINE * 40, **ON), stop=(LINE * 30,))
    assert outputs[-1].stop_cause is not None
    assert text_of(outputs) == demo.tokenizer.decode(tokens(outputs))


def test_arrays_of_numbers_and_rulers_have_more_patience_and_end_too(demo: ServedModel) -> None:
    for unit in ("0, ", "0x00, ", "-+", "null, "):
        period = len(encoded(demo, unit * 50)) // 50
        outputs = answered(dictated(demo, unit * MOST, **ON))
        assert outputs[-1].stop_cause is not None
        assert COPIES * period + DATA_PATIENCE <= outputs[-1].num_output_tokens <= 12 * period + DATA_PATIENCE
        few = unit * ((PATIENCE + 200) // period)
        assert text_of(answered(dictated(demo, few, **ON))) == few


SCHEMA = {"type": "array", "items": {"type": "integer"}}
TEXTS = {"type": "array", "items": {"type": "string"}}


def test_a_constrained_array_of_numbers_is_never_ended_and_a_constrained_text_is(demo: ServedModel) -> None:
    zeros = json.dumps([0] * 900)
    constraint = Constraint("json_schema", json.dumps(SCHEMA))
    outputs = answered(dictated(demo, zeros, **ON), constraint=constraint)
    assert text_of(outputs) == zeros
    assert len(tokens(outputs)) > COPIES * 3 + DATA_PATIENCE
    assert outputs[-1].stop_cause is None
    loop = json.dumps([LINE * 40])
    outputs = answered(dictated(demo, loop, **ON), constraint=Constraint("json_schema", json.dumps(TEXTS)))
    assert outputs[-1].stop_cause is not None
    assert loop.startswith(text_of(outputs))
    assert outputs[-1].finish_reason is FinishReason.LENGTH, "its array is open"


def test_copies_that_the_prompt_asks_for_are_written(demo: ServedModel) -> None:
    prompt = encoded(demo, f"Write '{LINE}' 20 times, please.")
    outputs = answered(dictated(demo, LINE * 20, **ON), prompt)
    assert (text_of(outputs), outputs[-1].stop_cause) == (LINE * 20, None)
    outputs = answered(dictated(demo, LINE * 60, **ON), prompt)
    assert outputs[-1].stop_cause is not None
    assert 20 <= text_of(outputs).count(LINE) <= 22
    prompt = encoded(demo, f"Repeat '{LINE}' as often as you can.")
    assert answered(dictated(demo, LINE * 60, **ON), prompt)[-1].stop_cause is None
    prompt = encoded(demo, f"What is wrong with '{LINE}'?")
    assert answered(dictated(demo, LINE * 60, **ON), prompt)[-1].stop_cause is not None


def test_the_tokens_of_an_answer_that_another_engine_began_count(demo: ServedModel) -> None:
    unit = encoded(demo, LINE)
    resumed = tuple(unit * 4)
    core = dictated(demo, unit * 60, **ON)
    params = SamplingParams(temperature=0.0, max_tokens=MOST)
    core.add(Request("a", [5, 6, 7], params, 0.0, resumed=resumed))
    outputs = run(core)["a"]
    assert outputs[-1].stop_cause is not None
    assert len(tokens(outputs)) <= PATIENCE
    assert outputs[-1].num_output_tokens == len(resumed) + len(tokens(outputs))


def test_a_loop_is_found_in_an_answer_that_was_preempted(demo: ServedModel) -> None:
    block = make_core(demo, block_size=16).runner.bytes_of(1)
    core = dictated(demo, LINE * 60, block_size=16, kv_cache_bytes=24 * block, prefix_caching=False, **ON)
    for name in "abcd":
        submit(core, name, [5, 6, 7], max_tokens=300, ignore_eos=False)
    outputs = run(core)
    assert core.stats().scheduler.preemptions_total > 0
    lengths = {name: len(tokens(found)) for name, found in outputs.items()}
    assert len(set(lengths.values())) == 1, lengths
    assert all(found[-1].stop_cause is not None for found in outputs.values())
