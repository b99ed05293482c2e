"""The means to run Metal kernels: on a Mac for real, elsewhere on the CPU."""

from tests.metal_on_cpu.fixtures import metal, metal_on_cpu

__all__ = ["metal", "metal_on_cpu"]
