"""A load's answers as figures, and figures of several repetitions as one."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .client import Answer
from .loads import Run


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Between the two nearest ranks, linearly; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Figures:
    """One run of a load against one server. Seconds, unless named otherwise."""

    load: str
    seconds: float
    requests: int
    answered: int
    errors: dict[str, int]
    retries: int
    """Of requests whose connection the server reset; their times count from the first try."""
    short: int
    """Answers with fewer tokens than were asked for."""
    output_tokens: float
    """Of complete answers as the server counts them; of those cut off (by an error, or by the end of C's window), the
    share of it that had come."""
    input_tokens: int
    """Of prompts whose answer began, from the server's own count; of prompts without one, nothing."""
    computed_tokens: int | None
    """input_tokens without those from a prefix cache; None if the server does not tell."""
    cached_tokens: int | None
    recomputed_beyond_new: int | None
    """D: the most tokens that a turn computed beside those that are new in it; None if that cannot be told."""
    output_tokens_per_second: float
    input_tokens_per_second: float
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    e2e_p50: float | None
    e2e_p99: float | None
    tokens_per_event: float | None
    """More than 1 if a server streams several tokens at once, which makes its inter-token times larger and fewer."""
    peak_memory_mb: float
    load_average: float
    """Of the machine over the minute before the load."""
    client_cpu_share: float
    """CPU seconds of the measuring client per second of the load."""


def measure(run: Run, peak_memory_bytes: int, load_average: float, client_cpu_seconds: float) -> Figures:
    """Inter-token times of C are those of its streams, and its other times those of the long prompts. Waits that were
    not over when time was up are among them, as long as they had lasted."""
    answers, (begin, end) = run.answers, run.window
    roles = {answer.role for answer in answers}
    watched = [answer for answer in answers if answer.role == "stream"] if "stream" in roles else answers
    waited = [answer for answer in answers if answer.role == "long"] if "long" in roles else answers
    good = [answer for answer in answers if answer.error is None]
    gaps = [gap for answer in watched for gap in answer.gaps(end)]
    output = sum(tokens_within(answer, begin, end) for answer in answers)
    begun = [answer for answer in answers if answer.chunk_times and answer.chunk_times[0] <= end]
    read = sum(answer.prompt_tokens for answer in begun)
    cached = [answer.cached_tokens for answer in good]
    tells = bool(good) and all(count is not None for count in cached)
    num_cached = sum(count or 0 for count in cached) if tells else None
    computed = None if num_cached is None else sum(answer.prompt_tokens for answer in good) - num_cached
    ttfts = [answer.ttft for answer in waited if answer.ttft is not None]
    durations = [answer.seconds for answer in waited if answer.error is None or answer.gave_up]
    chunks = sum(len(answer.chunk_times) for answer in good)
    return Figures(
        load=run.name,
        seconds=run.seconds,
        requests=len(answers),
        answered=len(good),
        errors=count_by(answer.error for answer in answers if answer.error),
        retries=sum(answer.retries for answer in answers),
        short=sum(answer.output_tokens < answer.asked_tokens for answer in good),
        output_tokens=output,
        input_tokens=read,
        computed_tokens=computed,
        cached_tokens=num_cached,
        recomputed_beyond_new=recomputed_beyond_new(good) if tells and run.name == "D" else None,
        output_tokens_per_second=output / run.seconds,
        input_tokens_per_second=read / run.seconds,
        ttft_p50=percentile(ttfts, 50),
        ttft_p99=percentile(ttfts, 99),
        itl_p50=percentile(gaps, 50),
        itl_p99=percentile(gaps, 99),
        e2e_p50=percentile(durations, 50),
        e2e_p99=percentile(durations, 99),
        tokens_per_event=sum(answer.output_tokens for answer in good) / chunks if chunks else None,
        peak_memory_mb=peak_memory_bytes / 1e6,
        load_average=load_average,
        client_cpu_share=client_cpu_seconds / run.seconds,
    )


def tokens_within(answer: Answer, begin: float, end: float) -> float:
    """An answer's tokens, by the share of its events that came in time."""
    if not answer.chunk_times:
        return 0.0
    in_time = sum(begin <= moment <= end for moment in answer.chunk_times)
    return answer.output_tokens * in_time / len(answer.chunk_times)


def count_by(errors: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for error in errors:
        counts[error] = counts.get(error, 0) + 1
    return counts


def recomputed_beyond_new(answers: Sequence[Answer]) -> int | None:
    """Of conversations, by user and in order: new in a turn is what the last turn's prompt and answer did not have.
    None if answers had thinking, of which the next prompt has nothing: what is new cannot be told then."""
    if any(answer.has_thinking for answer in answers):
        return None
    known: dict[str, int] = {}
    most = 0
    for answer in answers:
        new = answer.prompt_tokens - known.get(answer.role, 0)
        most = max(most, answer.prompt_tokens - (answer.cached_tokens or 0) - new)
        known[answer.role] = answer.prompt_tokens + answer.output_tokens
    return most


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are there."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None
