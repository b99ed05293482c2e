"""Compiles constraints to grammars with llguidance, and makes a matcher for each answer.

Any thread may compile. Compilation is bounded: texts that are too large or too deep are refused before, a child process
compiles a grammar first, and llguidance refuses what is too complex. A matcher belongs to the engine thread. Only
committed tokens advance it, so a failed step or a preemption does not affect it.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from mlxpaged.core.engine.constraint import Constraint, GrammarError, StructuredOutput
from mlxpaged.core.engine.matcher import Mask, is_allowed
from mlxpaged.daemon_thread import in_daemon_thread
from mlxpaged.library_errors import public_reason
from mlxpaged.models.panics import guarded
from mlxpaged.models.text.tokenizer import Tokenizer
from mlxpaged.parts.grammar.check import checker
from mlxpaged.parts.grammar.grammar_limits import check_size
from mlxpaged.parts.grammar.json_grammar import JSON_OPTIONS, lark_of_schema
from mlxpaged.parts.grammar.json_in_lark import with_own_json
from mlxpaged.parts.grammar.json_schema import (
    check_integers,
    check_schema,
    enforceable,
    has_limited_strings,
    with_inclusive_bounds,
)
from mlxpaged.parts.grammar.loosening import check_enforced
from mlxpaged.parts.grammar.schema_limits import parsed
from mlxpaged.parts.grammar.schema_merge import OtherSchemaError
from mlxpaged.parts.grammar.structured_output import lark

MAX_ROW_ITEMS = 4_000
"""Ways in which the grammar can go on at one place of an answer; an optional property is four of them. llguidance's own
limit is half as large. The masks of the engine thread's next step wait for them: 4,000 take up to 30 ms."""

TRIAL_TOKENS = 160
TRIAL_SECONDS = 1.0
"""A random answer of so many tokens must be possible, in this CPU time. Otherwise the constraint is refused before its
answer begins."""

TRIAL_TEXT = '"]},:'
"""A trial prefers these tokens in every second step, so that it comes out of the strings and lists of JSON."""

MAX_LEXER_STATES = 50_000
"""Lexer states of one answer, 1 to 2 KB each. llguidance's own limit is five times as large."""

KEPT = 64
"""Compiled constraints that are kept in memory. Clients repeat them, and compiling one takes up to half a second."""

PARTS_SECONDS = 2.0
"""Time limit for compiling each part of a structured output alone, before the whole. A part that cannot be enforced may
come late in the answer, where no trial of the whole gets to."""

STACK_BYTES = 2 * checker.STACK_BYTES
"""Bytes of the stack on which grammars are compiled. Without it, the size depends on the system, and on `ulimit -s`."""

LIMITS: dict[str, Any] = {
    "verbose_errors": False,
    "max_items_in_row": MAX_ROW_ITEMS,
    "max_lexer_states": MAX_LEXER_STATES,
}
"""Those of llguidance's parser that are not its own."""

LARK_START = re.compile(r"(?m)^[^\S\n]*(%llguidance\b|start[^\S\n]*:)")
"""What makes a grammar one in Lark's notation. llguidance's own expression is the same but for line feeds, for which it
takes quadratic time: 30 seconds for 30,000 of them, while no other thread of Python runs."""

CONTROL = re.compile(r"\\u00[01]|\\u007f")
"""A control character in JSON."""


class Grammars:
    """Compiles the constraints of one model. Several threads may use it.

    vocab_size: logits of the model; the tokenizer may know fewer tokens, or more.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._wrapped = tokenizer
        self._vocab_size = vocab_size
        self._executor = LLExecutor()
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()  # making the tokenizer takes a second
        self._kept: OrderedDict[Constraint | StructuredOutput, LLMatcher] = OrderedDict()
        """The one that was asked for last is the last."""
        self._kept_lock = threading.Lock()

    def start(self, constraint: Constraint | StructuredOutput, ignore_eos: bool) -> GrammarMatcher:
        """Make a matcher for one answer. Raises GrammarError. The constraint was compiled before, if another one asked
        for it: if it has been forgotten since then, it is compiled again without a child process."""
        matcher = self._find(constraint) or self.compile_on_thread(constraint, is_checked=True).result()
        takes_back = False if names_tokens(constraint) else None
        return GrammarMatcher(matcher.deep_copy(), self._wrapped.eos_token_ids, ignore_eos, takes_back)

    def compile(self, constraint: Constraint | StructuredOutput) -> LLMatcher:
        """Make a matcher at the start of the grammar, to be copied. Raises GrammarError with the reason, or OSError if
        no process can be started that compiles it first."""
        return self._find(constraint) or self.compile_on_thread(constraint).result()

    def compile_on_thread(
        self, constraint: Constraint | StructuredOutput, is_checked: bool = False
    ) -> Future[LLMatcher]:
        """The same, without waiting, on a thread whose stack has a known size. is_checked: whether a child process has
        compiled it before."""

        def run() -> LLMatcher:
            found = self.compile_here(constraint, is_checked)
            with self._kept_lock:
                self._kept[constraint] = found
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            return found

        return in_daemon_thread(run, "mlxpaged-grammar", STACK_BYTES)

    def is_compiled(self, constraint: Constraint | StructuredOutput) -> bool:
        """Whether `compile` takes no time. It is then among the last that are forgotten."""
        return self._find(constraint) is not None

    def _find(self, constraint: Constraint | StructuredOutput) -> LLMatcher | None:
        with self._kept_lock:
            found = self._kept.get(constraint)
            if found is not None:
                self._kept.move_to_end(constraint)
            return found

    def masks(self, rows: Sequence[tuple[GrammarMatcher, Collection[int]]]) -> list[Mask]:
        """The tokens that each answer may continue with. rows: matchers, each with tokens that it should avoid now.

        A mask is never empty: tokens to avoid stay in it if the grammar allows no others. A matcher with an error
        allows the end of the answer, and raises the error when it is advanced.
        """
        filled = allocate_token_bitmask(len(rows), self.tokenizer().vocab_size)
        matchers = [(matcher.matcher, i) for i, (matcher, _) in enumerate(rows)]
        fill_next_token_bitmask_par(self._executor, matchers, filled)
        return [
            preferring(mask, {*matcher.avoided, *avoided})
            for mask, (matcher, avoided) in zip(filled, rows, strict=True)
        ]

    def masks_along(
        self, matcher: GrammarMatcher, drafts: Sequence[int], avoided: Sequence[Collection[int]]
    ) -> list[Mask]:
        """The same for one answer, before each of its drafts and after the last one. The drafts must be allowed.
        avoided: for each mask."""
        found = []
        num_words = -(-self.tokenizer().vocab_size // 32)  # `compute_bitmask` has one more for some vocabularies
        for number, tokens in enumerate(avoided):
            if number:
                matcher.matcher.consume_token(drafts[number - 1])
            mask = np.frombuffer(matcher.matcher.compute_bitmask(), dtype=np.int32)[:num_words]
            found.append(preferring(mask, {*matcher.avoided, *tokens}))
        matcher.matcher.rollback(len(drafts))
        return found

    def compile_here(self, constraint: Constraint | StructuredOutput, is_checked: bool) -> LLMatcher:
        """The same, on this thread, and without keeping the result."""
        check_size(constraint)
        until = time.monotonic() + PARTS_SECONDS
        for part in dict.fromkeys(constraint.parts) if isinstance(constraint, StructuredOutput) else ():
            # A grammar is always compiled alone too, so that it cannot refer to the other parts.
            if part.kind == "grammar" or time.monotonic() < until:
                try:
                    self._new_matcher(part, is_checked)
                except GrammarError as error:
                    raise GrammarError(str(error), part.param) from None
        return self._new_matcher(constraint, is_checked)

    def _new_matcher(self, constraint: Constraint | StructuredOutput, is_checked: bool) -> LLMatcher:
        try:
            text = self._text(constraint)
            if not is_checked:
                checker.check([text], LIMITS)
            matcher = LLMatcher(self.tokenizer(), text, log_level=0, limits=LLParserLimits(**LIMITS))
        except ValueError as error:
            raise GrammarError(public_reason(error)) from None
        check(matcher)
        first = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)  # also finds a grammar that is too complex
        check(matcher)
        if not without(first, self._wrapped.eos_token_ids).any():
            raise GrammarError("only the empty text matches it")
        trial = matcher.deep_copy()
        for token_id in trial.compute_ff_tokens()[:1]:
            trial.consume_token(token_id)  # fails if the text that must follow is endless
            check(trial)
        self._try_out(matcher.deep_copy())
        return matcher

    def _try_out(self, matcher: LLMatcher) -> None:
        """Write a random answer. Raises GrammarError if the grammar cannot go on, or takes too long."""
        rng, until = random.Random(0), time.thread_time() + TRIAL_SECONDS
        for number in range(TRIAL_TOKENS):
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
            check(matcher)
            mask = without(mask, self._wrapped.eos_token_ids)
            if not mask.any():
                return
            preferred = [token_id for token_id in self._trial_ids if is_allowed(mask, token_id)]
            matcher.consume_token(rng.choice(preferred) if number % 2 and preferred else token_of(mask, rng))
            check(matcher)
            if time.thread_time() > until:
                raise GrammarError(f"takes {TRIAL_SECONDS * 1000 / (number + 1):.0f} ms for each token of an answer")

    @functools.cached_property
    def _trial_ids(self) -> list[int]:
        vocab = self._wrapped.reader.get_vocab()
        return [vocab[text] for text in TRIAL_TEXT if text in vocab]

    def _text(self, constraint: Constraint | StructuredOutput) -> str:
        """The grammar in llguidance's notation. Raises ValueError."""
        if isinstance(constraint, Constraint):
            return grammar_text(constraint)
        grammars = [{"name": "answer", "lark_grammar": lark(constraint, self._pieces)}]
        for i, part in enumerate(constraint.parts):
            text = grammar_text(part)
            is_lark = part.kind in ("choice", "grammar") or not text.startswith("{")
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
        """Special tokens by their text, as llguidance sees them, the longest first."""
        added = self._wrapped.reader.added_tokens_decoder.items()
        special = {token.content: i for i, token in added if self.tokenizer().is_special_token(i)}
        return dict(sorted(special.items(), key=lambda item: -len(item[0])))

    def tokenizer(self) -> LLTokenizer:
        """llguidance's view of the vocabulary. Raises GrammarError if it cannot be made from the model's tokenizer."""
        with self._tokenizer_lock:
            if self._tokenizer is None:
                wrapped = self._wrapped.reader
                size = max(len(wrapped), self._vocab_size)
                try:
                    new = guarded(from_tokenizer)
                    self._tokenizer = new(wrapped, size, sorted(self._wrapped.eos_token_ids) or None)
                except Exception as error:  # for unusual tokenizers, the libraries raise any type
                    raise GrammarError(
                        f"structured output does not work with this tokenizer: {public_reason(error)}"
                    ) from error
            return self._tokenizer


def grammar_text(constraint: Constraint) -> str:
    """A constraint in llguidance's notation. Raises ValueError."""
    if constraint.kind == "grammar":
        is_lark = LARK_START.search(constraint.text) is not None
        return grammar_from("lark", with_own_json(constraint.text) if is_lark else lark_of(constraint.text))
    if constraint.kind != "json_schema":
        return grammar_from(constraint.kind, constraint.text)
    schema = parsed(constraint.text)
    check_schema(schema)
    schema = enforceable(schema)
    if schema is False:
        raise ValueError("no value fits its 'not'")
    try:
        return lark_of_schema(schema)
    except (OtherSchemaError, RecursionError):
        check_enforced(schema, schema)
        check_integers(schema)
    schema = with_inclusive_bounds(schema)
    # In some strings, llguidance knows `\\u` for control characters only, and would force these on a model that begins
    # to write another character.
    text = json.dumps(schema)
    # Without `\\u`, it writes a listed control character as no character.
    limited = has_limited_strings(schema) and CONTROL.search(text) is None
    escapes = {"json_allowed_escapes": 'nrbtf"\\'} if limited else {}
    return LLMatcher.grammar_from_json_schema(text, overrides={**JSON_OPTIONS, **escapes})  # type: ignore[arg-type]


@functools.lru_cache(maxsize=16)
def lark_of(grammar: str) -> str:
    """A grammar of GBNF's notation in Lark's. What writes it is Python, and takes quadratic time for some: a child
    process does it, once for all compilations of a request. Raises ValueError."""
    return checker.lark_of(grammar)


def check(matcher: LLMatcher) -> None:
    """Raises GrammarError if a matcher has an error. Such errors are final."""
    if matcher.is_error():
        reason = public_reason(matcher.get_error().replace("<non-verbose/>", ""))
        raise GrammarError("no text matches it" if reason == "NoExtensionBias" else reason)


def without(mask: Mask, token_ids: Collection[int]) -> Mask:
    fewer: Mask = mask.copy()
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    ids = ids[ids < 32 * len(fewer)]
    bits = np.uint32(1) << (ids % 32).astype(np.uint32)
    np.bitwise_and.at(fewer.view(np.uint32), ids // 32, ~bits)
    return fewer


def token_of(mask: Mask, rng: random.Random) -> int:
    """A random token of a mask that is not empty."""
    word = rng.choice(np.flatnonzero(mask).tolist())
    bits = int(mask[word]) & 0xFFFFFFFF
    return int(32 * word) + rng.choice([bit for bit in range(32) if bits >> bit & 1])


def preferring(mask: Mask, avoided: Collection[int]) -> Mask:
    """The mask without these tokens, or the mask itself if nothing else would be allowed."""
    rest = without(mask, avoided) if avoided else mask
    return rest if rest.any() else mask


def names_tokens(constraint: Constraint | StructuredOutput) -> bool:
    """Whether a grammar of the request has tokens by their ids. llguidance 1.9.1 takes back ordinary ones that it has
    made a mask for, and then refuses them."""
    parts = constraint.parts if isinstance(constraint, StructuredOutput) else (constraint,)
    return any(part.kind == "grammar" and "<[" in part.text for part in parts)


class GrammarMatcher:
    """The state of one answer in its grammar. ends: the tokens that end an answer. avoided: tokens that are allowed
    only if nothing else is. takes_back: whether it can forget tokens; None: that is tried when it is needed."""

    def __init__(
        self, matcher: LLMatcher, ends: Collection[int], avoids_ends: bool, takes_back: bool | None = None
    ) -> None:
        self.matcher = matcher
        self._ends = ends
        self.avoided = ends if avoids_ends else ()
        self._takes_back = takes_back

    def forced(self) -> list[int]:
        """The next tokens if there is no choice."""
        return list(self.matcher.compute_ff_tokens())

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens can be drafts: the answer may continue with them, and none is its end. llguidance
        does not take back an end after a complete answer, and no token of a grammar with max_tokens or stop."""
        drafts = list(itertools.takewhile(lambda token_id: token_id not in self._ends, token_ids))
        count = int(self.matcher.validate_tokens(drafts))
        if count and self._takes_back is None:
            ahead = self.matcher.deep_copy()
            self._takes_back = ahead.consume_token(drafts[0]) and ahead.rollback(1)
        return count if self._takes_back else 0

    def may_end(self) -> bool:
        """Whether the answer is whole as it is."""
        return bool(self.matcher.is_accepting())

    def advance(self, token_id: int) -> bool:
        """Append a token to the answer. Returns True if nothing can follow. Raises GrammarError if the token is not
        allowed, or if the grammar has become too complex."""
        self.matcher.consume_token(token_id)
        try:
            check(self.matcher)
        except GrammarError as error:
            raise GrammarError(f"the answer cannot be continued within its constraint: {error}") from None
        return bool(self.matcher.is_stopped())
