"""Defines OpenAI's and vLLM's fields for structured output, and makes the constraint that they ask for.

Compiling a schema, regular expression or grammar shows whether it can be enforced (api/server.py).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.schema import Body, OneOf
from mlxpaged.core.engine.constraint import Constraint, ConstraintKind

MAX_ALTERNATIVES = 1000
"""The most alternatives of a choice."""

Schema = dict[str, Any] | str
"""A JSON schema, or the JSON text of one."""
Alternatives = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_ALTERNATIVES, fail_fast=True)
]

KINDS: dict[str, ConstraintKind] = {
    "json_object": "json_schema",
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
ANY_OBJECT = '{"type":"object"}'


class TextFormat(Body):
    """schema: of a JSON object, as llama.cpp has it."""

    type: Literal["text", "json_object"]
    json_schema: None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _text_has_no_schema(self) -> TextFormat:
        if self.schema_ is not None and self.type == "text":
            raise ValueError("schema: needs the type json_object or json_schema")
        return self

    def constraint(self, param: str) -> Constraint | None:
        if self.schema_:  # {} is none, as in llama.cpp
            return Constraint("json_schema", json.dumps(self.schema_), f"{param}.schema", is_strict=False)
        return Constraint("json_schema", ANY_OBJECT, param) if self.type == "json_object" else None


class JsonSchema(Body):
    """name, description: labels. strict: a schema that cannot be enforced is refused."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None

    def constraint(self, param: str) -> Constraint:
        return Constraint("json_schema", json.dumps(self.schema_), f"{param}.schema", is_strict=bool(self.strict))


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema

    def constraint(self, param: str) -> Constraint:
        return self.json_schema.constraint(f"{param}.json_schema")


ResponseFormat = Annotated[TextFormat | SchemaFormat, OneOf("type")]


class StructuredOutputs(Body):
    """vLLM's field for structured output."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Alternatives | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _asks_for_something(self) -> StructuredOutputs:
        if not constraints(self, "", ""):
            raise bad_parameter("structured_outputs", "must have one of json, regex, choice, grammar and json_object")
        return self


class StructuredFields(Body):
    """The fields that chat completions and completions share."""

    structured_outputs: StructuredOutputs | None = None
    # vLLM's earlier names.
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Alternatives | None = None
    guided_grammar: str | None = None

    def constraint(self, other: Constraint | None = None) -> Constraint | None:
        """Returns the only constraint, if any. other: that of another field. Raises ApiError if there are several."""
        asked = [] if other is None else [other]
        if self.structured_outputs is not None:
            asked += constraints(self.structured_outputs, "", "structured_outputs.")
        asked += constraints(self, "guided_", "guided_")
        if len(asked) > 1:
            raise bad_parameter(asked[1].param, f"cannot be combined with {asked[0].param}; give one of them")
        return asked[0] if asked else None


def constraints(body: BaseModel, prefix: str, shown_prefix: str) -> list[Constraint]:
    """Returns the constraints of the fields that begin with a prefix. shown_prefix: that of the client's names."""
    fields = {name.rstrip("_"): value for name, value in body if value not in (None, False)}
    found = []
    for name, kind in KINDS.items():
        if (value := fields.get(prefix + name)) is not None:
            text = ANY_OBJECT if value is True else value if isinstance(value, str) else json.dumps(value)
            found.append(Constraint(kind, text, shown_prefix + name))
    return found
