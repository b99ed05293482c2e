"""What requests with a grammar cost the other requests in the batch.

    python benchmarks/grammar.py [--model demo] [--plain 16] [--constrained 4] [--new-tokens 200] [--device-ms 0]
    python benchmarks/grammar.py --calls qwen3_coder --plain 0 --constrained 16

Plain streams run beside as many others, which are held to a JSON schema or free, in turn and in this process. With
--calls, they are held to calls of a tool in that format instead. The figure to quote is the ratio of the plain streams'
tokens per second; without plain streams, that of all streams. With --device-ms, steps overlap as on a Mac, on a
stand-in for a device that takes so long for a forward pass: the inter-token times then show whether constrained
requests get a token in every step, and whether the others' steps are later.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import time
from collections import defaultdict
from dataclasses import astuple, dataclass

from mlxpaged.core.engine.constraint import Constraint, StructuredOutput, ToolCallForm
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.cpu import blas  # before mlx: it loads the fast BLAS
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.formats import FORMATS, Format
from mlxpaged.models.loader import load_model
from mlxpaged.models.sources.short_names import DEMO_MODEL

# isort: split
import mlx.core as mx
from stand_in_device import stand_in_device

RECORDS = Constraint(
    "json_schema",
    json.dumps(
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["a", "b"]}},
                "required": ["name", "age", "tags"],
                "additionalProperties": False,
            },
            "minItems": 1000,
        }
    ),
)


EDIT = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "content": {"type": "string"},
        "line": {"type": "integer"},
        "mode": {"enum": ["insert", "replace"]},
    },
    "required": ["path", "content", "line", "mode"],
    "additionalProperties": False,
}


def calls_of(form: Format) -> StructuredOutput:
    """One call after another, each with arguments that fit EDIT."""
    calls = (ToolCallForm(form.pieces("edit", EDIT)),)
    return StructuredOutput("never", "", "", None, form.call_start, calls)


@dataclass(frozen=True)
class Run:
    """rate: tokens per second of the streams that are counted. gaps: median inter-token seconds of plain and other
    ones."""

    rate: float
    plain_gap: float
    other_gap: float


def run(core: EngineCore, args: argparse.Namespace, constraint: Constraint | StructuredOutput | None) -> Run:
    """From the first token of the batch to the last one of the plain streams, or of all without these. constraint: of
    the other streams."""
    counted = "plain" if args.plain else "other"
    others = args.constrained
    for i in range(args.plain + others):
        held = constraint if i < others else None
        params = SamplingParams(max_tokens=args.new_tokens, temperature=1.0, seed=i, ignore_eos=True, constraint=held)
        core.add(Request(f"{'other' if i < others else 'plain'} {i}", [20 + i, 5, 6, 7], params, core.clock()))
    core.step()
    start, running = time.perf_counter(), args.plain or others
    times: dict[str, list[float]] = defaultdict(list)
    while running:
        for output in core.step():
            times[output.request_id] += [output.time] * len(output.token_ids)
            running -= output.request_id.startswith(counted) and output.finish_reason is not None
    seconds = time.perf_counter() - start
    core.abort_all("the counted streams are done")
    core.finish_step()
    plain, other = (
        [after - before for name in times if name.startswith(kind) for before, after in itertools.pairwise(times[name])]
        for kind in ("plain", "other")
    )
    tokens = sum(len(each) for name, each in times.items() if name.startswith(counted))
    return Run(tokens / seconds, statistics.median(plain or [0]), statistics.median(other))


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--plain", type=int, default=16)
    parser.add_argument("--constrained", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--calls", choices=FORMATS, help="hold the others to calls in this format")
    parser.add_argument("--device-ms", type=float, default=0.0, help="a stand-in device's forward pass (default: none)")
    args = parser.parse_args()
    config = EngineConfig(model=args.model, max_num_seqs=args.plain + args.constrained, speculative="off")
    core = build_engine(config, load_model(args.model))
    device = f"a stand-in device of {args.device_ms:g} ms a step" if args.device_ms else str(mx.default_device())
    print(f"{args.model}, {device}, BLAS: {blas.describe()}; {args.runs} runs of each, in turn")
    seconds = args.device_ms / 1000
    with stand_in_device(core, seconds, seconds / 20, sleep_until) if seconds else contextlib.nullcontext():
        constraint = calls_of(FORMATS[args.calls]) if args.calls else RECORDS
        run(core, args, constraint)
        pairs = [(run(core, args, constraint), run(core, args, None)) for _ in range(args.runs)]
    held, free = zip(*pairs, strict=True)
    ratios = sorted(a.rate / b.rate for a, b in pairs)
    counted = "plain" if args.plain else "other"
    print(f"{args.plain} plain streams beside {args.constrained} others; tokens per second of the {counted} streams,")
    print("and median inter-token times in ms:")
    print(f"{'the others are':24} {'tok/s':>8} {'plain':>8} {'others':>8}")
    for name, runs in ((f"held to {args.calls or 'a schema'}", held), ("free", free)):
        rate, plain, other = (statistics.median(column) for column in zip(*map(astuple, runs), strict=True))
        print(f"{name:24} {rate:8.1f} {1e3 * plain:8.2f} {1e3 * other:8.2f}")
    print(f"ratio of tok/s {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
