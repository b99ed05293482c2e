"""Which errors are failed allocations."""

from __future__ import annotations

import errno

import pytest

from mlxpaged.core.engine.model_runner import DeviceError
from mlxpaged.engine.engine_thread import Failure
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.process_memory import is_out_of_memory

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
