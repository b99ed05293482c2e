"""Makes errors of the system fit for users."""

from __future__ import annotations


def sentence(error: Exception) -> str:
    """Returns "FILE: No such file or directory" of an OSError, without its number; the message of other errors."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error) or type(error).__name__
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
