"""What public reports say that servers made of models' outputs, and what is right.

public_failures.json has for each: thread, the repository and number of the report; kind, of the failure; format; tools,
of the request; output, of the model; outcomes, of which one must come: lists of calls, or "text" if all of it may be
text. text and thoughts are what stands beside the calls.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.api.generation.deltas import Thinking
from tests.formats.test_reading import calls_of, parse, said, squeezed, uncut

CASES = json.loads((Path(__file__).parent / "public_failures.json").read_text(encoding="utf-8"))
IDS = [f"{i} {case['thread'].split(',')[0]} {case['kind']} {case['format']}" for i, case in enumerate(CASES)]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_public_failure_does_not_happen(case: dict[str, Any]) -> None:
    form, output = case["format"], case["output"]
    tools = [{"type": "function", "function": function} for function in case["tools"]]
    deltas = parse([output], form, tools)
    thoughts, text = said(deltas, Thinking), said(deltas)
    calls = json.dumps(calls_of(deltas), sort_keys=True)  # in which 1, 1.0 and true are three things
    whole = calls == "[]" and squeezed(output, form) in squeezed(thoughts + text, form)
    lists = [json.dumps(outcome, sort_keys=True) for outcome in case["outcomes"] if outcome != "text"]
    assert calls in lists or ("text" in case["outcomes"] and whole), (calls, text, thoughts)
    if calls in lists:
        assert squeezed(text, form) == squeezed(case.get("text", ""), form)
        assert squeezed(case.get("thoughts", thoughts), form) == squeezed(thoughts, form)
    for cut in range(1, len(output)):
        assert uncut(parse([output[:cut], output[cut:]], form, tools)) == uncut(deltas), output[:cut]
