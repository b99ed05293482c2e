"""System One's dialect: POST /v1/systemone, as Ollama's client, llama.cpp's server and Rapid-MLX define it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from mlxpaged.api.decisions.figures import best, confidence, score
from mlxpaged.api.decisions.named import (
    TRUE,
    Named,
    NamedBool,
    NamedChoice,
    NamedQuestions,
    NamedScore,
)
from mlxpaged.api.decisions.schema import Content, Images, MethodFields
from mlxpaged.api.fields import decisions as fields
from mlxpaged.api.ollama.schema import duration

CLIENT_NAMES = {"messages": "state", "prompt": "state"}


class SystemOneRequest(MethodFields):
    """keep_alive: how long the model stays loaded. images: shown before `state`. temperature: divides the
    log-probabilities. Rapid-MLX has the last two."""

    table = fields.SYSTEM_ONE

    model: str | None = None
    keep_alive: Annotated[str | float | None, BeforeValidator(duration)] = None
    state: Content
    questions: NamedQuestions
    images: Images | None = None
    temperature: Annotated[float, Field(ge=1e-6, le=100)] | None = None


def answer(named: Named, found: Sequence[list[float]]) -> dict[str, Any]:
    [own] = found
    if isinstance(named.given, NamedBool):
        return {"type": "noul", "noul": own[named.labels.index(TRUE)]}
    if isinstance(named.given, NamedScore):
        keys = [str(index) for index in range(len(own))]
        return {
            "type": "score",
            "score": score(own),
            "legend": dict(zip(keys, named.labels, strict=True)),
            "probabilities": dict(zip(keys, own, strict=True)),
            "confidence": confidence(own),
        }
    assert isinstance(named.given, NamedChoice)
    return {
        "type": "choice",
        "choice": named.labels[best(own)],
        "probabilities": dict(zip(named.labels, own, strict=True)),
        "confidence": confidence(own),
    }
