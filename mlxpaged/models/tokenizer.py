"""Text to tokens and back: the chat template, special tokens, and text that appears as its tokens do."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
TAG_TOKENS = 16
"""A tag around thinking, and the white space behind it, are shorter."""
RENDERING_OPTIONS = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
"""What says how to render, or what: not for a caller's `chat_template_kwargs`."""


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template refuses these messages."""


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes a tool call. name: of mlx-lm's parser. start, end: what stands around it; an empty end means
    that the next start, or the answer's end, closes it. parse: (text between them, OpenAI's tools) -> {"name",
    "arguments"} or a list of them; raises whatever malformed text makes it raise."""

    name: str
    start: str
    end: str
    parse: Callable[[str, Any], Any]


@dataclass(frozen=True)
class Tags:
    """What an answer is divided by, as mlx-lm finds it in a model's vocabulary and chat template. think_start,
    think_end: around thinking, empty where the model does none. tools: None where it makes no calls."""

    think_start: str = ""
    think_end: str = ""
    tools: ToolFormat | None = None


class Tokenizer:
    """A model's tokenizer, for several threads: decoding only reads, but encoding may change a fast one's settings
    while it runs, so `encode` and `apply_chat_template` have a copy of their own and are called on one thread only."""

    def __init__(self, wrapped: Any) -> None:
        self._encoder = wrapped
        self._decoder = copy.deepcopy(wrapped._tokenizer)
        self._token_text = functools.cache(self.token_text)
        self.eos_token_ids: frozenset[int] = frozenset(wrapped.eos_token_ids)
        added = self._decoder.added_tokens_decoder
        self._special_ids = frozenset(self._decoder.all_special_ids) | {
            i for i, token in added.items() if token.special
        }
        self.has_chat_template = bool(wrapped.has_chat_template)
        form = tool_format(wrapped)
        self.tags = Tags(wrapped.think_start or "", wrapped.think_end or "", form)
        self.think_start_ids = self._tag_ids(self.tags.think_start)
        self.think_end_ids = self._tag_ids(self.tags.think_end)
        self._think_tokens = ShownTokens(self._special_ids.intersection(self.think_start_ids + self.think_end_ids))
        start = self._special_ids.intersection(self._tag_ids(form.start) if form else ())
        end = self._special_ids.intersection(self._tag_ids(form.end) if form else ())
        self._tool_tokens = ShownTokens(start | end, start, end)
        self.takes_late_system = self._shows_late_system()

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

    @functools.cached_property
    def _longest_token(self) -> int:
        return max(1, *(len(token) for token in self._decoder.get_vocab()))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Tokens of a conversation, ending where the assistant is to answer. options: `tools`, as OpenAI defines them,
        `continue_final_message`, and variables of the template. Raises ChatTemplateError."""
        if not self.has_chat_template:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        try:
            return list(
                self._encoder.apply_chat_template(
                    [dict(m) for m in messages], add_generation_prompt=add_generation_prompt, **options
                )
            )
        except Exception as error:  # templates raise whatever jinja2 raises, and say what they refuse
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error

    def _shows_late_system(self) -> bool:
        """Whether the chat template shows a system message that is not the first message. Many refuse it, some pass
        over it."""
        roles = ("system", "user", "system")
        try:
            messages = [{"role": role, "content": f"probe {i}"} for i, role in enumerate(roles)]
            return "probe 2" in self._encoder.apply_chat_template(messages, tokenize=False)
        except Exception:  # as in `apply_chat_template`; or there is no template
            return False

    def template_reads(self, variable: str) -> bool:
        """Whether the chat template does anything with a variable. One that is code, not text, is not asked."""
        source = self._decoder.chat_template
        if isinstance(source, dict):  # several templates, by name
            source = "\n".join(source.values())
        return not isinstance(source, str) or re.search(rf"\b{re.escape(variable)}\b", source) is not None

    def ends_with(self, prompt: Sequence[int], tag: str) -> bool:
        """Whether a tag, and white space, is the last of a prompt: templates open a think block where models always
        think, and leave a closed one where they are not to."""
        tail = str(self._decoder.decode(list(prompt[-TAG_TOKENS:]), skip_special_tokens=False))
        return tail.rstrip().endswith(tag)

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

    @functools.cached_property
    def _byte_of_char(self) -> dict[str, int]:
        """Byte-level BPE writes each byte as a printable character: the printable Latin-1 ones stand for themselves,
        the others follow from U+0100 on (the alphabet of GPT-2's tokenizer)."""
        itself = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in set(itself)]
        return {chr(byte): byte for byte in itself} | {chr(256 + i): byte for i, byte in enumerate(others)}

    def detokenizer(self, think_tags: bool = False, tool_tags: bool = False) -> Detokenizer:
        """think_tags, tool_tags: whether special tokens are shown that are part of those; with tool_tags also all
        inside of a call."""
        shown = [self._think_tokens] * think_tags + [self._tool_tokens] * tool_tags
        union = functools.reduce(ShownTokens.union, shown, ShownTokens())
        return Detokenizer(self.text_with_specials, self._token_text, self._special_ids, union)

    def _tag_ids(self, tag: str) -> list[int]:
        return list(self._encoder.encode(tag, add_special_tokens=False)) if tag else []


def tool_format(wrapped: Any) -> ToolFormat | None:
    if not wrapped.has_tool_calling:
        return None
    parse = wrapped.tool_parser
    return ToolFormat(parse.__module__.rpartition(".")[2], wrapped.tool_call_start, wrapped.tool_call_end, parse)


NO_IDS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ShownTokens:
    """Special tokens that are part of the text: `always`, and all from one of `opening` to one of `closing`."""

    always: frozenset[int] = NO_IDS
    opening: frozenset[int] = NO_IDS
    closing: frozenset[int] = NO_IDS

    def union(self, other: ShownTokens) -> ShownTokens:
        return ShownTokens(self.always | other.always, self.opening | other.opening, self.closing | other.closing)


class Detokenizer:
    """Text of one answer as its tokens come. The pieces join to what decoding all tokens at once gives.

    A token's text can depend on its predecessor (spaces) and its character may need a successor (bytes of UTF-8). So
    the tokens since the last but one emission are decoded together, and held back while they end inside a character.
    What was emitted last is nearly always one token: the text of those is kept (`token_text`), or each would be decoded
    a second time as the next one's predecessor, at 2 microseconds.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        token_text: Callable[[int], str],
        special_ids: frozenset[int],
        shown: ShownTokens,
    ) -> None:
        self._decode = decode
        self._token_text = token_text
        self._special_ids = special_ids
        self._shown = shown
        self._in_call = False
        self._context: list[int] = []  # the tokens emitted last; special ones that are not shown are never here
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """The text that this token completes: empty inside a character."""
        if token_id in self._special_ids and not self._shows(token_id):
            return ""
        self._pending.append(token_id)
        return self._emit(hold_incomplete=True)

    def _shows(self, special_id: int) -> bool:
        shown = special_id in self._shown.always or self._in_call
        self._in_call = (self._in_call or special_id in self._shown.opening) and special_id not in self._shown.closing
        return shown

    def finish(self) -> str:
        """What is left of a character that never became complete."""
        return self._emit(hold_incomplete=False) if self._pending else ""

    def _emit(self, hold_incomplete: bool) -> str:
        text = self._decode(self._context + self._pending)
        before = self._token_text(self._context[0]) if len(self._context) == 1 else self._decode(self._context)
        if hold_incomplete and (text.endswith(REPLACEMENT) or len(text) <= len(before)):
            return ""
        self._context, self._pending = self._pending, []
        return text[len(before) :]
