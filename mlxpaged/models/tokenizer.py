"""Text to tokens and back: the chat template, special tokens, and text that appears as its tokens do."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

REPLACEMENT = "\ufffd"


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template refuses these messages."""


class Tokenizer:
    """A model's tokenizer, for several threads: decoding only reads, but encoding may change a fast one's settings
    while it runs, so `encode` and `apply_chat_template` have a copy of their own and are called on one thread only."""

    def __init__(self, wrapped: Any) -> None:
        self._encoder = wrapped
        self._decoder = copy.deepcopy(wrapped._tokenizer)
        self.eos_token_ids: frozenset[int] = frozenset(wrapped.eos_token_ids)
        self._special_ids: frozenset[int] = frozenset(self._decoder.all_special_ids)
        self.has_chat_template = bool(wrapped.has_chat_template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of plain text, with or without the special tokens that the model expects around a prompt."""
        return list(self._encoder.encode(text, add_special_tokens=add_special_tokens))

    @property
    def reader(self) -> Any:
        """The Hugging Face tokenizer, for whoever only reads it; any thread."""
        return self._decoder

    def least_tokens(self, num_chars: int) -> int:
        """The fewest tokens that a text of so many characters can have, known without tokenizing it."""
        return num_chars // self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        return max(1, *(len(token) for token in self._decoder.get_vocab()))

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens of a conversation, ending where the assistant is to answer. Raises ChatTemplateError."""
        if not self.has_chat_template:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        try:
            return list(self._encoder.apply_chat_template([dict(m) for m in messages], add_generation_prompt=True))
        except Exception as error:  # templates raise whatever jinja2 raises, and say what they refuse
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._decoder.decode(list(token_ids), skip_special_tokens=True))

    def text_with_specials(self, token_ids: Sequence[int]) -> str:
        return str(self._decoder.decode(list(token_ids), skip_special_tokens=False))

    def token_text(self, token_id: int) -> str:
        """How a token by itself is shown, special tokens included."""
        return self.text_with_specials([token_id])

    def token_bytes(self, token_id: int) -> list[int]:
        """The UTF-8 bytes that a token stands for; a token may hold only part of a character."""
        piece = self._decoder.convert_ids_to_tokens(token_id)
        if piece is None:
            return []
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return [int(piece[3:5], 16)]
        text = self.token_text(token_id)
        if REPLACEMENT in text and all(char in self._byte_of_char for char in piece):
            return [self._byte_of_char[char] for char in piece]
        return list(text.encode())

    @cached_property
    def _byte_of_char(self) -> dict[str, int]:
        """Byte-level BPE writes each byte as a printable character: the printable Latin-1 ones stand for themselves,
        the others follow from U+0100 on (the alphabet of GPT-2's tokenizer)."""
        itself = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in set(itself)]
        return {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(others)}

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._decoder, self._special_ids)


class Detokenizer:
    """Text of one answer as its tokens come. The pieces join to what decoding all tokens at once gives.

    A token's text can depend on its predecessor (spaces) and its character may need a successor (bytes of UTF-8). So
    the tokens since the last but one emission are decoded together, and held back while they end inside a character.
    """

    def __init__(self, decoder: Any, special_ids: frozenset[int]) -> None:
        self._decoder = decoder
        self._special_ids = special_ids
        self._context: list[int] = []  # the tokens emitted last
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """The text that this token completes: empty inside a character."""
        if token_id in self._special_ids:
            return ""
        self._pending.append(token_id)
        return self._emit(hold_incomplete=True)

    def finish(self) -> str:
        """What is left of a character that never became complete."""
        return self._emit(hold_incomplete=False) if self._pending else ""

    def _emit(self, hold_incomplete: bool) -> str:
        text = self._decode(self._context + self._pending)
        before = self._decode(self._context)
        if hold_incomplete and (text.endswith(REPLACEMENT) or len(text) <= len(before)):
            return ""
        self._context, self._pending = self._pending, []
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._decoder.decode(token_ids, skip_special_tokens=True)) if token_ids else ""
