"""From times to figures: rates, percentiles, speed-up. Plain arithmetic; whatever nothing was measured for is None."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlxpaged.cli.bench.load import Answer, Pass


@dataclass(frozen=True)
class Spread:
    """p50, p99: interpolated linearly between the values, as numpy does."""

    avg: float
    p50: float
    p99: float


@dataclass(frozen=True)
class RunFigures:
    """One pass over all prompts. answers: complete ones."""

    answers: int
    output_tokens: int
    seconds: float
    output_tokens_per_second: float


@dataclass(frozen=True)
class LoadFigures:
    """Some passes with the same number of requests at a time, taken together: tokens, seconds and answers are sums, and
    rates their quotients. prompt_tokens: of answers that have begun. latency: from submission to the last token, of
    complete answers; ttft: to the first one; inter_token: between two tokens of an answer."""

    concurrency: int
    answers: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    seconds: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    latency_seconds: Spread | None
    ttft_seconds: Spread | None
    inter_token_seconds: Spread | None
    runs: tuple[RunFigures, ...]


@dataclass(frozen=True)
class Speedup:
    """Output tokens per second of requests at once, by those of one at a time: of all runs, and run by run."""

    ratio: float
    by_run: tuple[float, ...]


@dataclass(frozen=True)
class ContextFigures:
    """One request at a time after prompts of `context` tokens. prefill_seconds: to the first tokens; decode_seconds:
    from there to the last ones; both are sums over all answers, and rates are tokens by seconds."""

    context: int
    answers: int
    prompt_tokens: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    decoded_tokens: int
    decode_seconds: float
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
    """passes: of one concurrency, the last of them perhaps interrupted. None where no token has come yet."""
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
    """None where no token has come yet."""
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
