"""The means to run Metal kernels: on a Mac for real, elsewhere on the CPU."""

from __future__ import annotations

from tests.metal_on_cpu.fixtures import copied_kernels, metal, metal_on_cpu, unchecked

__all__ = ["copied_kernels", "metal", "metal_on_cpu", "unchecked"]
