"""Which format a model has, by its chat template and vocabulary; and the documentation's table of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxpaged.formats import FORMATS, Tools, format_of, thought_tags
from tests.formats.written import TEMPLATES

DOCS = Path(__file__).parents[2] / "docs/structured-output.md"


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_template_shows_its_format(form: str) -> None:
    found = format_of(TEMPLATES[form], ())
    assert found is FORMATS[form]


def test_other_formats_are_found_by_the_vocabulary() -> None:
    """Conversions of LFM2.5 do not name the tags in the template; Kimi K3 has code instead of a template."""
    assert {*TEMPLATES, "kimi_k3"} == FORMATS.keys()
    tags = {"<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"}
    assert format_of("", tags) is FORMATS["kimi_k3"]
    assert format_of("{{ tools }}", {"<|tool_call_start|>", "<|tool_call_end|>"}) is FORMATS["pythonic"]
    assert format_of("{{ messages }}", {"<think>"}) is None


def test_thoughts_are_found_by_the_vocabulary() -> None:
    for start, end in (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<mm:think>", "</mm:think>")):
        assert (thought_tags({start, end}).start, thought_tags({start, end}).end) == (start, end)
        assert not thought_tags({start})
    assert thought_tags({"<|channel>", "<channel|>"}).start == "<|channel>thought"


def test_mistrals_ids_have_nine_letters_or_digits() -> None:
    ids = {FORMATS["mistral"].new_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(len(each) == 9 and each.isalnum() and each.isascii() for each in ids)


@pytest.mark.parametrize(
    ("schema", "fitting", "other"),
    [
        ({"properties": {"a": {"type": "integer"}}, "required": ["a"]}, '{"a": 1}', '{"a": "1"}'),
        ({"properties": {"a": {"enum": ["x", 1]}}}, '{"a": "x"}', '{"a": "y"}'),
        ({"properties": {}, "additionalProperties": False}, "{}", '{"b": 1}'),
        ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "null"}}}, '{"a": null}', '{"a": 0}'),
        ({"properties": {"a": {"type": "object", "required": True}}, "required": True}, '{"a": {}}', '{"a": 1}'),
        ({"properties": {"a": {"items": {"type": "number"}}}}, '{"a": [1, 2.5]}', '{"a": [true]}'),
        ({"properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}, '{"a": null}', '{"a": 1}'),
    ],
)
def test_arguments_fit_a_schema_or_do_not(schema: dict[str, object], fitting: str, other: str) -> None:
    tools = Tools([{"function": {"name": "f", "parameters": {"type": "object", **schema}}}])
    assert tools.fit(tools.call("f", fitting))
    assert not tools.fit(tools.call("f", other))


def test_the_documentation_lists_every_format() -> None:
    rows = [f"| `{each.name}` | {each.models} |" for each in FORMATS.values()]
    table = "\n".join(["| Format (`--tool-parser`) | Models |", "|---|---|", *sorted(rows)])
    assert table in DOCS.read_text(), table
