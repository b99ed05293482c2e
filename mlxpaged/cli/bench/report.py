"""Reports the figures as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mlxpaged.cli.bench.figures import BASE_CONTEXT, Figures, comparison_figures, sweep_figures
from mlxpaged.cli.bench.plan import Plan, at_a_time
from mlxpaged.cli.doctor.machine import machine
from mlxpaged.engine.info import EngineInfo
from mlxpaged.engine_config import EngineConfig

PLAIN_WIDTH = 200
"""If the output is not a terminal, no line is wrapped."""

LOAD_ROWS: tuple[tuple[Any, ...], ...] = (
    ("output tokens/s", "output_tokens_per_second"),
    ("prompt tokens/s", "prompt_tokens_per_second"),
    ("latency avg / p50 / p99, s", "latency_seconds", 2, 1, ("avg", "p50", "p99")),
    ("TTFT p50 / p99, ms", "ttft_seconds", 1, 1000, ("p50", "p99")),
    ("inter-token p50 / p99, ms", "inter_token_seconds", 1, 1000, ("p50", "p99")),
    ("answers", "answers", 0),
    ("preemptions", "preemptions", 0),  # only if there are any
)
CONTEXT_COLUMNS: tuple[tuple[Any, ...], ...] = (
    ("context", "context", 0),
    ("prefill tokens/s", "prefill_tokens_per_second"),
    ("TTFT p50, s", "ttft_seconds", 2, 1, ("p50",)),
    ("decode tokens/s", "decode_tokens_per_second"),
    ("inter-token p50 / p99, ms", "inter_token_seconds", 1, 1000, ("p50", "p99")),
    (f"token cost, {BASE_CONTEXT} = 1", "token_cost", 2),
)
"""Title, figure, and the arguments of `cell`."""


def table(console: Console, plan: Plan) -> Table | None:
    """Returns None if nothing was measured."""
    figures = (sweep_figures if plan.is_sweep else comparison_figures)(plan.loads)
    if not figures:
        return None
    return context_table(console, figures) if plan.is_sweep else load_table(console, figures)


def json_report(config: EngineConfig, info: EngineInfo, plan: Plan, interrupted: bool) -> str:
    comparison: Figures | None = None
    if not plan.is_sweep:
        levels, prompts = comparison_figures(plan.loads), len(plan.loads[0].lengths)
        comparison = {"prompts": prompts, "prompt_tokens": plan.prompt_tokens, "single": next(iter(levels), None)}
        comparison["batched"] = levels[1:]
    shown = {name: getattr(info, name) for name in ("num_layers", "weight_bytes", "context_length")}
    pools = {name: getattr(info, name) for name in ("num_blocks", "kv_cache_bytes")}
    report = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "interrupted": interrupted,
        "machine": dict(machine()),
        "model": {"name": info.model, **shown},
        "engine": asdict(config) | pools | {"attention_backend": info.backend},
        "max_tokens": plan.max_tokens,
        "runs": plan.runs,
        "comparison": comparison,
        "context_sweep": sweep_figures(plan.loads) if plan.is_sweep else None,
    }
    return json.dumps(report, indent=2, default=str)


def report_console(file: Any) -> Console:
    """Returns a console with colours and lines on a terminal, with plain columns of text elsewhere."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def make_table(console: Console, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def load_table(console: Console, loads: Sequence[Figures]) -> Table:
    """Returns a row per figure and a column per level of concurrency."""
    table = make_table(console, "", *(at_a_time(load["concurrency"]) for load in loads))
    for name, key, *form in LOAD_ROWS:
        if key != "preemptions" or any(load[key] for load in loads):
            table.add_row(name, *(cell(load[key], *form) for load in loads))
    if gains := [load["speedup"] for load in loads[1:]]:
        table.add_row("speed-up", "1.00", *(f"{gain['ratio']:.2f}" for gain in gains))
        if any(len(gain["by_run"]) > 1 for gain in gains):
            extremes = (f"{min(gain['by_run']):.2f} to {max(gain['by_run']):.2f}" for gain in gains)
            table.add_row("  min to max of the runs", "", *extremes)
    return table


def context_table(console: Console, contexts: Sequence[Figures]) -> Table:
    table = make_table(console, *(name for name, *_ in CONTEXT_COLUMNS))
    for one in contexts:
        table.add_row(*(cell(one[key], *form) for _, key, *form in CONTEXT_COLUMNS))
    return table


def cell(figure: Any, digits: int = 1, scale: int = 1, parts: Sequence[str] = ()) -> str:
    """parts: the names of the numbers to show, if the figure is a spread."""
    if figure is None:
        return "-"
    return " / ".join(f"{scale * value:.{digits}f}" for value in ([figure[part] for part in parts] or [figure]))
