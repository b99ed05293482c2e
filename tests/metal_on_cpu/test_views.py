"""A view that `mx.as_strided` makes stands for the whole array, and no more."""

from __future__ import annotations

import mlx.core as mx
import pytest

from . import Interpreter, OutOfBounds
from .test_language import run, values

pytestmark = pytest.mark.usefixtures("metal_on_cpu")


def view_of(array: mx.array) -> mx.array:
    view = mx.as_strided(array, (8,), (1,))
    mx.eval(view)
    return view


def read(view: mx.array, index: int) -> float:
    out = run(f"out[thread_position_in_grid.x] = inp[{index}];", {"inp": view}, (1,), mx.float32)
    return float(out.item())  # type: ignore[arg-type]


def test_a_kernel_reads_and_writes_the_whole_array_through_a_view() -> None:
    array = values(500)
    view = view_of(array)
    assert read(view, 499) == array[499].item()
    run("const_cast<device float*>(inp)[499] = 7.0f; out[0] = 1.0f;", {"inp": view}, (1,), mx.float32)
    assert array[499].item() == 7.0


@pytest.mark.parametrize("index", [-1, 500, 10**6])
def test_an_access_beyond_the_array_is_an_error(index: int) -> None:
    with pytest.raises(OutOfBounds, match="inp"):
        read(view_of(values(500)), index)


def test_a_view_of_another_making_has_its_own_bounds() -> None:
    array = values(500)
    for view in (array[:8], array[8:16], mx.split(array, 5)[0]):
        with pytest.raises(OutOfBounds, match="inp"):
            read(view, view.size)


def test_the_shape_that_a_kernel_sees_is_the_views(metal_on_cpu: Interpreter) -> None:
    out = run("out[0] = inp_shape[0];", {"inp": view_of(values(20, 25))}, (1,), mx.float32)
    assert out.item() == 8


def test_a_view_outlives_its_array_with_its_own_bounds() -> None:
    """The buffer may have been replaced by then, so that nothing is known of its size."""
    array = values(500) + 1
    view = view_of(array)
    first = view[0].item()
    del array
    assert read(view, 0) == first
    with pytest.raises(OutOfBounds, match="inp"):
        read(view, 8)
