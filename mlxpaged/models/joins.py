"""Joins operations of a loaded model, so that a step launches fewer of them. Nothing here knows an architecture.

- The gate and up projections of a network are one product.
- Experts are told their rows, for which MLX launches a kernel in each product (expert_rows.py).
- The addition of a layer's residual and the norm after it are one kernel (joined_norms.py).

Each join is tried on random rows beside the module as it was, and undone if other numbers come out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxpaged.cpu.joined_linear import Join, layers_by_name, make_joint
from mlxpaged.models.expert_rows import ExpertsOfRows
from mlxpaged.models.joined_norms import join_norms
from mlxpaged.models.reference import is_rounding

logger = logging.getLogger(__name__)

GATE_AND_UP = ("gate_proj", "up_proj")
GATE_AND_UP_JOINT = "joint_gate_up_proj"
"""The name of the joint layer in the module of these."""

ROWS = (1, 40)
"""Rows of the trials: for MLX's products of few rows and of many. With two experts each, 40 are sorted by experts."""


def join(model: Module) -> None:
    """Join what can be joined, in place. Call it before adapters are installed."""
    report("gate and up projections", *join_gate_and_up(model))
    report("experts", *name_rows(model))
    report("additions and norms", *join_norms(model))


def join_gate_and_up(model: Module) -> tuple[int, list[str]]:
    """Join the projections of one network at a time, so that memory never holds a second model. Returns how many
    networks are joined, and the paths of those whose trial failed or gave other numbers."""
    joined, failed = 0, []
    for path, network, layers in layers_by_name(model, GATE_AND_UP):
        if (joint := make_joint(layers)) is None:
            continue
        trials = [inputs_of(layers[0], rows) for rows in ROWS]
        expected = [outputs_of(network, inputs) for inputs in trials]
        made = Join(network, GATE_AND_UP, GATE_AND_UP_JOINT, joint)
        got = [outputs_of(network, inputs) for inputs in trials]
        if made.joint.is_idle and all(map(is_rounding, got, expected)):
            joined += 1
        else:
            made.undo()
            failed.append(path)
        del joint, layers, made, expected, got
        mx.clear_cache()  # else MLX keeps the memory of the separate weights, which fits no other array
    return joined, failed


def name_rows(model: Module) -> tuple[int, list[str]]:
    """Returns how many layers of experts are told their rows, and the paths of those whose trial failed or gave other
    numbers."""
    named, failed = 0, []
    for path, layer in model.named_modules():
        if type(layer) in (SwitchLinear, QuantizedSwitchLinear):
            own, (x, indices) = type(layer), inputs_of(layer, 2)
            inputs = mx.expand_dims(x, (-2, -3)), indices
            expected = outputs_of(layer, inputs)
            layer.__class__ = type(f"Rows{own.__name__}", (ExpertsOfRows, own), {})
            if is_rounding(outputs_of(layer, inputs), expected) and getattr(layer, "global_scale", None) is None:
                named += 1
            else:
                layer.__class__ = own
                failed.append(path)
    return named, failed


def inputs_of(layer: Any, rows: int) -> tuple[mx.array, ...]:
    """Random rows for a network whose projection this is, and if it has experts, two of them for each row."""
    size = layer.scales.shape[-1] * layer.group_size if "scales" in layer else layer.weight.shape[-1]
    types = [array.dtype for array in layer.values() if mx.issubdtype(array.dtype, mx.floating)]
    x = mx.random.normal((rows, 1, size), key=mx.random.key(rows)).astype(types[0] if types else mx.bfloat16)
    if not isinstance(layer, (SwitchLinear, QuantizedSwitchLinear)):
        return (x,)
    return x, mx.random.randint(0, layer.num_experts, (rows, 1, 2), mx.uint32, key=mx.random.key(rows))


def outputs_of(network: Any, inputs: Sequence[mx.array]) -> mx.array | None:
    """None if the network takes other arguments, or returns something else than an array."""
    try:
        outputs = network(*inputs)
        mx.eval(outputs)
    except Exception:  # a model's own code may raise anything
        return None
    return outputs if isinstance(outputs, mx.array) else None


def report(what: str, joined: int, failed: Sequence[str]) -> None:
    if joined:
        logger.debug("joined %s: %d modules", what, joined)
    if failed:
        modules = f"{len(failed)} modules, the first is {failed[-1]}"
        logger.info("%s are not joined, because a trial failed or gave other numbers: %s", what, modules)
