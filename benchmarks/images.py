"""What the encoding of images does to streams.

    python benchmarks/images.py [--streams 8] [--images 8] [--side 1024] [--blocks 4] [--rounds 4]

The streams decode alone, and then while the images of one request are encoded, in this process, by turns: what else the
machine does changes both. The text model is the comparison's Llama; the tower is Pixtral's, of random weights, a
quarter as wide as Pixtral's own. The figure to quote is the ratio of the inter-token times' p99.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import numpy as np
from comparison.model import benchmark_model

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.cpu import blas  # before mlx: it loads the fast BLAS
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import load_model
from mlxpaged.parts.images.image_encoder import IMAGES
from mlxpaged.vision.families.pixtral.format import PixtralFormat
from mlxpaged.vision.families.pixtral.tower import PixtralSizes, PixtralTower
from mlxpaged.vision.image import PromptImage
from mlxpaged.vision.install import install
from mlxpaged.vision.tower import Vision

# isort: split
import mlx.core as mx
from streams import ends_after, gaps, once_added, print_gaps

CACHE = Path.home() / ".cache" / "mlxpaged" / "bench"
PATCH, MERGE = 16, 2
WIDTH, HEADS = 256, 4


def seeing_engine(model: Path, blocks: int, streams: int) -> EngineCore:
    served = load_model(str(model))
    width = int(served.model.args.hidden_size)
    sizes = PixtralSizes(
        *(WIDTH, 4 * WIDTH, blocks, HEADS, PATCH, 10000.0, "silu", MERGE, width, "gelu", False), merger_eps=1e-5
    )
    tower = PixtralTower(sizes)
    mx.eval(tower.state)
    form = PixtralFormat(placeholder=5, row_end=6, end=7, longest=(4096, 4096), side=PATCH * MERGE)
    vision = Vision(form, tower)
    install(served.model, vision)
    config = EngineConfig(model=str(model), max_num_seqs=streams + 1, prefix_caching=False, speculative="off")
    return build_engine(config, dataclasses.replace(served, vision=vision))


def prompt_with(numbers: range, side: int, form: PixtralFormat) -> tuple[list[int], tuple[PromptImage, ...]]:
    tokens: list[int] = [20]
    made = []
    for number in numbers:
        pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
        own = form.tokens(side, side)
        positions = tuple(len(tokens) + i for i, token in enumerate(own) if token == form.placeholder)
        made.append(PromptImage(number.to_bytes(16, "little"), pixels, positions))
        tokens += own
    return tokens, tuple(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="default: made from a seed")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--side", type=int, default=1024, help="of an image, in pixels")
    parser.add_argument("--blocks", type=int, default=4, help="of the tower")
    parser.add_argument("--rounds", type=int, default=4, help="in which the streams run alone and beside images")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which the streams run alone, in all rounds")
    args = parser.parse_args()
    core = seeing_engine(args.model or benchmark_model(CACHE), args.blocks, args.streams)
    assert core.served.vision is not None
    form = core.served.vision.format
    assert isinstance(form, PixtralFormat)
    print(f"{mx.default_device()}, BLAS: {blas.describe()}")
    params = SamplingParams(max_tokens=1, temperature=0.0)
    alone, beside, seconds = [], [], 0.0
    for i in range(args.rounds):
        alone += gaps(core, args.streams, ends_after(args.seconds / args.rounds))
        numbers = range(i * args.images // args.rounds, (i + 1) * args.images // args.rounds)
        tokens, images = prompt_with(numbers, args.side, form)
        started = time.monotonic()
        request = Request(f"images {i}", tokens, params, core.clock(), images=images)
        beside += gaps(core, args.streams, once_added(core, request, lambda: not core.scheduler.held[IMAGES]))
        seconds += time.monotonic() - started
    print(f"{args.streams} streams; {args.images} images of {args.side} x {args.side} pixels in {seconds:.1f} s")
    print_gaps(alone, beside, "while images are encoded")


if __name__ == "__main__":
    main()
