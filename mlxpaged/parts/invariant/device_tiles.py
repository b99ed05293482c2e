"""The tiles of rows in which a Mac's GPU computes a model's matrix products."""

from __future__ import annotations

import mlx.core as mx
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from mlxpaged.attention.neural_accelerators import uses_neural_accelerators
from mlxpaged.core.scheduling.row_tiles import ANY_ROWS, RowTiles
from mlxpaged.models.files.json_files import model_config
from mlxpaged.models.loader import ServedModel
from mlxpaged.models.token_cost import experts_per_token, is_of_experts

QUANTIZED_TILE, PLAIN_TILE = 32, 64
"""Rows of a tile of MLX's matrix kernels: bm of qmm in backend/metal/quantized.cpp, GEMM_TPARAM_MACRO in matmul.cpp."""
LEAST_ON_ACCELERATORS = 128
"""Fewer rows of a matrix of 4,096 columns run without the neural accelerators of an M5: qmm_splitk has no kernel for
them."""
ROWS_PER_EXPERT = 4
"""With fewer rows for each expert, gather_qmm reads an expert's weights once for each row."""


def device_tiles(served: ServedModel) -> RowTiles:
    """Returns the tiles of a model on this machine. On a CPU, a row costs the same in any number."""
    if mx.default_device() == mx.Device(mx.cpu):
        return ANY_ROWS
    modules = [module for _, module in served.model.named_modules()]
    quantized = any(isinstance(module, (QuantizedLinear, QuantizedSwitchLinear)) for module in modules)
    least = LEAST_ON_ACCELERATORS if uses_neural_accelerators() else 1
    experts = max((len(module.weight) for module in modules if is_of_experts(module)), default=0)
    if experts:
        config = model_config(served.path)
        least = max(least, ROWS_PER_EXPERT * experts // experts_per_token({**config, **config.get("text_config", {})}))
    return RowTiles(QUANTIZED_TILE if quantized else PLAIN_TILE, least)
