"""Defines what the request bodies of all APIs have in common: their base class and their limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, PlainValidator, Tag, model_validator
from pydantic.annotated_handlers import GetCoreSchemaHandler
from pydantic_core import CoreSchema

from mlxpaged.api.errors import bad_parameter

MAX_LIST = 10_000
"""Messages of a conversation, or parts of a message."""
MAX_TOOLS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]


def stop_strings(value: Any) -> list[str] | None:
    """Returns a string or a list of strings as a list. Raises ApiError with shorter messages than pydantic has."""
    if value is None:
        return None
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise bad_parameter("stop", "must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise bad_parameter("stop", f"has {len(strings)} strings; the limit is {MAX_STOP_STRINGS}")
    for i, text in enumerate(strings):
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
            field = "stop" if isinstance(value, str) else f"stop.{i}"
            raise bad_parameter(field, f"must be a string of 1 to {MAX_STOP_LENGTH} characters")
    return strings


Stop = Annotated[list[str] | None, PlainValidator(stop_strings, json_schema_input_type=StopString | StopStrings | None)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, value: Any) -> Any:
        """Keep only the first unknown field. pydantic describes each one, which takes five seconds for a million of
        them and blocks all threads."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            unknown = next((name for name in value if name not in known), None)
            return {name: each for name, each in value.items() if name in known or name == unknown}
        return value


def until_first_fault(fits: Callable[[Any], bool]) -> BeforeValidator:
    """Keep only the first value of an object that does not fit, if there is one, for the same reason."""

    def cut(value: Any) -> Any:
        faulty = next((key for key, each in value.items() if not fits(each)), None) if isinstance(value, dict) else None
        return value if faulty is None else {faulty: value[faulty]}

    return BeforeValidator(cut)


Labels = Annotated[dict[str, str], until_first_fault(lambda value: isinstance(value, str))]


@dataclass(frozen=True)
class OneOf:
    """Chooses the branch of a union by the field `key`, which is a literal in each branch. An error's path has the
    branch in brackets, as pydantic writes those of other unions. hidden: a value that the error does not show.
    default: returns the value for an object without the field `key`."""

    key: str
    hidden: str = ""
    default: Callable[[Mapping[str, Any]], str | None] = lambda fields: None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        types = {branch: get_args(branch.model_fields[self.key].annotation) for branch in get_args(source)}
        branches = {value: branch for branch, values in types.items() for value in values if value is not None}
        *first, last = (value for value in branches if value != self.hidden)
        discriminator = Discriminator(
            self._branch,
            custom_error_type="unsupported_type",
            custom_error_message=f"{self.key}: only {', '.join(first)} and {last} are supported here",
        )
        tagged: Any = reduce(or_, (Annotated[branch, Tag(f"[{value}]")] for value, branch in branches.items()))
        return handler.generate_schema(Annotated[tagged, discriminator])

    def _branch(self, value: Any) -> str:
        fields = value if isinstance(value, dict) else vars(value) if isinstance(value, BaseModel) else {}
        return f"[{fields.get(self.key) or self.default(fields)}]"
