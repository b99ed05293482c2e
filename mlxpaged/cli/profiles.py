"""Reads `--profile NAME=MODEL,KEY=VALUE,...`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlxpaged.cli import flags
from mlxpaged.cli.flags import TRUE
from mlxpaged.cli.guesses import meant_name
from mlxpaged.core.text.thinking_limit import ThinkingLimit
from mlxpaged.models.files.generation_config import LIMITS
from mlxpaged.registry.profile import Profile

FROM_FILE = "@"
"""Before the path of a file that has the text of `system`."""
SYSTEM = "system"
"""Its text may have commas, so it is the last key."""


def file_text(path: str) -> str:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a file of UTF-8"
        raise ValueError(f"{path!r} cannot be read: {reason}") from None
    if not text.strip():
        raise ValueError(f"{path!r} is empty")
    return text


def system_text(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be empty")
    return file_text(text.removeprefix(FROM_FILE)) if text.startswith(FROM_FILE) else text


def template(path: str) -> str:
    """The source of a chat template, if Jinja can read it."""
    from mlxpaged.models.text.templates.renderer import TemplateError, TemplateLimitError, variables_of

    source = file_text(path)
    try:
        variables_of(source)
    except (TemplateError, TemplateLimitError) as error:
        raise ValueError(f"{path!r} is no chat template: {error}") from None
    return source


def switch(text: str) -> bool:
    return flags.one_of("on", "off")(text) in TRUE


KEYS: dict[str, Callable[[str], Any]] = {
    "thinking": switch,
    "thinking_budget": ThinkingLimit.parse,
    "max_tokens": flags.positive_int,
    "chat_template": template,
    SYSTEM: system_text,
    **{name: flags.fitting(int if limits.whole else float, str(limits), limits.fit) for name, limits in LIMITS.items()},
}
FIELDS = {"thinking_budget": "thinking_limit"}
"""Keys that have other names in a profile."""


@flags.checked
def profile(text: str) -> Profile:
    """Raises ValueError, which names the profile and the key that is wrong."""
    first, comma, rest = text.partition(",")
    name, equals, model = (each.strip() for each in first.partition("="))
    if not (name and equals and model):
        raise ValueError(f"must be NAME=MODEL,KEY=VALUE,..., got {text!r}")
    found: dict[str, Any] = {}
    while comma:
        key, equals, value = rest.partition("=")
        key = key.strip().replace("-", "_")
        if key != SYSTEM:
            value, comma, rest = value.partition(",")
        else:
            comma = ""
        if key not in KEYS or not equals:
            keys = ", ".join(sorted(KEYS))
            raise ValueError(f"profile {name!r}: {key!r} is none of {keys}{meant_name(key, KEYS)}")
        if key in found:
            raise ValueError(f"profile {name!r}: {key} is given twice")
        try:
            found[key] = KEYS[key](value if key == SYSTEM else value.strip())
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"profile {name!r}: {key} {error}") from None
    sampling = {key: found.pop(key) for key in list(found) if key in LIMITS}
    return Profile(name, model, sampling, **{FIELDS.get(key, key): value for key, value in found.items()})


def check_names(profiles: Sequence[Profile], others: Sequence[str]) -> None:
    """others: names of models and aliases. Raises ValueError if one name would stand for two."""
    names = [each.name for each in profiles]
    for name in names:
        if name in others or names.count(name) > 1:
            what = "is a model's name or an alias already" if name in others else "is given twice"
            raise ValueError(f"--profile: the name {name!r} {what}")
