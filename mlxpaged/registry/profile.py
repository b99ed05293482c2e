"""Profiles: other names of a served model, each with defaults of its own for what requests do not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxpaged.core.text.thinking_limit import ThinkingLimit


@dataclass(frozen=True)
class Profile:
    """model: the name of a served model, or MODEL:ADAPTER. sampling: parameters, by name. thinking: whether the model
    thinks; None leaves it to the chat template. system: the system text of conversations without one. chat_template:
    its source; None for the model's own."""

    name: str
    model: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    thinking: bool | None = None
    thinking_limit: ThinkingLimit | None = None
    system: str | None = None
    chat_template: str | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """What the lists of models show of it. Of a long text, they say that there is one."""
        found: dict[str, Any] = dict(self.sampling)
        if self.max_tokens is not None:
            found["max_tokens"] = self.max_tokens
        if self.thinking is not None:
            found["thinking"] = self.thinking
        if self.thinking_limit is not None:
            found["thinking_budget"] = str(self.thinking_limit)
        texts = {"system": self.system, "chat_template": self.chat_template}
        return found | {name: True for name, text in texts.items() if text is not None}
