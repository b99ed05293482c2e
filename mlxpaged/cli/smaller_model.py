"""Names a model that fits, in place of one that does not."""

from __future__ import annotations

from mlxpaged.cli.banner import megabytes
from mlxpaged.models.sources.short_names import largest_within, short_names

ROOM = 0.7
"""Share of the free memory for the weights of a model that is suggested instead; the rest is for its KV cache."""


def smaller() -> str:
    """The end of the message about a model that is too large: the largest one of the table that would fit."""
    from mlxpaged.models.device_memory import default_device_memory

    name = largest_within(ROOM * default_device_memory())
    return "" if name is None else f"; {name} would fit ({megabytes(short_names()[name].bytes)})"
