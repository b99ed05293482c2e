"""What a model may have or miss."""

from __future__ import annotations

import enum


class Feature(enum.Enum):
    IMAGES = enum.auto()
    DRAFT_HEAD = enum.auto()
    RERANKING = enum.auto()
    EMBEDDINGS = enum.auto()
    KV_CACHE_DTYPE = enum.auto()  # the one that was asked for
    DISK_PREFIXES = enum.auto()


class Missing(dict[Feature, str]):
    """Why a model has none of a feature. The reason is empty if it has the feature, or never was to have it."""

    def __missing__(self, feature: Feature) -> str:
        return ""

    def but(self, feature: Feature, reason: str) -> Missing:
        """A copy with another reason for one feature."""
        return Missing({**self, feature: reason})
