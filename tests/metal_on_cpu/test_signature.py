"""Our generated source against MLX's own, byte for byte: an MLX upgrade that changes it is noticed here.

MLX prints the source without a Metal device when a verbose kernel is traced for export.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from . import Interpreter
from .signature import ATTRIBUTES, TemplateArgument


def mlx_source(
    capfd: pytest.CaptureFixture[str],
    path: Path,
    inputs: Sequence[mx.array],
    template: Sequence[tuple[str, TemplateArgument]] | None,
    output_dtypes: Sequence[mx.Dtype],
    **kernel: Any,
) -> str:
    made: Any = mx.fast.metal_kernel(**kernel)

    def call(*arrays: mx.array) -> Any:
        return made(
            inputs=list(arrays),
            template=template,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)] * len(output_dtypes),
            output_dtypes=list(output_dtypes),
            verbose=True,
        )

    capfd.readouterr()
    mx.export_function(str(path), call, *inputs)
    printed = capfd.readouterr().out
    return printed.partition("```\n")[2].rpartition("\n```")[0]


ARRAYS = [
    mx.zeros((4, 16)),
    mx.zeros((7,), mx.float16),
    mx.zeros((8,), mx.bfloat16),
    mx.array(3.0),
    mx.zeros((2, 2, 2), mx.int32),
]
EVERY_DTYPE = (
    mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64,
    mx.float16, mx.bfloat16, mx.float32, mx.complex64,
)  # fmt: skip
TEMPLATES: list[list[tuple[str, TemplateArgument]] | None] = [
    None,
    [("T", mx.float16)],
    [("T", mx.bfloat16), ("N", 64), ("FLAG", True), ("OFF", False), ("NEGATIVE", -3), ("U", mx.uint8)],
]
SOURCES = [
    "out0[0] = 1;",
    "uint i = thread_position_in_grid.x;\nout0[i] = a_shape[0] + a_ndim + d_strides[1] + grid_size.x;",
    "\n  // " + " ".join(ATTRIBUTES) + "\n  out0[0] = c_shape[0] + e_strides[2] + d_ndim;\n",
]


@pytest.mark.parametrize("template", TEMPLATES, ids=["plain", "dtype", "mixed"])
@pytest.mark.parametrize("source", SOURCES, ids=["bare", "shapes", "attributes"])
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("dtypes", [[mx.float32], [mx.bfloat16, mx.int32]], ids=["one", "two"])
def test_source_is_mlxs(
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    template: list[tuple[str, TemplateArgument]] | None,
    source: str,
    atomic: bool,
    dtypes: list[mx.Dtype],
) -> None:
    kernel: dict[str, Any] = {
        "name": "example",
        "input_names": ["a", "b", "c", "d", "e"],
        "output_names": [f"out{i}" for i in range(len(dtypes))],
        "source": source,
        "header": "// a header\nconstant constexpr int K = 3;\n",
        "atomic_outputs": atomic,
    }
    theirs = mlx_source(capfd, tmp_path / "f.mlxfn", ARRAYS, template, dtypes, **kernel)
    ours = Interpreter().metal_kernel(**kernel).signature(ARRAYS, dtypes, template or ()).source
    assert "example" in theirs
    assert ours == theirs


def test_every_dtype_has_mlxs_name(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    inputs = [mx.zeros((8,), dtype) for dtype in EVERY_DTYPE]
    kernel: dict[str, Any] = {
        "name": "dtypes",
        "input_names": [f"i{n}" for n in range(len(inputs))],
        "output_names": ["out"],
        "source": "out[0] = 0;",
    }
    theirs = mlx_source(capfd, tmp_path / "f.mlxfn", inputs, None, [mx.uint8], **kernel)
    assert Interpreter().metal_kernel(**kernel).signature(inputs, [mx.uint8]).source == theirs
