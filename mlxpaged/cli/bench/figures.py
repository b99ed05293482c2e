"""Computes figures from times: rates, percentiles, speed-up.

Figures are dictionaries, as the JSON report shows them. Times are seconds, rates are tokens per second; counts and
seconds are sums over all passes, rates are their quotients. A figure without a measurement is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlxpaged.cli.bench.load import Load, Pass

Figures = dict[str, Any]
BASE_CONTEXT = 256
"""The cost of a token at other contexts is given as a multiple of its cost at this one."""


def comparison_figures(loads: Sequence[Load]) -> list[Figures]:
    """Returns the figures of loads that have a token. `speedup` compares with the first load, one request at a time."""
    found = [load_figures(load) for load in loads if load.begun()]
    for batched in found[1:]:
        runs = zip(batched["runs"], found[0]["runs"], strict=False)  # a run may be missing after an interrupt
        by_run = [speedup(ours, alone) for ours, alone in runs]
        batched["speedup"] = {"ratio": speedup(batched, found[0]), "by_run": by_run}
    return found


def speedup(ours: Figures, alone: Figures) -> float:
    ratio: float = ours["output_tokens_per_second"] / alone["output_tokens_per_second"]
    return ratio


def load_figures(load: Load) -> Figures:
    answers = load.begun()
    runs = [figures for figures in map(run_figures, load.passes) if figures["output_tokens"]]
    seconds, output_tokens = sum(run["seconds"] for run in runs), sum(run["output_tokens"] for run in runs)
    prompt_tokens = sum(answer.prompt_tokens for answer in answers)
    return {
        "concurrency": load.concurrency,
        "answers": sum(run["answers"] for run in runs),
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "output_tokens": output_tokens,
        "preemptions": sum(one.preemptions for one in load.passes),
        "seconds": seconds,
        "prompt_tokens_per_second": prompt_tokens / seconds,
        "output_tokens_per_second": output_tokens / seconds,
        "latency_seconds": spread([each.token_times[-1] - each.submitted for each in answers if each.complete]),
        "ttft_seconds": spread([answer.ttft for answer in answers]),
        "inter_token_seconds": spread([gap for answer in answers for gap in answer.gaps]),
        "runs": runs,
    }


def run_figures(one: Pass) -> Figures:
    tokens = sum(len(answer.token_times) for answer in one.answers)
    rate = tokens / one.seconds if one.seconds else None
    complete = sum(answer.complete for answer in one.answers)
    return {"answers": complete, "output_tokens": tokens, "seconds": one.seconds, "output_tokens_per_second": rate}


def sweep_figures(loads: Sequence[Load]) -> list[Figures]:
    """Returns the figures of contexts that have a token. token_cost: time of a decoded token, 1 at BASE_CONTEXT."""
    found = [context_figures(load) for load in loads if load.begun()]
    rates = {each["context"]: each["decode_tokens_per_second"] for each in found}
    for each in found:
        rate, base = each["decode_tokens_per_second"], rates.get(BASE_CONTEXT)
        each["token_cost"] = base / rate if base and rate else None
    return found


def context_figures(load: Load) -> Figures:
    answers = load.begun()
    prompt_tokens, prefill = sum(answer.prompt_tokens for answer in answers), [answer.ttft for answer in answers]
    gaps = [gap for answer in answers for gap in answer.gaps]
    return {
        "context": load.lengths[0],
        "answers": sum(answer.complete for answer in answers),
        "prompt_tokens": prompt_tokens,
        "prefill_seconds": sum(prefill),
        "prefill_tokens_per_second": prompt_tokens / sum(prefill),
        "decoded_tokens": len(gaps),
        "decode_seconds": sum(gaps),
        "decode_tokens_per_second": len(gaps) / sum(gaps) if sum(gaps) else None,
        "ttft_seconds": spread(prefill),
        "inter_token_seconds": spread(gaps),
    }


def spread(values: Sequence[float]) -> Figures | None:
    """Percentiles are interpolated linearly, as numpy does."""
    if not values:
        return None
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return {"avg": sum(values) / len(values), "p50": p50, "p99": p99}
