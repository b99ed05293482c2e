"""Builds and launches the Metal kernels, and checks the limits of a launch.

The first lines of each file in metal_kernels/ say what its kernel computes and which shapes it takes.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

Size3 = tuple[int, int, int]
Template = Sequence[tuple[str, int | bool | mx.Dtype]]

MAX_THREADGROUP_MEMORY = 32 * 1024
MAX_THREADS = 1024

INPUTS_AND_OUTPUTS: dict[str, tuple[list[str], list[str]]] = {
    "paged_attention": (
        ["queries", "keys", "values", "block_tables", "items", "sinks", "scale", "window", "softcap", "after"],
        ["out", "done"],
    ),
    "paged_decode": (
        ["queries", "keys", "values", "block_tables", "items", "sinks", "scale", "softcap", "after"],
        ["out", "done"],
    ),
    "matrix_attention": (
        ["queries", "keys", "values", "block_tables", "items", "sinks", "scale", "window", "softcap", "after"],
        ["out", "done"],
    ),
    "latent_attention": (
        ["queries", "q_pe", "rows", "block_tables", "items", "sinks", "scale", "window", "softcap", "after"],
        ["out", "done"],
    ),
    "merge_partials": (["partials", "ranges", "sinks"], ["out"]),
    "add_rms_norm": (["x", "y", "weight", "eps"], ["sum", "normed"]),
    "kv_quantize": (
        ["new_keys", "new_values", "slot_mapping", "key_pool", "value_pool", "after", "scales"],
        ["done"],
    ),
    "kv_write": (["new_keys", "new_values", "slot_mapping", "key_pool", "value_pool", "after"], ["done"]),
    "qkv_write": (
        [
            *("rows", "positions", "slot_mapping", "written", "query_weight", "key_weight", "frequencies", "settings"),
            *("key_pool", "value_pool", "after"),
        ],
        ["queries", "done"],
    ),
    "kv_gather": (["key_pool", "value_pool", "blocks", "after"], ["keys", "values", "done"]),
    "block_move": (
        ["source_a", "source_b", "pool_a", "pool_b", "moves", "after"],
        ["copy_a", "copy_b", "done"],
    ),
}

FOR_QUANTIZED = re.compile(r"^#ifdef QUANTIZED\n(.*?)(?:^#else\n(.*?))?^#endif\n", re.DOTALL | re.MULTILINE)
"""Parts of a source for quantized pools, and what other pools have in their place."""

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

HEADERS = dict.fromkeys(("matrix_attention", "latent_attention"), "#include <metal_simdgroup_matrix>\n")
"""Metal's own headers that a kernel needs beside those of the MLX utilities that come before every kernel."""


def kernel_directory() -> Path:
    """The directory of the .metal files: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parent.parent
    for directory in (package / "metal_kernels", package.parent / "metal_kernels"):
        if directory.is_dir():
            return directory
    raise FileNotFoundError(f"the Metal sources are missing: neither in {package} nor beside it")


def can_run() -> bool:
    """Whether kernels run here: on a Metal device, or because a stand-in replaces `mx.fast.metal_kernel`."""
    native: Any = mx.fast.rope
    found: Any = mx.fast.metal_kernel
    return mx.metal.is_available() or type(found) is not type(native)


def launch(
    name: str,
    inputs: Sequence[mx.array | int | float],
    template: Template,
    grid: Size3,
    threadgroup: Size3,
    outputs: Sequence[tuple[Sequence[int], mx.Dtype]],
    threadgroup_memory: int = 0,
    quantized: bool = False,
) -> list[mx.array]:
    """Run the kernel of that name over `grid` threads. quantized: the variant for quantized pools, whose last input are
    their scales. Raises ValueError for a launch that Metal would refuse."""
    threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
    if threads > MAX_THREADS:
        raise ValueError(f"{name}: {threads} threads in a threadgroup, but Metal allows {MAX_THREADS}")
    if threadgroup_memory > MAX_THREADGROUP_MEMORY:
        raise ValueError(
            f"{name}: {threadgroup_memory} bytes of threadgroup memory, but Metal allows {MAX_THREADGROUP_MEMORY}"
        )
    results: list[mx.array] = build(mx.fast.metal_kernel, name, quantized)(
        inputs=inputs,
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
    )
    return results


@functools.cache
def build(metal_kernel: Callable[..., Any], name: str, quantized: bool = False) -> Any:
    """Build a kernel once. MLX compiles it once per set of template arguments. The factory is part of the cache key, so
    that a stand-in for `mx.fast.metal_kernel` gets kernels of its own."""
    inputs, outputs = INPUTS_AND_OUTPUTS[name]
    directory, header, full_name = kernel_directory(), HEADERS.get(name, ""), name
    if quantized:
        header += without_comments((directory / "quantization.h").read_text()) + "\n"
        if "scales" not in inputs:
            inputs, full_name = [*inputs, "scales"], f"{name}_quantized"
    part = r"\1" if quantized else r"\2"
    source = without_comments(FOR_QUANTIZED.sub(part, (directory / f"{name}.metal").read_text()))
    return metal_kernel(name=full_name, input_names=inputs, output_names=outputs, source=source, header=header)


def without_comments(source: str) -> str:
    """Returns a source without comments, indentation and empty lines: MLX hashes the whole text at each launch."""
    lines = map(str.strip, COMMENT.sub("", source).splitlines())
    return "\n".join(filter(None, lines))


def source_hash() -> str:
    """A hash that changes if any kernel source changes, so that times measured with other sources are ignored."""
    digest = hashlib.sha256()
    for path in sorted(path for path in kernel_directory().iterdir() if path.suffix in (".metal", ".h")):
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
