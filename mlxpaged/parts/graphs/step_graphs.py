"""Replays the graphs of decode steps.

Building the graph of a step in Python costs a microsecond or two for each of its hundreds of operations. A decode step
differs from an earlier one of the same signature in its inputs only: the uploaded vector, the sampled tokens, the
arrays of the KV pools, and the recurrent states. `mx.compile` keeps the graph and puts new inputs into it, in a fifth
of the time or less.

It is safe with pools that are written in place. The tokens that order reads and writes are inputs and outputs of the
graph, so the order is that of the step that was traced. What MLX simplifies and fuses are its own elementwise
operations. It never merges two kernels of `mx.fast.metal_kernel` (mlx/compile.cpp, mlx/fast_primitives.h).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxpaged.attention.metadata import HostStep
from mlxpaged.attention.pool import Memory
from mlxpaged.core.engine.model_runner import Build, NoGraphs, Outputs
from mlxpaged.models.caches import ModelCaches
from mlxpaged.models.states.rollback import CallsOfGroups, State

logger = logging.getLogger(__name__)

TRACE_AT = 4
"""Steps of one signature after which it is traced. Tracing costs about as much as four steps without a graph."""

MAX_GRAPHS = 64
"""Most signatures that are kept. The graph of a 28-layer model takes about half a megabyte."""


@dataclass
class StepGraph:
    """steps: how many steps had this signature. replay: None until it is traced. attention_calls: of one step. calls:
    those of recurrent modules for rows with drafts."""

    steps: int = 0
    replay: Callable[..., Any] | None = None
    attention_calls: int = 0
    calls: CallsOfGroups = field(default_factory=dict)


class StepGraphs(NoGraphs):
    """The graphs of the last signatures. enabled: false if a step cannot be traced; then every step is built."""

    def __init__(self, build: Build, caches: ModelCaches) -> None:
        super().__init__(build, caches)
        self._graphs: OrderedDict[Hashable, StepGraph] = OrderedDict()
        self.enabled = caches.replays

    def run(
        self, step: HostStep, vector: mx.array, sampled: mx.array | None, adapters: tuple[str | None, ...] = (None,)
    ) -> Outputs:
        caches = self._caches
        signature = step.signature if self.enabled and caches.only_decodes else None
        graph = None
        if signature is not None:
            graph = self._graph((signature, None if sampled is None else sampled.shape, adapters, caches.state_shapes))
        if graph is None or graph.steps < TRACE_AT:
            return self._build(step, vector, sampled)
        caches.check_blocks(step)
        if graph.replay is None:
            graph.replay = mx.compile(self._traced(graph, step))
            self.num_traced += 1
        try:
            states = [layer.before for layer in caches.recurrent]
            outputs, tokens, after, arguments = graph.replay(
                vector, sampled, [memory.bindings for memory in self._memories], states
            )
        except Exception:
            logger.warning("MLX cannot trace a step of this model: every step builds its graph", exc_info=True)
            self.enabled = False
        if not self.enabled:
            self._graphs.clear()
            return self._build(step, vector, sampled)
        for memory, token in zip(self._memories, tokens, strict=True):
            memory.token = token
        for layer, pending in zip(caches.recurrent, after, strict=True):
            layer.after = pending
        caches.rollback.replay(caches.step, graph.calls, arguments)
        caches.step.count(graph.attention_calls)
        result: Outputs = outputs
        return result

    @property
    def _memories(self) -> list[Memory]:
        return [pool.memory for pool in self._caches.pools]

    def _graph(self, signature: Hashable) -> StepGraph:
        graph = self._graphs.setdefault(signature, StepGraph())
        self._graphs.move_to_end(signature)
        if len(self._graphs) > MAX_GRAPHS:
            _, oldest = self._graphs.popitem(last=False)
            # It refers to `oldest`, so only the garbage collector would free it. If another thread does, MLX 0.32.1
            # keeps its graph, for the next function at the same address (ml-explore/mlx#4248).
            oldest.replay = None
        graph.steps += 1
        return graph

    def _traced(self, graph: StepGraph, step: HostStep) -> Callable[..., Any]:
        """What `mx.compile` calls once, with placeholders for its inputs."""

        def run(
            vector: mx.array, sampled: mx.array | None, bindings: list[list[mx.array]], states: list[list[State]]
        ) -> Any:
            real = [memory.bindings for memory in self._memories]
            recurrent = self._caches.recurrent
            calls = self._caches.step.attention_calls
            for memory, arrays in zip(self._memories, bindings, strict=True):
                memory.rebind(arrays)
            for layer, before in zip(recurrent, states, strict=True):
                layer.bind(before)
            try:
                outputs = self._build(step, vector, sampled)
                graph.attention_calls = self._caches.step.attention_calls - calls
                tokens, after = [memory.token for memory in self._memories], [layer.after for layer in recurrent]
                graph.calls, arguments = self._caches.rollback.traced()
                return outputs, tokens, after, arguments
            finally:
                self._caches.step.count(calls - self._caches.step.attention_calls)
                for memory, arrays in zip(self._memories, real, strict=True):
                    memory.rebind(arrays)
                for layer in recurrent:
                    layer.bind(None)
                self._caches.discard()

        return run
