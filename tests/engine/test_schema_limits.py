"""How deep and how large a schema may be. What is refused here never gets to the compiler."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpaged.parts.grammar import json_schema
from mlxpaged.parts.grammar.json_schema import MAX_MULTIPLE, check_schema, enforceable
from mlxpaged.parts.grammar.schema_limits import MAX_DEPTH, MAX_NESTING, MAX_RESOLVED, check_limits, parsed, target
from tests.engine.constraints import WRAPPED, chain, copied, doubling, nested


@pytest.mark.parametrize("name", WRAPPED)
def test_schemas_in_one_another_are_counted_through_references(name: str) -> None:
    check_limits(chain(name, MAX_DEPTH))
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} schemas in one another"):
        check_limits(chain(name, MAX_DEPTH + 5))


def test_objects_and_lists_in_one_another_are_counted() -> None:
    check_limits(nested(MAX_NESTING))
    for schema in (nested(MAX_NESTING + 1), {"const": nested(MAX_NESTING)}, {"enum": [[nested(MAX_NESTING - 1)]]}):
        with pytest.raises(ValueError, match=f"nested too deeply: the limit is {MAX_NESTING}"):
            check_limits(schema)


def test_a_text_that_no_parser_reads_is_refused_in_the_same_words() -> None:
    for text in ('{"items":' * 5000 + "{}" + "}" * 5000, "[" * 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parsed(text)
    with pytest.raises(ValueError, match="not valid JSON"):
        parsed('{"minimum": NaN}')


def test_what_references_copy_is_counted() -> None:
    check_limits(doubling(10))
    with pytest.raises(ValueError, match=f"more than {MAX_RESOLVED} schemas, with what its references copy"):
        check_limits(doubling(100))


def in_place(schema: dict[str, Any], times: int) -> dict[str, Any]:
    """A schema of 2^times schemas, if references in `schema` are copied. It has two for "next"."""
    defs = {f"d{i}": rename(schema, f"#/$defs/d{i + 1}") for i in range(times)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{times}": {"type": "object"}}}


def rename(value: Any, reference: str) -> Any:
    if isinstance(value, dict):
        return {key: reference if key == "$ref" else rename(each, reference) for key, each in value.items()}
    return [rename(each, reference) for each in value] if isinstance(value, list) else value


NEXT = {"$ref": "next"}
COPIES = [
    {"allOf": [NEXT, NEXT]},
    {"type": "object", "anyOf": [NEXT, NEXT]},
    {"properties": {"a": {**NEXT, "minProperties": 1}, "b": {"allOf": [NEXT, {"type": "object"}]}}},
    {"prefixItems": [{"oneOf": [NEXT], "type": "object"}] * 2},
]
NO_COPIES = [
    {"anyOf": [NEXT, NEXT]},
    {"allOf": [{"anyOf": [NEXT, NEXT]}], "description": "words", "$comment": "words", "unknown": 1},
    {"type": "object", "properties": {"a": {**NEXT, "title": "A", "default": {"type": 1}}, "b": NEXT}},
    {"properties": {"a": {"allOf": [NEXT], "description": "as Pydantic writes it"}, "b": {"items": NEXT}}},
]


@pytest.mark.parametrize("schema", COPIES)
def test_a_reference_is_copied_into_a_schema_that_says_more(schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="with what its references copy"):
        check_limits(in_place(schema, 40))


@pytest.mark.parametrize("schema", NO_COPIES)
def test_a_reference_alone_or_beside_words_is_not_copied(schema: dict[str, Any]) -> None:
    check_limits(in_place(schema, 40))


def test_schemas_that_refer_to_themselves_and_each_other_are_taken() -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}, "all": {"items": {"$ref": "#"}}}}
    check_limits(tree)
    check_limits({"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}], "$defs": {"a": {"items": {"$ref": "#"}}}})
    kinds = {f"k{i}": {"properties": {f"p{j}": {"$ref": f"#/$defs/k{j}"} for j in range(60)}} for i in range(60)}
    check_limits({"$ref": "#/$defs/k0", "$defs": kinds})  # as the schema of a language's syntax


def test_references_of_other_kinds_end_there() -> None:
    root = {"$defs": {"a/b": [{"type": "null"}], "c d": {}}, "$anchor": "x"}
    assert target("#/$defs/a~1b/0", root) == {"type": "null"}
    assert target("#/$defs/c%20d", root) == {}
    assert target("#", root) is root
    for reference in ("#/$defs/a~1b/1", "#/$defs/a~1b/-1", "#/$defs/none/x", "#x", "http://localhost/#/$defs", ""):
        assert target(reference, root) is None
        check_limits(root | {"$ref": reference})


def branch(**constants: Any) -> dict[str, Any]:
    return {"properties": {name: {"const": value} for name, value in constants.items()}, "required": [*constants]}


def objects(*branches: dict[str, Any]) -> dict[str, Any]:
    return {"oneOf": [{"type": "object", **each} for each in branches]}


@pytest.mark.parametrize(
    ("schema", "disjoint"),
    [
        (objects(*(branch(kind=str(i)) for i in range(64))), True),
        (objects(*(branch(kind=str(i), of=str(j)) for i in range(8) for j in range(8))), True),
        (objects(branch(a="1"), branch(a="2", b="1"), branch(a="1", b="2")), False),
        (objects(branch(a="1"), {}), False),
        (objects(branch(a="1"), {"type": ["object", "null"], **branch(a="2")}), False),
        ({"oneOf": [{"type": ["object", "null"], **branch(a="2")}, {"type": "array"}]}, True),
        (objects(branch(a=1), branch(a=2)), True),
        (objects(branch(a=1), branch(a="1"), branch(a=True), branch(a=None)), True),
        (objects(branch(a=10**20), branch(a=10**20 + 1)), True),
        (objects(branch(a=1), branch(a=1)), False),
        (objects(branch(a=1), branch(a=1.0)), False),
        (objects(branch(a=[1]), branch(a=[2])), False),
    ],
)
def test_branches_are_told_apart_by_one_property_or_in_pairs(schema: dict[str, Any], disjoint: bool) -> None:
    assert list(enforceable(schema)) == (["anyOf"] if disjoint else ["oneOf"])


def test_the_comparisons_of_all_branches_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    in_pairs = objects(*(branch(kind=str(i), of=str(j)) for i in range(8) for j in range(8)))
    enforceable({"prefixItems": [in_pairs] * 80})
    monkeypatch.setattr(json_schema, "MAX_COMPARED", 20_000)
    enforceable(in_pairs)
    with pytest.raises(ValueError, match="too many branches of oneOf"):
        enforceable({"prefixItems": [in_pairs] * 80})


def test_branches_to_which_references_lead_again_are_compared_once() -> None:
    """100 kB of either were 500,000 comparisons before they were refused: one to two seconds of Python."""
    large, small = (
        {"type": "object", **branch(**dict.fromkeys(names, "x"))} for names in ([f"a{i}" for i in range(1800)], ["b"])
    )
    kinds = {f"k{i}": branch(**{f"p{j}": str(i == j) for j in range(20)}) | {"type": "object"} for i in range(20)}
    for defs, count, disjoint in (({"a": large, "b": small}, 900, False), (kinds, 180, True)):
        each = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in defs]}
        found = enforceable({"$defs": defs, "prefixItems": [each] * count})
        assert [list(item) for item in found["prefixItems"]] == [["anyOf" if disjoint else "oneOf"]] * count


def test_types_that_do_not_exist_exclude_none() -> None:
    assert list(enforceable({"oneOf": [{"type": "text"}, {"type": ["number"]}]})) == ["oneOf"]


def test_the_common_multiple_of_many_large_numbers_is_not_computed() -> None:
    check_schema({"allOf": [{"multipleOf": number} for number in (0.5, 2, 100, MAX_MULTIPLE / 10)]})
    for numbers in ([10**300 + i for i in range(4000)], [0.1, MAX_MULTIPLE], [1e-30], [7, 11, 13, 17]):
        with pytest.raises(ValueError, match=f"multipleOf is above {MAX_MULTIPLE}"):
            check_schema({"allOf": [{"multipleOf": number} for number in numbers]})


def test_a_copy_counts_what_it_has() -> None:
    wide = {"type": "object", "properties": {f"p{i}": {} for i in range(200)}}
    copies = {"properties": {f"q{i}": copied(0) for i in range(60)}, "$defs": {"d0": wide}}
    with pytest.raises(ValueError, match="with what its references copy"):
        check_limits(copies)
    check_limits(copies | {"properties": {f"q{i}": copied(0) for i in range(40)}})
