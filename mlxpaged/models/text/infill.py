"""Fills in the middle of a text: the control tokens by which families of models mark what comes before and after it.

The prompt is made of token ids, because the tokens of a mark are no text. Whether a model was trained with the marks of
its vocabulary, the vocabulary does not say.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Family(NamedTuple):
    """The marks before the prefix, before the suffix, and after both; the last one is empty if there is none. ends:
    tokens that end the middle, in addition to the model's own. suffix_first: whether the suffix stands before the
    prefix."""

    prefix: str
    suffix: str
    middle: str
    ends: tuple[str, ...] = ()
    suffix_first: bool = False

    @property
    def marks(self) -> list[str]:
        return [mark for mark in (self.prefix, self.suffix, self.middle) if mark]


FAMILIES = (
    # Qwen 2.5 Coder and later Qwen, Granite 4, CodeGemma
    Family(
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ("<|fim_pad|>", "<|endoftext|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, Granite Code, Refact
    Family(
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ("<fim_pad>", "<|endoftext|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"),
    ),
    Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>", "<|endoftext|>")),  # SantaCoder
    Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ("<|EOT|>",)),  # DeepSeek
    Family("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # Code Llama
    Family("[PREFIX]", "[SUFFIX]", "", suffix_first=True),  # Codestral
)

Encode = Callable[[str, bool], list[int]]
"""Returns the tokens of a text. The second argument: with the special tokens around a prompt."""
INSIDE, SAMPLE = "☺", "a"
"""A character that begins no longer token, and a text."""


@dataclass(frozen=True)
class Infill:
    """The ids of a family's tokens. middle: None if the family has none."""

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]
    suffix_first: bool

    @property
    def marks(self) -> frozenset[int]:
        return frozenset({self.prefix, self.suffix, self.middle} - {None})  # type: ignore[arg-type]

    def prompt(self, encode: Encode, prefix: str | Sequence[int], suffix: str) -> list[int]:
        """The prompt whose answer is the middle. prefix: text or tokens."""
        before = encode(prefix, False) if isinstance(prefix, str) else list(prefix)
        first, second = [self.prefix, *before], [self.suffix, *inside(encode, suffix)]
        if self.suffix_first:
            first, second = second, first
        return [*beginning(encode), *first, *second, *([] if self.middle is None else [self.middle])]


def family_in(vocabulary: Container[str]) -> Family | None:
    """The first family whose marks are all single tokens of a vocabulary."""
    return next((each for each in FAMILIES if all(mark in vocabulary for mark in each.marks)), None)


def infill_of(vocabulary: Mapping[str, int]) -> Infill | None:
    """The ids of the family that a vocabulary has."""
    if (family := family_in(vocabulary)) is None:
        return None
    prefix, suffix, *middle = (vocabulary[mark] for mark in family.marks)
    ends = frozenset(vocabulary[end] for end in family.ends if end in vocabulary)
    return Infill(prefix, suffix, next(iter(middle), None), ends, family.suffix_first)


def inside(encode: Encode, text: str) -> list[int]:
    """The tokens of a text that does not begin where another text ends: some tokenizers put a space before each text
    that they get."""
    mark = encode(INSIDE, False)
    if encode(INSIDE + SAMPLE, False)[len(mark) :] == encode(SAMPLE, False):
        return encode(text, False)
    return encode(INSIDE + text, False)[len(mark) :]


def beginning(encode: Encode) -> list[int]:
    """The special tokens before a prompt."""
    text, whole = encode(SAMPLE, False), encode(SAMPLE, True)
    return next((whole[:i] for i in range(len(whole)) if whole[i : i + len(text)] == text), [])
