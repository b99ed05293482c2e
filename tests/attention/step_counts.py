"""What a decode step of known models is for a GPU, beside mlx-lm's own: counted by MLX's rules, never run.

    python -m tests.attention.step_counts [--batch 1 16] [--model Qwen3-4B ...]
    python -m tests.attention.step_counts --start
    python -m tests.attention.step_counts --memory [--model Qwen3-4B ...]

The second form counts what the start of two of them computes: start_counts.py. The third one says how many bytes of
results a prompt chunk has at once, with several limits of command buffers, if the GPU is so slow that the host always
waits for it. That is the rule for prompts. Its last column is what a start extrapolates from the shorter chunks,
divided by the longest.

The weights are those of the 4-bit models of mlx-community, the contexts have 900 tokens, the tokens are greedy. A step
is traced, so neither a GPU nor memory for the weights is needed. Dispatches are kernels. Before a barrier, all earlier
kernels of a command buffer end. Command buffers are counted with MLX's own limits on a Max chip, and with those that
the server sets on M1 to M4. Bytes are read: of weights, states and results, with the expected number of different
experts, and each visible key and value once.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.command_buffers import CommitLimits, Operation, commit_limits, count, peak_bytes
from mlxpaged.mlx_settings import LONG_BUFFERS
from mlxpaged.parts.memory.step_memory import GPU_TOKENS, extrapolated
from tests.attention import start_counts
from tests.attention.step_graphs import MODELS, PROMPTS, kv_bytes, our_step, prompt_step, step_of_mlx_lm

MAX_CHIP = commit_limits("applegpu_g14s")
LONG = CommitLimits(*map(int, LONG_BUFFERS.values()))

LIMITS = {
    "MLX's, base or Pro": commit_limits("applegpu_g13g"),
    "MLX's, Max": MAX_CHIP,
    "100 M elements": CommitLimits(LONG.ops, 100),
    "the server's": LONG,
}
CHUNKS = (*GPU_TOKENS, 2048)

COUNTS = ("dispatches", "barriers", "command buffers, Max", "with the limits of the server", "GB read")
HEADINGS = ("model", "batch", *COUNTS)


def row(name: str, batch: int) -> list[str]:
    """Cells with our figure, a slash, and mlx-lm's."""
    known = MODELS[name]
    sides: list[tuple[Sequence[Operation], int]] = [
        (our_step(known, batch), kv_bytes(known, batch)),  # our kernels get a few elements of a pool
        (step_of_mlx_lm(known, batch), 0),
    ]
    figures = []
    for step, more_bytes in sides:
        usual, long = count(step, MAX_CHIP), count(step, LONG)
        read = more_bytes + sum(operation.bytes_read for operation in step)
        figures.append((*usual, long.commits, f"{read / 1e9:.2f}"))
    return [name, str(batch), *(f"{ours} / {theirs}" for ours, theirs in zip(*figures, strict=True))]


def memory_rows(name: str) -> Iterator[list[str]]:
    """Cells with the most bytes of results that a prompt chunk of each of CHUNKS has at once."""
    steps = [prompt_step(MODELS[name], tokens) for tokens in CHUNKS]
    for kind, limits in LIMITS.items():
        peaks = [peak_bytes(step, limits) for step in steps]
        measured = dict(zip(CHUNKS[:-1], peaks, strict=False))
        ratio = extrapolated(measured, CHUNKS[-1]) / peaks[-1]
        yield [name, kind, *(f"{peak / 1e6:,.0f}" for peak in peaks), f"{ratio:.2f}"]


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    for cells in itertools.chain((headings, ["---"] * len(headings)), rows):
        print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", action="store_true", help="what a start computes, instead of a step")
    parser.add_argument("--memory", action="store_true", help="the memory of prompt chunks, instead of a step")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    if args.start:
        for line in start_counts.table(list(start_counts.SMALL_MODELS)):
            print(line, flush=True)
        return
    if args.memory:
        headings = ("model", "command buffers", *(f"MB, {tokens} tokens" for tokens in CHUNKS), "estimated / last")
        print_table(headings, itertools.chain(*(memory_rows(name) for name in args.model if name in PROMPTS)))
        return
    print_table(HEADINGS, (row(name, batch) for name in args.model for batch in args.batch))


if __name__ == "__main__":
    main()
