"""Finding blocks by what they contain, so that a prompt's known prefix is not computed again.

A full block's key is a 128-bit hash chained over its predecessor's key and its own tokens, seeded with whatever else
the KV values depend on (model, adapter, KV type). The hash only finds a candidate: a hit also needs equal tokens and
the same predecessor block content, so a collision costs a miss and never shares foreign KV.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from mlxpaged.cache.block_pool import BlockPool


@dataclass(frozen=True, eq=False)  # compared by identity: two equal contents at two times are two records
class CachedBlock:
    """What a published block holds: its own tokens, after everything that `parent` stands for."""

    key: bytes
    parent: CachedBlock | None
    tokens: tuple[int, ...]
    block: int


@dataclass(frozen=True)
class PrefixHit:
    """The longest cached chain of full blocks at the start of a prompt."""

    blocks: tuple[CachedBlock, ...] = ()

    def __len__(self) -> int:
        return len(self.blocks)


def hash_block(parent_key: bytes, tokens: Sequence[int]) -> bytes:
    """The 128-bit key of a full block that follows the block (or the seed) named by `parent_key`."""
    return hashlib.blake2b(parent_key + array("q", tokens).tobytes(), digest_size=16).digest()


class PrefixCache:
    """Index of the published blocks of one pool. seed: whatever the KV values depend on beside the tokens."""

    def __init__(self, pool: BlockPool[CachedBlock], seed: bytes = b"") -> None:
        self._pool = pool
        self._pool.on_evict = self._drop
        self._root = hashlib.blake2b(seed, digest_size=16).digest()
        self._by_key: dict[bytes, CachedBlock] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def extend_keys(self, keys: list[bytes], token_ids: Sequence[int], num_tokens: int) -> None:
        """Append to `keys` the hashes that it lacks of the full blocks of the first `num_tokens` tokens."""
        size = self._pool.block_size
        for index in range(len(keys), num_tokens // size):
            parent_key = keys[-1] if keys else self._root
            keys.append(hash_block(parent_key, token_ids[index * size : (index + 1) * size]))

    def match(self, keys: Sequence[bytes], token_ids: Sequence[int], behind: Sequence[CachedBlock] = ()) -> PrefixHit:
        """The longest chain of cached blocks that holds the tokens of `keys`, from the first block that follows the
        chain `behind` on."""
        size = self._pool.block_size
        chain: list[CachedBlock] = []
        parent = behind[-1] if behind else None
        for index in range(len(behind), len(keys)):
            found = self._by_key.get(keys[index])
            if found is None or found.parent is not parent:
                break
            if found.tokens != tuple(token_ids[index * size : (index + 1) * size]):
                break
            chain.append(found)
            parent = found
        return PrefixHit(tuple(chain))

    def insert(self, key: bytes, parent: CachedBlock | None, tokens: tuple[int, ...], block: int) -> CachedBlock:
        """Publish a block. Returns the record that stands for this content from now on.

        Where the same content is already cached in another block, that block's record is returned and `block` stays
        private to its sequence; where the key belongs to other content (a collision), the new block is not indexed.
        """
        existing = self._by_key.get(key)
        if existing is not None and existing.parent is parent and existing.tokens == tokens:
            return existing
        record = CachedBlock(key, parent, tokens, block)
        if existing is not None and not self._reachable(existing.parent):
            self._pool.forget(existing.block)  # its predecessor was evicted: no prompt can reach it any more
            existing = None
        if existing is None and self._reachable(parent):
            self._by_key[key] = record
            self._pool.remember(block, record)
        return record

    def _reachable(self, parent: CachedBlock | None) -> bool:
        return parent is None or self._by_key.get(parent.key) is parent

    def _drop(self, block: int, content: CachedBlock) -> None:
        del self._by_key[content.key]

    def clear(self) -> int:
        """Forget every cached block, and return how many. Sequences that run keep the blocks they hold."""
        records = list(self._by_key.values())
        for record in records:
            self._pool.forget(record.block)
        return len(records)
