"""The probe: runs a prompt through a loaded model to check that paged attention reproduces its logits.

Architectures differ in how they use a cache, and a new one may bypass it. So each model is run once with mlx-lm's
caches (reference.py) and once with ours: in chunks, in ragged batches, from shared blocks on, decoding, and past its
windows. A model whose logits differ is refused.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from mlxpaged.attention import precision
from mlxpaged.attention.latent import LatentLayer
from mlxpaged.attention.layer import PagedLayer
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.qkv import Qkv, QkvKind
from mlxpaged.core.step import Row
from mlxpaged.models.adapters.step_adapters import StepAdapters
from mlxpaged.models.caches import ModelCaches
from mlxpaged.models.checks.probe_steps import (
    BLOCK_SIZE,
    HEAD_POSITIONS,
    HEAD_ROWS,
    HEAD_STEP,
    OTHER,
    SHARING,
    block_tables,
    steps,
)
from mlxpaged.models.checks.reference import Reference, differences
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.head import RowSelection
from mlxpaged.models.layers import KV, LayerSpec, is_per_sequence
from mlxpaged.models.turns import Turns
from mlxpaged.progress import Stage

logger = logging.getLogger(__name__)

TIMES_ROUNDING = 3.0
"""Logits may differ so many times as much as by rounding alone."""
FLOAT32_RANGE, HALF_RANGE = (1e-3, 1e-2), (1e-2, 0.5)
"""The least and the greatest difference that is allowed, whatever the rounding is."""
REACH = 2
"""The first rows after a restored state are judged apart: the state of a short convolution reaches no further."""
OTHER_LOGITS = 0.5
"""Logits that differ more are those of another layer."""
OTHER_SEQUENCE = 1.0
"""Logits that differ more are those of another sequence. Independent ones differ by the square root of 2."""


class ProbedLayer(PagedLayer):
    """Records how the model calls its attention."""

    num_query_heads = 0
    sinks = False
    softcap = False
    qkv: QkvKind | None = None

    def write_rows(self, rows: mx.array, qkv: Qkv) -> mx.array:
        self.qkv = qkv.kind
        return super().write_rows(rows, qkv)

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None, softcap: float | None = None
    ) -> mx.array:
        self.num_query_heads = int(queries.shape[1])
        self.sinks = sinks is not None
        self.softcap = softcap is not None
        return super().attend(queries, scale, mask, sinks, softcap)


class ProbedLatentLayer(ProbedLayer, LatentLayer):
    """Records how the model calls its latent attention. Short chunks are expanded too, so that both paths run."""

    expand_from = 7


class PagedRun:
    """Runs steps of the probe's sequences on paged caches. adapter: of the prompt's sequences; the others have none."""

    def __init__(
        self,
        model: Module,
        specs: Sequence[LayerSpec],
        reference: Reference,
        adapters: StepAdapters | None = None,
        adapter: str | None = None,
    ) -> None:
        self._model, self._tokens = model, reference.tokens
        self._adapters, self._adapter = adapters or StepAdapters(), adapter
        self._tables = block_tables(len(reference.tokens))
        num_blocks = 1 + max(map(max, self._tables.values()))
        self.caches = ModelCaches(specs, num_blocks, BLOCK_SIZE, layer_types=(ProbedLayer, ProbedLatentLayer))

    def __call__(self, step: Sequence[Row], logits_rows: int | None = None) -> mx.array:
        """The logits of all rows of a step, [T, vocabulary]; [logits_rows, vocabulary] if the head selects rows. Raises
        UnsupportedModelError if the model does not run, or returns another number of rows."""
        lens = [row.num_tokens for row in step]
        contexts = [row.context_len for row in step]
        meta = AttentionMetadata.build(lens, contexts, [self._tables[row.sequence_id] for row in step], BLOCK_SIZE)
        ids = [token for row in step for token in self._part(row)]
        index = self._adapters.begin([None if row.sequence_id == OTHER else self._adapter for row in step], lens)
        try:
            if index is not None:
                self._adapters.upload(mx.array(index))
            logits = self.caches.run(self._model, mx.array(ids), [meta], step, self._tables)
            mx.eval(logits, self.caches.arrays)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(f"it does not run on paged caches: {type(error).__name__}: {error}") from error
        finally:
            self._adapters.end()
        wanted = len(ids) if logits_rows is None else logits_rows
        if logits.shape[0] != wanted:
            raise UnsupportedModelError(f"its output head returns {logits.shape[0]} rows of logits, not {wanted}")
        return logits[:, 0]

    def _part(self, row: Row) -> list[int]:
        """The row's tokens. Other tokens are the prompt backwards."""
        tokens = self._tokens[::-1] if row.sequence_id == OTHER else self._tokens
        return [tokens[position] for position in row.token_ids]


def probe(
    model: Module,
    specs: Sequence[LayerSpec],
    reference: Reference,
    turns: Turns | None = None,
    adapters: StepAdapters | None = None,
    adapter: str | None = None,
) -> list[LayerSpec]:
    """Run the reference's prompt in ragged steps. Returns the specs, completed with what this showed about the layers'
    attention. adapter: with which the reference was computed. Raises UnsupportedModelError if the logits differ."""
    run = PagedRun(model, specs, reference, adapters, adapter)
    per_sequence = is_per_sequence(specs)
    planned = steps(len(reference.tokens), shares_blocks=not per_sequence)
    kinds: dict[str, list[float]] = defaultdict(list)
    turns = turns or Turns()
    turns.begin(Stage.CHECKING_MODEL if adapter is None else Stage.CHECKING_ADAPTERS, len(planned))
    for step in planned:
        for kind, values in differences_of(step, run(step), reference):
            kinds[kind] += values
        turns.step()
    calls, wanted = run.caches.step.attention_calls, len(planned) * reference.attention_calls
    if calls < wanted and not per_sequence:  # a latent layer may attend several times in a step
        raise UnsupportedModelError(f"only {calls} of {wanted} attention calls went through the paged KV cache")
    compare(model, reference, kinds, per_sequence)
    layers = iter(run.caches.layers)
    return [completed(spec, layers) for spec in specs]


def differences_of(
    step: Sequence[Row],
    logits: mx.array,
    reference: Reference,
    distance: Callable[[mx.array, mx.array], mx.array] = differences,
) -> Iterator[tuple[str, list[float]]]:
    """What the sequences of a step compute, and how far each row of logits is from the reference."""
    first = 0
    for row in step:
        positions = [i for i in range(row.start, row.start + row.num_tokens) if i in reference.positions]
        rows = [first + position - row.start for position in positions]
        first += row.num_tokens
        if row.sequence_id == OTHER:
            continue
        values: Any = distance(logits[mx.array(rows)], reference.at(positions)).tolist()
        if row.num_tokens == 1:
            yield "decoding in a batch" if len(step) > 1 else "decoding alone", values
        elif row.start == 0:
            yield "in a first chunk", values
        else:
            kind = "in the chunk after a prefix hit" if row.sequence_id == SHARING else "in a second chunk"
            yield f"{kind}, at its start", values[:REACH]
            yield kind, values[REACH:]


def compare(model: Module, reference: Reference, kinds: dict[str, list[float]], per_sequence: bool) -> None:
    """Raises UnsupportedModelError if the differences of a kind are more than rounding.

    In float32, each row counts. In half types, a router of experts that chooses another one because of rounding moves
    single rows far. So the lower quartile of a kind counts: what is computed wrongly differs in most of its rows. What
    runs per_sequence is computed by mlx-lm, which may take other ways for prompts and decoding (DeepSeek V3.2). In half
    types, it can only be checked that sequences are not mixed up. Float32 counts as a half type if MLX rounds it to
    TF32, which is no more exact than float16.
    """
    is_float32 = weights_dtype(model) == mx.float32 and not precision.rounds_float32()
    least, most = FLOAT32_RANGE if is_float32 else HALF_RANGE
    allowed = min(max(least, TIMES_ROUNDING * reference.rounding), most)
    if per_sequence and not is_float32:
        allowed = OTHER_SEQUENCE
    for kind, values in kinds.items():
        difference = max(values) if is_float32 else sorted(values)[(len(values) - 1) // 4]
        logger.debug("%s: logits differ by %.2g, allowed are %.2g", kind, difference, allowed)
        if not difference <= allowed:
            raise UnsupportedModelError(
                f"the paged batch does not reproduce its logits: they differ by {difference:.2%} {kind}, and rounding "
                f"explains {allowed:.2%}"
            )


def selects_rows(model: Module, specs: Sequence[LayerSpec], reference: Reference, selection: RowSelection) -> bool:
    """Whether the model computes the logits of the selected rows, and only those."""
    selection.rows = mx.array(HEAD_ROWS)
    try:
        logits = PagedRun(model, specs, reference)(HEAD_STEP, len(HEAD_ROWS))
    except UnsupportedModelError:
        return False
    finally:
        selection.rows = None
    values: Any = differences(logits[1:], reference.at(HEAD_POSITIONS)).tolist()
    return bool(median(values) <= OTHER_LOGITS)


def weights_dtype(model: Module) -> mx.Dtype:
    """The type of most floating-point weights' computation: half if any weight is."""
    weights: Any = tree_flatten(model.parameters())
    dtypes = {array.dtype for _, array in weights if mx.issubdtype(array.dtype, mx.floating)}
    return mx.float32 if dtypes == {mx.float32} else mx.float16


def completed(spec: LayerSpec, layers: Iterator[PagedLayer]) -> LayerSpec:
    if isinstance(spec, tuple):
        return tuple(completed(each, layers) for each in spec)
    if not isinstance(spec, KV):
        return spec
    probed: Any = next(layers)
    found = {name: getattr(probed, name) for name in ("num_query_heads", "sinks", "softcap", "qkv")}
    return replace(spec, **found)
