"""Decides how many prompt tokens a step computes, by token budget, decode preference and time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf

from mlxpaged.core.scheduling.config import MOST_MULTIPLE, READING_SECONDS, SchedulerConfig, step_multiple
from mlxpaged.core.scheduling.row_tiles import LEAST_CHUNK, RowTiles
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.core.scheduling.step_cost import OUTLIER, Costs, StepCost
from mlxpaged.core.step import Row, Step


class PrefillBudget:
    """What prompts may use of one step: `tokens`, and `seconds` as estimated by `costs`. costs None: no time limit.
    seconds falls below zero if the shortest chunk takes longer. rows: that the step has already. logits: of so many
    prompt tokens the step may compute logits. tokens falls below zero if the first prompt begins with an image that
    may not be cut."""

    def __init__(
        self, tokens: int, logits: int, rows: int, tiles: RowTiles, costs: Costs | None = None, seconds: float = 0.0
    ) -> None:
        self.tokens = tokens
        self.seconds = seconds
        self._logits = logits
        self._rows = rows
        self._tiles = tiles
        self._costs = costs
        self._is_first = True

    def charge(self, seconds: float) -> None:
        """The step took so many seconds more than was estimated."""
        self.seconds -= seconds

    def has_room(self, sequence: Sequence) -> bool:
        """Whether `take_chunk` would give the sequence a token. Other sequences may still have room if it has none. The
        first prompt of a step gets its shortest chunk in any case, another one only if there is time for it."""
        if self.tokens <= 0 or (self._logits <= 0 and sequence.logits_from is not None):
            return False
        if self._is_first:
            return True
        shortest = sequence.whole_chunk(min(LEAST_CHUNK, self.tokens, sequence.num_uncomputed_tokens))
        if shortest > self.tokens:
            return False
        if self._costs is None:
            return True
        return self._costs.chunk_seconds(sequence.num_computed_tokens, shortest, self._rows) <= self.seconds

    def take_chunk(self, sequence: Sequence) -> int:
        """Return the size of the sequence's next chunk and deduct it. A chunk that is cut short is the last one of the
        step: the next prompt may have the same prefix and would compute the same tokens. A chunk that is cut because
        of its logits is not: only prompts with log-probabilities are limited by these. Returns 0 if the chunk begins
        with an image that needs a step of its own."""
        start, wanted = sequence.num_computed_tokens, sequence.num_uncomputed_tokens
        if sequence.logits_from is not None:
            wanted = min(wanted, max(0, sequence.logits_from - start) + self._logits)
        chunk = min(self.tokens, wanted)
        if self._costs is not None:
            within = self._costs.chunk_within(self.seconds, start, chunk, self._rows)
            if within < chunk:
                chunk = min(chunk, self._tiles.chunk(self._rows, within))
        chunk = sequence.whole_chunk(chunk)
        if chunk > self.tokens and not self._is_first:
            return 0
        if self._costs is not None:
            self.seconds -= self._costs.chunk_seconds(start, chunk, self._rows)
            if chunk < wanted or self.seconds <= 0:
                self.tokens = chunk
        self.tokens -= chunk
        self._rows += chunk
        self._is_first = False
        if sequence.logits_from is not None:
            self._logits -= max(0, start + chunk - max(start, sequence.logits_from))
        return chunk


class PrefillLimits:
    """Gives each step its PrefillBudget. Learns from the finished steps how long prompts take."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._tiles = config.tiles
        self._cost = StepCost(config.tiles)
        self.forget()

    def learn_rows(self, seconds: Mapping[int, float]) -> None:
        """Begin anew with what decoding steps of so many rows, with short contexts, took before the first request: with
        the tiles that they show, and their times."""
        self._tiles = self._config.tiles.measured(seconds)
        self._cost = StepCost(self._tiles, seconds)
        self.forget()

    def observe(self, step: Step, seconds: float) -> None:
        """Learn from a step: the device computed these rows, and nothing else, in `seconds`. The next steps make up for
        what it took, not for what was estimated: a GPU's times are not as linear as the estimates."""
        contexts, chunks = work_of(step.rows)
        if chunks and (estimate := self._cost.estimate(contexts, chunks)) is not None:
            self._last.charge(min(seconds, OUTLIER * estimate) - estimate)
        self._cost.observe(contexts, chunks, seconds)

    def learn(self) -> None:
        """Make the estimate of `expected_seconds` from the steps so far."""
        self._cost.costs()

    def expected_seconds(self, step: Step) -> float | None:
        """The time of a step by the latest estimate; None if it cannot tell. Any thread may ask."""
        return self._cost.expected_seconds(*work_of(step.rows))

    def row_seconds(self) -> dict[int, float]:
        """Seconds of steps without prompts by their rows, beside what their keys take."""
        return self._cost.row_seconds()

    def decode_seconds(self) -> Callable[[int, int], float] | None:
        """Returns the time of a step of so many decoding rows that attend to so many keys together; None if no step was
        timed yet."""
        costs = self._cost.decoding_costs()
        return None if costs is None else costs.decode_seconds

    def budget(
        self, contexts: ListOf[int], delayed: ListOf[int], tokens: int, logits: int, num_prompts: int
    ) -> PrefillBudget:
        """The budget of a step of at most `tokens`, and of so many logits of prompt tokens. contexts: of the tokens
        that it has already, drafts among them. delayed: context lengths of the sequences that wait for the step. What
        drafts take is taken from the prompts: no step is longer for them. num_prompts: that wait or are computed."""
        tiles = self._tiles
        num_rows = len(contexts)
        if contexts:
            share = int((1 - self._config.decode_preference) * tokens)
            tokens = max(0, min(tokens - num_rows, max(1, share)))
        limit = self._config.max_step_seconds
        costs = None if limit == 0 or not (delayed or limit) else self._cost.costs()
        if costs is None:
            self._last = PrefillBudget(tokens, logits, num_rows, tiles)
            return self._last
        seconds = -costs.linear_seconds(contexts)
        if limit is not None:
            seconds += limit
        else:
            seconds += seconds_with_prompts(costs.step_seconds(delayed), num_prompts)
            seconds -= max(0.0, -self._last.seconds) if contexts else 0.0  # what the last step took beyond its limit
            tokens = tokens if seconds > 0 else 0
        self._last = PrefillBudget(tokens, logits, num_rows, tiles, costs, seconds)
        return self._last

    def seconds_for_prompts(self, contexts: ListOf[int], num_prompts: int) -> float:
        """What so many prompts may take of a step, if sequences with these contexts decode. 0.0 if it is not known."""
        costs = self._cost.decoding_costs()
        if not num_prompts or costs is None:
            return 0.0
        plain = costs.step_seconds(contexts)
        return max(0.0, (self._config.max_step_seconds or seconds_with_prompts(plain, num_prompts)) - plain)

    def forget(self) -> None:
        """No prompt waits. What the last ones took beyond the limit does not delay the next."""
        self._last = PrefillBudget(0, 0, 0, self._tiles)

    def seconds_alone(self, start: int, tokens: int) -> float:
        """Time to compute the tokens from `start` on if nothing else runs. 0.0 if too few steps ran to estimate it."""
        costs = self._cost.reliable_costs()
        return 0.0 if costs is None else costs.prefill_seconds(start, tokens, self._config.max_num_batched_tokens)

    def seconds_roughly(self, start: int, tokens: int) -> float | None:
        """The same after any step with a prompt; None before."""
        costs = self._cost.costs()
        return None if costs is None else costs.prefill_seconds(start, tokens, self._config.max_num_batched_tokens)


def seconds_with_prompts(plain: float, num_prompts: int) -> float:
    """How long a step may take on average while so many prompts wait or are computed. plain: without prompts."""
    multiple = step_multiple(num_prompts)
    return max(multiple * plain, READING_SECONDS if multiple == MOST_MULTIPLE else 0.0)


def work_of(rows: ListOf[Row]) -> tuple[list[int], list[tuple[int, int]]]:
    """Context lengths of the decoding tokens, each of which the device computes as a row, and (start, tokens) of the
    prompt chunks."""
    contexts: list[int] = []
    chunks: list[tuple[int, int]] = []
    for row in rows:
        start, num_tokens = row.start, len(row.token_ids)
        if num_tokens == 1:
            contexts.append(start + 1)
        elif row.decodes:
            contexts += range(start + 1, start + num_tokens + 1)
        else:
            chunks.append((start, num_tokens))
    return contexts, chunks
