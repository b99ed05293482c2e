"""Reads what a model's generation_config.json recommends: sampling parameters and end tokens.

The model can run without this file. So a value that cannot be used is ignored with a warning. Older models name their
end tokens in config.json alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.json_files import read_object

logger = logging.getLogger(__name__)

FILE = "generation_config.json"
MAX_END_TOKENS = 1000
"""Tokens that end an answer. Models have up to ten."""


class Limits(NamedTuple):
    """The values of a sampling parameter. excluded: whether `least` itself is no value. whole: whether they are whole
    numbers."""

    least: float
    most: float
    excluded: bool = False
    whole: bool = False

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} {'above' if self.excluded else 'from'} {self.least:g} to {self.most:g}"

    def fit(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or (self.whole and value % 1):
            return False
        return (self.least < value if self.excluded else self.least <= value) and value <= self.most


LIMITS = {
    "temperature": Limits(0, 2),
    "top_p": Limits(0, 1, excluded=True),
    "top_k": Limits(-1, 2**31 - 1, whole=True),
    "min_p": Limits(0, 1),
    "repetition_penalty": Limits(0, 10, excluded=True),
    "presence_penalty": Limits(-2, 2),
    "frequency_penalty": Limits(-2, 2),
}
"""The sampling parameters that can have a default, and the values that requests may give them."""


class GenerationConfig(NamedTuple):
    """sampling: recommended values by the parameter's name. end_tokens: the tokens that end an answer, beside the
    tokenizer's own; empty if the file names none."""

    sampling: dict[str, float]
    end_tokens: list[int]


def read_generation_config(directory: Path) -> GenerationConfig:
    try:
        found = read_object(directory / FILE, missing_is_empty=True)
    except UnsupportedModelError as error:
        logger.warning("%s is ignored: %s", FILE, error)
        found = {}
    return GenerationConfig(sampling_of(found), end_tokens_of(FILE, found))


def sampling_of(found: Mapping[str, Any]) -> dict[str, float]:
    """The recommended values in a file. `do_sample: false` is a temperature of 0, whatever the file's own is."""
    sampling: dict[str, float] = {}
    for name, limits in LIMITS.items():
        value: Any = found.get(name)
        if limits.fit(value):
            sampling[name] = int(value) if limits.whole else float(value)
        elif value is not None:
            logger.warning("%s: %s is ignored: it must be %s, got %.40r", FILE, name, limits, value)
    if found.get("do_sample") is False:
        sampling["temperature"] = 0.0
    return sampling


def end_tokens_of(file: str, found: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer, as a file has them, whose name is for the warning if it is ignored."""
    given = found.get("eos_token_id")
    end_tokens = given if isinstance(given, list) else [] if given is None else [given]
    if len(end_tokens) > MAX_END_TOKENS:
        logger.warning("%s: eos_token_id is ignored: it has more than %d tokens", file, MAX_END_TOKENS)
    elif not all(type(token) is int and token >= 0 for token in end_tokens):
        logger.warning("%s: eos_token_id is ignored: it must be a token id or a list of them, got %.40r", file, given)
    else:
        return end_tokens
    return []
