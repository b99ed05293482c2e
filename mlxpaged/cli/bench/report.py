"""The figures as a table for people, and as JSON for programs."""

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
    Speedup,
    Spread,
    context_figures,
    load_figures,
    speedup,
)
from mlxpaged.cli.bench.plan import Comparison, Sweep, at_a_time
from mlxpaged.cli.doctor import machine
from mlxpaged.engine import EngineConfig, EngineInfo

PLAIN_WIDTH = 200
"""Where the output is no terminal: nothing is wrapped."""
NOTHING = "-"


@dataclass(frozen=True)
class Report:
    """What one command has found. interrupted: before it was done."""

    config: EngineConfig
    info: EngineInfo
    measured: Comparison | Sweep
    interrupted: bool
    time: datetime = field(default_factory=lambda: datetime.now(timezone.utc))

    def table(self, console: Console) -> Table | None:
        """None where nothing was measured."""
        if isinstance(self.measured, Sweep):
            return context_table(console, [one for one in self.contexts() if one is not None])
        single, batched = self.loads()
        return None if single is None else load_table(console, single, batched)

    def loads(self) -> tuple[LoadFigures | None, list[tuple[LoadFigures, Speedup]]]:
        assert isinstance(self.measured, Comparison)
        single = load_figures(self.measured.single)
        if single is None:
            return None, []
        found = map(load_figures, self.measured.batched)
        return single, [(figures, speedup(figures, single)) for figures in found if figures is not None]

    def contexts(self) -> list[ContextFigures | None]:
        assert isinstance(self.measured, Sweep)
        return [context_figures(context, passes) for context, passes in self.measured.passes.items()]

    def json(self) -> dict[str, Any]:
        """Times in seconds, rates in tokens per second. `comparison` or `context_sweep` is null: one is measured."""
        info, config = self.info, self.config
        result: dict[str, Any] = {
            "time": self.time.isoformat(timespec="seconds"),
            "interrupted": self.interrupted,
            "machine": dict(machine()),
            "model": {
                "name": info.model,
                "num_layers": info.num_layers,
                "weight_bytes": info.weight_bytes,
                "context_length": info.context_length,
            },
            "engine": {
                "attention_backend": info.backend,
                "attention_tuning": config.attention_tuning,
                "block_size": info.block_size,
                "num_blocks": info.num_blocks,
                "kv_cache_bytes": info.kv_cache_bytes,
                "max_num_seqs": config.max_num_seqs,
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "prefill_mode": config.prefill_mode,
                "decode_preference": config.decode_preference,
                "max_step_ms": config.max_step_ms,
                "prefix_caching": config.prefix_caching,
                "swap_space_bytes": config.swap_space_bytes,
            },
            "max_tokens": self.measured.max_tokens,
            "runs": self.measured.runs,
            "comparison": None,
            "context_sweep": None,
        }
        if isinstance(self.measured, Sweep):
            result["context_sweep"] = [asdict(one) for one in self.contexts() if one is not None]
        else:
            single, batched = self.loads()
            result["comparison"] = {
                "prompts": self.measured.prompts,
                "prompt_tokens": list(self.measured.prompt_tokens),
                "single": None if single is None else asdict(single),
                "batched": [asdict(figures) | {"speedup": asdict(gain)} for figures, gain in batched],
            }
        return result

    def write_json(self, target: str, stdout: Any) -> None:
        """target: a file, or - for `stdout`. Raises OSError."""
        text = json.dumps(self.json(), indent=2) + "\n"
        if target == "-":
            stdout.write(text)
            stdout.flush()
        else:
            Path(target).write_text(text)


def report_console(file: Any) -> Console:
    """Colours and lines on a terminal, columns of plain text elsewhere."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def make_table(console: Console, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left")
    return table


def load_table(console: Console, single: LoadFigures, batched: Sequence[tuple[LoadFigures, Speedup]]) -> Table:
    """A row per figure, a column per number of requests at a time."""
    loads = [single, *(figures for figures, _ in batched)]
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
    if batched:
        table.add_row("speed-up", "1.00", *(f"{gain.ratio:.2f}" for _, gain in batched))
        if any(len(gain.by_run) > 1 for _, gain in batched):
            table.add_row("  min to max of the runs", "", *(extremes(gain.by_run) for _, gain in batched))
    return table


def context_table(console: Console, contexts: Sequence[ContextFigures]) -> Table | None:
    if not contexts:
        return None
    table = make_table(
        console, "context", "prefill tokens/s", "TTFT p50, s", "decode tokens/s", "inter-token p50 / p99, ms"
    )
    for one in contexts:
        decode = one.decode_tokens_per_second
        table.add_row(
            str(one.context),
            f"{one.prefill_tokens_per_second:.1f}",
            cells(one.ttft_seconds, 1, 2, "p50"),
            NOTHING if decode is None else f"{decode:.1f}",
            cells(one.inter_token_seconds, 1000, 1, "p50", "p99"),
        )
    return table


def cells(spread: Spread | None, scale: float, digits: int, *names: str) -> str:
    if spread is None:
        return NOTHING
    return " / ".join(f"{scale * getattr(spread, name):.{digits}f}" for name in names)


def extremes(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else NOTHING
