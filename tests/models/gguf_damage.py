"""Gives a GGUF file more tokens, and damages it in 300 ways."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

HUGE = (2**16 + 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)


def enlarge(metadata: dict[str, Any], num_tokens: int) -> None:
    """Gives a model so many tokens."""
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.tokens"] = tokens + [f"token {i}" for i in range(num_tokens - len(tokens))]
    metadata["tokenizer.ggml.token_type"] = [1] * num_tokens


def damaged(data: bytes) -> Iterator[bytes]:
    """300 files, none of which is usable."""
    yield from cut_short(data)
    yield from counts(data)


def cut_short(data: bytes) -> Iterator[bytes]:
    """216 files, most of them with a part of the header."""
    tensors = data.rindex(b"token_embd.weight")
    for i in range(166):
        yield data[: i * tensors // 166]
    for i in range(50):
        yield data[: tensors + i * (len(data) - tensors - 200_000) // 50]


def counts(data: bytes) -> Iterator[bytes]:
    """Files whose numbers of tensors and keys, and whose lengths and dimensions are too large."""
    places = [8, 16, 24]  # numbers of tensors and keys, the length of the first key
    for name in (b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type"):
        places.append(data.index(name) + len(name) + 8)  # items of the array
    for name in (b"output_norm.weight", b"token_embd.weight", b"blk.0.attn_q.weight"):
        end = data.index(name) + len(name)
        places += [end - len(name) - 8, end + 4, end + 4 + 8]  # the name's length, and dimensions or what follows
    for place in places:
        for size in HUGE:
            yield data[:place] + struct.pack("<Q", size) + data[place + 8 :]
