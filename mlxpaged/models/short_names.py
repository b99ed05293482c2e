"""Short names of models."""

from __future__ import annotations

DEMO_MODEL = "demo"
