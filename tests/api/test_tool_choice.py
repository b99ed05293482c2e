"""The grammar of the calls that a request demands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxpaged.api.tool_choice import calls_grammar

llguidance = pytest.importorskip("llguidance")

PLACE = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TOOLS: list[dict[str, Any]] = [
    {"function": {"name": "move", "parameters": {"$ref": "#/$defs/place", "$defs": {"place": PLACE}}}},
    {"function": {"name": "stop"}},
]


def accepts(grammar: str, text: str) -> bool:
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.consume_token(token) for token in tokenizer.tokenize_str(text)) and matcher.is_accepting()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_it_takes_calls_of_the_tools_and_nothing_else() -> None:
    grammar = calls_grammar(TOOLS, '"<tool_call>"', '"</tool_call>"', one_call=False)
    assert accepts(grammar, call("move", x=3))
    assert accepts(grammar, call("move", x=3) + "\n" + call("stop"))
    for text in (call("jump"), call("move", x="3"), call("move"), "Hello", ""):
        assert not accepts(grammar, text), text


def test_it_takes_no_second_call_where_one_is_wanted() -> None:
    grammar = calls_grammar(TOOLS, '"<tool_call>"', '"</tool_call>"', one_call=True)
    assert accepts(grammar, call("stop"))
    assert not accepts(grammar, call("stop") + "\n" + call("stop"))
