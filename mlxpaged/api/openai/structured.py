"""The fields for structured output, OpenAI's and vLLM's, and the constraint that they ask for.

Compiling a schema, regular expression or grammar shows whether it can be enforced (api/server.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.schema import Body
from mlxpaged.engine import Constraint, ConstraintKind

MAX_ALTERNATIVES = 1000
"""The most alternatives of a choice."""

Schema = dict[str, Any] | str
"""A JSON schema, or the JSON text of one."""
Alternatives = Annotated[
    list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_ALTERNATIVES, fail_fast=True)
]

KINDS: dict[str, ConstraintKind] = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
ANY_OBJECT = '{"type":"object"}'


class JsonSchema(Body):
    """name, description: labels. strict: either way the answer fits the schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise bad_parameter("response_format.json_schema", "is required if type is 'json_schema'")
        if self.type != "json_schema" and self.json_schema is not None:
            raise bad_parameter("response_format.json_schema", f"needs type to be 'json_schema', not {self.type!r}")
        return self

    def constraints(self) -> Iterator[Constraint]:
        if self.type == "json_object":
            yield Constraint("json_schema", ANY_OBJECT, "response_format")
        elif self.json_schema is not None:
            yield Constraint("json_schema", json.dumps(self.json_schema.schema_), "response_format.json_schema.schema")


class StructuredOutputs(Body):
    """vLLM's field for structured output."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Alternatives | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def constraints(self) -> Iterator[Constraint]:
        if self.json_object:
            yield Constraint("json_schema", ANY_OBJECT, "structured_outputs.json_object")
        yield from constraints(self, "", "structured_outputs.")

    @model_validator(mode="after")
    def _asks_for_something(self) -> StructuredOutputs:
        if not any(True for _ in self.constraints()):
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

    def constraints(self) -> Iterator[Constraint]:
        """All constraints of the request. Only one is allowed."""
        if self.structured_outputs is not None:
            yield from self.structured_outputs.constraints()
        yield from constraints(self, "guided_", "guided_")

    def constraint(self) -> Constraint | None:
        """Raises ApiError if there is more than one."""
        first, *others = [*self.constraints(), None]
        if first is not None and others[0] is not None:
            raise bad_parameter(others[0].param, f"cannot be combined with {first.param}; give one of them")
        return first


def constraints(body: BaseModel, prefix: str, shown_prefix: str) -> Iterator[Constraint]:
    """The constraints of the fields that begin with a prefix. shown_prefix: begins their names for the client."""
    fields = {name.rstrip("_"): value for name, value in body if value is not None}
    for name, kind in KINDS.items():
        if (value := fields.get(prefix + name)) is not None:
            text = value if isinstance(value, str) else json.dumps(value)
            yield Constraint(kind, text, shown_prefix + name)
