"""What a tokenizer.json may do to a text, proved from the file before it is loaded.

The library tokenizers runs what the file says, without a limit: thirty rules that write two letters for one make a
billion of each letter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.files import check_file

NAME = "tokenizer.json"
MAX_ENTRIES = 700_000
"""Tokens, and other keys. Gemma 3 has 262,000 tokens and 320,000 keys. A million take 20 s to load."""
MAX_GROWTH = 100
"""Characters that one character of a text or token may become. The largest of known models is 72: compatibility forms
(18 for U+FDFA), and then bytes as characters."""
MAX_REPLACED = 16
"""Characters that `Replace` rules of a normalizer may make of one. A letter for a letter counts as 1, and a letter for
a pattern as 2. Few texts have the characters that Unicode's forms make long, but a rule may replace any letter."""
MAX_WRITTEN = 2**23
"""Bytes of a text with its replacements. Each takes 165 to 430 bytes while the text is encoded, and a model with a
context of a million tokens reads about four million. Without this limit, a megabyte takes 5.8 GB and 12 s if each
letter becomes 16."""
SPACE = "\u2581"
"""Many tokenizers write it in place of a space. It is a part of most tokens, so it counts as one byte."""
MAX_ADDED = 1024
"""Characters that a rule may add to a text, whatever its length."""
MAX_ADDED_TOKENS = 40_000
"""Tokens that are added to the vocabulary, in each file. Models with a token for each sound or image have 30,000.
Each takes 4.5 kB, and loading holds the interpreter lock."""
ADDED_TOKENS = {
    "added_tokens.json": (),
    "special_tokens_map.json": ("additional_special_tokens", "extra_special_tokens"),
    "tokenizer_config.json": ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"),
    NAME: ("added_tokens",),
}
"""Where they are listed: fields of files. Without a field, the whole file is the list."""

GROWTH = {
    "BertNormalizer": 8,
    "ByteLevel": 4,
    "Lowercase": 2,
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Precompiled": 18,
}
"""Characters that one character may become, by the type of a rule (Unicode 16, UAX #15). Rules that are not named here
neither add nor replace characters, but for `Replace`, and those of `ADDING`."""
ADDING = {"Prepend": "prepend", "Metaspace": "replacement"}
RULES = ("normalizers", "pretokenizers", "decoders", "processors")
"""Under one of these names, a sequence has its rules."""


def check_added_tokens(directory: Path, tokenizer: Any = None) -> None:
    """Raises UnsupportedModelError if a file adds too many tokens. tokenizer: what the tokenizer.json holds."""
    for name, fields in ADDED_TOKENS.items():
        check_file(directory / name)
        try:
            found = tokenizer if name == NAME else from_json((directory / name).read_bytes(), cache_strings="none")
        except (OSError, ValueError):  # there is none, or what reads it says what is wrong with it
            continue
        if not isinstance(found, dict):
            continue
        lists = [found.get(field) for field in fields] if fields else [found]
        count = sum(len(each) for each in lists if isinstance(each, (dict, list)))
        if count > MAX_ADDED_TOKENS:
            raise UnsupportedModelError(f"its {name} adds {count:,} tokens; the limit is {MAX_ADDED_TOKENS:,}")


def check_tokenizer_file(directory: Path) -> float:
    """Returns how many bytes of UTF-8 its replacements can make of one. Raises UnsupportedModelError for a
    tokenizer.json that could take all memory or time."""
    path = directory / NAME
    check_file(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:  # the model has another kind of tokenizer
        check_added_tokens(directory)
        return 1.0
    except OSError as error:
        raise UnsupportedModelError(f"its {NAME} cannot be read: {error}") from error
    if (count := data.count(b'":') + data.count(b'" :')) > MAX_ENTRIES:
        raise UnsupportedModelError(f"its {NAME} has {count:,} entries; the limit is {MAX_ENTRIES:,}")
    try:
        found = from_json(data, cache_strings="none")
    except ValueError as error:
        raise UnsupportedModelError(f"its {NAME} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UnsupportedModelError(f"its {NAME} is not an object")
    check_added_tokens(directory, found)
    for names in (("normalizer", "pre_tokenizer"), ("decoder",)):
        growth = 1.0
        for name in names:
            growth *= growth_of(found.get(name))
        if growth > MAX_GROWTH:
            what = f"the {' and '.join(names)} of its {NAME} can make {growth:,.0f} characters of one"
            raise UnsupportedModelError(f"{what}; the limit is {MAX_GROWTH}")
    if (growth := growth_of(found.get("normalizer"), {})) > MAX_REPLACED:
        what = f"replacements of its {NAME} can make {growth:,.0f} characters of one"
        raise UnsupportedModelError(f"{what}; the limit is {MAX_REPLACED}")
    return growth_of(found.get("normalizer"), {}, num_bytes)


def growth_of(rule: Any, growths: Mapping[str, float] = GROWTH, size: Callable[[str], int] = len) -> float:
    """Returns how many characters one character can become. growths: of rules that are not `Replace`, by their types.
    size: of a text. Raises UnsupportedModelError for a rule that adds much."""
    if not isinstance(rule, Mapping):
        return 1.0
    kind, growth = rule.get("type"), 1.0
    for name in RULES:
        inner = rule.get(name)
        for each in inner if isinstance(inner, list) else ():
            growth *= growth_of(each, growths, size)
            if growth > 1e9:
                return growth
    if kind == "Replace":
        return growth * replacing(rule.get("pattern"), str(rule.get("content") or ""), size)
    if isinstance(kind, str) and kind in ADDING and len(str(rule.get(ADDING[kind]) or "")) > MAX_ADDED:
        raise UnsupportedModelError(f"a rule of its {NAME} adds more than {MAX_ADDED:,} characters to a text")
    return growth * growths.get(str(kind), 1)


def replacing(pattern: Any, content: str, size: Callable[[str], int]) -> float:
    """A match of a regular expression may be empty: then the content comes beside each character."""
    literal = pattern.get("String") if isinstance(pattern, Mapping) else None
    if isinstance(literal, str) and literal:
        return max(1.0, size(content) / size(literal))
    return 1.0 + size(content)


def num_bytes(text: str) -> int:
    """Bytes of a text in UTF-8. SPACE alone counts as one."""
    return 1 if text == SPACE else len(text.encode("utf-8", "surrogatepass"))
