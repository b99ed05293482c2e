"""Finds where prompts part: a recurrent state is worth a checkpoint where later prompts will branch off again."""

from __future__ import annotations

from collections import Counter

from mlxpaged.core.blocks.prefix_cache import PrefixCache
from mlxpaged.core.scheduling.sequence import Sequence


class Junctions:
    """Counts the block keys of all unfinished prompts. The last key that a new prompt has in common with them, or with
    the prefix cache, is a junction until that prompt ends."""

    def __init__(self, prefix_cache: PrefixCache, block_size: int) -> None:
        self._prefix_cache = prefix_cache
        self._block_size = block_size
        self._keys: Counter[bytes] = Counter()
        self._junctions: Counter[bytes] = Counter()
        self._of: dict[int, tuple[list[bytes], bytes | None]] = {}  # by sequence: the keys counted for it, its junction

    def __contains__(self, key: bytes) -> bool:
        return key in self._junctions

    def add(self, sequence: Sequence) -> None:
        tokens, count = sequence.token_ids, sequence.num_prompt_tokens
        self._prefix_cache.extend_keys(sequence.kv.keys, tokens, count, sequence.cache_seed)
        keys = sequence.kv.keys[: (count - 1) // self._block_size]
        shared = len(self._prefix_cache.match(keys, tokens))
        while shared < len(keys) and keys[shared] in self._keys:
            shared += 1
        junction = keys[shared - 1] if shared else None
        self._of[sequence.sequence_id] = keys, junction
        self._keys.update(keys)
        if junction is not None:
            self._junctions[junction] += 1

    def remove(self, sequence: Sequence) -> None:
        keys, junction = self._of.pop(sequence.sequence_id)
        for key in keys:
            drop_one(self._keys, key)
        if junction is not None:
            drop_one(self._junctions, junction)


def drop_one(counter: Counter[bytes], key: bytes) -> None:
    """`counter -= Counter([key])`, but without a pass over all keys: that takes 2 ms with 300 prompts of 8,000
    tokens."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
