"""How exactly MLX computes float32 matrix products on this machine."""

from __future__ import annotations

from mlxpaged.attention.neural_accelerators import TF32_UNIT, forbids_tf32, uses_neural_accelerators

__all__ = ["TF32_UNIT", "rounds_float32"]


def rounds_float32() -> bool:
    """Whether MLX rounds the factors of float32 matrix products and of its attention to TF32.

    It does with neural accelerators, unless MLX_ENABLE_TF32 is 0 (ml-explore/mlx: enable_tf32 in utils.h). MLX reads
    the variable at its first product and keeps it, and it holds for the whole process. So it is not changed for a
    comparison.
    """
    return not forbids_tf32() and uses_neural_accelerators()
