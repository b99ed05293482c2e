"""The gated activation of most models, as MLX's CPU computes it fastest.

MLX's CPU takes 14 ns for an element of a sigmoid, one at a time and on one core, and 4 for a power: in an 80-million
model on two cores, a quarter of a step. A GPU has no such difference, so nothing is changed there.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import mlx.core as mx
from mlx.nn.layers.base import Module

ACTIVATION = "swiglu"

Gated = Callable[[mx.array, mx.array], mx.array]


def route_activation(model: Module) -> int:
    """On a CPU, let every module that defines a layer of `model` compute `swiglu` by powers. Returns how many do.

    Models call a module-level function, as they do for attention: other models of the same module get it too.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return 0
    names = {type(module).__module__ for _, module in model.named_modules()}
    modules = [sys.modules[name] for name in names if hasattr(sys.modules[name], ACTIVATION)]
    for module in modules:
        original = getattr(module, ACTIVATION)
        if not getattr(original, "takes_powers", False):
            setattr(module, ACTIVATION, _by_powers(original))
    return len(modules)


def _by_powers(original: Gated) -> Gated:
    def swiglu(gate: mx.array, x: mx.array) -> mx.array:
        if gate.dtype != mx.float32 or x.dtype != mx.float32:
            return original(gate, x)
        return gate / (1 + mx.power(2.0, gate * -math.log2(math.e))) * x

    swiglu.takes_powers = True  # type: ignore[attr-defined]
    return swiglu
