"""What `tool_choice` and strict tools demand of an answer."""

from __future__ import annotations

from mlxpaged.api.errors import bad_parameter


def check_demands(tool_choice: str | None, strict: bool) -> None:
    """Raises ApiError for what only constrained decoding can promise.

    tool_choice: "auto", "none", "required" or the name of a tool, or None. strict: whether a tool is.
    """
    if tool_choice not in (None, "auto", "none"):
        raise bad_parameter("tool_choice", f"{tool_choice!r} cannot be enforced yet; 'auto' and 'none' are supported")
    if strict:
        raise bad_parameter("tools", "strict cannot be enforced yet; leave it out, or set it to false")
