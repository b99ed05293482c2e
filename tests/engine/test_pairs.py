"""Every two optional parts of an engine work together, or are refused: the table in pairs.py, each of it once.

A part either changes answers (images, adapters, a quantized cache, a grammar, layers with states) or must not. The
answers of a pair are those of the parts that change them, each request alone, without a prefix cache.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.core.engine.constraint import Constraint
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.layers import bytes_per_token, state_bytes
from mlxpaged.models.loader import LoadOptions, ServedModel, load_model
from mlxpaged.parts.disk.disk_tier import NO_TIER, DiskTier
from mlxpaged.parts.drafting.draft_stats import NO_DRAFTS
from mlxpaged.parts.drafting.drafting import Drafting
from mlxpaged.parts.images.image_encoder import NO_IMAGES
from mlxpaged.parts.invariant.tiled_runner import TiledRunner
from tests.engine.helpers import part_of
from tests.engine.pairs import PAGE, PAIRS, PARTS, REFUSED, written
from tests.engine.seeing import image, shown, with_tower
from tests.engine.test_drafting import as_many, use_oracle
from tests.models.architectures import QWEN3_5, nested
from tests.models.draft_heads import make_drafting
from tests.support import make_adapter, poison_new_blocks

pytestmark = pytest.mark.usefixtures("known_costs")

NUM_REQUESTS, NUM_TOKENS = 6, 12
WORDS = Constraint("regex", "([a-z]{3} )+")

CHANGE_ANSWERS = {"images", "recurrent", "int8", "adapters", "grammar", "invariant"}
"""Parts that the reference has too. A batch-invariant engine rounds otherwise; its tokens may differ in a tie."""

OPTIONS: dict[str, dict[str, Any]] = {
    "text drafts": {"speculative": "ngram"},
    "draft head": {"speculative": "mtp"},
    "invariant": {"batch_invariant": True},
}


@dataclass(frozen=True)
class Models:
    """The model with attention only, and the one with recurrent layers, both with a draft head, and an adapter each."""

    directory: Path

    def load(self, parts: Iterable[str]) -> ServedModel:
        names = set(parts)
        path = self.directory / ("recurrent" if "recurrent" in names else "dense")
        adapters = [AdapterPath("red", path / "red")] if "adapters" in names else []
        dtype = "int8" if "int8" in names else "auto"
        options = LoadOptions(adapters=adapters, kv_cache_dtype=dtype, drafts="draft head" in names)
        served = load_model(str(path), options)
        assert served.kv_cache_dtype == dtype
        return with_tower(served)[0] if "images" in names else served


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    directory = tmp_path_factory.mktemp("pairs")
    text = nested(model_type="qwen3_5_text", **QWEN3_5 | {"head_dim": 64})
    for name, kind, config in (("dense", "glm4_moe", {"head_dim": 64}), ("recurrent", "qwen3_5", text)):
        path = make_drafting(directory / name, kind, **config).path
        make_adapter(path, path / "red", 1)
    return Models(directory)


def requests(parts: Iterable[str]) -> list[Request]:
    """Half of them have what the parts say of requests. All have one prefix, which is long enough to be stored."""
    names, made = set(parts), []
    prefix = random.Random(1).choices(range(5, 200), k=70)
    for number in range(NUM_REQUESTS):
        own, has = [*range(20 + number, 30 + number)], number % 2 == 0
        tokens, images = [*prefix, *own], ()
        if "images" in names and has:
            tokens, images = shown(prefix, image(number, 32, 16), own)
        params = SamplingParams(
            temperature=0.0,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            constraint=WORDS if "grammar" in names and has else None,
        )
        adapter = "red" if "adapters" in names and has else None
        made.append(Request(str(number), tokens, params, time.monotonic(), adapter=adapter, images=images))
    return made


def engine(served: ServedModel, parts: Iterable[str], directory: Path, blocks: int = 200, **more: Any) -> EngineCore:
    names = set(parts)
    block = 8 * bytes_per_token(served.layers)
    options: dict[str, Any] = {"block_size": 8, "attention_backend": "gather", "max_step_ms": 0, "speculative": "off"}
    for name in names:
        options |= OPTIONS.get(name, {})
    if "disk" in names:
        options["prefix_cache_dir"] = directory
    if "swap" in names:
        options["swap_space_bytes"] = 300 * block + NUM_REQUESTS * 4 * state_bytes(served.layers)
    config = EngineConfig(served.name, kv_cache_bytes=blocks * block, **(options | more))
    core = build_engine(config, served)
    poison_new_blocks(core)
    return core


def answers(core: EngineCore, asked: list[Request], together: bool) -> dict[str, list[int]]:
    """The tokens of each. together: whether they run at the same time."""
    found: dict[str, list[int]] = {}
    for batch in [asked] if together else [[each] for each in asked]:
        for each in batch:
            core.add(each)
        while core.has_work():
            for output in core.step():
                assert output.error is None, output.error
                found.setdefault(output.request_id, []).extend(output.token_ids)
    assert core.scheduler.pool.usage().used == 0
    return found


USED: dict[str, Callable[[EngineCore], bool]] = {
    "images": lambda core: core.stats().of(NO_IMAGES).encoded_total > 0,
    "text drafts": lambda core: core.stats().of(NO_DRAFTS).accepted_total > 0,
    "draft head": lambda core: core.stats().of(NO_DRAFTS).drafted_total > 0,
    "recurrent": lambda core: core.runner.is_recurrent,
    "disk": lambda core: core.stats().of(NO_TIER).blocks_loaded_total > 0,
    "int8": lambda core: core.served.kv_cache_dtype == "int8",
    "adapters": lambda core: "red" in core.served.adapters.names,
    "invariant": lambda core: isinstance(core.runner, TiledRunner),
    "swap": lambda core: core.stats().scheduler.blocks_swapped_in_total > 0,
    "grammar": lambda core: core.grammars is not None,
}


def draft_all(core: EngineCore, parts: Iterable[str], known: dict[str, list[int]]) -> None:
    """Each draft is verified, whatever it costs. Those from the text are mostly right."""
    if "text drafts" in parts:
        use_oracle(core, known)
    elif "draft head" in parts:
        part_of(core, Drafting).budget.lengths = as_many


@pytest.mark.parametrize("pair", PAIRS, ids=" with ".join)
def test_two_parts_work_together(pair: tuple[str, str], models: Models, tmp_path: Path) -> None:
    asked, served = requests(pair), models.load(pair)
    alone = [part for part in pair if part in CHANGE_ANSWERS]
    reference = engine(models.load(alone), alone, tmp_path, prefix_caching=False)
    expected = answers(reference, asked, together=False)
    if "grammar" in pair:
        for each in asked[::2]:
            text = served.tokenizer.reader.decode(expected[each.request_id])
            assert re.fullmatch("[a-z ]+", text)
    blocks = 18 if "swap" in pair else 200
    core = engine(served, pair, tmp_path / "disk", blocks)
    draft_all(core, pair, expected)
    assert answers(core, asked, together=True) == expected
    used = {part for part in pair if USED[part](core)}
    if "disk" in pair:
        assert answers(core, asked, together=True) == expected
        core.abort_all("end")
        core.keep_prefixes()
        core.close()
        core = engine(served, pair, tmp_path / "disk", blocks)
        draft_all(core, pair, expected)
        part_of(core, DiskTier).share.store.flush()
        assert answers(core, asked, together=True) == expected
        used |= {part for part in pair if USED[part](core)}
    core.close()
    assert used == set(pair)


def test_what_is_refused_is_refused(models: Models, tmp_path: Path) -> None:
    assert set(REFUSED) == {("draft head", "invariant"), ("recurrent", "invariant")}
    config = EngineConfig(speculative="auto", batch_invariant=True)
    assert not config.loads_draft_head
    with pytest.raises(UnsupportedModelError, match="recurrent layers are not batch-invariant"):
        engine(models.load(["recurrent"]), ["invariant"], tmp_path)


def test_the_page_has_the_table() -> None:
    assert len(PAIRS) + len(REFUSED) == len(PARTS) * (len(PARTS) - 1) // 2
    page = PAGE.read_text()
    assert written(page) == page, "run python -m tests.engine.pairs"
