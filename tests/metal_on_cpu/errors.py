"""What a kernel can do wrong. Every message names the kernel and, where they are known, buffer, index and
thread."""

from __future__ import annotations


class MetalError(Exception):
    """A kernel that Metal would reject, or whose result Metal does not define."""


class MetalCompileError(MetalError):
    """The source does not compile, or uses what Metal 3.1 does not have."""


class MetalRunError(MetalError):
    """A launch broke a rule. `buffer`, `index`, `thread` and `threadgroup` say where, as far as it is
    known."""

    def __init__(
        self,
        message: str,
        *,
        buffer: str | None = None,
        index: int | None = None,
        thread: tuple[int, int, int] | None = None,
        threadgroup: tuple[int, int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.buffer = buffer
        self.index = index
        self.thread = thread
        self.threadgroup = threadgroup


class OutOfBounds(MetalRunError):
    """A load or store outside every buffer, or past a threadgroup or local array."""


class Misaligned(MetalRunError):
    """A vector load or store at an address that its type does not allow."""


class ReadOnly(MetalRunError):
    """A store to a buffer of the constant address space."""


class DataRace(MetalRunError):
    """Two threads touched an element, one of them stored, and no barrier orders the two."""


class Divergence(MetalRunError):
    """A barrier or simd operation that not all of its threads reach, or a shuffle from a lane that is not
    there."""


class ResourceLimit(MetalRunError):
    """More threadgroup memory, threads per threadgroup or thread memory than the device has."""


class UninitialisedRead(MetalRunError):
    """Memory was used that no thread had stored to."""


class UninitialisedOutput(MetalRunError):
    """An output element that no thread stored."""


class ArithmeticFault(MetalRunError):
    """An integer division by zero: no trap on a GPU, and no defined result."""


class Runaway(MetalRunError):
    """The launch did not end within the time allowed: an endless loop, or a case too large for the CPU."""


class Unrepeatable(MetalRunError):
    """Two orders of the threads gave different results."""
