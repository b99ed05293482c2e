"""mlx-vlm's dialect: POST /v1/decisions with `state` or images, and an object of questions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxpaged.api.decisions.figures import best, score
from mlxpaged.api.decisions.named import Named, NamedBool, NamedLabels, NamedScore

CLIENT_NAMES = {"messages": "state", "prompt": "state"}
THRESHOLD = 0.5
"""From this probability on, a label fits and a boolean is true."""


def answer(named: Named, found: Sequence[list[float]]) -> dict[str, Any]:
    given, first = named.given, found[0]
    if isinstance(given, NamedBool):
        return {"type": "bool", "value": first[1] >= THRESHOLD, "probability": first[1]}
    if isinstance(given, NamedLabels):
        scores = {label: each[1] for label, each in zip(named.labels, found, strict=True)}
        least = THRESHOLD if given.threshold is None else given.threshold
        fitting = [label for label, fit in scores.items() if fit >= least]
        return {"type": "multi_label", "value": fitting, "scores": scores, "metadata": {"threshold": least}}
    metadata: dict[str, Any] = {"confidence": first[best(first)]}
    if isinstance(given, NamedScore):
        keys = [str(index) for index in range(len(first))]
        metadata["legend"] = dict(zip(keys, named.labels, strict=True))
        value: Any = score(first)
    else:
        keys, value = list(named.labels), named.labels[best(first)]
    probabilities = dict(zip(keys, first, strict=True))
    return {"type": given.type, "value": value, "probabilities": probabilities, "metadata": metadata}
