"""What all objects in request bodies have in common."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Discriminator


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def one_of(key: str, known: str) -> Discriminator:
    """Chooses a union's branch by the value of `key`, in brackets, as pydantic writes branches in an error's path."""

    def tag(value: Any) -> str:
        return f"[{value.get(key)}]" if isinstance(value, dict) else f"[{getattr(value, key, None)}]"

    message = f"{key}: only {known} are supported here"
    return Discriminator(tag, custom_error_type="unsupported_type", custom_error_message=message)
