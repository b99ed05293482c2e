"""What `mlxpaged serve` prints when the model is loaded."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxpaged.engine.async_engine import AsyncEngine
    from mlxpaged.engine.info import EngineInfo
    from mlxpaged.registry.registry import Registry


def banner(registry: Registry, url: str, needs_key: bool, ollama_url: str | None = None) -> str:
    """The registry's default model must be loaded."""
    from mlxpaged import __version__
    from mlxpaged.engine.info import EngineInfo

    engine = registry.default.engine
    assert engine is not None
    assert engine.info is not None
    info, extra, fields = engine.info, "", dict[str, Any]()
    if adapters := [name for model in registry.models.values() for name in model.names[1:]]:
        extra += f"  adapters  {', '.join(adapters)}\n"
    for model in registry.loaded:
        if model.engine is None or model.engine.info is None or (made := model.engine.info.embedding_model) is None:
            continue
        extra += f"  embedding {made.name}: {made.dimensions} dimensions, inputs up to {made.max_tokens} tokens\n"
    if later := [model.name for model in registry.models.values() if model.engine is None]:
        extra += f"  on use    {', '.join(later)}\n"
    if isinstance(info, EngineInfo):
        facts = of_text_model(info, engine) + extra
        facts += f"  batch     up to {engine.config.max_num_seqs} sequences\n"
        path, fields = "chat/completions", {"messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    else:
        weights = megabytes(info.weight_bytes)
        facts = f"  model     {info.model}: {weights} of weights, inputs up to {info.max_model_len} tokens\n{extra}"
        path, fields = "embeddings", {"input": ["one text", "another text"]}
        if info.cross_encoder is not None:
            path, fields = "rerank", {"query": "What is red?", "documents": ["the sky", "a ripe tomato"]}
    key = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    ollama = "" if ollama_url is None else f"  ollama    {ollama_url}\n"
    return f"""
mlxpaged {__version__}
{facts}  address   {url}
{ollama}
In a browser: {page_address(url)}
Try it:
  curl {url}/v1/{path} -H 'Content-Type: application/json'{key} \\
    -d '{json.dumps({"model": info.model} | fields)}'
"""


def of_text_model(info: EngineInfo, engine: AsyncEngine) -> str:
    """Lines about a model that generates text, and its memory."""
    from mlxpaged.models.features import Feature
    from mlxpaged.parts.disk.disk_tier import NO_TIER

    config = engine.config
    weights, pool = megabytes(info.weight_bytes), megabytes(info.start_kv_cache_bytes)
    if info.start_kv_cache_bytes < info.kv_cache_bytes:
        pool += f", grows to {megabytes(info.kv_cache_bytes)}"
    pool += f", {info.kv_cache_dtype}" * (info.kv_cache_dtype != "auto")
    extra, slots = f"  {computed(info)}\n", info.num_swap_slots
    if "model" in info.drafters or "mtp" in info.drafters:
        extra += f"  drafts    by {config.draft_model or 'the draft head of the model'}\n"
    elif config.speculative == "mtp":
        extra += f"  slower    there is no draft head: {info.missing[Feature.DRAFT_HEAD]}\n"
    if reason := info.missing[Feature.KV_CACHE_DTYPE]:
        extra += f"  larger    the KV cache is not {config.kv_cache_dtype}: {reason}\n"
    if slots:
        place, size = config.swap_dir or "memory", megabytes(slots * info.kv_cache_bytes // info.num_blocks)
        tokens = slots * info.block_size // len(info.groups)
        extra += f"  swap      {size} in {place}: {slots} blocks, {tokens} tokens\n"
    if config.prefix_cache_dir is None:
        extra += "  on disk   no prefixes; with --prefix-cache-dir DIR, they are there after a restart\n"
    elif engine.stats is not None:
        store, place = engine.stats.of(NO_TIER).store, config.prefix_cache_dir
        off = info.missing[Feature.DISK_PREFIXES]
        kept = f"{megabytes(store.size)} of prefixes in {place}, up to {megabytes(store.max_size)}"
        extra += f"  on disk   {f'no prefixes: {off}' if off else kept}\n"
    if info.kernels_off is not None:
        extra += f"  slower    the Metal kernels are off: {info.kernels_off}\n"
    if slow := info.num_layers_per_sequence:
        extra += f"  slower    {slow} of {info.num_layers} layers run once per sequence, without a prefix cache\n"
    if not info.groups.keeps_all:
        windows = Counter(window for window in info.groups.windows if window is not None)
        counts = ", ".join(f"{count} with a window of {window} tokens" for window, count in windows.items())
        extra += f"  groups    {len(info.groups)} cache groups: {counts}\n"
    if (states := info.states).bytes_per_state:
        one, total = megabytes(states.bytes_per_state), megabytes(states.nbytes)
        extra += f"  states    {one} for each sequence: {states.max_num_seqs} sequences and "
        extra += f"{states.num_checkpoints} checkpoints, {total} reserved\n"
    if (cluster := info.cluster) is not None:
        extra += f"  ranks     {', '.join(cluster.ranks)}, by {cluster.backend}\n"
        if (link := cluster.link) is not None:
            token, step, sums = 1e3 * link.token_seconds, 1e3 * link.step_seconds, 2 * info.num_layers
            extra += f"  link      {megabytes(link.token_bytes)} of one token are added up in {token:.2f} ms, and "
            extra += f"{megabytes(link.step_bytes)} of a full step in {step:.1f} ms\n"
            extra += f"            {sums} sums take {sums * token:.1f} ms of every token's time\n"
    return f"""  model     {info.model}: {info.num_layers} layers, {weights} of weights, context {info.longest}
  KV cache  {pool}: up to {info.num_blocks} blocks of {info.block_size} tokens, {info.backend} attention
{extra}"""


def computed(info: EngineInfo) -> str:
    """What the model is computed in, and what a CPU made of its weights."""
    storage = info.stored.storage.value
    if storage == "dense":
        sizes = f"{megabytes(info.weight_bytes)} instead of {megabytes(info.checkpoint_bytes)}"
        return f"computed  in {info.dtype}: the weights take {sizes} (--cpu-dtype)"
    if storage == "scales":
        return f"computed  in {info.dtype}, with quantized weights: {info.stored.reason}"
    if info.stored.reason:
        return f"slower    computed in {info.dtype}: {info.stored.reason}"
    return f"computed  in {info.dtype}"


def page_address(url: str) -> str:
    """The address of the page for a browser on this machine, which has no machine named 0.0.0.0."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:") + "/"


def megabytes(size: int) -> str:
    if 0 < size < 1e5:
        return f"{size / 1e3:.1f} KB"
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
