"""The names of the attention backends. Nothing here imports mlx."""

from __future__ import annotations

from typing import Literal, get_args

Backend = Literal["auto", "metal", "gather", "cpu"]
BACKENDS: tuple[str, ...] = get_args(Backend)
