"""Of schemas that other programs write, all that can be enforced is, and what cannot be is left out by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.core.engine.constraint import Constraint, GrammarError, StructuredOutput, ToolCallForm
from mlxpaged.formats import FORMATS
from mlxpaged.formats.schemas import closed
from mlxpaged.models.loader import load_model
from mlxpaged.parts.grammar.grammar import Grammars
from mlxpaged.parts.grammar.json_grammar import lark_of_schema
from mlxpaged.parts.grammar.loosening import check_enforced, loosened
from tests.scripted import make_scripted_model

ONE_FIELD, COMBINED = (
    json.loads((Path(__file__).parent / f"{name}_schemas.json").read_text(encoding="utf-8"))
    for name in ("one_field", "combined")
)
"""What zod's `toJSONSchema` writes of an object with one field of each of its types, and pydantic of such models; and
of types in types. By library and name."""

NAMED = {
    "zod emoji": "pattern",
    "zod iso.duration": "pattern",
    "pydantic set[int]": "uniqueItems",
    "pydantic frozenset[str]": "uniqueItems",
    "pydantic conset": "uniqueItems",
    "pydantic confrozenset": "uniqueItems",
    "pydantic schema_extra.not": "not",
    "zod look-behind": "pattern",
    "zod back reference": "pattern",
    "zod xor of objects": "oneOf",
    "pydantic set of models names": "uniqueItems",
    "pydantic set in model": "uniqueItems",
}
"""Those of which a keyword cannot be enforced."""

IMPOSSIBLE = {"zod never": "required property 'a' is unsatisfiable"}
"""A required field that nothing fits."""


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    served = load_model(str(make_scripted_model(tmp_path_factory.mktemp("model"), "json_tools")))
    return Grammars(served.tokenizer, served.vocab_size)


def schemas_of(sources: dict[str, dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Each with the first word of its library before its name."""
    found = [(f"{library.split()[0]} {name}", each) for library in sources for name, each in sources[library].items()]
    assert len(found) > 200
    return found


def compile_loosened(grammars: Grammars, schema: dict[str, Any]) -> tuple[str, ...]:
    """Compile what can be enforced of a schema, and try it out. Returns the keywords that are left out."""
    loose, keywords = loosened(schema)
    grammars.compile_here(Constraint("json_schema", json.dumps(loose)), is_checked=True)
    return keywords


def test_each_type_of_zod_and_pydantic_is_enforced_or_loosened_by_name(grammars: Grammars) -> None:
    for where, schema in schemas_of(ONE_FIELD):
        if where in IMPOSSIBLE:
            with pytest.raises(GrammarError, match=IMPOSSIBLE[where]):
                compile_loosened(grammars, schema)
        else:
            assert compile_loosened(grammars, schema) == ((NAMED[where],) if where in NAMED else ()), where


def test_types_in_types_are_enforced_or_loosened_by_name(grammars: Grammars) -> None:
    for where, schema in schemas_of(COMBINED):
        assert compile_loosened(grammars, schema) == ((NAMED[where],) if where in NAMED else ()), where


def test_what_cannot_be_enforced_is_refused_with_its_place(grammars: Grammars) -> None:
    for where, schema in schemas_of(ONE_FIELD) + schemas_of(COMBINED):
        if where in NAMED:
            with pytest.raises(ValueError, match=f"'{NAMED[where]}' cannot be enforced; it is at '"):
                check_enforced(schema, schema)
        else:
            check_enforced(schema, schema)


def test_types_in_types_are_enforced_in_arguments_too(grammars: Grammars) -> None:
    form = FORMATS["json_tools"]
    objects = [(where, schema) for where, schema in schemas_of(COMBINED) if schema.get("type") == "object"]
    assert len(objects) > 100
    for _, schema in objects:
        call = ToolCallForm(form.pieces("f", closed(loosened(schema)[0])))
        held = StructuredOutput("never", "", "", None, form.call_start, (call,), one_call=True)
        grammars.compile_here(held, is_checked=True)


@pytest.mark.parametrize("wrong", [["a"], {"a": 1}, None, 1])
def test_what_is_no_name_is_not_required(wrong: Any) -> None:
    """Fuzzing found that a list among the required names was an internal error."""
    part = {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}, "required": [wrong, "a"]}
    tree: dict[str, Any] = {**part, "minProperties": 2}
    assert loosened(tree) == (tree, ())
    joined = {"allOf": [part, {"type": "object", "required": [wrong, "b"]}]}
    assert lark_of_schema(joined) == lark_of_schema({"allOf": [{**part, "required": ["a"]}, {"required": ["b"]}]})
    assert FORMATS["qwen3_coder"].pieces("edit", part)
