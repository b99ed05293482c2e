"""Puts the KV layers of a model into cache groups, so that layers with a sliding window give back their old blocks.

A block has a fixed number of places, and each place holds one block of a layer, or of several layers with smaller
blocks (Gemma 4). A group has at most one layer, or pack of layers, for each place. Layers of different groups share the
memory of a place: a block belongs to one group at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mlxpaged.attention.metadata import TableView
from mlxpaged.models.layers import KV

MAX_UNUSED = 0.1
"""Most places of a window's groups that may be without a layer, as a share of the layers' own places. Fewer places in a
block need more groups, and each group has a block table that goes to the device in every step."""


class LayerPlace(NamedTuple):
    """place: index of the memory of its blocks. view: which blocks of it."""

    place: int
    view: TableView = TableView()


@dataclass(frozen=True)
class CacheLayout:
    """windows: of each cache group, None for all keys. places: what has the layout of each place of a block: one of the
    layers whose blocks are the largest, or as many heads of a quantized layer as take its place. layers: where each KV
    layer of the model has its blocks."""

    windows: tuple[int | None, ...]
    places: tuple[KV, ...]
    layers: tuple[LayerPlace, ...]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in a block of a group."""
        return sum(spec.kv_layout(block_size=1).bytes_per_token for spec in self.places)


def one_group(layers: Sequence[KV], window: int | None = None) -> CacheLayout:
    """Each layer has a place of its own."""
    return CacheLayout((window,), tuple(layers), tuple(map(LayerPlace, range(len(layers)))))


def cache_layout(layers: Sequence[KV], context_length: int) -> CacheLayout:
    """Group the layers by window and layout. A window that no context passes counts as none. If the memory of the
    largest layer does not consist of blocks of each other one, all are in one group and keep all their blocks."""
    kinds: dict[tuple[int | None, int], list[int]] = {}
    largest = max(layers, key=lambda spec: spec.kv_layout().bytes_per_token, default=None)
    windows = [spec.window if spec.window is not None and spec.window < context_length else None for spec in layers]
    if largest is None or len(set(windows)) == 1:
        return one_group(layers, windows[0] if windows else None)
    largest = place_for(largest, layers)
    for i, (spec, window) in enumerate(zip(layers, windows, strict=True)):
        ratio = largest.kv_layout().blocks_of(spec.kv_layout())
        if not ratio:
            return one_group(layers)
        kinds.setdefault((window, ratio), []).append(i)
    num_places = places_per_block([-(-len(members) // ratio) for (_, ratio), members in kinds.items()])
    group_windows: list[int | None] = []
    placed: dict[int, LayerPlace] = {}
    for (window, ratio), members in sorted(kinds.items(), key=lambda kind: kind[0][0] is not None):
        for index, layer in enumerate(members):
            group, rest = divmod(index, num_places * ratio)
            placed[layer] = LayerPlace(rest // ratio, TableView(len(group_windows) + group, ratio, rest % ratio))
        group_windows += [window] * -(-len(members) // (num_places * ratio))
    return CacheLayout(tuple(group_windows), (largest,) * num_places, tuple(placed[i] for i in range(len(layers))))


def place_for(largest: KV, layers: Sequence[KV]) -> KV:
    """A layer whose blocks take those of `largest` and of the quantized layers. The scales of the latter are in a plane
    that layers without quantization do not use."""
    quantized = next((spec for spec in layers if spec.quantization is not None), None)
    if quantized is None:
        return largest
    ratio = max(1, largest.kv_layout().planes[0].nbytes // quantized.kv_layout().planes[0].nbytes)
    return replace(quantized, num_kv_heads=ratio * quantized.num_kv_heads)


def places_per_block(wanted: Sequence[int]) -> int:
    """The most places of a block with which the groups of each kind leave at most MAX_UNUSED of theirs unused. wanted:
    places for all layers of each kind."""

    def wastes_little(num_places: int) -> bool:
        return all(-count % num_places <= MAX_UNUSED * count for count in wanted)

    return next(filter(wastes_little, range(max(wanted), 0, -1)))
