"""Measures at the start how much memory the largest step takes beside weights and KV pools."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from mlxpaged.attention.gather import scores_bytes
from mlxpaged.core.blocks.groups import CacheGroups
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.prompt_logits import prompt_logits_bytes
from mlxpaged.core.step import Row, Step
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.cache_groups import CacheLayout, cache_layout, one_group
from mlxpaged.models.device_memory import free_device_memory
from mlxpaged.models.layers import KV, is_per_sequence, keeps_states, state_bytes
from mlxpaged.models.loader import ServedModel
from mlxpaged.parts.drafting.acceptance import MOST_DRAFTS
from mlxpaged.parts.drafting.draft_budget import MOST_DRAFT_ROWS
from mlxpaged.parts.memory.fitting import drafting_sequences, least_step
from mlxpaged.vision.image import LARGEST
from mlxpaged.vision.tower import Vision

logger = logging.getLogger(__name__)

CPU_TOKENS = (64,)
"""Tokens of the measured step on a CPU, so that a start takes no longer: 0.4 s for a model of 82 million parameters."""

GPU_TOKENS = (256, 512)
"""Tokens of the two measured steps on a GPU: 12 TFLOP for 8 billion parameters, which are 5 to 8 s on an M1. One step
of 2,048 tokens was 33."""

CPU_SIDE = 224
"""Most pixels of a side of the measured image on a CPU."""

MEASURED_PARTS = 2


def measure_step(served: ServedModel, config: EngineConfig) -> int:
    """Bytes that a step of --max-num-batched-tokens takes at the longest context, at least `least_step`.

    Prompt chunks are run through the model, on a GPU of GPU_TOKENS, on a CPU of CPU_TOKENS tokens. Their peaks are
    extrapolated to the token budget (`extrapolated`). The longest context adds what an attention that copies its keys
    and values needs for one layer, and a GPU's step adds the scores that its attention keeps, and the logits of the
    prompt tokens whose log-probabilities it computes. Drafts add `draft_bytes`. A CPU also stores these logits, and
    scores, which this leaves out: there, the pools take no more than half of the free memory.
    """
    largest = min(config.max_num_batched_tokens, served.max_model_len)
    chunks = sorted({min(tokens, largest) for tokens in (GPU_TOKENS if mx.metal.is_available() else CPU_TOKENS)})
    peaks = {tokens: peak_of_chunk(served, tokens, config.block_size) for tokens in chunks}
    step = extrapolated(peaks, largest)
    per_token = [spec.kv_layout(block_size=1).bytes_per_token for spec in served.kv_layers] or [0]
    fits = (config.kv_cache_bytes or free_device_memory()) // max(1, sum(per_token))
    keys = min(served.max_model_len, fits)
    context = keys * max((copied_bytes(spec) for spec in served.kv_layers), default=0)
    logits = scores = 0
    if mx.metal.is_available():
        logits = prompt_logits_bytes(served.vocab_size, largest)
        shapes = (spec.attention_shape(config.block_size) for spec in served.kv_layers)
        scores = max((scores_bytes(shape, largest, keys) for shape in shapes), default=0)
    drafts = draft_bytes(served, config)
    found = max(least_step(), step + context + scores + logits + drafts)
    measured = ", ".join(f"{peak / 1e6:.1f} MB for {tokens} tokens" for tokens, peak in peaks.items())
    logger.info(
        "a step takes up to %.1f MB: chunks took %s; the longest context adds %.1f MB, scores %.1f MB, prompt "
        "log-probabilities %.1f MB, states before drafts %.1f MB",
        *(found / 1e6, measured, context / 1e6, scores / 1e6, logits / 1e6, drafts / 1e6),
    )
    return found


def extrapolated(peaks: Mapping[int, int], tokens: int) -> int:
    """Bytes of a chunk of so many tokens, at most. peaks: measured, by tokens.

    The arrays of a step grow with its tokens. Those of all layers exist at once if MLX encodes them before the first
    ones are computed; it does so for at most ten command buffers, which have a largest number of elements. So the peak
    grows ever less, and the line from 0 through the last measured peak is not below it. The line through the last two
    is closer. But command buffers are few and large: the peak grows in steps, and goes on growing where one operation
    passes the limit. By MLX's rules (`make bench-counts ARGS=--memory`), the second line alone was 0.62 to 2.8 times
    the peak of 2,048 tokens. So the peak is taken to grow by the root of the tokens at least: 1.05 to 3.7 times."""
    (*others, (last, peak)) = sorted(peaks.items())
    by_tokens = peak * tokens // last
    if not others:
        return by_tokens
    before, lower = others[-1]
    by_growth = peak + max(0, peak - lower) * (tokens - last) // (last - before)
    return min(by_tokens, max(by_growth, int(peak * math.sqrt(tokens / last))))


def draft_bytes(served: ServedModel, config: EngineConfig) -> int:
    """Bytes that rows with drafts keep of recurrent layers until the next rows of their sequences.

    In a step, S = min(--max-num-seqs, `drafting_sequences`) sequences have D = min(MOST_DRAFT_ROWS, S * MOST_DRAFTS)
    drafts together, or fewer. They take 2 * S * s + (S + D) * a bytes: s for the state before each row, and as much for
    the one that replaces the state after it; a for the arguments of all recurrent modules for each token. A row with
    one draft is run to find a.
    """
    if config.speculative == "off" or is_per_sequence(served.layers) or not keeps_states(served.layers):
        return 0
    runner = ModelRunner(served, 1, config.block_size, "auto", layout=small_layout(served))
    tables = np.zeros((runner.num_groups, 1), np.int32)
    for start, count in ((0, 1), (1, 2)):
        logits = range(start, start + count)
        row = Row(0, start, [0] * count, logits, num_sampled=count, tables=tables)
        runner.finish_step(runner.forward(Step([row]), running=[0]))
    sequences = min(config.max_num_seqs, drafting_sequences(state_bytes(served.layers)))
    tokens = sequences + min(MOST_DRAFT_ROWS, sequences * MOST_DRAFTS)
    return 2 * sequences * state_bytes(served.layers) + tokens * runner.rollback.argument_bytes // 2


def small_layout(served: ServedModel) -> CacheLayout:
    own_caches = is_per_sequence(served.layers)
    return one_group(served.kv_layers) if own_caches else cache_layout(served.kv_layers, served.max_model_len)


def copied_bytes(spec: KV) -> int:
    """Bytes of a token that an attention copies. The gather backend copies quantized keys and values twice: before and
    after it dequantizes them."""
    layout = spec.kv_layout(block_size=1)
    stored = 0 if layout.quantization is None else layout.bytes_per_token
    return layout.unquantized.bytes_per_token + stored


def measure_encoding(vision: Vision) -> int:
    """Bytes that the encoding of the largest image takes at once.

    The first parts of an image are computed, which are alike: on a GPU of the largest one, on a CPU of one that is
    no larger than CPU_SIDE, so that a start takes no longer. From there on, the memory grows with the pixels.
    """
    on_gpu = mx.metal.is_available()
    largest = vision.format.size(*LARGEST)
    width, height = largest if on_gpu else vision.format.size(CPU_SIDE, CPU_SIDE)
    before = int(mx.get_active_memory())
    mx.reset_peak_memory()
    pixels = mx.zeros((1, height, width, 3), mx.uint8)
    for state in itertools.islice(vision.tower.encode(pixels), MEASURED_PARTS):
        mx.eval(state)
    peak = max(0, int(mx.get_peak_memory()) - before)
    del state, pixels
    mx.clear_cache()
    found = peak * max(1, largest[0] * largest[1] // (width * height))
    logger.info("an image of %d x %d takes up to %.1f MB while it is encoded", *largest, found / 1e6)
    return found


def peak_of_chunk(served: ServedModel, tokens: int, block_size: int) -> int:
    """Bytes that MLX allocates at once while it computes a prompt of so many tokens, beside weights and pools."""
    layout = small_layout(served)
    count = CacheGroups(layout.windows, block_size).blocks_needed(tokens, tokens)
    runner = ModelRunner(served, count, block_size, "auto", layout=layout)
    adapter = next(iter(served.adapters.names), None)  # a step with adapters takes more
    tables = np.arange(count, dtype=np.int32).reshape(len(layout.windows), -1)
    row = Row(0, 0, [0] * tokens, range(tokens - 1, tokens), num_sampled=1, adapter=adapter, tables=tables)
    before = int(mx.get_active_memory())
    mx.reset_peak_memory()
    runner.finish_step(runner.forward(Step([row])))
    peak = int(mx.get_peak_memory()) - before
    del runner
    mx.clear_cache()
    return max(0, peak)
