"""The figures as a table, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mlxpaged.cli.bench.figures import (
    ContextFigures,
    LoadFigures,
    Spread,
    context_figures,
    load_figures,
    speedup,
    token_costs,
)
from mlxpaged.cli.bench.plan import BASE_CONTEXT, Comparison, Sweep, at_a_time
from mlxpaged.cli.doctor import machine
from mlxpaged.engine import EngineConfig, EngineInfo

PLAIN_WIDTH = 200
"""If the output is not a terminal, no line is wrapped."""
NOTHING = "-"


@dataclass(frozen=True)
class Report:
    """The figures of one command."""

    config: EngineConfig
    info: EngineInfo
    measured: Comparison | Sweep
    interrupted: bool
    time: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    def table(self, console: Console) -> Table | None:
        """None if nothing was measured."""
        if isinstance(self.measured, Sweep):
            return context_table(console, self.contexts())
        loads = self.loads()
        return load_table(console, loads) if loads else None

    def loads(self) -> list[LoadFigures]:
        """One for each level of concurrency, one request at a time first."""
        assert isinstance(self.measured, Comparison)
        found = map(load_figures, self.measured.passes.values())
        return [figures for figures in found if figures is not None]

    def contexts(self) -> list[ContextFigures]:
        assert isinstance(self.measured, Sweep)
        found = (context_figures(context, passes) for context, passes in self.measured.passes.items())
        return [figures for figures in found if figures is not None]

    def json(self) -> dict[str, Any]:
        """Times are seconds, rates tokens per second. token_cost: a decoded token's time, by that at BASE_CONTEXT."""
        info, config = self.info, self.config
        shown = ("num_layers", "weight_bytes", "context_length")
        pools = {name: getattr(info, name) for name in ("num_blocks", "kv_cache_bytes")}
        result: dict[str, Any] = {
            "time": self.time.isoformat(timespec="seconds"),
            "interrupted": self.interrupted,
            "machine": dict(machine()),
            "model": {"name": info.model, **{name: getattr(info, name) for name in shown}},
            "engine": asdict(config) | pools | {"attention_backend": info.backend},
            "max_tokens": self.measured.max_tokens,
            "runs": self.measured.runs,
            "comparison": None,
            "context_sweep": None,
        }
        if isinstance(self.measured, Sweep):
            contexts = self.contexts()
            costs = zip(contexts, token_costs(contexts, BASE_CONTEXT), strict=True)
            result["context_sweep"] = [asdict(one) | {"token_cost": cost} for one, cost in costs]
        else:
            loads = self.loads()
            result["comparison"] = {
                "prompts": self.measured.prompts,
                "prompt_tokens": list(self.measured.prompt_tokens),
                "single": asdict(loads[0]) if loads else None,
                "batched": [asdict(load) | {"speedup": asdict(speedup(load, loads[0]))} for load in loads[1:]],
            }
        return result

    def write_json(self, target: str, stdout: Any) -> None:
        """target: a file, or - for `stdout`. Raises OSError."""
        text = json.dumps(self.json(), indent=2, default=str) + "\n"
        if target == "-":
            stdout.write(text)
            stdout.flush()
        else:
            Path(target).write_text(text)


def report_console(file: Any) -> Console:
    """Colours and lines on a terminal, plain columns of text elsewhere."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def make_table(console: Console, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def load_table(console: Console, loads: Sequence[LoadFigures]) -> Table:
    """A row per figure, a column per level of concurrency."""
    gains = [speedup(load, loads[0]) for load in loads[1:]]
    table = make_table(console, "", *(at_a_time(load.concurrency) for load in loads))

    def row(name: str, cell: Callable[[LoadFigures], str]) -> None:
        table.add_row(name, *map(cell, loads))

    row("output tokens/s", lambda load: f"{load.output_tokens_per_second:.1f}")
    row("prompt tokens/s", lambda load: f"{load.prompt_tokens_per_second:.1f}")
    row("latency avg / p50 / p99, s", lambda load: cells(load.latency_seconds, 1, 2, "avg", "p50", "p99"))
    row("TTFT p50 / p99, ms", lambda load: cells(load.ttft_seconds, 1000, 1, "p50", "p99"))
    row("inter-token p50 / p99, ms", lambda load: cells(load.inter_token_seconds, 1000, 1, "p50", "p99"))
    row("answers", lambda load: str(load.answers))
    if any(load.preemptions for load in loads):
        row("preemptions", lambda load: str(load.preemptions))
    if gains:
        table.add_row("speed-up", "1.00", *(f"{gain.ratio:.2f}" for gain in gains))
        if any(len(gain.by_run) > 1 for gain in gains):
            table.add_row("  min to max of the runs", "", *(extremes(gain.by_run) for gain in gains))
    return table


def context_table(console: Console, contexts: Sequence[ContextFigures]) -> Table | None:
    if not contexts:
        return None
    cost_head = f"token cost, {BASE_CONTEXT} = 1"
    columns = ("context", "prefill tokens/s", "TTFT p50, s", "decode tokens/s", "inter-token p50 / p99, ms", cost_head)
    table = make_table(console, *columns)
    for one, cost in zip(contexts, token_costs(contexts, BASE_CONTEXT), strict=True):
        decode = one.decode_tokens_per_second
        table.add_row(
            str(one.context),
            f"{one.prefill_tokens_per_second:.1f}",
            cells(one.ttft_seconds, 1, 2, "p50"),
            NOTHING if decode is None else f"{decode:.1f}",
            cells(one.inter_token_seconds, 1000, 1, "p50", "p99"),
            NOTHING if cost is None else f"{cost:.2f}",
        )
    return table


def cells(spread: Spread | None, scale: float, digits: int, *names: str) -> str:
    if spread is None:
        return NOTHING
    return " / ".join(f"{scale * getattr(spread, name):.{digits}f}" for name in names)


def extremes(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else NOTHING
