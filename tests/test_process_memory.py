"""Which errors are failed allocations, and what is asked for before libraries that cannot fail need it."""

from __future__ import annotations

import errno
import resource
import sys

import pytest

from mlxpaged import process_memory
from mlxpaged.core.engine.model_runner import DeviceError
from mlxpaged.cpu import blas
from mlxpaged.engine.engine_thread import Failure
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.process_memory import (
    MARGIN,
    STACK_BYTES,
    address_space_left,
    can_allocate,
    is_out_of_memory,
    require_memory,
    reusable_bytes,
)

OF_MLX = RuntimeError("[malloc] Unable to allocate 4096 bytes.")


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OF_MLX,
        RuntimeError("[metal::malloc] Resource limit (499000) exceeded."),
        RuntimeError("std::bad_alloc"),
        RuntimeError("can't start new thread"),
        RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (00000008)"),
        caused_by(DeviceError("RuntimeError: x"), OF_MLX),
        caused_by(UnsupportedModelError("x"), MemoryError()),
    ],
    ids=repr,
)
def test_a_failed_allocation_is_known_whatever_its_type(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert Failure.of(error).lacks_memory


@pytest.mark.parametrize("error", [RuntimeError("x"), OSError(errno.ENOSPC, "x"), ValueError("std::bad_alloc"), None])
def test_other_errors_are_none(error: Exception | None) -> None:
    assert not is_out_of_memory(error)


def test_without_a_limit_everything_is_granted() -> None:
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        pytest.skip("the tests run under a limit")
    assert address_space_left() is None
    require_memory(MARGIN - 1, "this")


def test_under_a_limit_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "address_space_left", lambda: 50_000_000)
    monkeypatch.setattr(process_memory, "reusable_bytes", lambda: 20_000_000)
    require_memory(70_000_000 - MARGIN, "this")
    with pytest.raises(MemoryError, match=r"^this may take 36\.5 MB, but only 36\.4 MB are free$"):
        require_memory(70_000_001 - MARGIN + 10**5, "this")


def test_without_room_for_a_stack_nothing_is_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "address_space_left", lambda: STACK_BYTES - 1)
    monkeypatch.setattr(process_memory, "reusable_bytes", lambda: 10**12)
    with pytest.raises(MemoryError):
        require_memory(1, "this")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no limit on the address space")
@pytest.mark.parametrize(("left", "new", "fits"), [(MARGIN, 0, True), (MARGIN, 1, False), (STACK_BYTES - 1, 0, False)])
def test_malloc_is_asked_and_may_take_new_memory_down_to_the_margin(
    monkeypatch: pytest.MonkeyPatch, left: int, new: int, fits: bool
) -> None:
    looks = iter([left, left - new])
    monkeypatch.setattr(process_memory, "address_space_left", lambda: next(looks))
    assert can_allocate(1000) is fits


def test_malloc_tells_how_much_is_free() -> None:
    assert reusable_bytes() >= 0


def test_openblas_does_not_take_its_buffers_if_they_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would try for ever."""
    if blas.loaded is None:
        pytest.skip("OpenBLAS is not in use")
    monkeypatch.setattr(process_memory, "address_space_left", lambda: 10_000_000)
    monkeypatch.setattr(process_memory, "reusable_bytes", lambda: 0)
    with pytest.raises(MemoryError, match="the work buffers of OpenBLAS"):
        blas.reserve_buffers(1000)
