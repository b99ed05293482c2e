"""From times to figures: rates, percentiles, speed-up. Figures without a measurement are None."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlxpaged.cli.bench.load import Answer, Pass


@dataclass(frozen=True)
class Spread:
    """Percentiles are interpolated linearly, as numpy does."""

    avg: float
    p50: float
    p99: float


@dataclass(frozen=True)
class RunFigures:
    """One pass over all prompts."""

    answers: int  # complete ones
    output_tokens: int
    seconds: float
    output_tokens_per_second: float


@dataclass(frozen=True)
class LoadFigures:
    """All passes with the same number of requests at a time: counts and seconds are sums, rates are their quotients."""

    concurrency: int
    answers: int
    prompt_tokens: int  # of answers that have begun
    cached_tokens: int
    output_tokens: int
    preemptions: int
    seconds: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    latency_seconds: Spread | None  # from submission to the last token, of complete answers
    ttft_seconds: Spread | None
    inter_token_seconds: Spread | None
    runs: tuple[RunFigures, ...]


@dataclass(frozen=True)
class Speedup:
    """Output tokens per second, divided by those of one request at a time."""

    ratio: float  # of all runs together
    by_run: tuple[float, ...]


@dataclass(frozen=True)
class ContextFigures:
    """One request at a time, with prompts of `context` tokens. Counts and seconds are sums over all answers."""

    context: int
    answers: int
    prompt_tokens: int
    prefill_seconds: float  # to the first token
    prefill_tokens_per_second: float
    decoded_tokens: int
    decode_seconds: float  # from the first token to the last
    decode_tokens_per_second: float | None
    ttft_seconds: Spread | None
    inter_token_seconds: Spread | None


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return Spread(sum(values) / len(values), p50, p99)


def ttft(answer: Answer) -> float:
    return answer.token_times[0] - answer.submitted


def gaps(answers: Sequence[Answer]) -> list[float]:
    return [after - before for answer in answers for before, after in itertools.pairwise(answer.token_times)]


def begun(passes: Sequence[Pass]) -> list[Answer]:
    return [answer for one in passes for answer in one.answers if answer.token_times]


def load_figures(passes: Sequence[Pass]) -> LoadFigures | None:
    """passes: of one concurrency; the last one may be interrupted. None if there is no token yet."""
    passes = [one for one in passes if begun([one])]
    if not passes:
        return None
    answers = begun(passes)
    runs = tuple(map(run_figures, passes))
    seconds, output_tokens = sum(run.seconds for run in runs), sum(run.output_tokens for run in runs)
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    return LoadFigures(
        concurrency=passes[0].concurrency,
        answers=sum(run.answers for run in runs),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(answer.cached_tokens for answer in answers),
        output_tokens=output_tokens,
        preemptions=sum(one.preemptions for one in passes),
        seconds=seconds,
        prompt_tokens_per_second=prompt_tokens / seconds,
        output_tokens_per_second=output_tokens / seconds,
        latency_seconds=spread([each.token_times[-1] - each.submitted for each in answers if each.complete]),
        ttft_seconds=spread([ttft(answer) for answer in answers]),
        inter_token_seconds=spread(gaps(answers)),
        runs=runs,
    )


def run_figures(one: Pass) -> RunFigures:
    tokens = sum(len(answer.token_times) for answer in one.answers)
    complete = sum(answer.complete for answer in one.answers)
    return RunFigures(complete, tokens, one.seconds, tokens / one.seconds)


def speedup(batched: LoadFigures, single: LoadFigures) -> Speedup:
    pairs = zip(batched.runs, single.runs, strict=False)  # interrupted, a run may be missing
    return Speedup(
        batched.output_tokens_per_second / single.output_tokens_per_second,
        tuple(ours.output_tokens_per_second / alone.output_tokens_per_second for ours, alone in pairs),
    )


def context_figures(context: int, passes: Sequence[Pass]) -> ContextFigures | None:
    """None if there is no token yet."""
    answers = begun(passes)
    if not answers:
        return None
    prompt_tokens, between = sum(answer.prompt_tokens for answer in answers), gaps(answers)
    prefill_seconds = sum(map(ttft, answers))
    return ContextFigures(
        context=context,
        answers=sum(answer.complete for answer in answers),
        prompt_tokens=prompt_tokens,
        prefill_seconds=prefill_seconds,
        prefill_tokens_per_second=prompt_tokens / prefill_seconds,
        decoded_tokens=len(between),
        decode_seconds=sum(between),
        decode_tokens_per_second=len(between) / sum(between) if sum(between) else None,
        ttft_seconds=spread([ttft(answer) for answer in answers]),
        inter_token_seconds=spread(between),
    )


def token_costs(contexts: Sequence[ContextFigures], base: int) -> list[float | None]:
    """How many times as long a decoded token takes as at the context `base`; None if one of them was not measured."""
    rates = {one.context: one.decode_tokens_per_second for one in contexts}
    at_base = rates.get(base)
    return [at_base / rate if at_base and rate else None for rate in rates.values()]
