"""Whole answers held to a form: thinking under a budget, then text or calls, also if steps are dropped or fail."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.core.engine.constraint import Constraint, GrammarError, StructuredOutput, ToolCallForm
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.formats.pieces import Json
from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.parts.grammar import grammar
from mlxpaged.parts.grammar.grammar import Grammars
from mlxpaged.parts.grammar.structured_output import lark
from tests.engine.helpers import finish, let_steps_fail, make_core
from tests.scripted import make_scripted_model

OBJECT = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"], "additionalProperties": False}
CALLS = tuple(ToolCallForm((f"\n{name} ", Json(json.dumps(OBJECT)), "\n</tool_call>"), "tools.0") for name in "fg")
THINK, TOOL = ("<think>", "</think>"), "<tool_call>"
WORDS = Constraint("regex", "([a-z]{3} ){1,9}", "guided_regex")

CALL = r'<tool_call>\n[fg] \{\s*"a"\s*:\s*(1|22)\s*\}\n</tool_call>'
FORMS: dict[str, tuple[StructuredOutput, str]] = {
    "text behind open thoughts": (StructuredOutput("open", *THINK, WORDS), r"(?s).*</think>([a-z]{3} ){1,9}"),
    "calls": (StructuredOutput("may", *THINK, None, TOOL, CALLS), rf"(?s)(<think>.*</think>)?\n?\n?{CALL}(\n?{CALL})*"),
    "one call": (StructuredOutput("never", *THINK, None, TOOL, CALLS, one_call=True), CALL),
    "calls or text": (
        StructuredOutput("open", *THINK, WORDS, TOOL, CALLS),
        rf"(?s).*</think>({CALL}.*|([a-z]{{3}} ){{1,9}})",
    ),
    "text and calls": (
        StructuredOutput("may", *THINK, "free", TOOL, CALLS),
        rf"(?s)[^<]*(<(?!tool_call>)[^<]*)*({CALL}.*)?",
    ),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_model(str(make_scripted_model(tmp_path_factory.mktemp("model"), "json_tools")))


def add_mix(core: EngineCore) -> None:
    """Two of every form, the second one a fork of the first, and as many free ones."""
    for i, (name, (form, _)) in enumerate(FORMS.items()):
        for copy in range(2):
            params: dict[str, Any] = {"seed": 10 * i + copy, "max_tokens": 90, "logit_bias": {256: 3.0, 264: 3.0}}
            if i % 2:
                params |= {"frequency_penalty": 0.2, "min_tokens": 20}
            held = {"thinking_budget": 6 + i, "begins_thinking": form.thinking == "open", "think_tags": True}
            prompt = [5, 6, 7] * 12 + [i + 10]
            fork = f"held {name} 0" if copy else None
            for kind, more in (("held", held | {"constraint": form, "tool_tags": True}), ("free", {})):
                request_id = f"{kind} {name} {copy}"
                fork_of = fork if kind == "held" else None
                core.add(
                    Request(request_id, prompt, SamplingParams(**params, **more), time.monotonic(), fork_of=fork_of)
                )


def texts_of(core: EngineCore) -> dict[str, str]:
    texts, reasons = finish(core)
    for name, (_, pattern) in FORMS.items():
        for copy in range(2):
            request_id = f"held {name} {copy}"
            if reasons[request_id] is FinishReason.STOP:
                assert re.fullmatch(pattern, texts[request_id]), f"{name}: {texts[request_id]!r}"
    return texts


@pytest.fixture(scope="module")
def expected(served: ServedModel) -> dict[str, str]:
    core = make_core(served)
    add_mix(core)
    texts = texts_of(core)
    assert sum("<tool_call>" in text for text in texts.values()) >= 4
    return texts


@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize(("blocks", "swap"), [(100, 0), (9, 0), (9, 12)], ids=["roomy", "recomputed", "swapped"])
def test_answers_do_not_depend_on_overlap_preemption_forks_or_failures(
    served: ServedModel,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    overlaps: bool,
    blocks: int,
    swap: int,
) -> None:
    monkeypatch.setattr(ModelRunner, "overlaps", overlaps)
    core = make_core(served, blocks, swap, max_num_batched_tokens=64)
    let_steps_fail(core, monkeypatch)
    add_mix(core)
    assert texts_of(core) == expected
    assert (core.stats().scheduler.preemptions_total > 0) or blocks == 100


def test_the_part_that_cannot_be_enforced_is_named(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "PARTS_SECONDS", math.inf)
    grammars = Grammars(served.tokenizer, served.vocab_size)
    wrong = ToolCallForm((Json('{"not": {}}'),), "tools.1")
    for form, param in (
        (StructuredOutput("may", *THINK, WORDS, TOOL, (CALLS[0], wrong), param="mine"), "tools.1"),
        (
            StructuredOutput("may", *THINK, Constraint("regex", "[a", "guided_regex"), TOOL, CALLS, param="mine"),
            "guided_regex",
        ),
    ):
        with pytest.raises(GrammarError) as caught:
            grammars.compile(form)
        assert caught.value.param == param


def test_a_tag_in_several_tokens_is_text(tmp_path: Path, served: ServedModel) -> None:
    """As many as the vocabulary has: special tokens stand by themselves, what is between them is text."""

    def pieces(text: str) -> list[str | int]:
        return [{"<|a|>": 1, "<|b|>": 2}.get(piece, piece) for piece in re.split(r"(<\|[ab]\|>)", text) if piece]

    form = StructuredOutput("may", "<|a|>think<|b|>", "[/think/]", WORDS)
    assert lark(form, pieces).splitlines() == [
        'start: (<[1]> "think" <[2]> thought)? answer',
        "thought: thought_head ",
        "thought_head[lazy]: THOUGHT",
        r"THOUGHT: /(?s:.*)\[\/think\/\]/",
        "answer: (@part_0)",
    ]
