"""Constraints in the engine: the matcher stays with the booked tokens, also if a step is dropped or fails."""

from __future__ import annotations

import itertools
import json
import re
import time
from typing import Any

import numpy as np
import pytest

from mlxpaged.core.engine.constraint import Constraint, GrammarError
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.parts.grammar.grammar import KEPT, Grammars
from mlxpaged.parts.grammar.json_schema import enforceable
from tests.engine.helpers import finish, let_steps_fail, make_core
from tests.support import every, make_tiny_model

LINES = Constraint("regex", "([a-z]{2} [0-9]{2}\n){1,9}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_model(str(make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", eos_token_id=2)))


def add(core: EngineCore, name: str, prompt: list[int], constraint: Constraint | None, **params: Any) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 40, "ignore_eos": True} | params
    core.add(Request(name, prompt, SamplingParams(constraint=constraint, **options), time.monotonic()))


def texts_of(core: EngineCore) -> dict[str, str]:
    texts, reasons = finish(core)
    for name, text in texts.items():
        if name.startswith("constrained") and reasons[name] is FinishReason.STOP:
            assert re.fullmatch(LINES.text, text)
    return texts


def add_mix(core: EngineCore) -> None:
    """Six held to LINES, six free ones, with shared prefixes."""
    for i in range(6):
        prompt = [5, 6, 7] * 12 + [i + 10]
        options = {"seed": i, "temperature": float(i % 3), "logprobs": 1 if i == 4 else None}
        if i == 5:
            options |= {"frequency_penalty": 1.0, "top_p": 0.9}
        add(core, f"held {i}", prompt, LINES, max_tokens=30 + 5 * i, **options)
        add(core, f"free {i}", prompt, None, **options)


POOLS = {"roomy": (100, 0), "recomputed": (6, 0), "swapped": (6, 12)}
"""Blocks of the pool and of its swap space."""


@pytest.fixture(scope="module")
def expected(served: ServedModel) -> dict[str, str]:
    core = make_core(served)
    add_mix(core)
    return texts_of(core)


@pytest.mark.parametrize(("pool", "overlaps"), every(2, itertools.product(POOLS, (False, True))))
def test_answers_do_not_depend_on_overlap_preemption_or_failures(
    served: ServedModel,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    pool: str,
    overlaps: bool,
) -> None:
    blocks, swap = POOLS[pool]
    monkeypatch.setattr(ModelRunner, "overlaps", overlaps)
    core = make_core(served, blocks, swap, max_num_batched_tokens=64)
    let_steps_fail(core, monkeypatch)
    add_mix(core)
    assert texts_of(core) == expected
    stats = core.stats().scheduler
    assert (stats.preemptions_total > 0) or blocks == 100
    assert (stats.blocks_swapped_out_total > 0) == (swap > 0)


def test_constrained_requests_are_in_every_step_when_steps_overlap(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "overlaps", True)
    rows: list[set[int]] = []
    forward = ModelRunner.forward

    def noting(runner: ModelRunner, batch: Any, *args: Any) -> Any:
        rows.append({row.sequence_id for row in batch.rows})
        return forward(runner, batch, *args)

    monkeypatch.setattr(ModelRunner, "forward", noting)
    core = make_core(served)
    add(core, "free", [1, 2, 3], None, max_tokens=20)
    add(core, "constrained", [4, 5, 6], Constraint("regex", "[a-z]{40}"), max_tokens=10)
    finish(core)
    assert rows == [{0, 1}] * 10 + [{0}] * 10


def test_a_constrained_request_alone_gives_the_same_answer_when_steps_overlap(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "overlaps", True)
    core = make_core(served)
    add(core, "constrained", [4, 5, 6], LINES)
    alone = texts_of(core)
    monkeypatch.setattr(ModelRunner, "overlaps", False)
    core = make_core(served)
    add(core, "constrained", [4, 5, 6], LINES)
    assert alone == texts_of(core) != {}


def test_compiled_constraints_are_kept_but_not_for_ever(served: ServedModel) -> None:
    core = make_core(served)
    first = core.grammars.compile(Constraint("regex", "a0"))
    assert core.grammars.compile(Constraint("regex", "a0", param="elsewhere")) is first
    for i in range(1, KEPT + 1):
        core.grammars.compile(Constraint("regex", f"a{i}"))
    assert core.grammars.compile(Constraint("regex", "a0")) is not first


def test_what_cannot_be_compiled_is_refused_by_the_engine_too(served: ServedModel) -> None:
    core = make_core(served)
    with pytest.raises(GrammarError, match="unclosed"):
        add(core, "constrained", [1], Constraint("regex", "[a"))
    assert not core.has_work()


@pytest.mark.parametrize("most", [1, 4])
def test_an_answer_of_a_grammar_with_ordinary_tokens_goes_on_after_its_drafts(served: ServedModel, most: int) -> None:
    """llguidance takes such tokens back and then refuses them."""
    tokens = served.tokenizer.reader.encode("What is 17 + 25?", add_special_tokens=False)
    grammars = Grammars(served.tokenizer, served.vocab_size)
    grammar = "start: " + " ".join(f"<[{token}]>" for token in tokens)
    matcher, at, ended = grammars.start(Constraint("grammar", grammar), ignore_eos=False), 0, False
    while at < len(tokens):
        drafts = matcher.forced()[:most]
        drafts = drafts[: matcher.count_allowed(drafts)]
        if drafts:
            grammars.masks_along(matcher, drafts, [()] * (len(drafts) + 1))
        for token in tokens[at : at + len(drafts) + 1]:
            ended = matcher.advance(token)
        at += len(drafts) + 1
    assert ended


def test_a_mask_has_a_bit_for_every_token_and_no_more(served: ServedModel) -> None:
    core = make_core(served)
    matcher = core.grammars.start(Constraint("choice", '["a", "b"]'), ignore_eos=True)
    [mask] = core.grammars.masks([(matcher, ())])
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert {served.tokenizer.token_text(int(token)) for token in allowed} == {"a", "b"}
    [without_a] = core.grammars.masks([(matcher, allowed[:1].tolist())])
    assert np.unpackbits(without_a.view(np.uint8)).sum() == 1
    [all_avoided] = core.grammars.masks([(matcher, allowed.tolist())])
    assert (all_avoided == mask).all()


A = {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]}
B = {"type": "object", "properties": {"kind": {"enum": ["b", "c"]}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("branches", "disjoint"),
    [
        ([A, B], True),
        ([A, {"$ref": "#/$defs/b"}], True),
        ([{"type": "string"}, {"type": ["null", "integer"]}, A], True),
        ([A, A], False),
        ([A, {**B, "required": []}], False),
        ([{"type": "integer"}, {"type": "number"}], False),
        ([A, {}], False),
        ([A, {"$ref": "#/$defs/missing"}], False),
        ([{"type": "string"}] + [{"type": "integer"}] * 64, False),
        ("nothing", False),
    ],
)
def test_one_of_is_any_of_where_its_branches_exclude_each_other(branches: Any, disjoint: bool) -> None:
    schema = {"$defs": {"b": B}, "properties": {"oneOf": {"oneOf": branches}}, "default": {"oneOf": [A, B]}}
    key = "anyOf" if disjoint else "oneOf"
    assert enforceable(schema) == {**schema, "properties": {"oneOf": {key: branches}}}


@pytest.mark.parametrize(
    ("bounds", "allowed", "refused"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.001", "0.5"], ["0", "0.0", "0.51"]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1.001", "1.49"], ["1", "1.0", "1.5"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0.0}, ["-0.5", "-0.01"], ["-0", "0", "-0.0"]),
        ({"exclusiveMaximum": 3, "maximum": 2.5, "exclusiveMinimum": 0.5}, ["2.5", "0.51"], ["2.6", "0.5", "3"]),
        ({"exclusiveMinimum": 99_999, "minimum": 3}, ["99999.5", "100000"], ["99999", "4"]),
        ({"exclusiveMinimum": 2, "type": "integer"}, ["3"], ["2"]),
    ],
)
def test_a_number_is_within_its_bounds(
    served: ServedModel, bounds: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    schema = {"type": "array", "items": {"type": "number"} | bounds}
    matcher = make_core(served).grammars.start(Constraint("json_schema", json.dumps(schema)), ignore_eos=False)
    for text in allowed + refused:
        tokens = served.tokenizer.encode(f"[{text}]", add_special_tokens=False)
        assert (matcher.count_allowed(tokens) == len(tokens)) == (text in allowed), text
