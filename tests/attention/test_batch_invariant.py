"""In a tile of a batch-invariant engine, a row's attention is the same, to the bit, beside any other rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata, HostStep, step_of
from tests.attention.scenes import TOLERANCE, Extras, attend, fill_blocks, reference_attention, write
from tests.metal_on_cpu import Interpreter
from tests.support import every

TILE, BLOCK, HEADS = 8, 32, 4
CONTEXTS = (1, 64, 65, 128, 129, 33, 300, 5, 400)
"""Some in one range of keys, some in several, on both backends."""

SCALE = 0.2
CASES = {
    "plain": (KVLayout(2, 16, 16, mx.float32, BLOCK), Extras()),
    "half": (KVLayout(2, 16, 16, mx.float16, BLOCK), Extras()),
    "window": (KVLayout(2, 16, 16, mx.float32, BLOCK), Extras(window=70, sinks=True)),
    "chunk": (KVLayout(1, 16, 12, mx.float32, BLOCK), Extras(chunk=130, softcap=2.0)),
    "latent": (KVLayout(1, 24, 16, mx.float32, BLOCK, latent=True), Extras()),
}


@pytest.fixture(params=["gather", "metal"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "gather" or mx.metal.is_available():
        yield request.param
        return
    with Interpreter().installed():
        yield request.param


class Rows:
    """A sequence of each context, whose last token attends. Free slots are NaN."""

    def __init__(self, layout: KVLayout, extras: Extras, backend: str) -> None:
        rng = np.random.default_rng(1)
        counts = [-(-context // BLOCK) for context in CONTEXTS]
        blocks = rng.permutation(sum(counts))
        self.tables = np.full((len(CONTEXTS), max(counts)), -1, np.int32)
        for i, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
            self.tables[i, :count] = blocks[end - count : end]
        self.kv = LayerKVCache.from_layout(sum(counts), layout, backend)
        fill_blocks(self.kv, range(sum(counts)))
        self.keys, self.values = [], []
        self.queries = self._random(rng, len(CONTEXTS), HEADS, layout.key_size)
        self.options = {"scale": SCALE, "window": extras.window, "chunk": extras.chunk, "softcap": extras.softcap}
        self.sinks = rng.normal(size=HEADS).astype(np.float32) if extras.sinks else None
        for table, context in zip(self.tables, CONTEXTS, strict=True):
            keys = self._random(rng, context, layout.num_kv_heads, layout.key_size)
            values = (
                keys[..., :16] if layout.latent else self._random(rng, context, layout.num_kv_heads, layout.value_size)
            )
            meta = AttentionMetadata.build([context], [context], [[block for block in table.tolist() if block >= 0]])
            write(self.kv, keys, values, meta)
            self.keys.append(keys)
            self.values.append(values)

    def _random(self, rng: np.random.Generator, *shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32)).astype(self.kv.layout.dtype)

    def attend(self, chosen: list[int]) -> np.ndarray:
        """Of a tile that begins with these rows. The last one is repeated."""
        repeats = TILE - len(chosen)
        tile = chosen + chosen[-1:] * repeats
        contexts = [CONTEXTS[i] for i in tile]
        planner = self.kv.planner(HEADS, self.options["window"], self.options["chunk"])
        planners = [] if planner is None else [planner]
        step = HostStep.build(
            replace(step_of([1] * TILE, contexts, self.tables[None, tile]), num_repeats=repeats),
            BLOCK,
            planners=planners,
        )
        [meta], _ = step.on_device(step.upload())
        sinks = None if self.sinks is None else mx.array(self.sinks)
        out = attend(self.kv, self.queries[mx.array(tile)], meta, sinks=sinks, **self.options)
        return np.array(out.astype(mx.float32))


@pytest.mark.parametrize("case", every(2, CASES))
def test_a_row_has_the_same_attention_alone_and_in_any_tile(case: str, backend: str) -> None:
    layout, extras = CASES[case]
    rows = Rows(layout, extras, backend)
    alone = [rows.attend([i])[0] for i in range(len(CONTEXTS))]
    for i, found in enumerate(alone):
        queries, keys, values = (
            np.array(each.astype(mx.float32), np.float64)
            for each in (rows.queries[i : i + 1], rows.keys[i], rows.values[i])
        )
        expected = reference_attention(queries, keys, values, SCALE, extras, rows.sinks)
        np.testing.assert_allclose(found, expected[0], atol=TOLERANCE[layout.dtype])
    rng = np.random.default_rng(2)
    for _ in range(3):
        chosen = rng.choice(len(CONTEXTS), rng.integers(2, TILE + 1), replace=False).tolist()
        found = rows.attend(chosen)
        for place, i in enumerate([*chosen, *chosen[-1:] * (TILE - len(chosen))]):
            assert found[place].tobytes() == alone[i].tobytes(), (chosen, place)
