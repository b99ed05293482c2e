"""Names in the file of keys, for the flags of `mlxpaged keys`: key_file.py needs pydantic, which takes 0.2 s."""

from __future__ import annotations

from typing import Literal

TierName = Literal["high", "normal", "low"]
TIERS: tuple[TierName, ...] = ("high", "normal", "low")
NAME_PATTERN = "^[A-Za-z0-9._-]{1,64}$"
