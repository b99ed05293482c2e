"""Samples tokens from logits, for all rows of a step at once.

The order is vLLM's: logit bias and forbidden tokens, penalties, grammars, temperature, min-p, top-k, top-p, sampling.
random_sampling.py has what comes after the temperature.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpaged.core.engine.logprobs import TokenLogprobs
from mlxpaged.core.engine.matcher import Mask
from mlxpaged.core.engine.random_sampling import filter_width, row_parameters, sample_rows
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.step import FIRST_CONTENT_ID


class SamplingRow(NamedTuple):
    """One row of logits. position: of the token to sample. token_ids: prompt and answer, known up to `position`.

    forbidden: tokens that must not be sampled. mask: the tokens that a grammar allows. forced: the token to take,
    for any logits. close: the token to take in place of any of these end tokens. drafts: the tokens before `position`
    that `token_ids` does not have. The rows of a sequence with drafts follow one another, each with one draft more.
    Each may be rejected by the row before it.
    """

    sequence_id: int
    params: SamplingParams
    seed: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    position: int
    forbidden: Collection[int] = ()
    mask: Mask | None = None
    forced: int | None = None
    drafts: Sequence[int] = ()
    close: tuple[int, Collection[int]] | None = None

    def token_at(self, position: int) -> int:
        """A token before `self.position`."""
        first_draft = self.position - len(self.drafts)
        return self.drafts[position - first_draft] if position >= first_draft else self.token_ids[position]

    @property
    def plain(self) -> bool:
        return (
            self.params.plain
            and not self.forbidden
            and self.mask is None
            and self.forced is None
            and self.close is None
        )


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class Samples:
    """The tokens sampled for R rows. They are on the device until `read`. tokens[R]: int32. logprobs: of the rows that
    requested them."""

    tokens: mx.array
    logprobs: Sequence[RowLogprobs] = ()

    @property
    def arrays(self) -> list[mx.array]:
        return [self.tokens, *(array for each in self.logprobs for array in each.arrays)]

    def read(self) -> list[SampledToken]:
        """Wait for the device, and return the tokens in the order of the rows."""
        tokens: list[int] = self.tokens.tolist()  # type: ignore[assignment]
        logprobs = {i: found for each in self.logprobs for i, found in each.read(tokens).items()}
        return [SampledToken(token, logprobs.get(i)) for i, token in enumerate(tokens)]


def joined(samples: Sequence[Samples]) -> Samples:
    """The samples of single rows as those of all rows."""
    logprobs = [
        replace(each, counts=dict.fromkeys([i], *each.counts.values()))
        for i, of_row in enumerate(samples)
        for each in of_row.logprobs
    ]
    return Samples(mx.concatenate([each.tokens for each in samples]), logprobs)


class Sampler:
    """Its only state is the token counts of requests with penalties. They stay on the device until `forget`.

    compiled: keep the graph of random sampling, and let MLX join its operations into fewer kernels. one_by_one: sample
    each row in operations of its own, so that no rounding depends on the other rows. absent: tokens that have logits,
    but do not exist. Those after the last token that exists are cut off, which is a view and no kernel.
    """

    def __init__(
        self, vocab_size: int, compiled: bool = False, one_by_one: bool = False, absent: Collection[int] = ()
    ) -> None:
        exist = np.ones(vocab_size, np.bool_)
        exist[list(absent)] = False
        self.vocab_size = int(exist.nonzero()[0][-1]) + 1
        self.absent = mx.array(~exist) if absent else None  # bool [V]
        self._gaps = None if exist[: self.vocab_size].all() else mx.array(~exist[: self.vocab_size])
        self._one_by_one = one_by_one
        self._compiled = mx.compile(sample_rows) if compiled else sample_rows
        self.reset()

    def reset(self) -> None:
        """Forget all sequences, after a device error."""
        self._counts = TokenCounts(self.vocab_size)

    def warm_up(self) -> None:
        """Sample once in each way, so that MLX compiles the kernels of random sampling before a request needs them."""
        plain = SamplingParams(seed=0)
        for params in (plain, replace(plain, min_p=0.5), replace(plain, top_p=0.5), replace(plain, top_k=2)):
            for count in (1, 2):
                rows = [SamplingRow(i, params, 0, (), 0, 0) for i in range(count)]
                self.sample(mx.zeros((count, self.vocab_size)), rows).read()

    def forget(self, sequence_id: int) -> None:
        """Forget a sequence that ended, or whose last sampled tokens were discarded."""
        self._counts.forget(sequence_id)

    def sample(self, logits: mx.array, rows: Sequence[SamplingRow]) -> Samples:
        """logits[R, V]: of any float type, one row for each entry of `rows`."""
        logits = self.of_tokens(logits)
        if self._one_by_one and len(rows) > 1 and not all(row.plain for row in rows):
            samples = joined([self._samples(logits[i : i + 1], [row]) for i, row in enumerate(rows)])
        else:
            samples = self._samples(logits, rows)
        self._counts.add(rows, samples.tokens)
        return samples

    def guess(self, logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
        """Tokens [R] that are likely to be sampled for these rows, by the logits [R, V] of a draft head: with the noise
        and the filters of each row, and without penalties."""
        return self._sample(biased(self.of_tokens(logits).astype(mx.float32), rows), rows)

    def of_tokens(self, logits: mx.array) -> mx.array:
        """The logits of tokens that exist: none of the others is sampled or reported. A draft head may have fewer."""
        if logits.shape[-1] > self.vocab_size:
            logits = logits[:, : self.vocab_size]
        return logits if self._gaps is None else without(logits, self._gaps[: logits.shape[-1]])

    def _samples(self, logits: mx.array, rows: Sequence[SamplingRow]) -> Samples:
        if all(row.plain for row in rows):
            return Samples(mx.argmax(logits, axis=-1).astype(mx.int32))
        raw = logits.astype(mx.float32)
        scores = masked(self._counts.penalize(biased(raw, rows), rows), rows)
        tokens = closed(self._sample(scores, rows), rows)
        forced = {i: row.forced for i, row in enumerate(rows) if row.forced is not None}
        if forced:
            tokens[mx.array(list(forced))] = mx.array(list(forced.values()), dtype=mx.int32)
        logprobs = token_logprobs(raw, tokens, rows)
        return Samples(tokens, () if logprobs is None else (logprobs,))

    def _sample(self, scores: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
        """Random rows are sampled, the others get the most likely token."""
        random = [i for i, row in enumerate(rows) if not row.params.greedy]
        if not random:
            return mx.argmax(scores, axis=-1).astype(mx.int32)
        chosen = [rows[i] for i in random]
        vocab_size = scores.shape[-1]
        parameters = mx.array(row_parameters(chosen, vocab_size))
        filters = [i for i, row in enumerate(chosen) if row.params.filters]
        width = filter_width([chosen[i].params for i in filters], vocab_size)
        if len(random) == len(rows) and len(filters) in (0, len(rows)):
            return self._compiled(scores, parameters, width)
        index = mx.array(random)
        tokens = mx.argmax(scores, axis=-1).astype(mx.int32)
        tokens[index] = sample_rows(scores[index], parameters, width, mx.array(filters) if filters else None)
        return tokens


def biased(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Add every row's logit_bias, and -inf to its forbidden tokens. Tokens without logits are skipped: a tokenizer may
    have such end tokens, and a draft model may have fewer logits than the model."""
    changes = [(i, *row.params.bias) for i, row in enumerate(rows) if row.params.logit_bias]
    changes += [(i, *never(row.forbidden)) for i, row in enumerate(rows) if row.forbidden]
    if not changes:
        return logits
    numbers, ids, biases = zip(*changes, strict=True)
    at, tokens, bias = (
        np.repeat(np.asarray(numbers, np.int32), [*map(len, ids)]),
        np.concatenate(ids),
        np.concatenate(biases),
    )
    if not (known := tokens < logits.shape[-1]).all():
        at, tokens, bias = at[known], tokens[known], bias[known]
    return logits.at[mx.array(at), mx.array(tokens)].add(mx.array(bias)) if len(at) else logits


def closed(tokens: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Replace the end tokens [R] of the rows in whose place another is to be taken."""
    at, instead, ends = [], [], set[int]()
    for i, row in enumerate(rows):
        if row.close is not None:
            at.append(i)
            instead.append(row.close[0])
            ends.update(row.close[1])
    if not ends:
        return tokens
    index = mx.array(at)
    is_end = mx.any(tokens[index][:, None] == mx.array(sorted(ends)), axis=-1)
    tokens[index] = mx.where(is_end, mx.array(instead, mx.int32), tokens[index])
    return tokens


def without(logits: mx.array, absent: mx.array) -> mx.array:
    """Set the logits [R, V] of tokens that do not exist, absent[V], to -inf."""
    return mx.where(absent, mx.array(-mx.inf, logits.dtype), logits)


def never(token_ids: Collection[int]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Token ids that must not be sampled, and the bias of each, as `SamplingParams.bias` has them."""
    ids = np.fromiter(token_ids, np.int32, len(token_ids))
    return ids, np.full(len(ids), -np.inf, np.float32)


def masked(logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
    """Set to -inf what a row's grammar does not allow. The bits are expanded on the device, so the upload is 32 times
    smaller."""
    masks = {i: row.mask for i, row in enumerate(rows) if row.mask is not None}
    if not masks:
        return logits
    words = mx.array(np.stack(list(masks.values())).view(np.uint32))
    bits = (words[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = bits.reshape(len(masks), -1)[:, : logits.shape[-1]].astype(mx.bool_)
    index = mx.array(list(masks))
    constrained = mx.array(logits)
    constrained[index] = mx.where(allowed, logits[index], -mx.inf)
    return constrained


class TokenCounts:
    """How often each token occurs in the prompts and answers of the requests with penalties; one row per request.

    For a request with repetition_context_size, the counts of the prompt are such that prompt and answer together are
    the counts of its last tokens.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._row_of: dict[int, int] = {}
        self._unused: list[int] = []
        self._prompt = mx.zeros((0, vocab_size), mx.int32)
        self._answer = mx.zeros((0, vocab_size), mx.int32)

    def forget(self, sequence_id: int) -> None:
        row = self._row_of.pop(sequence_id, None)
        if row is not None:
            self._unused.append(row)

    def penalize(self, logits: mx.array, rows: Sequence[SamplingRow]) -> mx.array:
        where = [i for i, row in enumerate(rows) if row.params.penalizes]
        if not where:
            return logits
        chosen = [rows[i] for i in where]
        for row in chosen:
            if row.sequence_id not in self._row_of:
                self._count_afresh(row)
        at = mx.array([self._row_of[row.sequence_id] for row in chosen])
        prompt, answer = self._prompt[at], self._answer[at]
        drafts = [(i, token) for i, row in enumerate(chosen) for token in row.drafts]
        if drafts:
            answer = answer.at[tuple(mx.array(drafts).T)].add(1)
        left = [
            (i, token)
            for i, row in enumerate(chosen)
            for position in range(row.position - len(row.drafts), row.position)
            for token in leaves(row, position)
        ]
        if left:
            prompt = prompt.at[tuple(mx.array(left).T)].add(-1)
        seen = (prompt + answer) > 0
        repetition = column([row.params.repetition_penalty for row in chosen])
        presence = column([row.params.presence_penalty for row in chosen])
        frequency = column([row.params.frequency_penalty for row in chosen])
        index = mx.array(where)
        scores = logits[index]
        scores = mx.where(seen, mx.where(scores > 0, scores / repetition, scores * repetition), scores)
        scores = scores - frequency * answer - presence * (answer > 0)
        penalized = mx.array(logits)
        penalized[index] = scores
        return penalized

    def add(self, rows: Sequence[SamplingRow], tokens: mx.array) -> None:
        """Count the tokens that were sampled for these rows, except those after a draft that was rejected."""
        where = [i for i, row in enumerate(rows) if row.sequence_id in self._row_of] if self._row_of else []
        if where:
            at = mx.array([self._row_of[rows[i].sequence_id] for i in where])
            counts = follow_accepted(rows, tokens)[mx.array(where)]
            self._answer = self._answer.at[at, tokens[mx.array(where)]].add(counts)
            leaving = [
                (self._row_of[rows[i].sequence_id], number, token)
                for number, i in enumerate(where)
                for token in leaves(rows[i], rows[i].position)
            ]
            if leaving:
                index, number, token_ids = mx.array(leaving).T
                self._prompt = self._prompt.at[index, token_ids].add(-counts[number])
            mx.async_eval(self._prompt, self._answer)

    def _count_afresh(self, row: SamplingRow) -> None:
        if not self._unused:
            size = self._prompt.shape[0]
            more = mx.zeros((max(1, size), self._vocab_size), mx.int32)
            self._prompt = mx.concatenate([self._prompt, more])
            self._answer = mx.concatenate([self._answer, more])
            self._unused = list(range(size, size + more.shape[0]))
        at = self._unused.pop()
        self._row_of[row.sequence_id] = at
        window = row.params.repetition_context_size
        answer = self._occurrences(row.token_ids[row.num_prompt_tokens : row.position])
        if window is None:
            prompt = self._occurrences(row.token_ids[: row.num_prompt_tokens])
        else:
            prompt = self._occurrences(row.token_ids[max(0, row.position - window) : row.position]) - answer
        self._prompt[at] = mx.array(prompt)
        self._answer[at] = mx.array(answer)

    def _occurrences(self, token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        tokens = np.asarray(token_ids, dtype=np.int64)
        of_text = tokens[tokens < self._vocab_size]  # the others are of images
        return np.bincount(of_text, minlength=self._vocab_size).astype(np.int32)


def follow_accepted(rows: Sequence[SamplingRow], tokens: mx.array) -> mx.array:
    """For each row, 1 if the rows before it have sampled all its drafts, else 0: int32 [R]."""
    most = max(len(row.drafts) for row in rows)
    if not most:
        return mx.ones(len(rows), mx.int32)
    expected = mx.array([row.drafts[-1] if row.drafts else 0 for row in rows], mx.int32)
    is_first = mx.array([not row.drafts for row in rows])
    equal = is_first | (expected == mx.concatenate([tokens[:1], tokens[:-1]]))
    before = [[i - min(back, len(row.drafts)) for back in range(most)] for i, row in enumerate(rows)]
    return mx.all(equal[mx.array(before)], axis=-1).astype(mx.int32)


def leaves(row: SamplingRow, position: int) -> Sequence[int]:
    """The token that is no longer among the last repetition_context_size ones after the one at `position`, if any. It
    is known: only the latest token can still be on the device."""
    window = row.params.repetition_context_size
    if window is None or position < window:
        return ()
    token = row.token_at(position - window)
    return () if token >= FIRST_CONTENT_ID else (token,)


def column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


def most_likely(scores: mx.array, count: int) -> mx.array:
    """Indices of the `count` largest values of each row, best first.

    Only these are sorted: sorting everything took ten times as long for 16 rows of 152,000.
    """
    if count == 0:
        return mx.zeros((scores.shape[0], 0), mx.int32)
    if count == 1:
        return mx.argmax(scores, axis=-1, keepdims=True)
    count = min(count, scores.shape[-1])
    best = mx.argpartition(-scores, count - 1, axis=-1)[:, :count]
    order = mx.argsort(-mx.take_along_axis(scores, best, axis=-1), axis=-1)
    return mx.take_along_axis(best, order, axis=-1)


@dataclass(frozen=True)
class RowLogprobs:
    """Log-probabilities of n rows of a step. counts: by row number, how many tokens to report. sampled[n]: of the
    sampled token. best[n, k] and best_logprobs[n, k]: the most likely tokens, or those that the row asked for."""

    counts: Mapping[int, int]
    sampled: mx.array
    best: mx.array
    best_logprobs: mx.array

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.sampled, self.best, self.best_logprobs

    def read(self, tokens: Sequence[int]) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities by row number. tokens: the sampled tokens of all rows of the step."""
        tables: list[list[Any]] = [array.tolist() for array in self.arrays]  # type: ignore[misc]
        found = {}
        for (i, count), logprob, top, top_logprobs in zip(self.counts.items(), *tables, strict=True):
            best = tuple(zip(top[:count], top_logprobs[:count], strict=True))
            found[i] = TokenLogprobs(tokens[i], logprob, best)
        return found


def token_logprobs(logits: mx.array, tokens: mx.array, rows: Sequence[SamplingRow]) -> RowLogprobs | None:
    """The log-probabilities of the rows that asked for them; None if no row did."""
    chosen_params = {i: row.params for i, row in enumerate(rows) if row.params.logprobs is not None}
    if not chosen_params:
        return None
    counts = {i: len(params.logprob_token_ids) or params.logprobs or 0 for i, params in chosen_params.items()}
    index = mx.array(list(counts))
    chosen = logits[index]
    logprobs = chosen - mx.logsumexp(chosen, axis=-1, keepdims=True)
    sampled = mx.take_along_axis(logprobs, tokens[index][:, None], axis=-1)[:, 0]
    best = most_likely(logprobs, max(counts.values()))
    asked = [
        (at, k, token)
        for at, params in enumerate(chosen_params.values())
        for k, token in enumerate(params.logprob_token_ids)
    ]
    if asked:
        row, k, token = (mx.array(column) for column in zip(*asked, strict=True))
        best[row, k] = token.astype(best.dtype)
    return RowLogprobs(counts, sampled, best, mx.take_along_axis(logprobs, best, axis=-1))
