"""What a sequence may wait for before it is queued."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wait:
    """brings_prefix: whether a part of the prompt may not have to be computed after it, so that the time of its prefill
    cannot be told before."""

    name: str
    brings_prefix: bool = False
