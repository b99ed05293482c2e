"""`mlxpaged doctor [MODEL]`: what one run on a machine can settle about kernels, speed and memory."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxpaged.attention import AttentionShape, Limits, kernels, resolve_backend
from mlxpaged.attention.self_check import self_check
from mlxpaged.attention.tuner import ShapeTimes, tune
from mlxpaged.cli.doctor import report
from mlxpaged.cli.doctor.attention_times import attention_times
from mlxpaged.cli.doctor.machine import machine
from mlxpaged.cli.doctor.sizes import Sizes
from mlxpaged.cli.doctor.speed import engine_rates, make_engine, mlx_lm_rates, prefill_peak
from mlxpaged.cli.doctor.step_graph import command_buffers
from mlxpaged.engine import EngineCore
from mlxpaged.models import ModelNotFoundError, ServedModel, UnsupportedModelError, load_model, resolve_model
from mlxpaged.models.short_names import DEMO_MODEL

SIZES = Sizes()


def run(args: argparse.Namespace) -> int:
    """Returns exit status 1 if a kernel fails or the model cannot be served, else 0."""
    logging.basicConfig(level="WARNING", format="%(levelname)s: %(message)s", stream=sys.stderr, force=True)
    sections: dict[str, Any] = {}
    try:
        for name, content in Doctor(args.model, args.block_size, args.max_num_seqs, args.retune).sections():
            sections[name] = content
            if not args.json:
                print("\n".join(report.lines(name, content)), flush=True)
    except (ModelNotFoundError, UnsupportedModelError) as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    text = json.dumps(sections, indent=1)
    if args.json:
        print(text)
    if args.report not in (None, "-"):
        Path(args.report).write_text(text + "\n", encoding="utf-8")
        print(f"the report is in {args.report}", file=sys.stderr)
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
        path = resolve_model(self._model)
        theirs = measured(lambda: mlx_lm_rates(path, SIZES))
        free_memory()
        served = load_model(self._model)
        yield "model", report.model_section(served)
        shapes = [spec.attention_shape(self._block_size) for spec in served.kv_layers]
        checks = self_check(shapes) if kernels.can_run() else None
        yield "kernels", report.not_measured(NO_DEVICE) if checks is None else report.checks_section(checks)
        works = checks is not None and not any(check.stops_metal for check in checks)
        found = tune(shapes, Limits(served.context_length, self._max_num_seqs), self._retune) if works else []
        reason = NO_DEVICE if checks is None else "the Metal kernels are not used"
        yield "tuning", report.tuning_section(found) if works else report.not_measured(reason)
        backend = "metal" if works else resolve_backend("auto")
        yield "attention", self._attention(served, shapes, backend, found)
        buffers = report.not_measured(NO_DEVICE)
        if mx.metal.is_available():
            buffers = measured(lambda: command_buffers(served, self._block_size))
        yield "command_buffers_per_step", buffers
        core = measured(lambda: make_engine(served, backend, self._block_size, SIZES))
        yield from self._engine_sections(core, theirs)

    def _attention(
        self, served: ServedModel, shapes: list[AttentionShape], backend: str, found: list[ShapeTimes]
    ) -> Any:
        if not shapes:
            return report.not_measured("the model has no attention layers with a KV cache")
        tunings = {one.shape: one.tuning for one in found}
        times = measured(lambda: attention_times(shapes, backend, tunings, served.context_length, SIZES))
        free_memory()
        return {"backend": backend, "calls": times}

    def _engine_sections(self, core: EngineCore | dict[str, str], theirs: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(core, dict):
            ours = peak = core
        else:
            engine = core
            ours = measured(lambda: engine_rates(engine, SIZES))
            peak = measured(lambda: prefill_peak(engine, SIZES))
            engine.close()
        yield "decoding", report.decoding_section(SIZES.batches, ours, theirs)
        yield "largest_prefill", peak
        if self._model == DEMO_MODEL:
            yield "note", DEMO_NOTE


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
