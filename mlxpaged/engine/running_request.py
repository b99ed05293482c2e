"""A request inside the engine: its sequence, and how far its text has come."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from mlxpaged.engine.grammar import GrammarMatcher, Mask
from mlxpaged.engine.request import Request, TokenLogprobs
from mlxpaged.engine.sampler import SamplingRow
from mlxpaged.engine.stop_strings import StopStrings
from mlxpaged.engine.thinking_budget import ThinkingBudget
from mlxpaged.engine.timeline import TimelineRecorder
from mlxpaged.models import Tokenizer
from mlxpaged.scheduler import Sequence


class HeldLogprobs(NamedTuple):
    """Log-probabilities of a token whose text covers characters `start` to `end` of the answer."""

    token: TokenLogprobs
    start: int
    end: int


class RunningRequest:
    """A request inside the engine: its sequence and the state of its text."""

    def __init__(
        self, request: Request, sequence: Sequence, tokenizer: Tokenizer, matcher: GrammarMatcher | None
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.matcher = matcher
        self.detokenizer = tokenizer.detokenizer(request.params.think_tags, request.params.tool_tags)
        self.stop_strings = StopStrings(request.params.stop)
        self.made_chars = 0  # of the answer's text, those that are held back included
        self.sent_chars = 0
        self.held_logprobs: list[HeldLogprobs] = []
        self.seed = secrets.randbits(64) if request.params.seed is None else request.params.seed
        self.timeline = TimelineRecorder(sequence) if request.timeline else None
        limit, start, end = request.params.thinking_budget, tokenizer.think_start_ids, tokenizer.think_end_ids
        inside = request.params.begins_thinking
        self.thinking = None if limit is None else ThinkingBudget(limit, start, end, inside)

    def forbidden(self, position: int) -> frozenset[int]:
        """Tokens that must not be drawn at `position`."""
        too_short = position - self.sequence.num_prompt_tokens < self.request.params.min_tokens
        return self.sequence.stop_token_ids if too_short else frozenset()

    def forced(self) -> int | None:
        """The token that has to come next; None for whichever is drawn. A grammar may want a character completed before
        it."""
        token = None if self.thinking is None else self.thinking.forced()
        return token if token is None or self.matcher is None or self.matcher.allows(token) else None

    def sampling_row(self, position: int, mask: Mask | None) -> SamplingRow:
        """To draw the token at `position`. mask: what its grammar allows there, if it has one."""
        sequence = self.sequence
        return SamplingRow(
            sequence.sequence_id,
            self.request.params,
            self.seed,
            sequence.token_ids,
            sequence.num_prompt_tokens,
            position,
            forbidden=self.forbidden(position) if mask is None else (),
            mask=mask,
        )
