"""How much the doctor measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """queries, keys: of the timed calls of attention; 64 is a chunk beside decoding sequences. prompt_tokens and
    answer_tokens: of each sequence whose decoding is timed. batches: sequences at a time. prefill_tokens,
    long_prefill_tokens: most of the prompts whose memory is measured."""

    queries: tuple[int, ...] = (1, 64)
    keys: tuple[int, ...] = (1024, 8192)
    batches: tuple[int, ...] = (1, 4, 16)
    prompt_tokens: int = 32
    answer_tokens: int = 64
    prefill_tokens: int = 2048
    long_prefill_tokens: int = 32768
