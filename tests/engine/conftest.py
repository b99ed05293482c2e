"""The means to run Metal kernels: on a Mac for real, elsewhere on the CPU."""

from tests.metal_on_cpu.fixtures import metal

__all__ = ["metal"]
