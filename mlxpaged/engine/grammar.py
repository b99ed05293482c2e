"""Constraints as grammars: what an answer may be, compiled by llguidance, and how far each answer has come in its own.

Compiling happens on any thread and is bounded: llguidance gives up on what is too large or too complex. A matcher
belongs to the engine thread and is advanced by tokens that are booked, never by tokens that are drawn: a step that
fails, is repeated, or loses its sequence to a preemption leaves it where the known tokens are.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from mlxpaged.engine.answer_grammar import lark
from mlxpaged.engine.constraint import Constraint, ConstraintKind, StructuredOutput
from mlxpaged.engine.json_schema import check_schema, disjoint_one_of_as_any_of
from mlxpaged.models import Tokenizer

MAX_CHARS: dict[ConstraintKind, int] = {
    "json_schema": 128 * 1024,
    "regex": 8 * 1024,
    "choice": 64 * 1024,
    "grammar": 32 * 1024,
}
"""Of a constraint. The compiler cannot be interrupted, and the time of some parts of it grows with the square of this:
at these limits the worst that was found took two seconds, a regular expression of 80,000 characters a minute."""

MAX_LEXER_STATES = 50_000
"""Of one answer: 1 to 2 KB each, says llguidance, which allows five times as many."""

KEPT = 64
"""Compiled constraints in memory. Clients repeat theirs: compiling again costs up to half a second."""

BLAME_SECONDS = 2.0
"""To find the part of a form that is to blame, by compiling each by itself. There may be a thousand."""

WHITESPACE = r"( |\n[ \t]{0,64})?"
"""Between the tokens of JSON: what models write. Where any amount is allowed, some write it until max_tokens."""

Mask = npt.NDArray[np.int32]
"""[W]: one bit for each of 32 * W tokens, the lowest first; set where the token may be drawn."""


class GrammarError(ValueError):
    """A constraint that cannot be enforced, or an answer that left its own. param: the field to blame, where it is not
    that of the whole constraint."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Grammars:
    """The constraints of one model, compiled. Safe to use from several threads.

    vocab_size: rows of the model's output; the tokenizer may know fewer tokens, or more.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._wrapped = tokenizer
        self._vocab_size = vocab_size
        self._kept: OrderedDict[Constraint | StructuredOutput, LLMatcher] = OrderedDict()
        self._kept_lock = threading.Lock()
        self._executor = LLExecutor()
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()  # its own: making the tokenizer takes a second

    def compile(self, constraint: Constraint | StructuredOutput) -> LLMatcher:
        """At its start, for copies. Raises GrammarError with the reason."""
        with self._kept_lock:
            if constraint in self._kept:
                self._kept.move_to_end(constraint)
                return self._kept[constraint]
        matcher = self._compile(constraint)
        with self._kept_lock:
            self._kept[constraint] = matcher
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return matcher

    def start(self, constraint: Constraint | StructuredOutput, ignore_eos: bool) -> GrammarMatcher:
        """For one answer. Compiles what nobody compiled before, or too long ago. Raises GrammarError."""
        return GrammarMatcher(self.compile(constraint).deep_copy(), self._wrapped.eos_token_ids if ignore_eos else ())

    def masks(self, rows: Sequence[tuple[GrammarMatcher, Collection[int]]]) -> list[Mask]:
        """What each answer may go on with. Beside its matcher: tokens to avoid now, beyond the matcher's own.

        Never without a token: where the grammar allows nothing else, what should be avoided is drawn. A matcher that
        went wrong allows the end of the answer, and says what happened when it is advanced.
        """
        filled = allocate_token_bitmask(len(rows), self.tokenizer().vocab_size)
        matchers = [(matcher.matcher, i) for i, (matcher, _) in enumerate(rows)]
        fill_next_token_bitmask_par(self._executor, matchers, filled)
        return [
            preferring(mask, {*matcher.avoided, *avoided})
            for mask, (matcher, avoided) in zip(filled, rows, strict=True)
        ]

    def _compile(self, constraint: Constraint | StructuredOutput) -> LLMatcher:
        check_length(constraint)
        try:
            text = constraint.text if isinstance(constraint, StructuredOutput) else None
            if isinstance(text, Constraint) and text.kind == "grammar":
                self._new_matcher(text)  # alone it cannot refer to the grammars around it
            return self._new_matcher(constraint)
        except GrammarError:
            until = time.monotonic() + BLAME_SECONDS
            for part in constraint.parts if isinstance(constraint, StructuredOutput) else ():
                try:
                    if time.monotonic() < until:
                        self._new_matcher(part)
                except GrammarError as error:
                    raise GrammarError(str(error), part.param) from None
            raise

    def _new_matcher(self, constraint: Constraint | StructuredOutput) -> LLMatcher:
        limits = LLParserLimits(verbose_errors=False, max_lexer_states=MAX_LEXER_STATES)
        try:
            matcher = LLMatcher(self.tokenizer(), self._text(constraint), log_level=0, limits=limits)
        except ValueError as error:
            raise GrammarError(str(error)) from None
        except RecursionError:
            raise GrammarError("is nested too deeply") from None
        check(matcher)
        first = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)  # also shows whether it is too complex
        check(matcher)
        if not without(first, self._wrapped.eos_token_ids).any():
            raise GrammarError("only the empty text fits it")
        trial = matcher.deep_copy()
        for token_id in trial.compute_ff_tokens()[:1]:
            trial.consume_token(token_id)  # fails where what has to follow never ends
            check(trial)
        return matcher

    def _text(self, constraint: Constraint | StructuredOutput) -> str:
        """In llguidance's own notation. Raises ValueError or RecursionError."""
        if isinstance(constraint, Constraint):
            return grammar_text(constraint)
        grammars = [{"name": "answer", "lark_grammar": lark(constraint, self._pieces)}]
        for i, part in enumerate(constraint.parts):
            text = grammar_text(part)
            is_lark = part.kind in ("choice", "grammar")
            grammars.append(
                ({"lark_grammar": text} if is_lark else json.loads(text)["grammars"][0]) | {"name": f"part_{i}"}
            )
        return json.dumps({"grammars": grammars})

    def _pieces(self, text: str) -> list[str | int]:
        special = self._special_tokens
        cut = re.split(f"({'|'.join(map(re.escape, special))})", text) if special else [text]
        return [special.get(piece, piece) for piece in cut if piece]

    @functools.cached_property
    def _special_tokens(self) -> dict[str, int]:
        """What llguidance takes for one; the longest come first."""
        added = self._wrapped.reader.added_tokens_decoder.items()
        special = {token.content: i for i, token in added if self.tokenizer().is_special_token(i)}
        return dict(sorted(special.items(), key=lambda item: -len(item[0])))

    def tokenizer(self) -> LLTokenizer:
        """llguidance's view of the vocabulary. Raises GrammarError where the model's tokenizer does not allow one."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                wrapped = self._wrapped.reader
                size = max(len(wrapped), self._vocab_size)
                try:
                    self._tokenizer = from_tokenizer(wrapped, size, sorted(self._wrapped.eos_token_ids) or None)
                except Exception as error:  # whatever an unusual tokenizer makes the libraries raise
                    raise GrammarError(f"this model's tokenizer cannot be constrained: {error}") from error
            return self._tokenizer


def grammar_text(constraint: Constraint) -> str:
    """In llguidance's own notation. Raises ValueError."""
    if constraint.kind != "json_schema":
        return grammar_from(constraint.kind, constraint.text)
    schema = json.loads(constraint.text)
    check_schema(schema)
    # A schema may carry options of llguidance's. These are not its author's to choose: the first two would let the
    # answer be what the schema does not allow.
    options = {"lenient": False, "coerce_one_of": False, "whitespace_flexible": True, "whitespace_pattern": WHITESPACE}
    text = json.dumps(disjoint_one_of_as_any_of(schema))
    return LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]


def check_length(constraint: Constraint | StructuredOutput) -> None:
    """Raises GrammarError."""
    parts = constraint.parts if isinstance(constraint, StructuredOutput) else (constraint,)
    for kind, limit in MAX_CHARS.items():
        length = sum(len(part.text) for part in parts if part.kind == kind)
        if length > limit:
            raise GrammarError(f"has {length} characters of {kind}; the limit is {limit}")


def check(matcher: LLMatcher) -> None:
    """Raises GrammarError for one that went wrong, which it stays."""
    if matcher.is_error():
        reason = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
        raise GrammarError("no text fits it" if reason == "NoExtensionBias" else reason)


def without(mask: Mask, token_ids: Collection[int]) -> Mask:
    fewer: Mask = mask.copy()
    words = fewer.view(np.uint32)
    for token_id in token_ids:
        if token_id < 32 * len(words):
            words[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    return fewer


def preferring(mask: Mask, avoided: Collection[int]) -> Mask:
    """The mask without these tokens, unless it has no others."""
    rest = without(mask, avoided) if avoided else mask
    return rest if rest.any() else mask


class GrammarMatcher:
    """One answer's way through its grammar. avoided: tokens that are drawn only where nothing else fits."""

    def __init__(self, matcher: LLMatcher, avoided: Collection[int] = ()) -> None:
        self.matcher = matcher
        self.avoided = avoided

    def allows(self, token_id: int) -> bool:
        """Whether the answer may go on with this token."""
        return bool(self.matcher.validate_tokens([token_id]))

    def advance(self, token_id: int) -> bool:
        """The answer goes on with this token. True where nothing can follow. Raises GrammarError for one that does not
        fit, or where the grammar became too complex."""
        self.matcher.consume_token(token_id)
        try:
            check(self.matcher)
        except GrammarError as error:
            raise GrammarError(f"the answer cannot go on within its constraint: {error}") from None
        return bool(self.matcher.is_stopped())
