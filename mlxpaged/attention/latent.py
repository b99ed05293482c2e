"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over one pool of rows [latent | rotary part of the key].

mlx-lm's module has two paths. For one token it multiplies the queries by the key projection, so that all heads attend
to the latents themselves: that is how the rows of a step attend. For more tokens it expands keys and values of all
heads from the latents. With DeepSeek-V3's sizes, a query, key and head then take 320 instead of 1,088 multiplications,
but expanding a key takes 131,072 for each head. So a long prompt chunk is a call of its own on that path.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layer import PagedAttentionError, PagedLayer, StepContext
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.token_groups import Masks, TokenGroup

EXPAND_FROM, EXPAND_FROM_ON_GPU = 256, 64
"""Tokens of a chunk from which on expanding pays: 131,072 / 256 + 320 is less than 1,088. On a GPU a chunk
of 32 tokens or more takes MLX's attention over a copy of the rows, for whose size it has no fused kernel, so expanding
pays earlier there; an estimate that no Mac has measured."""

MAX_SCORES = 2**28
"""Most scores of one call, which mlx-lm's module keeps: 0.5 GB in 16-bit types. Longer chunks are cut."""


class LatentGroup(TokenGroup):
    """The rows of some sequences, or a piece of a chunk, with metadata of their own."""

    def __init__(self, meta: AttentionMetadata, first: int, last: int, sequences: slice, context_len: int = 0) -> None:
        """context_len: of the piece, its tokens included; 0 for rows."""
        super().__init__(first, last, is_rows=not context_len)
        lens, contexts = meta.step.query_lens[sequences], meta.step.context_lens[sequences]
        if context_len:
            lens, contexts = [last - first], [context_len]
        self.meta = meta.part(sequences, slice(first, last), lens, contexts)
        self.mask: mx.array | None = None
        if context_len:
            self.mask = mx.arange(context_len) <= mx.arange(context_len - lens[0], context_len)[:, None]

    def select(self, array: Any, num_tokens: int) -> Any:
        """The rows of the group, as in other groups; a factor of the queries, [T, 1, 1, 1], becomes [1, 1, n, 1]
        (Mistral 4)."""
        part = super().select(array, num_tokens)
        is_factor = isinstance(part, mx.array) and part is not array and part.ndim == 4 and not self.is_rows
        return part.transpose(0, 2, 1, 3) if is_factor else part


def make_latent_groups(meta: AttentionMetadata, num_heads: int, expand_from: int) -> list[LatentGroup]:
    """The calls of a step, in the order of its tokens. Empty if it has no chunk that is worth expanding."""
    groups: list[LatentGroup] = []
    first_sequence = first_row = token = 0
    for i, (length, context_len) in enumerate(zip(meta.step.query_lens, meta.step.context_lens, strict=True)):
        piece = min(length, MAX_SCORES // (num_heads * context_len))
        if piece >= expand_from:
            if token > first_row:
                groups.append(LatentGroup(meta, first_row, token, slice(first_sequence, i)))
            for first in range(token, token + length, piece):
                last = min(first + piece, token + length)
                groups.append(LatentGroup(meta, first, last, slice(i, i + 1), context_len - (token + length - last)))
            first_sequence, first_row = i + 1, token + length
        token += length
    if groups and token > first_row:
        groups.append(LatentGroup(meta, first_row, token, slice(first_sequence, len(meta.step.query_lens))))
    return groups


class Identity(mx.array):
    """An identity matrix. `x @ identity.swapaxes(-1, -2)` is x itself, and no operation of the step: Python first asks
    the right operand of a product, if its class extends the left one's. MLX's functions see an array like any other."""

    def swapaxes(self, axis1: int, axis2: int, *, stream: Any = None) -> Identity:
        return self

    def __rmatmul__(self, left: mx.array) -> mx.array:
        return left


class LatentLayer(PagedLayer):
    """Replaces mlx-lm's KVCache of a layer with latent attention.

    The rows of a step get the identity matrix as k_pe. So what mlx-lm's module adds to the scores as a mask,
    `scale * q_pe @ k_pe^T`, is the scaled rotary part of the queries. num_heads: query heads, for the size of pieces.
    """

    num_heads = 1
    expand_from = EXPAND_FROM_ON_GPU if mx.metal.is_available() else EXPAND_FROM

    def __init__(
        self, kv: LayerKVCache, step: StepContext, window: int | None = None, chunk: int | None = None, view: int = 0
    ) -> None:
        super().__init__(kv, step, window, chunk, view)
        # Made once: in a step it would be seven more operations of each layer.
        self._identity = Identity(mx.eye(kv.layout.key_size - kv.layout.value_size, dtype=kv.layout.dtype))
        mx.eval(self._identity)
        self._group: LatentGroup | None = None

    @property
    def _meta(self) -> AttentionMetadata:
        return super()._meta if self._group is None else self._group.meta

    @property
    def num_tokens(self) -> int:
        return self._step.meta(self.view).num_tokens

    @property
    def groups(self) -> list[LatentGroup]:
        """The calls of the running step; empty if one call takes all its rows."""
        meta = self._step.meta(self.view)
        key = ("latent groups", self.num_heads, self.expand_from)
        if key not in meta.derived:
            meta.derived[key] = make_latent_groups(meta, self.num_heads, self.expand_from)
        groups: list[LatentGroup] = meta.derived[key]
        return groups

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        super().make_mask(*args, **kwargs)
        return Masks([group.mask for group in self.groups]) if self.groups else None

    def load(self, index: int) -> LatentLayer | ExpandedChunk:
        """What the module gets as its cache for a group."""
        self._group = self.groups[index]
        return self if self._group.is_rows else ExpandedChunk(self.kv, self._step, self._group)

    def store(self, _index: int) -> None:
        self._group = None

    def discard(self) -> None:
        """Forget the group: its call may have raised."""
        self._group = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write latents [T, 1, 1, R] and rotary parts [T, 1, 1, P]. Returns the latents and the identity [P, P]."""
        self.kv.write(keys.squeeze(2), values.squeeze(2), self._meta)
        self._step.wrote(keys, values, self)
        return keys, self._identity

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None, softcap: float | None = None
    ) -> mx.array:
        """queries: [T, H, 1, R]; mask: the scaled rotary part of the queries, [T, H, 1, P]. Returns [T, H, 1, R]."""
        if not isinstance(mask, mx.array) or sinks is not None or softcap is not None:
            raise PagedAttentionError("the model's latent attention is called in an unknown way")
        return self._attend(queries, scale, q_pe=mask.squeeze(2).astype(self.kv.layout.dtype))


class ExpandedChunk:
    """Replaces mlx-lm's KVCache for one piece of a prompt chunk, [1, n] tokens."""

    def __init__(self, kv: LayerKVCache, step: StepContext, group: LatentGroup) -> None:
        self._kv, self._step, self._group = kv, step, group
        [query_len], [context_len] = group.meta.step.query_lens, group.meta.step.context_lens
        self.offset = context_len - query_len

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write latents [1, 1, n, R] and rotary parts [1, 1, n, P]. Returns those of the whole context, [1, 1, K, R]
        and [1, 1, K, P]."""
        latents, rotary = (each.squeeze(0).swapaxes(0, 1) for each in (keys, values))  # [0] would be a gather, a copy
        self._kv.write(latents, rotary, self._group.meta)
        self._step.count(1)
        context = self._kv.read_context(self._group.meta)[None]
        return context[..., : keys.shape[-1]], context[..., keys.shape[-1] :]
