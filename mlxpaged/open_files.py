"""The limit of open files that a process begins with."""

from __future__ import annotations

import resource

IMPORT_LIMIT = 4096
"""The hard limit that mlx-lm's import sets. It fails if that would be a higher one, as in a container with a limit."""


def prepare() -> None:
    """Import mlx-lm under a lower hard limit too. Call it after all that must come before the import of mlx."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= IMPORT_LIMIT:
        return
    set_limit = resource.setrlimit
    resource.setrlimit = lambda kind, limits: None
    try:
        import mlx_lm  # noqa: F401
    finally:
        resource.setrlimit = set_limit
