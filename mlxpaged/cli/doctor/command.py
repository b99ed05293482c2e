"""`mlxpaged doctor [MODEL]`: what one run on a machine can settle about kernels, speed and memory."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxpaged.attention import kernels
from mlxpaged.attention.kv_cache import resolve_backend
from mlxpaged.attention.layout import AttentionShape
from mlxpaged.attention.self_check import check_fusions, self_check
from mlxpaged.attention.tuner import Limits, ShapeTimes, tune
from mlxpaged.cli.doctor import report
from mlxpaged.cli.doctor.attention_times import attention_times
from mlxpaged.cli.doctor.machine import machine
from mlxpaged.cli.doctor.sizes import Sizes
from mlxpaged.cli.doctor.speed import engine_rates, make_engine, mlx_lm_rates, prefill_peak, prompt_rows
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.row_times import time_rows
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.errors import ModelNotFoundError, UnsupportedModelError
from mlxpaged.models.layers import unfused
from mlxpaged.models.loader import LoadOptions, ServedModel, load_model
from mlxpaged.models.sources.resolve import resolve
from mlxpaged.models.sources.short_names import BUNDLED
from mlxpaged.parts.drafting.acceptance import MOST_DRAFTS
from mlxpaged.parts.drafting.draft_budget import draft_lengths

SIZES = Sizes()

CHANCES = (0.5, 0.8)
"""Chances of a draft token that it is accepted."""


def run(args: argparse.Namespace) -> int:
    """Returns exit status 1 if a kernel fails or the model cannot be served, else 0."""
    logging.basicConfig(level="WARNING", format="%(levelname)s: %(message)s", stream=sys.stderr, force=True)
    sections: dict[str, Any] = {}
    written = None if args.report in (None, "-") else Path(args.report)
    try:
        for name, content in Doctor(args.model, args.block_size, args.max_num_seqs, args.retune).sections():
            sections[name] = content
            if written is not None:  # each time: the next section may take long, or the machine down
                written.write_text(json.dumps(sections, indent=1) + "\n", encoding="utf-8")
            if not args.json:
                print("\n".join(report.lines(name, content)), flush=True)
    except (ModelNotFoundError, UnsupportedModelError) as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(sections, indent=1))
    if written is not None:
        print(f"the report is in {written}", file=sys.stderr)
    return int(report.has_failed(sections))


class Doctor:
    """One run. A section that cannot be measured says why."""

    def __init__(self, model: str, block_size: int, max_num_seqs: int, retune: bool) -> None:
        self._model = model
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._retune = retune

    def sections(self) -> Iterator[tuple[str, Any]]:
        """Names and contents, as JSON has them. mlx-lm comes first, so that one model at a time is in memory.

        Raises ModelNotFoundError or UnsupportedModelError."""
        yield "machine", dict(machine())
        path = resolve(self._model).directory
        theirs = measured(lambda: mlx_lm_rates(path, SIZES))
        free_memory()
        served = load_model(self._model, LoadOptions(cpu_dtype=EngineConfig.cpu_dtype, dtype=EngineConfig.dtype))
        yield "model", report.model_section(served)
        shapes = [spec.attention_shape(self._block_size) for spec in served.kv_layers]
        fusions = [fusion for fusion in (spec.qkv_shape(self._block_size) for spec in served.kv_layers) if fusion]
        checks = [*self_check(shapes), *check_fusions(fusions)] if kernels.can_run() else None
        broken = [check.shape for check in checks or () if check.problem is not None]
        served = replace(served, layers=[unfused(spec, broken, self._block_size) for spec in served.layers])
        yield "kernels", report.not_measured(NO_DEVICE) if checks is None else report.checks_section(checks)
        works = checks is not None and not any(check.stops_metal for check in checks)
        found = tune(shapes, Limits(served.context_length, self._max_num_seqs), self._retune) if works else []
        reason = NO_DEVICE if checks is None else "the Metal kernels are not used"
        yield "tuning", report.tuning_section(found) if works else report.not_measured(reason)
        backend = "metal" if works else resolve_backend("auto")
        yield "attention", self._attention(served, shapes, backend, found)
        yield from self._engine_sections(served, backend, theirs)

    def _attention(
        self, served: ServedModel, shapes: list[AttentionShape], backend: str, found: list[ShapeTimes]
    ) -> Any:
        if not shapes:
            return report.not_measured("the model has no attention layers with a KV cache")
        tunings = {one.shape: one.tuning for one in found}
        times = measured(lambda: attention_times(shapes, backend, tunings, served.context_length, SIZES))
        free_memory()
        return {"backend": backend, "calls": times}

    def _engine_sections(self, served: ServedModel, backend: str, theirs: Any) -> Iterator[tuple[str, Any]]:
        engines: list[EngineCore] = []

        def with_engine(measure: Callable[[EngineCore], Any]) -> Any:
            """Measures with the first engine, which has the pools of the shorter prompt."""
            if not engines:
                engines.append(make_engine(served, backend, self._block_size, SIZES, SIZES.prefill_tokens))
            return measure(engines[0])

        yield "step_times", measured(lambda: with_engine(time_rows_of))
        yield "drafts", measured(lambda: with_engine(drafts_of))
        ours = measured(lambda: with_engine(lambda engine: engine_rates(engine, SIZES)))
        yield "decoding", report.decoding_section(SIZES.batches, ours, theirs)
        yield "prompt_steps", measured(lambda: with_engine(lambda engine: prompt_rows(engine, SIZES)))
        most = SIZES.prefill_tokens
        yield "largest_prefill", measured(lambda: with_engine(lambda engine: prefill_peak(engine, most)))
        for engine in engines:
            engine.close()
        engines.clear()
        free_memory()
        yield "long_prefill", measured(lambda: long_prefill(served, backend, self._block_size))
        if self._model in BUNDLED:
            yield "note", DEMO_NOTE


def time_rows_of(engine: EngineCore) -> dict[str, float]:
    return {str(rows): round(1000 * seconds, 3) for rows, seconds in sorted(time_rows(engine).items())}


def drafts_of(engine: EngineCore) -> dict[str, dict[str, int]]:
    """The draft tokens that a step would verify for each sequence, by their chance and by the sequences that decode,
    according to the times of steps by their rows."""
    seconds = engine.scheduler.times.decode_seconds()
    assert seconds is not None, "steps were timed"

    def count(batch: int, chance: float) -> int:
        of_each = [chance**number for number in range(1, MOST_DRAFTS + 1)]
        return draft_lengths([100] * batch, [of_each] * batch, seconds)[0]

    return {f"{chance:.0%}": {str(batch): count(batch, chance) for batch in SIZES.batches} for chance in CHANCES}


def long_prefill(served: ServedModel, backend: str, block_size: int) -> Any:
    if backend != "metal":
        return report.not_measured(f"{SIZES.long_prefill_tokens} tokens take long without the Metal kernels")
    engine = make_engine(served, backend, block_size, SIZES, SIZES.long_prefill_tokens)
    try:
        return prefill_peak(engine, SIZES.long_prefill_tokens)
    finally:
        engine.close()


NO_DEVICE = "there is no Metal device"
DEMO_NOTE = (
    "These figures are of the bundled demo model, which is tiny: they mean nothing for a real model or for a Mac. For "
    "figures that do, run `mlxpaged doctor MODEL` on the Mac."
)


def measured(measure: Callable[[], Any]) -> Any:
    """What `measure` returns, or why it could not."""
    try:
        return measure()
    except Exception as error:  # of any library, for any model: the other sections are worth having
        logging.getLogger(__name__).debug("not measured", exc_info=error)
        return report.not_measured(f"{type(error).__name__}: {error}")


def free_memory() -> None:
    gc.collect()
    mx.clear_cache()
