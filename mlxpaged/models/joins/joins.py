"""Joins operations of a loaded model, so that a step launches fewer of them. Nothing here knows an architecture.

- The gate and up projections of a network are one product.
- Experts are told their rows, for which MLX launches a kernel in each product (expert_rows.py).
- The addition of a layer's residual and the norm after it are one kernel (joined_norms.py).

Each join is tried on random rows beside the module as it was, and undone if other numbers come out. Of modules that
compute alike, one is tried (trials.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxpaged.models.checks.probe_steps import SHORT_PROMPT
from mlxpaged.models.checks.reference import are_rounding
from mlxpaged.models.joins.expert_rows import ExpertsOfRows
from mlxpaged.models.joins.joined_linear import Join, are_of_one_kind, layers_by_name, make_joint
from mlxpaged.models.joins.joined_norms import join_norms
from mlxpaged.models.turns import Turns
from mlxpaged.progress import Stage
from mlxpaged.trials import Trials, random_rows, record_all

logger = logging.getLogger(__name__)

GATE_AND_UP = ("gate_proj", "up_proj")
GATE_AND_UP_JOINT = "joint_gate_up_proj"
"""The name of the joint layer in the module of these."""

ROWS = (1, SHORT_PROMPT)
"""Rows of the trials: for MLX's products of few rows and of many. The reference and the probe have as many, so that no
kernel is compiled for a trial alone. With two experts each, 32 are sorted by experts."""
FEW_ROWS = 2
"""Rows of the trial of a layer of experts: they are not sorted."""
CHOSEN = 2
"""Experts of each row."""


def join(model: Module, turns: Turns | None = None) -> None:
    """Join what can be joined, in place. Call it before adapters are installed. turns: of other models."""
    report("gate and up projections", *join_gate_and_up(model, turns))
    report("experts", *name_rows(model))
    report("additions and norms", *join_norms(model))


def join_gate_and_up(model: Module, turns: Turns | None = None) -> tuple[int, list[str]]:
    """Join the projections of one network at a time, so that memory never holds a second model. Returns how many
    networks are joined, and the paths of those whose trial, or that of an equal one, failed or gave other numbers."""
    turns, trials = turns or Turns(), Trials[bool]()
    joined, failed = 0, list[str]()
    networks = list(layers_by_name(model, GATE_AND_UP))
    turns.begin(Stage.CHECKING_LAYERS, len(networks))
    for path, network, layers in networks:
        is_right = join_network(network, layers, trials)
        if is_right is not None:
            joined += is_right
            failed += [] if is_right else [path]
        turns.step()
    logger.debug("%d of %d networks were tried", trials.count, len(networks))
    return joined, failed


def join_network(network: Any, layers: Sequence[Any], trials: Trials[bool]) -> bool | None:
    """Whether the network is joined now; None if its projections cannot be."""
    if not are_of_one_kind(layers):
        return None
    zeros = [zeros_for(layers[0], rows) for rows in ROWS]
    recorded = record_all(network, zeros)
    known = trials.known(recorded)
    if known is False:
        return False
    joint = make_joint(layers)
    inputs = zeros if known else [inputs_of(layers[0], rows) for rows in ROWS]
    expected = None if known else outputs_of(network, inputs)
    made = Join(network, GATE_AND_UP, GATE_AND_UP_JOINT, joint)
    if known:  # nothing is computed: this shows that both projections take their outputs
        is_right = outputs_of(network, inputs, computed=False) is not None and made.joint.is_idle
    else:
        got = outputs_of(network, inputs)
        is_right = made.joint.is_idle and are_rounding(got, expected)
        trials.note(recorded, is_right)
    if not is_right:
        made.undo()
    del joint, made
    mx.clear_cache()  # else MLX keeps the memory of the separate weights, which fits no other array
    return is_right


def name_rows(model: Module) -> tuple[int, list[str]]:
    """Returns how many layers of experts are told their rows, and the paths of those whose trial, or that of an equal
    one, failed or gave other numbers."""
    trials, named, failed = Trials[bool](), 0, list[str]()
    for path, layer in model.named_modules():
        own = type(layer)
        if own not in (SwitchLinear, QuantizedSwitchLinear):
            continue
        recorded = record_all(layer, [vectors(*zeros_for(layer, FEW_ROWS))])
        is_right = trials.known(recorded)
        if is_right is None:
            inputs = [vectors(*inputs_of(layer, FEW_ROWS))]
            expected = outputs_of(layer, inputs)
            layer.__class__ = rows_class(own)
            has_no_scale = getattr(layer, "global_scale", None) is None
            is_right = are_rounding(outputs_of(layer, inputs), expected) and has_no_scale
            trials.note(recorded, is_right)
        layer.__class__ = rows_class(own) if is_right else own
        named += is_right
        failed += [] if is_right else [path]
    return named, failed


def rows_class(own: type[Module]) -> type[Module]:
    return type(f"Rows{own.__name__}", (ExpertsOfRows, own), {})


def zeros_for(layer: Any, rows: int) -> tuple[mx.array, ...]:
    """Arrays like `inputs_of`, which are not computed."""
    shape, dtype = shape_of(layer, rows)
    x = mx.zeros(shape, dtype)
    return (x, mx.zeros((rows, 1, CHOSEN), mx.uint32)) if has_experts(layer) else (x,)


def inputs_of(layer: Any, rows: int) -> tuple[mx.array, ...]:
    """Random rows for a network whose projection this is, and if it has experts, CHOSEN of them for each row."""
    shape, dtype = shape_of(layer, rows)
    x = random_rows(shape, dtype, rows)
    if not has_experts(layer):
        return (x,)
    indices = np.random.default_rng(rows).integers(layer.num_experts, size=(rows, 1, CHOSEN), dtype=np.uint32)
    return x, mx.array(indices)


def shape_of(layer: Any, rows: int) -> tuple[tuple[int, ...], mx.Dtype]:
    """Shape and type of the inputs of a projection."""
    size = layer.scales.shape[-1] * layer.group_size if "scales" in layer else layer.weight.shape[-1]
    types = [array.dtype for array in layer.values() if mx.issubdtype(array.dtype, mx.floating)]
    return (rows, 1, size), types[0] if types else mx.bfloat16


def has_experts(layer: Any) -> bool:
    return isinstance(layer, (SwitchLinear, QuantizedSwitchLinear))


def vectors(x: mx.array, indices: mx.array) -> tuple[mx.array, ...]:
    """What a network of experts passes to the layers of these."""
    return mx.expand_dims(x, (-2, -3)), indices


def outputs_of(network: Any, inputs: Sequence[Sequence[mx.array]], computed: bool = True) -> list[mx.array] | None:
    """None if the network takes other arguments, or returns something else than an array."""
    try:
        outputs = [network(*each) for each in inputs]
        if computed:
            mx.eval(outputs)
    except Exception:  # a model's own code may raise anything
        return None
    return outputs if all(isinstance(each, mx.array) for each in outputs) else None


def report(what: str, joined: int, failed: Sequence[str]) -> None:
    if joined:
        logger.debug("joined %s: %d modules", what, joined)
    if failed:
        modules = f"{len(failed)} modules, the first is {failed[-1]}"
        logger.info("%s are not joined, because a trial failed or gave other numbers: %s", what, modules)
