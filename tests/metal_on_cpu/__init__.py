"""Metal kernels without a Mac: a stand-in for `mx.fast.metal_kernel` that compiles MSL with clang and runs
it on the CPU, strictly. See README.md for what it checks and what only a Mac can show.

    with Interpreter().installed() as metal:
        code_that_builds_kernels()
        assert metal.last_launch("paged_decode").loads["keys"] == keys.size
"""

from __future__ import annotations

from .compiler import is_supported
from .errors import (
    ArithmeticFault,
    DataRace,
    Divergence,
    MetalCompileError,
    MetalError,
    MetalRunError,
    Misaligned,
    OutOfBounds,
    ReadOnly,
    ResourceLimit,
    Runaway,
    UninitialisedOutput,
    UninitialisedRead,
    Unrepeatable,
)
from .kernel import Interpreter, MetalKernel
from .launch import LaunchRecord

__all__ = [
    "ArithmeticFault",
    "DataRace",
    "Divergence",
    "Interpreter",
    "LaunchRecord",
    "MetalCompileError",
    "MetalError",
    "MetalKernel",
    "MetalRunError",
    "Misaligned",
    "OutOfBounds",
    "ReadOnly",
    "ResourceLimit",
    "Runaway",
    "UninitialisedOutput",
    "UninitialisedRead",
    "Unrepeatable",
    "is_supported",
]
