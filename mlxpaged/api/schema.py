"""What the request bodies of all APIs have in common: their base class, and the limits of what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator

MAX_LIST = 10_000
"""Messages of a conversation, or parts of a message."""
MAX_TOOLS = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, value: Any) -> Any:
        """Keep only the first unknown field: pydantic describes each, which takes five seconds for a million of them,
        and no other thread runs meanwhile."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            unknown = next((name for name in value if name not in known), None)
            return {name: each for name, each in value.items() if name in known or name == unknown}
        return value


def until_first_fault(fits: Callable[[Any], bool]) -> BeforeValidator:
    """Of an object with values that do not fit, keep only the first of these, for the same reason."""

    def cut(value: Any) -> Any:
        faulty = next((key for key, each in value.items() if not fits(each)), None) if isinstance(value, dict) else None
        return value if faulty is None else {faulty: value[faulty]}

    return BeforeValidator(cut)


Labels = Annotated[dict[str, str], until_first_fault(lambda value: isinstance(value, str))]


def one_of(key: str, known: str) -> Discriminator:
    """Chooses a union's branch by the value of `key`, in brackets, as pydantic writes branches in an error's path."""

    def tag(value: Any) -> str:
        return f"[{value.get(key)}]" if isinstance(value, dict) else f"[{getattr(value, key, None)}]"

    message = f"{key}: only {known} are supported here"
    return Discriminator(tag, custom_error_type="unsupported_type", custom_error_message=message)
