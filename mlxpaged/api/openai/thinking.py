"""Defines the fields about thinking: OpenAI's effort, vLLM's budget, and the objects of other vendors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.foreign import hint
from mlxpaged.api.schema import Body

Level = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORT_TOKENS = {"none": None, "minimal": 256, "low": 1024, "medium": 4096, "high": 16384, "xhigh": None, "max": None}
"""Limits of the thinking in tokens, by reasoning_effort. With "none", the chat template turns the thinking off."""


def left_to_the_model(value: Any) -> Any:
    """Returns None for the words by which clients say that they choose no effort."""
    return None if value in ("auto", "default") else value


Effort = Annotated[Level | None, BeforeValidator(left_to_the_model)]
Budget = Annotated[int, Field(ge=1)]
"""Most tokens of the thinking."""


class Thinking(Body):
    """The object of GLM, DeepSeek, Kimi and Anthropic."""

    type: Annotated[Literal["enabled", "disabled", "adaptive", "auto"] | None, hint("thinking.type")]
    budget_tokens: Budget | None = None


class Reasoning(Body):
    """OpenRouter's object. max_tokens: as `thinking_budget`."""

    effort: Annotated[Effort, hint("reasoning.effort")] = None
    max_tokens: Budget | None = None
    enabled: bool | None = None


class ThinkingFields(Body):
    reasoning_effort: Annotated[Effort, hint("reasoning_effort")] = None
    thinking_budget: Budget | None = None
    thinking: bool | Thinking | None = None
    reasoning: Reasoning | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ThinkingFields:
        if self.thinking_budget is not None and self.reasoning_effort is not None:
            raise bad_parameter("thinking_budget", "cannot be combined with reasoning_effort; give one of them")
        return self

    @property
    def effort(self) -> Level | None:
        """Returns the effort that is asked for. Where fields differ, OpenAI's holds."""
        if self.reasoning_effort is not None:
            return self.reasoning_effort
        said = self.thinking.type if isinstance(self.thinking, Thinking) else self.thinking
        if said in (False, "disabled") or (self.reasoning is not None and self.reasoning.enabled is False):
            return "none"
        return self.reasoning.effort if self.reasoning is not None else None

    @property
    def budget(self) -> int | None:
        """Returns the most tokens of the thinking, by the smallest of the limits that are given."""
        limits = [
            self.thinking_budget,
            getattr(self.thinking, "budget_tokens", None),
            self.reasoning.max_tokens if self.reasoning is not None else None,
            EFFORT_TOKENS[self.effort] if self.effort is not None else None,
        ]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def enables_thinking(self) -> bool | None:
        """Whether the thinking is turned on or off; None leaves it to the chat template."""
        if self.effort == "none":
            return False
        said = self.thinking.type if isinstance(self.thinking, Thinking) else self.thinking
        asked = said in (True, "enabled", "adaptive") or (self.reasoning is not None and self.reasoning.enabled)
        return True if asked else None

    @property
    def asks_thinking(self) -> bool:
        """Whether a model that does not think leaves something undone."""
        adaptive = isinstance(self.thinking, Thinking) and self.thinking.type in ("adaptive", "auto")
        return self.effort != "none" and (self.budget is not None or (self.enables_thinking is True and not adaptive))
