"""Answers with speculative decoding are those without, token for token, whatever is drafted."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from collections.abc import Sequence as ListOf
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from mlxpaged.core.engine.constraint import Constraint
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.step import Step
from mlxpaged.models.loader import load_model
from mlxpaged.parts.drafting import ngram
from mlxpaged.parts.drafting.draft_budget import Lengths
from mlxpaged.parts.drafting.draft_stats import NO_DRAFTS
from mlxpaged.parts.drafting.drafting import Drafting
from mlxpaged.parts.drafting.ngram import NgramDrafter, NgramIndex
from tests.engine.helpers import make_core, part_of
from tests.engine.seeing import image, load_seeing, shown
from tests.models.architectures import make_architecture

RIGHT = 0.7
"""How often the oracle knows the next token."""


class Oracle:
    """Knows the answers of a run without drafts, and is wrong by chance. It counts the drafts that it was asked for."""

    def __init__(self, answers: Mapping[str, ListOf[int]], seed: int = 1, right: float = RIGHT) -> None:
        self._answers, self._rng, self._right = answers, random.Random(seed), right

    def begin_step(self) -> None:
        pass

    def propose(self, running: RunningRequest, most: int) -> tuple[list[int], int]:
        sequence = running.sequence
        done = sequence.num_output_tokens
        following = self._answers[sequence.request_id][done : done + most]
        return [token if self._rng.random() < self._right else (token + 1) % 200 for token in following], 3

    def forget(self, sequence_id: int) -> None:
        pass


def as_many(contexts: ListOf[int], chances: ListOf[ListOf[float]], *_: ListOf[float]) -> list[int]:
    """All drafts are verified."""
    return [len(each) for each in chances]


def every_other_step() -> Lengths:
    """Drafts are verified in every other step, so that steps with and without are in flight one after the other. What
    would be verified if all were accepted is asked too: all."""
    turns = itertools.cycle((False, False, True, True))

    def lengths(contexts: ListOf[int], chances: ListOf[ListOf[float]], *_: ListOf[float]) -> list[int]:
        is_certain = all(chance == 1.0 for each in chances for chance in each)
        return as_many(contexts, chances) if is_certain or next(turns) else [0] * len(contexts)

    return lengths


def use_oracle(core: EngineCore, answers: Mapping[str, ListOf[int]], seed: int = 1) -> Drafting:
    drafting = part_of(core, Drafting)
    drafting.drafter, drafting.budget.lengths = Oracle(answers, seed), as_many
    return drafting


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 200) for _ in range(length)]


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 4},
    {"temperature": 0.7, "top_k": 20, "seed": 5, "logit_bias": {50: 2.0}},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.9, "min_p": 0.05, "seed": 6, "min_tokens": 12, "ignore_eos": False},
    {"temperature": 0.0, "max_tokens": 3},
]


def requests(count: int = 8) -> list[Request]:
    return [
        Request(
            f"r{i}",
            prompt(i, 5 + 13 * (i % 4)),
            SamplingParams(**{"max_tokens": 40, "ignore_eos": True} | PARAMS[i % len(PARAMS)]),
            float(i),
        )
        for i in range(count)
    ]


def finish(core: EngineCore) -> dict[str, RequestOutput]:
    """The last output of each request, with all its tokens and log-probabilities."""
    last: dict[str, RequestOutput] = {}
    while core.has_work():
        for output in core.step():
            assert output.error is None
            before = last.get(output.request_id)
            tokens = (() if before is None else before.token_ids) + output.token_ids
            logprobs = (() if before is None else before.logprobs) + output.logprobs
            text = ("" if before is None else before.text) + output.text
            last[output.request_id] = output._replace(token_ids=tokens, logprobs=logprobs, text=text)
    return last


def answers(core: EngineCore, asked: ListOf[Request]) -> dict[str, RequestOutput]:
    core.submit(asked)
    return finish(core)


def tokens_of(outputs: Mapping[str, RequestOutput]) -> dict[str, tuple[int, ...]]:
    return {name: output.token_ids for name, output in outputs.items()}


NAMES = ("llama", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3")


@pytest.fixture(scope="module", params=NAMES)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_architecture(tmp_path_factory.mktemp("drafting") / "m", request.param)


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 16, "max_num_seqs": 8}, {"blocks": 14}, {"blocks": 14, "swap_blocks": 40}],
    ids=["plain", "chunks", "recompute", "swap"],
)
@pytest.mark.rotated("models")
def test_answers_are_those_without_drafts(path: Path, options: dict[str, Any]) -> None:
    expected = answers(make_core(load_model(str(path))), requests())
    core = make_core(load_model(str(path)), speculative="ngram", **options)
    drafting = use_oracle(core, tokens_of(expected))
    got = answers(core, requests())
    assert tokens_of(got) == tokens_of(expected)
    assert {name: output.text for name, output in got.items()} == {name: each.text for name, each in expected.items()}
    assert drafting.stats().accepted_total > 60
    assert drafting.stats().drafted_total > drafting.stats().accepted_total
    assert core.scheduler.pool.usage().used == 0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_architecture(tmp_path_factory.mktemp("drafting") / "m", "llama")


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that keeps keys and values, and one with recurrent states too."""
    return make_architecture(tmp_path_factory.mktemp("drafting") / "m", request.param)


def both(path: Path, **options: Any) -> tuple[EngineCore, EngineCore]:
    """An engine without drafts, and one with."""
    return make_core(load_model(str(path)), **options), make_core(load_model(str(path)), speculative="ngram", **options)


def test_stops_and_limits_within_accepted_drafts(either: Path) -> None:
    """The oracle goes on after them."""
    plain, core = both(either)
    free = answers(plain, requests())
    words = {name: output.text for name, output in free.items()}
    params: list[dict[str, Any]] = [
        {"stop_token_ids": frozenset({free["r0"].token_ids[6]})},
        {"stop": (words["r0"][9:12],)},
        {"max_tokens": 5},
        {"max_tokens": 1},
    ]

    def asked() -> list[Request]:
        return [
            Request(f"s{i}", prompt(0, 5), SamplingParams(**{"max_tokens": 40, "temperature": 0.0} | each), 0.0)
            for i, each in enumerate(params)
        ]

    expected = answers(plain, asked())
    assert [expected[f"s{i}"].num_output_tokens < 40 for i in range(4)] == [True] * 4
    use_oracle(core, {f"s{i}": free["r0"].token_ids for i in range(4)}, seed=3)
    got = answers(core, asked())
    for name, output in expected.items():
        fields = ("token_ids", "text", "finish_reason", "num_output_tokens", "stop_string")
        assert [getattr(got[name], each) for each in fields] == [getattr(output, each) for each in fields]
    assert core.scheduler.pool.usage().used == 0


def test_accepted_drafts_after_a_stop_string_are_no_tokens_of_the_answer(llama: Path) -> None:
    plain, core = both(llama)
    free = Request("a", prompt(0, 5), SamplingParams(max_tokens=40, temperature=0.0), 0.0)
    whole = answers(plain, [free])["a"]
    stopped = replace(free, params=replace(free.params, stop=(whole.text[2:4],)))
    drafting = part_of(core, Drafting)
    drafting.drafter, drafting.budget.lengths = Oracle({"a": whole.token_ids}, right=1.0), as_many
    core.add(stopped)
    counts = [(each.num_accepted, each.num_output_tokens) for _ in iter(core.has_work, False) for each in core.step()]
    assert counts == [(max(0, number - 1), number) for _, number in counts]
    assert 2 < len(counts) < 9, "a step accepts more"


def test_forks_and_later_turns_from_the_prefix_cache(llama: Path) -> None:
    plain, core = both(llama)
    params = SamplingParams(max_tokens=50, temperature=0.9, seed=5, ignore_eos=True)
    others = SamplingParams(max_tokens=50, temperature=0.9, seed=6, ignore_eos=True)

    def play(core: EngineCore, of_oracle: Mapping[str, ListOf[int]] | None) -> dict[str, RequestOutput]:
        if of_oracle is not None:
            use_oracle(core, of_oracle)
        core.submit([Request("a", prompt(1, 40), params, 0.0), Request("b", prompt(1, 40), others, 0.0, fork_of="a")])
        first = finish(core)
        again = [*prompt(1, 40), *first["a"].token_ids, 7, 8]
        core.submit([Request("c", again, params, 1.0)])
        return first | finish(core)

    expected = play(plain, None)
    got = play(core, tokens_of(expected))
    assert tokens_of(got) == tokens_of(expected)
    assert got["c"].num_cached_tokens == expected["c"].num_cached_tokens == 40 + 49
    assert core.stats().of(NO_DRAFTS).accepted_total > 60


def test_log_probabilities_of_drafts(either: Path) -> None:
    plain, core = both(either)
    asked = Request("a", prompt(3, 9), SamplingParams(max_tokens=30, temperature=0.0, logprobs=3, ignore_eos=True), 0.0)
    expected = answers(plain, [asked])["a"]
    use_oracle(core, {"a": expected.token_ids})
    got = answers(core, [asked])["a"]
    assert [each.token_id for each in got.logprobs] == list(expected.token_ids)
    assert [each.logprob for each in got.logprobs] == pytest.approx(
        [each.logprob for each in expected.logprobs], abs=1e-4
    )


@pytest.mark.parametrize("source", ["prediction", "grammar"])
def test_tokens_that_the_model_does_not_know_are_no_drafts(
    llama: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """The tokenizer has more tokens than the model has embeddings and logits."""
    plain, core = both(llama)
    size, run, unknown = core.served.vocab_size, core.runner.forward, list[int]()

    def checking(step: Step, *args: Any) -> Any:
        unknown.extend(token for token in step.token_ids if token >= size)
        if unknown:
            raise ValueError("memory outside of the embedding would be read")
        return run(step, *args)

    monkeypatch.setattr(core.runner, "forward", checking)
    assert len(core.served.tokenizer.reader) > size
    asked = Request("r", prompt(1, 9), SamplingParams(temperature=0.0, max_tokens=12, frequency_penalty=0.1), 0.0)
    params = replace(asked.params, constraint=Constraint("regex", "[a-e]{3}the the[a-e]{3}"))
    if source == "prediction":
        params = replace(asked.params, predicted=(*answers(plain, [asked])["r"].token_ids[:4], size, size + 1))
    drafting = part_of(core, Drafting)
    drafting.budget.lengths = as_many
    core.add(replace(asked, params=params))
    while core.has_work():
        core.step()
    assert unknown == []


def test_batch_invariant_answers_are_equal_to_the_bit(llama: Path) -> None:
    plain, core = both(llama, batch_invariant=True)
    expected = answers(plain, requests())
    use_oracle(core, tokens_of(expected))
    got = answers(core, requests())
    assert tokens_of(got) == tokens_of(expected)
    assert [each.logprob for each in got["r4"].logprobs] == [each.logprob for each in expected["r4"].logprobs]
    assert core.stats().of(NO_DRAFTS).accepted_total > 60


def test_a_step_with_drafts_that_fails_is_repeated(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row, with the same drafts; or after a device error, from the known tokens."""
    plain, core = both(llama)
    expected = answers(plain, requests())
    use_oracle(core, tokens_of(expected))
    run, count = core.runner.forward, 0

    def sometimes_failing(step: Step, *args: Any) -> Any:
        nonlocal count
        count += 1
        if count in (6, 7, 9) and step.has_drafts:
            raise ValueError("injected") if count < 9 else DeviceError("injected")
        return run(step, *args)

    monkeypatch.setattr(core.runner, "forward", sometimes_failing)
    assert tokens_of(answers(core, requests())) == tokens_of(expected)
    assert count > 9


@pytest.mark.parametrize("alternates", [False, True], ids=["all steps", "every other pair"])
def test_tokens_stay_in_order_if_blocks_cannot_be_moved(
    llama: Path, monkeypatch: pytest.MonkeyPatch, alternates: bool
) -> None:
    """Their text may wait for a step that is then computed another way."""
    served = load_model(str(llama))
    expected = answers(make_core(served), requests(12))
    monkeypatch.setattr(ModelRunner, "overlaps", True)
    original, calls = ModelRunner.move_blocks, itertools.count()

    def sometimes(self: ModelRunner, *moves: Any) -> None:
        if next(calls) % 2:
            raise OSError("the swap space is gone")
        original(self, *moves)

    monkeypatch.setattr(ModelRunner, "move_blocks", sometimes)
    core = make_core(served, speculative="ngram", blocks=8, swap_blocks=40)
    drafting = use_oracle(core, tokens_of(expected))
    if alternates:
        drafting.budget.lengths = every_other_step()
    assert tokens_of(answers(core, requests(12))) == tokens_of(expected)
    assert next(calls) > 2


def test_drafts_take_free_blocks_only(llama: Path) -> None:
    """A pool with room for the answers alone: no sequence is preempted because of drafts."""
    plain, core = both(llama, blocks=8, prefix_caching=False)
    asked = [
        Request(f"r{i}", prompt(i, 30), SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True), float(i))
        for i in range(4)
    ]
    expected = answers(plain, asked)
    use_oracle(core, tokens_of(expected))
    assert tokens_of(answers(core, asked)) == tokens_of(expected)
    assert core.scheduler.stats().preemptions_total == plain.scheduler.stats().preemptions_total == 0


def test_models_that_run_once_per_sequence_decode_without_drafts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    core = make_core(load_model(str(make_architecture(tmp_path / "m", "llama4"))), speculative="ngram")
    assert core.part(Drafting) is None
    assert "decodes without drafts" in caplog.text


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.4},
    {"repetition_penalty": 2.0, "repetition_context_size": 3, "logit_bias": dict.fromkeys(range(10, 15), 4.0)},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.8, "repetition_context_size": 20, "temperature": 0.8, "seed": 5},
    {"frequency_penalty": -0.5, "min_p": 0.1, "temperature": 1.0, "seed": 6},
]


@pytest.mark.parametrize("options", [{}, {"blocks": 8}, {"batch_invariant": True}], ids=["", "recompute", "invariant"])
def test_penalties_count_the_drafts_before_a_token(llama: Path, options: dict[str, Any]) -> None:
    plain, core = both(llama, **options)
    asked = [
        Request(
            f"r{i}",
            prompt(i, 9),
            SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True} | each),
            float(i),
        )
        for i, each in enumerate(PENALTIES)
    ]
    without = answers(plain, [replace(each, params=replace(each.params, **NO_PENALTIES)) for each in asked])
    expected = answers(plain, asked)
    assert not set(tokens_of(expected).values()) & set(tokens_of(without).values()), "the penalties matter"
    use_oracle(core, tokens_of(expected))
    assert tokens_of(answers(core, asked)) == tokens_of(expected)
    assert core.stats().of(NO_DRAFTS).accepted_total > 60


NO_PENALTIES: dict[str, Any] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@pytest.mark.parametrize("limit", [0, 1, 5, 30])
@pytest.mark.rotated("models")
def test_the_end_of_thinking_is_forced_after_drafts(either: Path, limit: int) -> None:
    """The bias makes the model open a block again whenever it can."""
    served = load_model(str(either))
    served.tokenizer.think_start_ids, served.tokenizer.think_end_ids = [3], [4, 5, 6]
    plain, core = make_core(served), make_core(served, speculative="ngram")
    params = SamplingParams(
        max_tokens=40,
        temperature=0.9,
        seed=1,
        ignore_eos=True,
        thinking_budget=limit,
        begins_thinking=True,
        logit_bias={3: 3.0},
    )
    asked = [Request("r0", prompt(0, 9), params, 0.0), Request("r1", prompt(1, 9), replace(params, top_k=9), 0.0)]
    expected = answers(plain, asked)
    assert any(output.token_ids[limit : limit + 3] == (4, 5, 6) for output in expected.values())
    use_oracle(core, tokens_of(expected))
    assert tokens_of(answers(core, asked)) == tokens_of(expected)
    assert core.stats().of(NO_DRAFTS).accepted_total > 30


SCHEMA = {
    "type": "object",
    "properties": {
        "description": {"type": "string", "maxLength": 12},
        "temperature": {"type": "integer"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["description", "temperature", "unit"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("has_oracle", [False, True], ids=["forced tokens", "oracle"])
def test_constrained_answers(has_oracle: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Drafts that the grammar does not allow are cut, and the names of a schema are drafted because nothing else can
    come."""
    served = load_model("demo")
    plain, core = make_core(served), make_core(served, speculative="ngram")
    constraints = [
        Constraint("json_schema", json.dumps(SCHEMA)),
        Constraint("regex", "[a-z]{3}( [a-z]{3}){8}"),
        Constraint("choice", json.dumps(["the quick brown fox", "the quick red fox", "no"])),
    ]
    asked = [
        Request(f"c{i}", prompt(i, 9), SamplingParams(max_tokens=60, temperature=0.8, seed=i, constraint=each), 0.0)
        for i, each in enumerate(constraints)
    ]
    expected = answers(plain, asked)
    drafting = part_of(core, Drafting)
    drafting.budget.lengths = as_many
    if has_oracle:
        use_oracle(core, tokens_of(expected))
    got = answers(core, asked)
    fields = ("token_ids", "text", "finish_reason", "num_output_tokens")
    for name, output in expected.items():
        assert [getattr(got[name], each) for each in fields] == [getattr(output, each) for each in fields]
    assert core.stats().of(NO_DRAFTS).accepted_total >= 10
    assert core.stats().steps_total < plain.stats().steps_total
    assert not caplog.text, "no step fails and is repeated"


def test_the_end_of_an_answer_with_a_grammar_is_no_draft() -> None:
    """In a text with earlier answers, it comes after the last token that the grammar allows."""
    served = load_model("demo")
    plain, core = make_core(served, speculative="off"), make_core(served, speculative="ngram")
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=1, constraint=Constraint("regex", "[a-z]{5}"))
    asked = [Request("r", prompt(1, 9), params, 0.0)]
    expected = answers(plain, asked)
    drafting = part_of(core, Drafting)
    following = {"r": [*expected["r"].token_ids, *served.tokenizer.eos_token_ids]}
    drafting.drafter, drafting.budget.lengths = Oracle(following, right=1.0), as_many
    assert tokens_of(answers(core, asked)) == tokens_of(expected)
    assert core.stats().of(NO_DRAFTS).accepted_total > 0


@pytest.mark.parametrize("has_oracle", [False, True], ids=["forced tokens", "oracle"])
@pytest.mark.parametrize("limit", ["max_tokens=5", 'stop="x"'])
def test_a_grammar_that_cannot_be_taken_back_has_no_drafts(limit: str, has_oracle: bool) -> None:
    served = load_model("demo")
    plain, core = make_core(served, speculative="off"), make_core(served, speculative="ngram")
    rule = Constraint("grammar", f'start: words "the the" words\nwords[{limit}]: /[a-z ]+/\n')
    asked = [Request("r", prompt(1, 9), SamplingParams(max_tokens=40, temperature=0.8, seed=1, constraint=rule), 0.0)]
    expected = answers(plain, asked)
    drafting = part_of(core, Drafting)
    drafting.budget.lengths = as_many
    if has_oracle:
        use_oracle(core, tokens_of(expected))
    assert tokens_of(answers(core, asked)) == tokens_of(expected)


def test_repeated_text_is_drafted_from_itself(either: Path) -> None:
    """A bias makes the model repeat one token."""
    plain, core = both(either)
    drafting = part_of(core, Drafting)
    drafting.budget.lengths = as_many
    asked = [
        Request(f"r{i}", prompt(i, 20), SamplingParams(max_tokens=80, temperature=0.0, logit_bias={50: 50.0}), float(i))
        for i in range(3)
    ]
    expected = answers(plain, asked)
    assert tokens_of(answers(core, asked)) == tokens_of(expected)
    stats = core.stats()
    assert stats.of(NO_DRAFTS).accepted_total > 180
    assert stats.steps_total < plain.stats().steps_total / 4


def test_nothing_is_kept_of_a_request_that_has_ended(either: Path) -> None:
    _, core = both(either)
    drafter = NgramDrafter()
    drafting = part_of(core, Drafting)
    drafting.drafter, drafting.budget.lengths = drafter, as_many
    answers(core, requests())
    core.submit(requests())
    core.step()
    core.abort_all("enough")
    assert drafter.num_sequences == 0


def test_indexes_have_room_for_so_many_tokens_together(either: Path) -> None:
    """Sequences for which there is none have no drafts of their text, and the room is free again after the others."""
    plain, core = both(either)
    drafting = part_of(core, Drafting)
    drafter = NgramDrafter(most_tokens=100)
    drafting.drafter, drafting.budget.lengths = drafter, as_many
    most, extend, present = 0, NgramIndex.extend, WeakKeyDictionary[NgramIndex, int]()

    def note(index: NgramIndex, *args: Any) -> int:
        nonlocal most
        added = extend(index, *args)
        present[index] = len(index)
        most = max(most, sum(present.values()))
        return added

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramIndex, "extend", note)
        assert tokens_of(answers(core, requests())) == tokens_of(answers(plain, requests()))
    assert most == 100
    params = SamplingParams(max_tokens=40, temperature=0.0, logit_bias={50: 50.0})
    before = core.stats().of(NO_DRAFTS).accepted_total
    answers(core, [Request("last", prompt(1, 20), params, 0.0)])
    assert core.stats().of(NO_DRAFTS).accepted_total > before + 20


def test_many_long_prompts_delay_no_step(either: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step adds few tokens to the indexes, of however many sequences. All are searched in the end."""
    monkeypatch.setattr(ngram, "TOKENS_AT_ONCE", 40)
    monkeypatch.setattr(ngram, "LEAST_TOKENS", 4)
    added = [0]
    extend = NgramIndex.extend

    def count(index: NgramIndex, token_ids: ListOf[int], end: int, most: int) -> int:
        number = extend(index, token_ids, end, most)
        added[-1] += number
        return number

    monkeypatch.setattr(NgramIndex, "extend", count)
    _, core = both(either)
    drafting = part_of(core, Drafting)
    drafting.budget.lengths = as_many
    params = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True, logit_bias={50: 50.0})
    core.submit([Request(f"r{i}", prompt(i, 100), params, float(i)) for i in range(6)])
    while core.has_work():
        core.step()
        added.append(0)
    assert max(added) <= 2 * (40 + 6 * 4)  # what a step verifies may be chosen twice
    assert sum(added) > 6 * 100
    assert core.stats().of(NO_DRAFTS).accepted_total > 6 * 20


def test_drafts_beside_images(either: Path) -> None:
    """Rows of an image are never drafts, though they came after the same tokens before."""
    beside = [7, 8, 9, 10]
    tokens, images = shown([*prompt(1, 20), *beside], image(1, 64, 32), [*prompt(2, 9), *beside])
    params = SamplingParams(max_tokens=30, temperature=0.0, logit_bias=dict.fromkeys(beside, 30.0))
    asked = [Request("a", tokens, params, 0.0, images=images), Request("b", prompt(3, 40), params, 0.0)]
    served, _ = load_seeing(either)
    expected = answers(make_core(served), asked)
    served, tower = load_seeing(either)
    core = make_core(served, speculative="ngram")
    drafting = part_of(core, Drafting)
    drafting.budget.lengths = as_many
    assert tokens_of(answers(core, asked)) == tokens_of(expected)
    assert core.stats().of(NO_DRAFTS).accepted_total > 0
    assert tower.calls == [(1, 32, 64, 3)]


@pytest.mark.parametrize("alternates", [False, True], ids=["all steps", "every other pair"])
def test_text_is_made_while_the_next_step_runs(monkeypatch: pytest.MonkeyPatch, alternates: bool) -> None:
    """A step is launched once the last one's tokens are known, and then their text is made: unless a grammar or a limit
    on thinking follows it, or the answer ends."""
    served = load_model("demo")
    constrained = SamplingParams(
        max_tokens=40, temperature=0.8, seed=9, constraint=Constraint("regex", "[a-z]{3}( [a-z]{3}){8}")
    )
    stopped = SamplingParams(max_tokens=40, temperature=1.0, seed=2, ignore_eos=True, stop=("e", "a"))
    asked = [
        *requests(),
        Request("grammar", prompt(20, 9), constrained, 9.0),
        Request("stop", prompt(21, 9), stopped, 9.0),
    ]
    expected = answers(make_core(served), asked)
    monkeypatch.setattr(ModelRunner, "overlaps", True)
    core = make_core(served, speculative="ngram")
    drafting = use_oracle(core, tokens_of(expected))
    if alternates:
        drafting.budget.lengths = every_other_step()
    events: list[str] = []
    forward, advance, read = core.runner.forward, core.requests.advance, InFlightStep.read

    def launching(step: Step, *args: Any) -> Any:
        events.append("launch with drafts" if step.has_drafts else "launch")
        return forward(step, *args)

    def delivering(tokens: Mapping[int, ListOf[Any]]) -> None:
        if tokens:
            events.append("text")
        advance(tokens)

    def reading(step: InFlightStep) -> Any:
        events.append("read")
        return read(step)

    monkeypatch.setattr(InFlightStep, "read", reading)
    monkeypatch.setattr(core.runner, "forward", launching)
    monkeypatch.setattr(core.requests, "advance", delivering)
    got = answers(core, asked)
    fields = ("token_ids", "text", "finish_reason")
    for name, output in expected.items():
        assert [getattr(got[name], each) for each in fields] == [getattr(output, each) for each in fields], name
    assert core.stats().of(NO_DRAFTS).accepted_total > 40
    threes = list(zip(events, events[1:], events[2:], strict=False))
    assert threes.count(("read", "launch with drafts", "text")) > 2
    assert core.scheduler.pool.usage().used == 0
