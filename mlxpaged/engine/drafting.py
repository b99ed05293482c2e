"""Speculative decoding: proposes draft tokens for decoding sequences, and accepts those that were sampled.

A row with drafts has the sequence's last token and k drafts, and all k + 1 positions are sampled, each with its own
noise, which depends on the seed and the position only. A draft is accepted if the same token was sampled before it. So
the tokens of an answer are those that are sampled without drafts, whatever is drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from typing import Protocol

from mlxpaged.engine.request_table import RequestTable
from mlxpaged.engine.running_request import RunningRequest
from mlxpaged.engine.sampler import SampledToken
from mlxpaged.engine.status import NO_DRAFTS, DraftStats
from mlxpaged.scheduler.draft_budget import MOST_DRAFTS, PRIORS, Acceptance, draft_lengths
from mlxpaged.scheduler.scheduler import Scheduler, is_decoding
from mlxpaged.scheduler.sequence import Sequence
from mlxpaged.step import Row

MOST_DRAFT_ROWS = 64
"""Drafts of a step. Times of steps are measured up to 128 rows."""


class Drafter(Protocol):
    def propose(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        """Returns up to `most` tokens that may come next, and how many tokens of the text they were found by."""
        ...

    def forget(self, sequence_id: int) -> None:
        """A sequence has ended."""
        ...


Lengths = Callable[[ListOf[int], ListOf[ListOf[float]]], list[int]]
"""Contexts and chances of all decoding sequences -> drafts of each, see `draft_lengths`."""


class Drafting:
    """Belongs to the engine thread. lengths: decides how many drafts are verified; None: by the times of steps."""

    def __init__(
        self, scheduler: Scheduler, requests: RequestTable, drafter: Drafter, lengths: Lengths | None = None
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self.drafter = drafter
        self.lengths = lengths or self._fastest
        self._acceptance: dict[int, Acceptance] = {}
        self._shared = list(PRIORS)
        self._matches: dict[int, int] = {}  # of the drafts in the next step, by sequence id
        self.stats = NO_DRAFTS

    def choose(self) -> bool:
        """Give running sequences the drafts of the next step. Returns whether any has one. If a step is in flight, its
        tokens are missing here: process them, and choose again."""
        decoding = list(filter(is_decoding, self._scheduler.running))
        proposals = [self._propose(sequence) for sequence in decoding]
        self._matches.clear()
        if not any(drafts for drafts, _ in proposals):
            for sequence in decoding:
                sequence.drafts = ()
            return False
        chances = [
            self._acceptance_of(sequence).chances(match, len(drafts)) if drafts else []
            for sequence, (drafts, match) in zip(decoding, proposals, strict=True)
        ]
        contexts = [len(sequence.token_ids) for sequence in decoding]
        lengths = self.lengths(contexts, chances)
        self._add_probe(decoding, contexts, [len(each) for each in chances], lengths)
        for sequence, (drafts, match), length in zip(decoding, proposals, lengths, strict=True):
            sequence.drafts = drafts[:length]
            self._matches[sequence.sequence_id] = match
        return any(lengths)

    def _add_probe(
        self, decoding: ListOf[Sequence], contexts: ListOf[int], proposed: ListOf[int], lengths: list[int]
    ) -> None:
        """Let a sequence whose drafts were not worth verifying for long have one, if that would be worth it with drafts
        that are all accepted."""
        for i, sequence in enumerate(decoding):
            if proposed[i] and not lengths[i] and self._acceptance_of(sequence).is_probe_due:
                lengths[i] = min(1, self.lengths(contexts, [[1.0] * min(1, count) for count in proposed])[i])
                return

    def _propose(self, sequence: Sequence) -> tuple[list[int], int]:
        running = self._requests.by_sequence[sequence.sequence_id]
        left = sequence.max_tokens - (len(sequence.token_ids) - sequence.num_prompt_tokens) - 1
        asked = running.request.params.speculative
        most = min(left, MOST_DRAFTS if asked is None or asked is True else int(asked))
        if most <= 0 or not can_draft(running):
            return [], 0
        return self.drafter.propose(sequence, most)

    def _fastest(self, contexts: ListOf[int], chances: ListOf[ListOf[float]]) -> list[int]:
        seconds = self._scheduler.decode_seconds()
        if seconds is None:
            return [0] * len(contexts)
        most = max(1, MOST_DRAFT_ROWS // len(contexts))
        return draft_lengths(contexts, [each[:most] for each in chances], seconds)

    def _acceptance_of(self, sequence: Sequence) -> Acceptance:
        return self._acceptance.setdefault(sequence.sequence_id, Acceptance(self._shared))

    def accept(self, row: Row, sampled: list[SampledToken]) -> list[SampledToken]:
        """Returns the first of the tokens that a row has sampled: up to the first one that is not the next draft, or
        that ends the answer."""
        running = self._requests.by_sequence.get(row.sequence_id)
        drafts = row.token_ids[1:] if row.num_sampled > 1 else ()
        if running is None or not drafts:
            if (acceptance := self._acceptance.get(row.sequence_id)) is not None:
                acceptance.observe(0, 0, 0)
            return sampled
        ends, before = running.sequence.finish_reason_after, running.sequence.num_output_tokens
        accepted = 0
        while (
            accepted < len(drafts)
            and sampled[accepted].token_id == drafts[accepted]
            and ends(drafts[accepted], before + accepted + 1) is None
        ):
            accepted += 1
        self.stats = DraftStats(self.stats.drafted_total + len(drafts), self.stats.accepted_total + accepted)
        running.num_drafted += len(drafts)
        running.num_accepted += accepted
        match = self._matches.get(row.sequence_id, 0)
        self._acceptance_of(running.sequence).observe(match, len(drafts), accepted)
        return sampled[: accepted + 1]

    def forget(self, sequence_id: int) -> None:
        self._acceptance.pop(sequence_id, None)
        self.drafter.forget(sequence_id)


def can_draft(running: RunningRequest) -> bool:
    """Whether its tokens may be sampled before those that come before them are known: not if a grammar, a penalty or a
    limit on thinking follows each token."""
    sequence = running.sequence
    return not running.needs_tokens and sequence.num_output_tokens > 0 and sequence.num_step_failures == 0
