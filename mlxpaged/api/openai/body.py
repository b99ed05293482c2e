"""What all objects in request bodies have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, model_validator


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, value: Any) -> Any:
        """The first one is as good as a million, each of which pydantic would describe: five seconds, in which no
        other thread gets to run."""
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            unknown = next((name for name in value if name not in known), None)
            return {name: each for name, each in value.items() if name in known or name == unknown}
        return value


def until_first_fault(fits: Callable[[Any], bool]) -> BeforeValidator:
    """Of an object whose values do not all fit only the first that does not, for the same reason."""

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
