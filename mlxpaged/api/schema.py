"""Defines what the request bodies of all APIs have in common: their base class and their limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationInfo,
    model_validator,
)
from pydantic.annotated_handlers import GetCoreSchemaHandler
from pydantic_core import CoreSchema

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.fields.table import Table
from mlxpaged.api.reading import Reading

MAX_LIST = 10_000
"""Messages of a conversation, or parts of a message."""
MAX_TOOLS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_CHARS = 2048
"""Characters of all stop strings of a request. The engine's thread makes an automaton of them: 2.5 us for each."""

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
StopString = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]


def stop_strings(field: str, value: Any) -> list[str] | None:
    """Returns a string or a list of strings as a list. Empty strings are left out: clients send them for "none".
    Raises ApiError with shorter messages than pydantic has."""
    if value is None:
        return None
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list):
        raise bad_parameter(field, "must be a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise bad_parameter(field, f"has {len(strings)} strings; the limit is {MAX_STOP_STRINGS}")
    for i, text in enumerate(strings):
        if not isinstance(text, str) or len(text) > MAX_STOP_LENGTH:
            name = field if isinstance(value, str) else f"{field}.{i}"
            raise bad_parameter(name, f"must be a string of at most {MAX_STOP_LENGTH} characters")
    if (size := sum(map(len, strings))) > MAX_STOP_CHARS:
        raise bad_parameter(field, f"has {size} characters together; the limit is {MAX_STOP_CHARS}")
    return [text for text in strings if text]


def stop_field(field: str) -> PlainValidator:
    return PlainValidator(partial(stop_strings, field), json_schema_input_type=StopString | StopStrings | None)


def unlimited(value: Any) -> Any:
    """Returns None for -1, by which clients say that there is no limit, or no value."""
    return None if type(value) is int and value == -1 else value


UNLIMITED = BeforeValidator(unlimited)
Limit = Annotated[Annotated[int, Field(ge=1)] | None, UNLIMITED]
"""Most tokens of an answer."""
TokenLimit = Annotated[Annotated[int, Field(ge=0)] | None, UNLIMITED]
"""The same. 0: only the prompt is computed."""


LIKELIEST_ONLY = 1e-9
"""A top_p that keeps the likeliest token only, as long as the vocabulary has fewer than 1e9 tokens."""


def likeliest_only(value: Any) -> Any:
    """Returns a top_p that keeps one token for 0, by which clients mean that. A top_p must be above 0."""
    return LIKELIEST_ONLY if type(value) in (int, float) and value == 0 else value


TopP = Annotated[Annotated[float, Field(gt=0, le=1)] | None, BeforeValidator(likeliest_only)]


def allow_more(schema: dict[str, Any]) -> None:
    """Describes a body in OpenAPI: it may have more fields, because unknown ones are ignored."""
    schema.pop("additionalProperties", None)


class Body(BaseModel):
    """An object of a request's body. A `Reading`, as the context of the validation, says what happens to unknown
    fields; without one they are refused. table: the fields of a whole body."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        json_schema_extra=allow_more,
    )
    table: ClassVar[Table] = Table()

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: Any, info: ValidationInfo) -> Any:
        reading = info.context or Reading(cls, strict=True)
        return reading.known_fields(cls, value) if isinstance(value, dict) else value


def until_first_fault(fits: Callable[[Any], bool]) -> BeforeValidator:
    """Keep only the first value of an object that does not fit, if there is one, for the same reason."""

    def cut(value: Any) -> Any:
        faulty = next((key for key, each in value.items() if not fits(each)), None) if isinstance(value, dict) else None
        return value if faulty is None else {faulty: value[faulty]}

    return BeforeValidator(cut)


def as_text(value: Any) -> Any:
    """Returns a text as it is and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


Label = Annotated[str, BeforeValidator(lambda value: None if value is None else as_text(value))]
"""A text that changes nothing. Some clients send numbers and objects."""
MAX_LABELS = 16
"""OpenAI's limit."""
Labels = Annotated[
    dict[str, Any],
    Field(max_length=MAX_LABELS),
    AfterValidator(lambda labels: {key: as_text(each) for key, each in labels.items()}),
]


OTHER = "[]"
"""The tag of the branch that takes all other values."""


@dataclass(frozen=True)
class OneOf:
    """Chooses the branch of a union by the field `key`, which is a literal in each branch. If it is a string in one of
    them, this branch takes all other values. An error's path has the branch in brackets, as pydantic writes those of
    other unions. hidden: values that the error does not show. default: returns the value for an object without the
    field `key`."""

    key: str
    hidden: tuple[str, ...] = ()
    default: Callable[[Mapping[str, Any]], str | None] = lambda fields: None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        types = {branch: get_args(branch.model_fields[self.key].annotation) for branch in get_args(source)}
        branches = {value: branch for branch, values in types.items() for value in values if value is not None}
        shown = [value for value in branches if value not in self.hidden]
        discriminator: dict[str, Any] = {
            "custom_error_type": "unsupported_type",
            "custom_error_message": f"{self.key}: must be "
            f"{' or '.join(filter(None, (', '.join(shown[:-1]), shown[-1])))}",
        }
        tags = [(f"[{value}]", branch) for value, branch in branches.items()]
        tags += [(OTHER, branch) for branch in types if branch.model_fields[self.key].annotation is str]
        tagged: Any = reduce(or_, (Annotated[branch, Tag(tag)] for tag, branch in tags))
        return handler.generate_schema(Annotated[tagged, Discriminator(self._branch(tags), **discriminator)])

    def _branch(self, tags: Sequence[tuple[str, Any]]) -> Callable[[Any], str]:
        """Returns a function that returns the tag of a value."""
        known = {tag for tag, _ in tags}

        def branch(value: Any) -> str:
            fields = value if isinstance(value, dict) else vars(value) if isinstance(value, BaseModel) else {}
            found = fields.get(self.key) or self.default(fields)
            tag = f"[{found}]"
            return OTHER if tag not in known and isinstance(found, str) else tag

        return branch
