"""Runs one step through the model: uploads its metadata, and makes the logits that its rows want."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlxpaged.attention.kv_cache import resolve_backend
from mlxpaged.attention.layout import AttentionShape
from mlxpaged.attention.metadata import HostStep, IntArray
from mlxpaged.attention.tuning import Tuning
from mlxpaged.core.engine.step_input import NO_TOKENS, SampledTokens, StepInput, token_vectors
from mlxpaged.core.engine.swap_space import Bytes, SwapSpace, copy_in_pieces, read_bytes, split_columns, write_bytes
from mlxpaged.core.step import PENDING, BlockMoves, Step
from mlxpaged.cpu.streams import synchronize
from mlxpaged.models.cache_groups import CacheLayout
from mlxpaged.models.caches import ModelCaches
from mlxpaged.models.device_memory import unused_memory
from mlxpaged.models.loader import ServedModel

logger = logging.getLogger(__name__)

REBUILD_PAUSES = (0.05, 0.2, 1.0)
"""Seconds before the pools are rebuilt again, if that failed."""


TOO_LONG = ("gpu timeout", "callbackerrortimeout", "impactinginteractivity", "impacting interactivity")
"""Parts of Metal's messages, in lower case, of a command buffer that the system ended because it took too long: for
itself, or for the display."""


class DeviceError(RuntimeError):
    """The device failed to run this step or an earlier one. The contents of the KV pools are lost."""

    @property
    def is_timeout(self) -> bool:
        """Whether the step took the device too long."""
        return any(text in str(self).lower() for text in TOO_LONG)


Outputs = list[mx.array]
"""The logits of a step, and if what drafts needs them, the hidden states of its tokens."""

Build = Callable[[HostStep, mx.array, mx.array | None], Outputs]
"""Makes the outputs of a step from its upload and from the tokens of the step in flight."""


class LastPass(NamedTuple):
    """What further passes over the tokens of a step need. vector: the upload of the step. hidden[T, 1, D]: the states
    of its tokens."""

    step: HostStep
    vector: mx.array
    hidden: mx.array


class NoGraphs:
    """Builds every step. A subclass replays some (parts/graphs/step_graphs.py). build: the step without a graph.
    num_traced: steps that were traced and compiled so far."""

    enabled = False
    num_traced = 0

    def __init__(self, build: Build, caches: ModelCaches) -> None:
        self._build = build
        self._caches = caches

    def run(
        self, step: HostStep, vector: mx.array, sampled: mx.array | None, adapters: tuple[str | None, ...] = (None,)
    ) -> Outputs:
        """The outputs of a step. vector: its upload. sampled: tokens of the step in flight. adapters: whose layers are
        in the graph."""
        return self._build(step, vector, sampled)

    def stop(self) -> None:
        """No step is replayed from now on."""
        self.enabled = False

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Every step builds its graph while the context lasts."""
        enabled, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = enabled


class ModelRunner:
    """Owns the KV pools and runs the model. It belongs to the thread that made it, as MLX's streams do: calls of
    `forward` from others are refused.

    tunings: by the shape of a layer; shapes that are missing have the default tuning. layout: the cache groups of the
    model's layers; by default one. inputs: what some steps have beside tokens. graphs: of decode steps, which are
    replayed. unwire: is called before pools are freed. is_shared: whether runners of other processes
    compute the model together with this one (shared_runner.py), so that all must be in the same state at each call.
    least_top: of how many of the most likely tokens prompt log-probabilities are computed, also if fewer are asked for.
    """

    is_shared = False
    least_top = 0

    def __init__(
        self,
        served: ServedModel,
        num_blocks: int,
        block_size: int,
        backend: str,
        tunings: Mapping[AttentionShape, Tuning] | None = None,
        num_swap_slots: int = 0,
        swap_dir: Path | None = None,
        layout: CacheLayout | None = None,
        inputs: ListOf[StepInput] = (),
        graphs: type[NoGraphs] = NoGraphs,
        unwire: Callable[[], object] = lambda: None,
    ) -> None:
        self._model, self._rows, self._adapters = served.model, served.rows, served.adapters.step
        self._inputs = inputs
        self._block_size = block_size
        sizes = served.layers, num_blocks, block_size
        self._unwire = unwire
        self.caches = ModelCaches(*sizes, backend, tunings, layout=layout, num_drafting=served.num_drafting)
        self.layers = self.caches.layers
        self.pools = self.caches.pools
        self._states = self.caches.states
        self.recurrent = self.caches.recurrent
        self.rollback = self.caches.rollback
        self.backend = resolve_backend(backend)
        self.swap = SwapSpace(self.pools, num_swap_slots, swap_dir)
        self.thread_id = threading.get_ident()
        self.model_calls = 0
        self.last_pass: LastPass | None = None
        self.graphs = graphs(self._outputs, self.caches)
        self._last_step: HostStep | None = None
        mx.eval(self.caches.arrays)

    @property
    def attention_calls(self) -> int:
        return self.caches.step.attention_calls

    @property
    def num_traced(self) -> int:
        """Steps that were traced and compiled so far, to be replayed later. They take longer than others."""
        return self.graphs.num_traced

    @property
    def is_recurrent(self) -> bool:
        """Whether a step changes states, so that its forward pass cannot be repeated."""
        return bool(self._states)

    @property
    def kv_cache_bytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    def bytes_of(self, num_blocks: int) -> int:
        """Bytes of so many blocks in all pools."""
        return num_blocks * sum(pool.layout.bytes_per_block for pool in self.pools)

    @property
    def num_groups(self) -> int:
        """Groups of the block tables."""
        return 1 + max(view.group for view in self.caches.views)

    @property
    def overlaps(self) -> bool:
        """Whether a step may be launched while the previous one is in flight.

        Only the Metal backend writes its pools in place while they are read. With MLX's own operations on a GPU, the
        next write would copy a whole pool that an unfinished step still reads. On a CPU, MLX runs few operations ahead:
        launching a step takes nearly as long as the step, and the previous step's tokens would be read that much later.
        """
        return self.backend == "metal"

    def forward(
        self,
        step: Step,
        sampled: SampledTokens = NO_TOKENS,
        running: Collection[int] = (),
    ) -> mx.array:
        """Return logits [R + P, V], not yet evaluated: of the R tokens that are sampled from, or if there are none, of
        the last token, and then of the P others whose logits are wanted, both in the order of the step.

        Writes the keys and values of the step's tokens into their blocks. sampled: tokens of the step in flight, which
        replace the pending ones. running: ids of all running sequences; recurrent states of others are dropped. Token
        ids, metadata and the plan of the Metal backend go to the device in one upload. If it raises, no recurrent state
        has changed.
        """
        self.prepare(step)
        return self.run(step, sampled, running)

    def prepare(self, step: Step) -> None:
        """Check the thread, and make what the step's inputs need."""
        if threading.get_ident() != self.thread_id:
            raise RuntimeError("the model runs on the engine thread only")
        for each in self._inputs:
            if each.concerns(step):
                each.prepare(step)

    def tell(self, call: str, *arguments: Any) -> None:
        """Let the other runners of the model make the same call."""

    def agree(self, values: ListOf[int]) -> list[int]:
        """For each of the values, the least that a runner of the model has in its place."""
        return list(values)

    def tokens_in_flight(self, sampled: SampledTokens) -> mx.array | None:
        """The sampled tokens, on the device of this runner."""
        return sampled.tokens

    def run(self, step: Step, sampled: SampledTokens = NO_TOKENS, running: Collection[int] = ()) -> mx.array:
        """Does what `forward` does, by this runner."""
        rows, caches = step.rows, self.caches
        caches.roll_back(rows, self._adapters.of_rows)
        step = step.with_drafts_as_rows()
        more = token_vectors(step, sampled.sequence_ids)
        in_flight = self.tokens_in_flight(sampled) if len(more) > 2 else None
        index = self._adapters.begin([row.adapter for row in step.rows], step.query_lens)
        if index is not None:
            more.append(index)
        caches.begin(rows)
        inputs = [each for each in self._inputs if each.concerns(step)]
        try:
            for each in inputs:
                each.begin(step)
            host = self._host_step(step, more)
            vector = host.upload()
            if not self.overlaps or inputs:  # inputs would be constants of a graph
                logits, *hidden = self._outputs(host, vector, in_flight)
            else:
                logits, *hidden = self.graphs.run(host, vector, in_flight, self._adapters.active)
            self.last_pass = LastPass(host, vector, *hidden) if hidden else None
            caches.commit(running)
        finally:
            caches.end()
            self._adapters.end()
            for each in inputs:
                each.end()
        self.model_calls += 1
        return logits

    def _host_step(self, step: Step, more: ListOf[IntArray]) -> HostStep:
        """What the step uploads: the last step's with changes, while the same sequences decode."""
        layers = self.caches.views, self.caches.planners
        last, grown = self._last_step, None
        if last is not None and step.num_repeats is None:
            grown = last.grown(step, more, *layers)
        self._last_step = grown or HostStep.build(step, self._block_size, more, *layers)
        return self._last_step

    def _outputs(self, step: HostStep, vector: mx.array, sampled: mx.array | None) -> Outputs:
        """The graph of a step. vector: its upload. sampled: tokens that replace the pending ones."""
        metas, (ids, wanted_rows, *indices) = step.on_device(vector)
        if sampled is not None:
            ids = mx.where(ids == PENDING, sampled[indices.pop(0)], ids)
        if indices:
            self._adapters.upload(indices[0])
        with contextlib.nullcontext() if self._rows is None else self._rows.selecting(wanted_rows):
            logits = self.caches.forward(self._model, ids, metas)
        if len(metas[0].plans) > len(step.plans):  # the arrays of the late plan would be constants of a graph
            self.graphs.stop()
        if self._rows is None:
            return [logits[wanted_rows, -1]]
        hidden = self._rows.take_hidden()
        return [logits[:, -1]] if hidden is None else [logits[:, -1], hidden]

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """The statistics leave out the steps that run while the context lasts."""
        calls = self.model_calls, self.caches.step.attention_calls
        try:
            yield
        finally:
            self.model_calls = calls[0]
            self.caches.step.count(calls[1] - self.caches.step.attention_calls)

    def move_blocks(self, moves: BlockMoves) -> None:
        """Swap and copy blocks after the steps in flight and before the step that needs them. Raises errors of the disk
        and the device."""
        self.swap.store(moves.swap_out)
        for sequence_id, num_tokens, slots in moves.states_out:
            self.swap.store_arrays(slots, self.caches.saved(sequence_id, num_tokens, self._adapters.of_rows))
        for pool in self.pools:
            pool.copy_blocks(moves.copies)
        self.swap.load(moves.swap_in)
        for slots, sequence_id in moves.states_in:
            arrays = iter(self.swap.load_arrays(slots))
            for state in self.recurrent:
                state.restore(sequence_id, arrays)

    def read_blocks(self, blocks: ListOf[int]) -> list[mx.array]:
        """The bytes of blocks, [n, ...] for each plane of each pool, after the steps in flight."""
        arrays = read_bytes(self.pools, blocks)
        mx.async_eval(arrays)
        return arrays

    def write_blocks(self, blocks: ListOf[int], rows: Bytes) -> None:
        """Overwrite blocks, after the steps in flight. rows: [n, bytes of a block of all pools]."""
        write_bytes(self.pools, blocks, split_columns(self.pools, rows))
        if not self.overlaps:
            self.finish_step()

    def copy_blocks(self, moves: Mapping[int, int]) -> None:
        """Copy blocks, source to target, in one layer after the other. The copies are done on return. Raises
        DeviceError."""
        with device_errors():
            copy_in_pieces(self.pools, list(moves.items()))

    def resize_pool(self, index: int, num_blocks: int) -> None:
        """Give a pool another size, as `LayerKVCache.resize` does. Raises MLX's error if memory is missing."""
        self._unwire()
        self.pools[index].resize(num_blocks)

    def free_memory(self) -> int:
        """Bytes that can be taken now without another program losing any."""
        return unused_memory()

    def clear_cache(self) -> None:
        """Give back the freed buffers that MLX keeps."""
        mx.clear_cache()

    def start_step(self, *results: mx.array) -> None:
        """Let the device begin and return at once. Raises DeviceError."""
        with device_errors():
            mx.async_eval(results, self.caches.arrays)

    def finish_step(self, *results: mx.array) -> None:
        """Wait until the results are computed and the pools are written. Raises DeviceError."""
        with device_errors():
            mx.eval(results, self.caches.arrays)

    def rebuild_pools(self) -> None:
        """After a device error, wait for all running work, then make all KV pools anew. Raises DeviceError if the
        device cannot do even that: memory that was short may still be."""
        self._unwire()
        rebuild(self.caches, self.finish_step)


def rebuild(caches: ModelCaches, finish: Callable[[], None]) -> None:
    """Wait for all running work, then make all KV pools anew, some times if it fails. finish: waits for them. Raises
    DeviceError."""
    with contextlib.suppress(Exception):
        mx.synchronize()
    synchronize()
    for pause in REBUILD_PAUSES:
        caches.clear()
        try:
            finish()
        except DeviceError as error:
            logger.error("KV pools cannot be rebuilt; trying again in %g s: %s", pause, error)
            time.sleep(pause)
        else:
            return
    caches.clear()
    finish()


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Turn exceptions into DeviceError: MLX raises a device's errors at any later evaluation, as several types."""
    try:
        yield
    except Exception as error:
        raise DeviceError(f"{type(error).__name__}: {error}") from error
