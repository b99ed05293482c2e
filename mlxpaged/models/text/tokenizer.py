"""Text to tokens and back: the chat template, special tokens, and incremental detokenization."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import Unigram, WordLevel, WordPiece
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from mlxpaged.formats import FORMATS, HARMONY, HERMES, Format, format_of, harmony, thought_tags
from mlxpaged.library_errors import public_reason
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.panics import guarded
from mlxpaged.models.text.control_tokens import ControlTokenError, ControlTokens, can_normalize_into, encoded, unmarked
from mlxpaged.models.text.infill import infill_of
from mlxpaged.models.text.template_form import TemplateForm, form_of, takes_tools
from mlxpaged.models.text.templates.renderer import TemplateError, TemplateLimitError, render, variables_of
from mlxpaged.models.text.thinking_variables import efforts_of, switch_of
from mlxpaged.models.text.tokenizer_limits import MAX_WRITTEN, num_bytes


@dataclass(frozen=True)
class RemoteTemplate:
    """A chat template that is rendered in another process."""

    source: str

    def render(self, **variables: Any) -> str:
        return render(self.source, variables)


assert callable(chat_template_utils._compile_jinja_template)
chat_template_utils._compile_jinja_template = RemoteTemplate
"""transformers has no setting for what renders chat templates."""

REPLACEMENT = "\ufffd"
MOST_HELD = 64
KEPT_BACK = range(4, 8)
"""Tokens that are held back at most while they are bytes and no characters. Then the text of all but the last ones is
sent, as many as one of KEPT_BACK: a character has at most four bytes."""
TAG_TOKENS = 16
"""Upper bound on the tokens of a thinking tag and the white space after it."""
RENDERING_OPTIONS = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
"""Arguments of the renderer itself. A request's `chat_template_kwargs` may not set them."""
ENCODE = ("encode", "_encode_plus")
DECODE = ("decode", "_decode")
"""What a kind of tokenizer may have its own version of."""

SAMPLE = "a A 1 ."
"""Text that has tokens in every vocabulary."""
NO_IDS: frozenset[int] = frozenset()
UNLIMITED = 2**32
"""More characters than a text can have."""


class TextTooLongError(ValueError):
    """The text would take too much memory while it is encoded."""


class InfillError(ValueError):
    """A text asks for infilling in a way that the tokenizer cannot encode."""


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template refuses these messages."""


@dataclass(frozen=True)
class Tags:
    """The tags that divide an answer. think_start, think_end: around a thought; empty if there are none.
    think_anywhere: whether a thought may begin after text. think_next: tags before which a thought ends, closed or not.
    tools: HERMES if the chat template does not show tools."""

    think_start: str = ""
    think_end: str = ""
    tools: Format = HERMES
    think_anywhere: bool = False
    think_next: tuple[str, ...] = ()

    @property
    def thinks(self) -> bool:
        """Whether the model can think. In Harmony, thoughts are messages of their own."""
        return bool(self.think_start) or self.tools is HARMONY


class Tokenizer:
    """A model's tokenizer, used by several threads. Decoding only reads, and so does encoding with a fast tokenizer: it
    sets options only if they are others than before, which nothing here asks for. A tokenizer in Python is copied for
    decoding. is_thread_safe: whether several threads may encode at once; they may not with a tokenizer in Python."""

    def __init__(self, wrapped: Any, tool_format: str | None = None, growth: float = 1.0) -> None:
        """tool_format: one of FORMATS; None for the one that the chat template or the vocabulary shows. growth: how
        many bytes of UTF-8 its replacements can make of one. Raises UnsupportedModelError if the tokenizer has no
        vocabulary. transformers makes one of any directory."""
        self._encoder = wrapped
        self._tool_format, self._growth = tool_format, growth
        self._most_encoded = int(MAX_WRITTEN / growth)
        # transformers turns truncation and padding off when it first encodes. `encode` does without it afterwards.
        known = [i for i in guarded(wrapped.encode)(SAMPLE, add_special_tokens=False) if i != wrapped.unk_token_id]
        if not known:
            raise UnsupportedModelError("its tokenizer has no tokens for text, because its vocabulary is missing")
        self.any_token = known[-1]
        plain = wrapped._tokenizer
        # Some kinds change the text before the file's rules do; Code Llama's only a text with this token.
        self._fill_token: str | None = getattr(plain, "fill_token", None)
        kind = type(plain)
        own = any(getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name) for name in ENCODE)
        self._encodes_by_file = isinstance(self._fast, FastTokenizer) and (not own or self._fill_token is not None)
        # A copy takes 12 MB for 32,000 tokens and 93 MB for 262,000, and a third of the load's time.
        self._decoder = plain if self._encodes_by_file else copy.deepcopy(plain)
        self.token_text = functools.cache(self._token_text)
        self.text_alone = functools.cache(self._text_alone)
        # Its own is one of them, too. mlx-lm before 0.32 takes it only if there are no others.
        self.eos_token_ids: frozenset[int] = frozenset({*wrapped.eos_token_ids, wrapped.eos_token_id} - {None})
        self._text_of = decode_of(self._decoder)
        added = self._decoder.added_tokens_decoder
        special = {*self._decoder.all_special_ids, *(i for i, token in added.items() if token.special)}
        self._special_ids = frozenset(special)
        self.has_chat_template = bool(wrapped.has_chat_template)
        vocabulary = self._decoder.get_vocab()
        self.infill = infill_of(vocabulary)
        token_ids = {*vocabulary.values(), *added}
        self._is_token = bytearray(max(token_ids) + 1)
        for token_id in token_ids:
            self._is_token[token_id] = True
        found = FORMATS[tool_format] if tool_format else format_of(self.template_source, vocabulary)
        # Whether the chat template shows tools and calls, and their format is known. Some templates show calls and
        # results, but leave it to the system message to describe the tools, as the server can do for these formats.
        self.shows_tools = found is not None and self.template_reads("tools")
        mentions_calls = not self.template_source or "tool_calls" in self.template_source
        may_show_calls = found is not None and (self.shows_tools or found.shown is not None) and mentions_calls
        self.form = TemplateForm()
        find = partial(form_of, self._probed, (found or HERMES).new_id)
        try:
            self.shows_tools = self.shows_tools and takes_tools(self._probed)
            self.form = find(self.shows_tools, may_show_calls)
        except UnsupportedModelError:  # it exceeds a limit: with tools alone, if the other way does not raise it again
            self.shows_tools = False
            self.form = find(False, False)
        tools = found if found is not None and (self.shows_tools or self.shows_calls or found is HARMONY) else HERMES
        thoughts = thought_tags(vocabulary)
        following = tuple(tag for tag in thoughts.next if tag in tools.tags)
        self.tags = Tags(thoughts.start, thoughts.end, tools, thoughts.anywhere, following)
        in_messages = tools is HARMONY
        if in_messages:
            ends = (i for i, token in added.items() if token.content in harmony.LAST)
            self.eos_token_ids |= {*ends}
        self.think_start_ids = self._tag_ids(harmony.BEGIN_THOUGHT if in_messages else thoughts.start)
        self.think_end_ids = self._tag_ids(harmony.END_THOUGHT if in_messages else thoughts.end)
        self.think_next_ids = [self._tag_ids(tag) for tag in following]
        self.call_ids = [self._tag_ids(tag) for tag in tools.starts]
        self._control = self._control_tokens()
        self.takes_system = self._shows_systems("system", "user")
        late = ("system", "user", "system"), ("system", "user", "assistant", "system", "user")
        self.takes_late_system = all(self._shows_systems(*roles) for roles in late)
        self.thinking_switch = switch_of(self.template_reads, self.template_source)
        self.efforts = efforts_of(self.template_reads, self.template_source, self._renders)

    def _control_tokens(self) -> ControlTokens:
        """Control tokens are those that the tokenizer marks as special, and added tokens in the template's text or in
        the tags of thinking and calls. Other added tokens are common texts, like several line feeds."""
        added = self._decoder.added_tokens_decoder
        tags = (self.tags.think_start, self.tags.think_end, *self.tags.tools.tags)
        markup = "\n".join((self.template_source, *tags))
        special = self._special_ids | self.eos_token_ids
        ids = {
            token.content: token_id
            for token_id, token in added.items()
            if token_id in special or (is_markup(token.content) and token.content in markup)
        }
        by_model = {text for text, i in ids.items() if i not in special and any(text in tag for tag in tags)}
        by_model |= {text for text in tags[:2] if ids.get(text, -1) not in self.eos_token_ids}
        return ControlTokens(ids, by_model, can_normalize_into(self._fast, ids))

    def with_template(self, source: str) -> Tokenizer:
        """The same vocabulary with another chat template, as --chat-template would set it. Raises UnsupportedModelError
        if only one of the two has messages in Harmony, by which the engine divides answers."""
        wrapped = copy.copy(self._encoder)
        plain = wrapped._tokenizer
        wrapped._tokenizer = copy.copy(plain) if self.is_thread_safe else copy.deepcopy(plain)
        wrapped._tokenizer.chat_template = source
        wrapped._chat_template, wrapped.has_chat_template = None, True
        other = Tokenizer(wrapped, self._tool_format, self._growth)
        if (other.tags.tools is HARMONY) != (self.tags.tools is HARMONY):
            raise UnsupportedModelError("of it and the model's own, only one has messages in Harmony")
        return other

    @property
    def shows_calls(self) -> bool:
        return self.form.shows_calls

    @property
    def is_thread_safe(self) -> bool:
        return self._fast is not None

    @property
    def _fast(self) -> Any:
        """The tokenizer of the library tokenizers; None if the model has none."""
        return getattr(self._encoder, "backend_tokenizer", None)

    @guarded
    def encode(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """Tokens of a text. add_special_tokens: with the special tokens that the model expects around a prompt.
        split_special_tokens: control tokens in the text are text. Raises ControlTokenError if they cannot be,
        TextTooLongError and InfillError."""
        self._check_length(text)
        if split_special_tokens:
            return encoded(self._control.renamed_tokenizer(self._fast), text, add_special_tokens)
        if self._fill_token is not None and self._fill_token in text:
            return self._infilled(text, add_special_tokens)
        if self._encodes_by_file:
            return encoded(self._fast, text, add_special_tokens)
        return list(self._encoder.encode(text, add_special_tokens=add_special_tokens))

    def _infilled(self, text: str, add_special_tokens: bool) -> list[int]:
        """Tokens of a text whose middle is to be filled in. transformers changes the tokenizer meanwhile, and leaves
        rules of its own in it: so it gets a copy. Raises InfillError."""
        try:
            return list(copy.deepcopy(self._decoder).encode(text, add_special_tokens=add_special_tokens))
        except ValueError as error:  # there are several places, or no tokens to mark one
            raise InfillError(f"a text with {self._fill_token} cannot be filled in: {public_reason(error)}") from error

    @guarded
    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Tokens of two texts with the special tokens around them, and where the second begins by the types that the
        tokenizer gives: after all tokens if it has one type. Raises TextTooLongError."""
        self._check_length(first + second)
        [found] = self._fast.encode_batch_fast([(first, second)], add_special_tokens=True)
        types = list(found.type_ids)
        return list(found.ids), types.index(1) if 1 in types else len(types)

    def _check_length(self, text: str) -> None:
        if 4 * len(text) > self._most_encoded and (size := num_bytes(text)) > self._most_encoded:
            what = f"a text of {size:,} bytes in UTF-8 is too long for the model's tokenizer"
            raise TextTooLongError(f"{what}, which takes at most {self._most_encoded:,}")

    def mark(self, messages: Sequence[Mapping[str, Any]], *others: Any) -> tuple[Any, ...]:
        """Does what `ControlTokens.mark` does, before rendering. Raises ChatTemplateError."""
        try:
            return self._control.mark(self.template_source, messages, *others)
        except ControlTokenError as error:
            raise ChatTemplateError(f"these messages are not supported: {error}") from error

    @property
    def reader(self) -> Any:
        """The Hugging Face tokenizer. Any thread may read it."""
        return self._decoder

    def least_tokens(self, num_chars: int) -> int:
        """The fewest tokens that a text of this many characters can have."""
        return num_chars // self._longest_token

    def most_chars(self, num_tokens: int) -> int:
        """The most characters that this many tokens can have."""
        return num_tokens * self._longest_token

    def absent_ids(self, size: int) -> list[int]:
        """The ids below `size` that no token has: the head of a model may have more rows, and a vocabulary gaps."""
        flags = self._is_token[:size].ljust(size, b"\0")
        ids = (token_id for token_id, is_token in enumerate(flags) if not is_token)
        return [each for each in ids if each not in self.eos_token_ids and not self._has_name(each)]

    def _has_name(self, token_id: int) -> bool:
        try:
            return self._decoder.convert_ids_to_tokens(token_id) is not None
        except Exception:  # a tokenizer in Python raises any type
            return False

    @functools.cached_property
    def _longest_token(self) -> int:
        """The most characters of a token. Word pieces and unigrams have one unknown token for any word, and white space
        may have none."""
        if self._fast is not None and isinstance(self._fast.model, (Unigram, WordLevel, WordPiece)):
            return UNLIMITED
        return max(1, *(len(token) for token in self._decoder.get_vocab()))

    @guarded
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        check: Callable[[str], None] = lambda text: None,
        marker: str | None = None,
        /,
        **options: Any,
    ) -> list[int]:
        """Tokens of a conversation up to the start of the assistant's answer. Control tokens in the messages and
        options are text. check: raises an error for a text that is too long to be tokenized. marker: from `mark`, if
        that has made these messages and options. options: `tools`, as OpenAI defines them, `continue_final_message`,
        and variables of the template. Raises ChatTemplateError and TextTooLongError."""
        if not self.has_chat_template:
            raise ChatTemplateError(
                "this model has no chat template; give it one with --chat-template, or use /v1/completions"
            )
        if marker is None:
            marker, messages, options = self.mark(messages, options)
        try:
            text = self._render(messages, add_generation_prompt=add_generation_prompt, **options)
        except TemplateLimitError as error:
            raise ChatTemplateError(f"the model's chat template cannot render these messages: {error}") from error
        except OSError:  # no process can be started
            raise
        except Exception as error:  # a template in Python raises any type, with a message
            reason = public_reason(error)
            raise ChatTemplateError(f"the model's chat template refuses these messages: {reason}") from error
        check(unmarked(text, marker))
        if not marker:
            return self.encode(text, add_special_tokens=False)
        self._check_length(text)
        try:
            return self._control.encode(self._fast, text, marker)
        except ControlTokenError as error:
            raise ChatTemplateError(f"these messages are not supported: {error}") from error

    def _shows_systems(self, *roles: str) -> bool:
        """Whether the chat template renders the system messages of a conversation of these roles, each in its place.
        Some templates refuse all system messages, many refuse those after the first message, and some ignore them, show
        the last one only, or all of them at the beginning (DeepSeek), where each new one changes the whole prompt.
        Raises UnsupportedModelError if the template exceeds a limit with these messages, as it will with all."""
        text = self._probed([{"role": role, "content": f"probe {i}"} for i, role in enumerate(roles)]) or ""
        places = [text.find(f"probe {i}") for i in range(len(roles))]
        return min(places) >= 0 and places == sorted(places)

    def _renders(self, variables: Mapping[str, Any]) -> bool:
        """Whether the chat template takes these variables. Raises UnsupportedModelError if it exceeds a limit with
        them."""
        messages = [{"role": "user", "content": "probe"}]
        return self._probed(messages, add_generation_prompt=True, **variables) is not None

    def _probed(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str | None:
        """The text of a conversation; None if the chat template refuses it, or there is none. Raises
        UnsupportedModelError if the template exceeds a limit."""
        try:
            return self._render(messages, **options)
        except TemplateLimitError as error:
            raise UnsupportedModelError(f"its chat template is refused: {error}") from error
        except OSError:
            raise
        except Exception:  # as in `apply_chat_template`
            return None

    def _render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        if self.form.lists_tools:
            options = {"tools": [], **options}
        if "tools" in options:
            options["tools"] = self.form.tools(options["tools"])
        shown = self.form.messages(messages, bool(options.get("tools")))
        return str(self._encoder.apply_chat_template(shown, tokenize=False, **options))

    def template_reads(self, variable: str) -> bool:
        """Whether the chat template uses a variable; True if the template is code instead of text."""
        return not self.template_source or variable in self._template_variables

    @functools.cached_property
    def _template_variables(self) -> frozenset[str]:
        try:
            return variables_of(self.template_source)
        except (TemplateError, TemplateLimitError):  # each request is told so
            return frozenset()

    @property
    def template_source(self) -> str:
        """The text of the chat template; empty if there is none, or if it is code."""
        source = self._decoder.chat_template
        if isinstance(source, dict):  # several templates, by name
            return "\n".join(source.values())
        return source if isinstance(source, str) else ""

    def ends_with(self, prompt: Sequence[int], tag: str) -> bool:
        """Whether a prompt ends with a tag and white space. Templates open a think block for models that always think,
        and add a closed one if the model is not to think."""
        return self.text_with_specials(prompt[-TAG_TOKENS:]).rstrip().endswith(tag)

    @guarded
    def decode(self, token_ids: Sequence[int]) -> str:
        return self._text_of(list(token_ids), True)

    @guarded
    def text_with_specials(self, token_ids: Sequence[int]) -> str:
        return self._text_of(list(token_ids), False)

    def _text_alone(self, token_id: int) -> str:
        """The text of a single token, special tokens included."""
        return self.text_with_specials([token_id])

    def _token_text(self, token_id: int) -> str:
        """The text of a token after others. Some decoders take a space from the beginning of a text (Llama 2)."""
        before = self.text_alone(self.any_token)
        text = self.text_with_specials([self.any_token, token_id])
        is_after = token_id not in self._special_ids and text.startswith(before)
        return text[len(before) :] if is_after else self.text_alone(token_id)

    @guarded
    def token_bytes(self, token_id: int) -> list[int]:
        """The UTF-8 bytes of a token; a token may be only part of a character."""
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

    def detokenizer(self, think_tags: bool = False, tool_tags: bool = False, after: int | None = None) -> Detokenizer:
        """think_tags, tool_tags: whether to show special tokens that are part of these tags; tool_tags also shows all
        special tokens inside a call. after: the token before the answer, if its text goes on in the answer."""
        tools = self.tags.tools
        shown = {*self.think_start_ids, *self.think_end_ids} if think_tags else set()
        if think_tags:
            shown |= self._special_in(tools.dropped)
        if tool_tags or (think_tags and tools is HARMONY):
            shown |= self._special_in(tools.tags)
        opening = self._special_in(tools.starts) if tool_tags else NO_IDS
        closing = self._special_in(tools.ends) if tool_tags else NO_IDS
        if self.infill is not None and after in self.infill.marks:  # the answer is in the middle of a text
            after = self.any_token
        is_text = after is not None and after not in self._special_ids
        return Detokenizer(self, self._special_ids - shown, opening, closing, after if is_text else None)

    def _special_in(self, tags: Sequence[str]) -> frozenset[int]:
        return self._special_ids.intersection(token for tag in tags for token in self._tag_ids(tag))

    def _tag_ids(self, tag: str) -> list[int]:
        return list(self._encoder.encode(tag, add_special_tokens=False)) if tag else []


def decode_of(tokenizer: Any) -> Callable[[list[int], bool], str]:
    """Returns the text of tokens, with or without the special ones: by the library tokenizers alone, where the `decode`
    of transformers does nothing more. For one or two tokens, that one takes three times as long."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    own = [getattr(type(tokenizer), name, None) for name in DECODE]
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    is_bpe = type(getattr(fast, "model", None)).__name__ == "BPE"
    cleans = tokenizer.clean_up_tokenization_spaces and (forced or not is_bpe)
    if fast is None or cleans or own != [getattr(PreTrainedTokenizerFast, name, tokenizer) for name in DECODE]:
        return lambda ids, skips: str(tokenizer.decode(ids, skip_special_tokens=skips))
    return lambda ids, skips: str(fast.decode(ids, skip_special_tokens=skips))


def is_markup(text: str) -> bool:
    """Whether a token that is not marked as special is more than a word or white space."""
    return not (text.isspace() or text[:1].isalnum())


class Detokenizer:
    """Text of one answer, token by token. The pieces join to the text of all tokens decoded at once.

    A token's text can depend on its predecessor (spaces), and its character may need a successor (bytes of UTF-8). So
    the tokens since the last but one emission are decoded together, and held back while they end inside a character.
    The last emission is nearly always one token, whose text is cached (`text_alone`): decoding it again takes 2 us.

    hidden: tokens that are no part of the text, except between an `opening` and a `closing` one. after: a token before
    the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        hidden: frozenset[int],
        opening: frozenset[int],
        closing: frozenset[int],
        after: int | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden, self._opening, self._closing = hidden, opening, closing
        self._in_call = False
        self._context = [] if after is None else [after]  # tokens of the last emission, without hidden ones
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """The text that this token completes; empty inside a character."""
        hidden = token_id in self._hidden and not self._in_call
        self._in_call = (self._in_call or token_id in self._opening) and token_id not in self._closing
        if hidden:
            return ""
        self._pending.append(token_id)
        return self._emit(hold_incomplete=True)

    def finish(self) -> str:
        """The rest of a character that never became complete."""
        return self._emit(hold_incomplete=False) if self._pending else ""

    def _emit(self, hold_incomplete: bool) -> str:
        decode, context = self._tokenizer.text_with_specials, self._context
        before = self._tokenizer.text_alone(context[0]) if len(context) == 1 else decode(context)
        if before.endswith(REPLACEMENT):  # a byte, which decoders may join to the next ones: any text goes before them
            context, before = [self._tokenizer.any_token], self._tokenizer.text_alone(self._tokenizer.any_token)
        text = decode(context + self._pending)
        if hold_incomplete and (text.endswith(REPLACEMENT) or len(text) <= len(before)):
            return self._emit_first(context, before, text) if len(self._pending) >= MOST_HELD else ""
        self._context, self._pending = self._pending, []
        return text[len(before) :]

    def _emit_first(self, context: list[int], before: str, text: str) -> str:
        """The text of the first pending tokens, which no later token changes, or else the time to decode all of them
        would grow with their square. before, text: of the context, and of the context and all pending tokens."""
        for kept in KEPT_BACK:
            first = self._tokenizer.text_with_specials(context + self._pending[:-kept])
            if text.startswith(first):
                self._context, self._pending = self._pending[:-kept], self._pending[-kept:]
                return first[len(before) :]
        return ""
