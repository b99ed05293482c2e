"""Decides how many draft tokens a step verifies: as many as bring the most tokens per second, and cost no one else.

A draft costs a row. A row is nearly free on some devices and as dear as a token on others, and the time of a step by
its rows has plateaus, so all totals are compared. A total counts only if no stream waits for the step much longer than
its tokens would take without drafts; if no stream falls behind by the drafts of others; and if the prompts that are
computed lose hardly anything. Where no such total is faster than no drafts, none are verified.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf

from mlxpaged.core.scheduling.row_table import SHORTEST
from mlxpaged.parts.drafting.acceptance import MOST_DRAFTS, MOST_LEAD, PRIORS, Acceptance, StepCounts
from mlxpaged.parts.drafting.measured_gain import AS_EXPECTED, Measured, MeasuredGain

MOST_DRAFT_ROWS = 64
"""Drafts of a step. Times of steps are measured up to 128 rows."""

LENGTHS = (1, 2, 4, 8)
"""Numbers of drafts that a sequence may have: few, so that steps of as many rows come again and are replayed."""

SPANS = tuple(itertools.pairwise((0, *LENGTHS)))

LEAST_GAIN = 1.03
"""Drafts must make a step so many times as fast, because their chances and the times are estimates."""

PROBE_SHARE = 0.005
"""Share of the time that probes may take, after one step. The dearest row takes 0.8 of a step, so fewer than one gap
between tokens in a hundred is longer for a probe."""

MOST_STRETCH = 1.2
"""How many times as long as without drafts a step may take for the tokens that a stream is expected to get in it. So
one that has no drafts waits a fifth longer for its token, which a reader hardly sees."""

PROMPT_STRETCH = 1.05
"""How many times as long as without drafts a step may take while a prompt waits or is computed: how much later its
first token comes."""

ASK_AGAIN = 32
"""Steps of as many sequences after which it is asked again whether drafts could be worth verifying at all."""

EXPOSED_SHARE = 0.1
"""What the latest step counts in the time that the device waits. The average begins at 0, so that drafts are tried. A
wait counts as one step at most: a longer one is a pause of the process."""

TIME_AGAIN = 16
"""After so many steps with drafts, times their gain, one goes without: what a step without takes must be known, or
drafts that have ceased to pay would never be found out. So that costs about a hundredth."""

Seconds = Callable[[int, int], float]
"""Time of a decoding step with so many rows that attend to so many keys together."""

Lengths = Callable[[ListOf[int], ListOf[ListOf[float]], ListOf[float], ListOf[float]], list[int]]
"""Contexts, chances, costs and leads of all decoding sequences -> drafts of each, see `draft_lengths`."""


def draft_lengths(
    contexts: ListOf[int],
    chances: ListOf[ListOf[float]],
    seconds: Seconds,
    costs: ListOf[float] = (),
    exposed: float = 0.0,
    leads: ListOf[float] = (),
    prompts: float = 0.0,
    measured: Measured = AS_EXPECTED,
) -> list[int]:
    """Returns how many of its drafts each decoding sequence verifies, one of LENGTHS or 0.

    contexts: context lengths of the sequences. chances: for each sequence, see `Acceptance.chances`. costs: of a draft
    of each sequence before it is verified, as a share of a step without drafts; those of several sequences are made at
    once. By default 0. exposed: seconds in which the device waits before a step with drafts. leads: see `Acceptance`,
    by default 0 for all. prompts: seconds that the step is expected to take for prompts; 0 if there are none.
    measured: of the latest steps, which these are expected to be like.
    """
    count, keys = len(contexts), sum(contexts)
    best = [0] * count
    decoding = seconds(count, keys)
    if decoding <= 0:
        return best  # too little is known
    plain = decoding + prompts
    limit = (PROMPT_STRETCH if prompts else math.inf) * plain
    # Rows that are free in a tile that is not full are not free beside a prompt, whose tokens would fill it.
    row = (seconds(2 * MOST_DRAFT_ROWS, keys) - seconds(MOST_DRAFT_ROWS, keys)) / MOST_DRAFT_ROWS if prompts else 0.0
    most = LEAST_GAIN * count / plain
    ahead = [lead + MOST_LEAD for lead in leads] or [MOST_LEAD] * count
    spans = [
        (measured.accepted * sum(each[first:length]) / (length - first), costs[i] if costs else 0.0, i, length)
        for i, each in enumerate(chances)
        for first, length in SPANS
        if length <= len(each)
    ]
    spans.sort(key=lambda span: span[1] - span[0])  # those of a sequence in order
    for longest in sorted({length for *_, length in spans}):  # where many of some are too long, all may have a few
        lengths, gets, making = [0] * count, [1.0] * count, 0.0  # gets: expected tokens of each sequence
        rows, all_keys, tokens = count, keys, float(count)
        for chance, cost, i, length in spans:
            if length > longest:
                continue
            more = length - lengths[i]
            lengths[i], gets[i] = length, gets[i] + more * chance
            rows, all_keys, tokens = rows + more, all_keys + more * contexts[i], tokens + more * chance
            making = max(making, length * decoding * cost)
            verifying = max(measured.seconds * seconds(rows, all_keys), decoding + row * (rows - count))
            took = verifying + making + exposed + prompts
            if tokens / took <= most or took > limit:
                continue
            if took <= min(MOST_STRETCH * min(gets), min(map(operator.add, ahead, gets))) * plain:
                most, best = tokens / took, list(lengths)
    return best


def gain_of(lengths: ListOf[int], contexts: ListOf[int], chances: ListOf[ListOf[float]], seconds: Seconds) -> float:
    """Returns how many times as many tokens per second as without these drafts are expected. See `draft_lengths`."""
    rows, keys = len(contexts), sum(contexts)
    tokens = rows + sum(sum(each[:length]) for each, length in zip(chances, lengths, strict=True))
    all_keys = sum((1 + length) * context for length, context in zip(lengths, contexts, strict=True))
    return tokens / rows * seconds(rows, keys) / max(seconds(rows + sum(lengths), all_keys), SHORTEST)


def of_few(lengths: ListOf[int], chances: ListOf[ListOf[float]], most: int) -> list[int]:
    """Returns the lengths, but 0 for all except `most` sequences, those whose drafts bring the most tokens."""
    order = sorted(range(len(lengths)), key=lambda i: -sum(chances[i][: lengths[i]]))
    chosen = set(order[:most])
    return [length if i in chosen else 0 for i, length in enumerate(lengths)]


class DraftBudget:
    """Chooses what each step verifies, by how often the drafts of each sequence were accepted and by what steps take.

    seconds: returns the times of steps as they are known now, or None. most_states: most sequences with drafts in a
    step, None if it does not matter. lengths: decides instead of the times, if it is set.
    """

    def __init__(self, seconds: Callable[[], Seconds | None], most_states: int | None = None) -> None:
        self._seconds = seconds
        self._most_states = most_states
        self.lengths: Lengths | None = None
        self.exposed = 0.0  # seconds in which the device waits before a step with drafts, though steps could overlap
        self._acceptance: dict[int, Acceptance] = {}
        self._shared, self._steps = list(PRIORS), StepCounts()
        self._searched: ListOf[int] = ()  # for drafts of the next step
        self._could_pay, self._last_batch, self._steps_left = False, (-1, False), 0
        self._num_with_drafts = 0  # steps in a row
        self._latest = 1, 1  # rows and keys of the latest step that only decoded, without its drafts
        self._waited = 0.0  # seconds that the device has waited since the latest step in which that mattered
        self._saved = 1.0  # for probes, in steps without drafts
        self._prompts = 0.0  # seconds that the next step may take for prompts
        self._gain = MeasuredGain()
        self._chances: dict[int, ListOf[float]] = {}  # of the drafts of the next step, by sequence id

    def of(self, sequence_id: int) -> Acceptance:
        acceptance = self._acceptance.get(sequence_id)
        if acceptance is None:
            acceptance = self._acceptance[sequence_id] = Acceptance(self._shared, self._steps)
        return acceptance

    def forget(self, sequence_id: int) -> None:
        self._acceptance.pop(sequence_id, None)

    def begin_step(self, contexts: ListOf[int], prompts: float) -> bool:
        """Returns whether drafts of the next step could be worth verifying if all were accepted. The answer is kept for
        some steps: where it is no, nothing is searched for drafts. prompts: seconds that the step may take for
        prompts."""
        batch, self._prompts = (len(contexts), prompts > 0), prompts
        if batch != self._last_batch or self._steps_left == 0:
            self._last_batch, self._steps_left = batch, ASK_AGAIN
            count = max(1, len(contexts))
            self._could_pay = any(self.verified(contexts or [1], [[1.0] * MOST_DRAFTS] * count, [0.0] * count))
        self._steps_left -= 1
        return self._could_pay

    def verified(
        self,
        contexts: ListOf[int],
        chances: ListOf[ListOf[float]],
        costs: ListOf[float],
        leads: ListOf[float] = (),
    ) -> list[int]:
        """Returns how many of these drafts would be worth verifying. See `draft_lengths`."""
        if self.lengths is not None:
            return self.lengths(contexts, chances, costs, leads)
        if (seconds := self._seconds()) is None:
            return [0] * len(contexts)
        most = max(1, MOST_DRAFT_ROWS // len(contexts))
        within = [each[:most] for each in chances]
        measured = self._gain.measured
        return draft_lengths(contexts, within, seconds, costs, self.exposed, leads, self._prompts, measured)

    def searches(self, sequence_id: int) -> bool:
        """Whether the text of a sequence is searched for drafts of the next step."""
        return self.lengths is not None or self.of(sequence_id).searches

    def choose(
        self,
        ids: ListOf[int],
        contexts: ListOf[int],
        chances: ListOf[ListOf[float]],
        costs: ListOf[float],
        searched: ListOf[int],
    ) -> list[int]:
        """Returns how many drafts each of these sequences verifies in the next step. For contexts, chances and costs
        see `draft_lengths`. searched: the sequences whose text was searched."""
        lengths = [0] * len(ids)
        if any(chances):
            if self._waited and (seconds := self._seconds()) is not None:
                self._steps.lose(self._waited / max(seconds(len(contexts), sum(contexts)), SHORTEST))
                self._waited = 0.0
            leads = [self.of(each).lead for each in ids]
            lengths = self.verified(contexts, chances, costs, leads)
            if self.lengths is None:
                self._add_probe(ids, contexts, chances, costs, leads, lengths)
            if self._most_states is not None:
                lengths = of_few(lengths, chances, self._most_states)
            if self.lengths is None and self._is_plain_due(lengths, contexts, chances):
                lengths = [0] * len(ids)
        if any(lengths):
            self._searched, self._chances = searched, dict(zip(ids, chances, strict=True))
        else:
            self.choose_none(searched)
        return lengths

    def choose_none(self, searched: ListOf[int]) -> None:
        """The next step has no drafts, although these texts were searched."""
        self._end_search(searched, {})

    def count_step(self, accepted: Mapping[int, int], drafted: Mapping[int, int]) -> None:
        """A step has ended. accepted, drafted: drafts of those that had some."""
        self._steps.end_step()
        if accepted:
            self._end_search(self._searched, accepted)
            self._searched = ()
            expected = sum(sum(self._chances.get(each, ())[:number]) for each, number in drafted.items())
            self._gain.count(sum(accepted.values()), expected)

    def _end_search(self, searched: ListOf[int], accepted: Mapping[int, int]) -> None:
        for each in searched:
            if (acceptance := self._acceptance.get(each)) is not None:
                acceptance.end_search(accepted.get(each, 0))

    def note_step(self, rows: int, keys: int, drafts: tuple[int, int], seconds: float) -> float:
        """A step that only decodes has taken so long. It would have had so many rows and keys without its drafts, which
        had so many more. Returns how many steps without drafts would have taken as long."""
        more, more_keys = drafts
        self._latest = rows, keys
        self._num_with_drafts = self._num_with_drafts + 1 if more else 0
        self._saved = min(self._saved + PROBE_SHARE, 1.0)
        if (estimate := self._seconds()) is None:
            return 1.0
        self._gain.note(more > 0, seconds, max(estimate(rows + more, keys + more_keys), SHORTEST))
        if not more:
            return 1.0
        took = (seconds + self.exposed) / max(self._gain.pace * estimate(rows, keys), SHORTEST)
        self._steps.lose(took - 1)
        return took

    def note_choice(self, seconds: float) -> None:
        """The device has waited so long for the drafts of the next step, or for that there are none."""
        self._waited += self._within_a_step(seconds)

    def note_exposed(self, seconds: float) -> None:
        """The device has waited for the host before a step with drafts."""
        self.exposed += EXPOSED_SHARE * (self._within_a_step(seconds) - self.exposed)

    def _within_a_step(self, seconds: float) -> float:
        """A wait, but no longer than the latest step without drafts would have taken."""
        estimate = self._seconds()
        return seconds if estimate is None else min(seconds, estimate(*self._latest))

    def _add_probe(
        self,
        ids: ListOf[int],
        contexts: ListOf[int],
        chances: ListOf[ListOf[float]],
        costs: ListOf[float],
        leads: ListOf[float],
        lengths: list[int],
    ) -> None:
        """Let a sequence whose drafts were not worth verifying for long have one, if that would be worth it with drafts
        that are all accepted, and if its row is not too dear."""
        for i, each in enumerate(ids):
            if chances[i] and not lengths[i] and self.of(each).is_probe_due:
                hopeful = self.verified(contexts, [[1.0] * min(1, len(others)) for others in chances], costs, leads)
                if hopeful[i] and (seconds := self._seconds()) is not None:
                    rows, keys = len(contexts), sum(contexts)
                    took = self._gain.measured.seconds * seconds(rows + 1, keys + contexts[i])
                    cost = took / max(seconds(rows, keys), SHORTEST) - 1
                    if cost <= self._saved:
                        self._saved -= max(0.0, cost)
                        lengths[i] = 1
                return

    def _is_plain_due(self, lengths: ListOf[int], contexts: ListOf[int], chances: ListOf[ListOf[float]]) -> bool:
        """Whether the step goes without these drafts, so that its time is known."""
        if not any(lengths) or self._num_with_drafts < TIME_AGAIN or (seconds := self._seconds()) is None:
            return False
        return self._num_with_drafts >= TIME_AGAIN * gain_of(lengths, contexts, chances, seconds)
