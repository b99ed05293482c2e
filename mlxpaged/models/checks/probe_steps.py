"""Which tokens the probe runs, and in which steps.

They are so few that a model of 4 billion parameters takes about 2 seconds. The slowest Mac is an M1: 2.6 TFLOPS, of
which about 40 % are reached, and 68 GB/s. A token of such a model takes 8 GFLOP, which are 7.7 ms. A forward pass reads
the weights once: 118 ms for 8 GB in float16, 34 ms for 2.3 GB in 4 bits. With the short prompt, a model that runs as
one batch takes:

    forward passes   tokens
    1                32       the reference: the prompt at once (reference.py)
    1                16       its rounding (reference.py)
    2                4        what the layers keep (layer_finder.py)
    5                55       `steps`
    1                8        `HEAD_STEP`, for each layer that may be the output head

The 115 tokens take 0.89 s. The 10 forward passes read the weights in 1.18 s in float16, and in 0.34 s in 4 bits.
Attention modules are also called with 8 rows each, two to seven times, to find out whether they can be fused
(fused_attention.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.utils import get_total_parameters

from mlxpaged.core.step import Row
from mlxpaged.models.layers import leaves

SHORT_PROMPT = 32
"""Tokens of the prompt if no window needs more."""
ROUNDING_TOKENS = 16
"""Tokens of the prompt with which the effect of rounding is measured."""
FINDER_TOKENS = 4
"""Tokens with which layer_finder.py finds what the layers keep."""
PAST_WINDOW = 16
"""Tokens of the prompt that do not fit into its longest window."""
LONGEST_WINDOW = 1024
"""The prompt passes no longer window, however small the model is: the logits of all tokens are in memory at once."""
MAX_TOKENS_TIMES_PARAMETERS = 1.2e12
"""Tokens times parameters of all forward passes. The prompt passes no window that takes more. It is 2.4 TFLOP, which
are 2.3 s on an M1: a model of 1 billion parameters passes windows up to 550 tokens, one of 4 billion up to 100."""

BLOCK_SIZE = 8
CHUNKED, SHARING, OTHER = 0, 1, 2
"""The sequences: the prompt in chunks; the prompt from blocks of the first sequence on; other tokens, whose logits are
not compared. They change those of the first two sequences if a batch mixes sequences up."""
CHECKPOINT = 0

WINDOW_FIELDS = (
    "sliding_window",
    "sliding_window_size",
    "window_size",
    "attention_window_size",
    "loop_window_size",
    "attention_chunk_size",
    "index_topk",
)
"""Where mlx-lm's models keep how many tokens a layer sees or selects."""


def positions(
    sequence_id: int, start: int, count: int, restore: int | None = None, checkpoints: Sequence[tuple[int, int]] = ()
) -> Row:
    """A row of `count` tokens, whose positions stand for the tokens: what is probed does not depend on these."""
    return Row(sequence_id, start, range(start, start + count), restore=restore, checkpoints=checkpoints)


def steps(length: int, shares_blocks: bool = True) -> list[list[Row]]:
    """The ragged steps for a prompt of `length` tokens. As in the scheduler's steps, decoding rows are first.

    1. A new sequence of other tokens, and the first chunk of the prompt, which leaves a checkpoint.
    2. Other tokens decode; the prompt's next chunk; the second sequence starts from shared blocks and the checkpoint.
    3. All three decode.
    4. Two of them decode, in another order.
    5. The second sequence decodes alone: a model may take another way for a single row.

    Without shares_blocks there is no second sequence.
    """
    shared, chunk, end = shared_tokens(length), length - 13, length - 2
    checkpoints = [(shared, CHECKPOINT)] if shares_blocks else []
    planned = [
        [positions(OTHER, 0, 5), positions(CHUNKED, 0, chunk, None, checkpoints)],
        [
            positions(OTHER, 5, 1),
            positions(CHUNKED, chunk, end - chunk),
            positions(SHARING, shared, end - 1 - shared, CHECKPOINT),
        ],
        [positions(OTHER, 6, 1), positions(CHUNKED, end, 1), positions(SHARING, end - 1, 1)],
        [positions(SHARING, end, 1), positions(CHUNKED, end + 1, 1)],
        [positions(SHARING, end + 1, 1)],
    ]
    kept = [[row for row in step if shares_blocks or row.sequence_id != SHARING] for step in planned]
    return [step for step in kept if step]


HEAD_STEP = [positions(OTHER, 0, 3), positions(CHUNKED, 0, 5)]
"""The step with which a layer is tried as the output head."""
HEAD_ROWS = [2, 5, 6, 7]
"""The rows of it that are selected: the last one of the other tokens, and the last three of the prompt."""
HEAD_POSITIONS = [2, 3, 4]
"""The positions of those three in the prompt."""


def shared_tokens(length: int) -> int:
    """The tokens of the prompt that are in shared blocks. Only whole blocks are shared."""
    return (length - PAST_WINDOW) // BLOCK_SIZE * BLOCK_SIZE


def block_tables(length: int) -> dict[int, list[int]]:
    """The blocks of each sequence. Those of the first are in descending order, and the second shares some of them."""
    count, shared = -(-length // BLOCK_SIZE), shared_tokens(length) // BLOCK_SIZE
    first = list(range(count))[::-1]
    return {CHUNKED: first, SHARING: first[:shared] + list(range(count, 2 * count - shared)), OTHER: [2 * count]}


def num_tokens(length: int) -> int:
    """The tokens of all forward passes for a prompt of `length` tokens, if the model runs as one batch."""
    paged = sum(row.num_tokens for step in (*steps(length), HEAD_STEP) for row in step)
    return length + ROUNDING_TOKENS + FINDER_TOKENS + paged


def prompt_length(model: Module, context_length: int) -> tuple[int, list[int]]:
    """The tokens of the prompt, and the windows of the model that they do not pass."""
    parameters = get_total_parameters(model)
    length, missed = SHORT_PROMPT, []
    for window in sorted(window for window in windows(model) if window < context_length):
        needed = max(length, window + PAST_WINDOW)
        fits = window <= LONGEST_WINDOW and num_tokens(needed) * parameters <= MAX_TOKENS_TIMES_PARAMETERS
        if needed == length or (fits and needed <= context_length):
            length = needed
        else:
            missed.append(window)
    return length, missed


def windows(model: Any) -> set[int]:
    """How many tokens the model's layers see or select, if they are not all."""
    found: set[Any] = set()
    for cache in leaves(make_prompt_cache(model)):
        if isinstance(cache, RotatingKVCache):
            found.add(cache.max_size)
        elif isinstance(cache, ChunkedKVCache):
            found.add(cache.chunk_size)
    for fields in arguments(model):
        found |= {fields.get(name) for name in WINDOW_FIELDS}
        blocks, block_size = fields.get("index_topk_blocks"), fields.get("index_block_size")
        if isinstance(blocks, int) and isinstance(block_size, int):
            found.add(blocks * block_size)
    return {window for window in found if isinstance(window, int) and window > 0}


def arguments(model: Module) -> Iterator[dict[str, Any]]:
    """The configurations that the model's modules keep, as mlx-lm completes them."""
    for module in model.modules():
        for args in (getattr(module, "args", None), getattr(module, "config", None)):
            if hasattr(args, "__dict__"):
                yield vars(args)
