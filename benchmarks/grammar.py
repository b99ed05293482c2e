"""Throughput of plain streams with grammar-constrained ones among them, beside the same without grammars.

    python benchmarks/grammar.py [--model demo] [--plain 16] [--constrained 4] [--new-tokens 200]

Both run in this process, in turn; the figure to quote is the ratio of tokens per second of the plain streams, while as
many others run beside them, held to a JSON schema or free.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from mlxpaged.cpu import blas  # before mlx: it loads the fast BLAS
from mlxpaged.engine import Constraint, EngineConfig, EngineCore, Request, SamplingParams, build_engine
from mlxpaged.models import DEMO_MODEL, load_model

# isort: split
import mlx.core as mx

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


def time_plain(core: EngineCore, args: argparse.Namespace, constraint: Constraint | None) -> float:
    """Tokens per second of the plain streams, from the first token of the batch to their last one."""
    others = args.constrained
    for i in range(args.plain + others):
        held = constraint if i < others else None
        params = SamplingParams(max_tokens=args.new_tokens, temperature=1.0, seed=i, ignore_eos=True, constraint=held)
        core.add(Request(f"{'other' if i < others else 'plain'} {i}", [20 + i, 5, 6, 7], params, core.clock()))
    core.step()
    start, tokens, running = time.perf_counter(), 0, args.plain
    while running:
        for output in core.step():
            if output.request_id.startswith("plain"):
                tokens += len(output.token_ids)
                running -= output.finish_reason is not None
    seconds = time.perf_counter() - start
    core.abort_all("the plain ones are done")
    return tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--plain", type=int, default=16)
    parser.add_argument("--constrained", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    core = build_engine(
        EngineConfig(model=args.model, max_num_seqs=args.plain + args.constrained), load_model(args.model)
    )
    print(f"{args.model}, {mx.default_device()}, BLAS: {blas.describe()}; {args.runs} runs of each, in turn")
    time_plain(core, args, RECORDS)
    pairs = [(time_plain(core, args, RECORDS), time_plain(core, args, None)) for _ in range(args.runs)]
    held, free = (statistics.median(rates) for rates in zip(*pairs, strict=True))
    ratios = sorted(a / b for a, b in pairs)
    print(f"{args.plain} plain streams, tokens per second: {held:.1f} beside {args.constrained} held to a schema,")
    print(f"{free:.1f} beside {args.constrained} free ones; ratio {statistics.median(ratios):.2f}", end=" ")
    print(f"({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
