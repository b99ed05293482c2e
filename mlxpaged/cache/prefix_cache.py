"""Finds blocks by their contents, so that a known prefix of a prompt is not computed again.

A full block's key is a 128-bit hash of its predecessor's key and its own tokens. The first key is made from a seed: the
model and the KV type, on which KV values also depend. The hash only finds a candidate: a hit also needs equal tokens
and the same predecessor. So a collision causes a miss and never shares the KV of another prompt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxpaged.cache.block_pool import BlockPool


@dataclass(frozen=True, eq=False)  # compared by identity: two equal contents at two times are two records
class CachedBlock:
    """Content of a published block: its tokens, preceded by those of `parent` and its ancestors."""

    key: bytes
    parent: CachedBlock | None
    tokens: tuple[int, ...]
    block: int


def hash_block(parent_key: bytes, tokens: Sequence[int]) -> bytes:
    """The 128-bit key of a full block. parent_key: the key of the preceding block, or the hash of the seed."""
    return hashlib.blake2b(parent_key + array("q", tokens).tobytes(), digest_size=16).digest()


class PrefixCache:
    """Index of the published blocks of one pool. seed: all that KV values depend on, except the tokens."""

    def __init__(self, pool: BlockPool[CachedBlock], seed: bytes = b"") -> None:
        self._pool = pool
        self._pool.on_evict = self._drop
        self._root = hashlib.blake2b(seed, digest_size=16).digest()
        self._by_key: dict[bytes, CachedBlock] = {}
        self.on_drop: Callable[[CachedBlock], None] | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def extend_keys(self, keys: list[bytes], token_ids: Sequence[int], num_tokens: int) -> None:
        """Append to `keys` until it has the hashes of all full blocks of the first `num_tokens` tokens."""
        size = self._pool.block_size
        for index in range(len(keys), num_tokens // size):
            parent_key = keys[-1] if keys else self._root
            keys.append(hash_block(parent_key, token_ids[index * size : (index + 1) * size]))

    def match(
        self, keys: Sequence[bytes], token_ids: Sequence[int], prefix: Sequence[CachedBlock] = ()
    ) -> list[CachedBlock]:
        """The longest chain of cached blocks for these keys and tokens that follows the blocks of `prefix`."""
        size = self._pool.block_size
        chain: list[CachedBlock] = []
        parent = prefix[-1] if prefix else None
        for index in range(len(prefix), len(keys)):
            found = self._by_key.get(keys[index])
            if found is None or found.parent is not parent:
                break
            if found.tokens != tuple(token_ids[index * size : (index + 1) * size]):
                break
            chain.append(found)
            parent = found
        return chain

    def insert(self, key: bytes, parent: CachedBlock | None, tokens: tuple[int, ...], block: int) -> CachedBlock:
        """Publish a block. Returns the record of its content.

        If another block already has the same content, that block's record is returned, and `block` stays private to its
        sequence. If other content has the same key (a collision), the new block is not indexed.
        """
        existing = self._by_key.get(key)
        if existing is not None and existing.parent is parent and existing.tokens == tokens:
            return existing
        record = CachedBlock(key, parent, tokens, block)
        if existing is not None and not self._reachable(existing.parent):
            self._pool.forget(existing.block)  # its predecessor was evicted, so no prompt can find it
            existing = None
        if existing is None and self._reachable(parent):
            self._by_key[key] = record
            self._pool.remember(block, record)
        return record

    def _reachable(self, parent: CachedBlock | None) -> bool:
        return parent is None or self._by_key.get(parent.key) is parent

    def _drop(self, block: int, content: CachedBlock) -> None:
        del self._by_key[content.key]
        if self.on_drop is not None:
            self.on_drop(content)

    def clear(self) -> None:
        """Forget every cached block. Running sequences keep their blocks."""
        for record in list(self._by_key.values()):
            self._pool.forget(record.block)
