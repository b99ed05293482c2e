"""Figures of GGUF files: how soon damaged ones are refused, and the memory that each type takes.

    python -m tests.models.gguf_figures [--tokens 128000] [--layers 8] [--files Q4_0 Q4_K_M ...]

A model with many tokens is damaged in 300 ways, and refused as `mlxpaged serve` refuses it. Its memory is what
Python and NumPy allocate, in a second pass; MLX has nothing of such a file. Then a model with the proportions of Llama
3.1 8B is loaded from files with random weights: one for each type, and mixtures as llama.cpp makes them. Memory is
MLX's, after the model is loaded, and the most meanwhile.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxpaged.models.errors import ModelNotFoundError, UnsupportedModelError
from mlxpaged.models.sources.gguf.directory import gguf_directory
from mlxpaged.models.sources.model_files import ModelFiles
from mlxpaged.models.sources.resolve import resolve
from tests.models.gguf_blocks import VALUES, random_tensor
from tests.models.gguf_damage import damaged, enlarge
from tests.models.gguf_files import Stored, plain
from tests.models.gguf_models import as_gguf
from tests.support import make_tiny_model

SIZES = {
    "vocab_size": 3712,  # both matrices of tokens have 6.5 % of the weights each
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


def has_more_bits(name: str, num_layers: int) -> bool:
    """Whether Q4_K_M and Q5_K_M have a tensor in Q6_K (use_more_bits in llama.cpp's llama-quant.cpp)."""
    if name == "output.weight":
        return True
    if not name.endswith(("attn_v.weight", "ffn_down.weight")):
        return False
    layer, part = int(name.split(".")[1]), num_layers // 8
    return layer < part or layer >= 7 * num_layers // 8 or (layer - part) % 3 == 2


def is_output(name: str, _: int) -> bool:
    return name == "output.weight"


def never(_: str, __: int) -> bool:
    return False


IsLarger = Callable[[str, int], bool]
"""Whether a tensor has Q6_K, given its name and the number of layers."""

FILES: dict[str, tuple[str, IsLarger]] = {
    **{kind: (kind, never) for kind in (*VALUES, "F16", "BF16")},
    "Q4_0+Q6_K": ("Q4_0", is_output),  # what llama.cpp calls Q4_0
    "Q4_K_M": ("Q4_K", has_more_bits),
    "Q5_K_M": ("Q5_K", has_more_bits),
}
"""The type of most tensors, and which others have Q6_K."""


def refuse(path: Path) -> None:
    try:
        resolve(str(path))
    except (ModelNotFoundError, UnsupportedModelError):
        return
    raise SystemExit(f"a damaged file was not refused: {path}")


def print_damaged(directory: Path, num_tokens: int) -> None:
    model = make_tiny_model(directory / "m", "llama")
    path = as_gguf(model, directory / "whole.gguf", change=lambda metadata, _: enlarge(metadata, num_tokens))
    whole = path.read_bytes()
    path, slowest, most, count = directory / "m.gguf", 0.0, 0, 0
    for data in damaged(whole):
        path.write_bytes(data)
        start = time.perf_counter()
        refuse(path)
        slowest, count = max(slowest, time.perf_counter() - start), count + 1
        tracemalloc.start()
        refuse(path)
        most = max(most, tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    print(
        f"{count} damaged files of {len(whole) / 1e6:.1f} MB are refused: the slowest in {slowest:.3f} s, "
        f"with {most / 1e6:.1f} MB of memory at most\n"
    )
    if slowest > 1 or most > len(whole):
        raise SystemExit("the limits are a second, and the size of the file")


def memory(path: Path) -> tuple[int, int]:
    """Bytes of a loaded file, and the most while it was loaded."""
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model, _ = ModelFiles(gguf_directory(path)).load(lambda done, total: None)
    mx.eval(model.parameters())
    return mx.get_active_memory() - before, mx.get_peak_memory() - before


def print_memory(directory: Path, files: Sequence[str], num_layers: int) -> None:
    model = make_tiny_model(directory / "model", "llama", weights=dict, **SIZES, num_hidden_layers=num_layers)
    print("| File | MB | MB in memory | Times the file | MB while it is loaded |\n|---|---|---|---|---|")
    for name in files:
        kind, is_larger = FILES[name]

        def store(tensor: str, array: Any, kind: str = kind, is_larger: IsLarger = is_larger) -> Stored:
            if array.ndim < 2:
                return plain(array)
            if kind not in VALUES:
                return plain(array, kind)
            return random_tensor("Q6_K" if is_larger(tensor, num_layers) else kind, array.shape)

        path = as_gguf(model, directory / "model.gguf", store)
        size, (taken, most) = path.stat().st_size, memory(path)
        print(f"| {name} | {size / 1e6:.1f} | {taken / 1e6:.1f} | {taken / size:.3f} | {most / 1e6:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128_000)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--files", nargs="*", choices=FILES, default=list(FILES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print_damaged(Path(directory), args.tokens)
        print_memory(Path(directory), args.files, args.layers)


if __name__ == "__main__":
    main()
