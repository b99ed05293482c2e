"""Finds blocks by their contents, so that a known prefix of a prompt is not computed again.

The key of a full block of tokens is a 128-bit hash of its predecessor's key and its own tokens. The first key is made
from seeds: the model, its KV type and the adapter, on which KV values also depend. The hash only finds a candidate: a
hit also needs equal tokens and the same predecessor. So a collision causes a miss and never shares the KV of another
prompt.

A sequence that has only the first tokens of a cached block goes on within a copy of it, so a prefix is shared to its
last token. For that, the block in which a sequence has ended has a record too, which is not full. Only the sequences of
one client share parts of blocks: `cached_tokens` would let others guess a prompt one token after the other, instead of
32 at once.

The KV of these tokens is in one block for each cache group. A hit needs all blocks of the groups without a window, and
of the others only those that the next token sees.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from mlxpaged.core.blocks.block_pool import BlockPool
from mlxpaged.core.blocks.groups import ONE_GROUP, CacheGroups
from mlxpaged.core.blocks.table_rows import UNUSED
from mlxpaged.core.step import FIRST_CONTENT_ID


class Origin(NamedTuple):
    """Where a block's content comes from. seed: what the KV of its sequence depends on, beside its tokens and the seed
    of the cache. client: whose it is; only its sequences find parts of the block."""

    seed: bytes = b""
    client: str = ""


UNKNOWN = Origin()


@dataclass(eq=False)  # compared by identity: two equal contents at two times are two records
class CachedBlock:
    """Content of published blocks: `tokens`, preceded by those of `parent` and its ancestors.

    blocks: for each group, the block that has it, or UNUSED. origin: that of the first one who published it. children:
    records in the cache that have this parent, in ORDER.
    is_valuable: whether it is worth storing on a disk. is_start: whether that is so for the recurrent state after it.
    """

    key: bytes
    parent: CachedBlock | None
    tokens: tuple[int, ...]
    blocks: list[int]
    origin: Origin = UNKNOWN
    children: list[CachedBlock] = field(default_factory=list, repr=False)
    is_valuable: bool = False
    is_start: bool = False


class Content(NamedTuple):
    """What the pool stores for a published block."""

    record: CachedBlock
    group: int


NEIGHBOURS = 4
"""Records that are looked at on each side, in ORDER, for one that has the blocks of all groups."""

ORDER = attrgetter("origin.client", "tokens")


def hash_block(parent_key: bytes, tokens: Sequence[int]) -> bytes:
    """The 128-bit key of a full block. parent_key: the key of the preceding block, or the hash of the seed."""
    return hashlib.blake2b(parent_key + array("q", tokens).tobytes(), digest_size=16).digest()


def value(chain: Iterable[CachedBlock]) -> None:
    """These blocks are worth storing: their prefix was found again, or took long to compute. chain: from the first
    block of a prompt to the one after which a sequence goes on."""
    record = None
    for record in chain:
        record.is_valuable = True
    if record is not None:
        record.is_start = True


def salted(seed: bytes, salt: tuple[str, ...]) -> bytes:
    """A seed for sequences that share blocks only with those of the same seed and salt. () is no salt."""
    return hashlib.blake2b(repr((seed, salt)).encode(), digest_size=16).digest() if salt else seed


class PrefixCache:
    """Index of the published blocks of one pool. seed: all that KV values depend on, except the tokens.

    A record is dropped with its block of a group without a window: no prompt can be continued from it then. If all
    groups have windows, it is kept while it has a block or children.
    """

    def __init__(self, pool: BlockPool[Content], seed: bytes = b"", groups: CacheGroups = ONE_GROUP) -> None:
        self._pool = pool
        pool.call_at_evict(self._drop)
        self._root = hashlib.blake2b(seed, digest_size=16).digest()
        self._by_key: dict[bytes, CachedBlock] = {}
        self._firsts: defaultdict[bytes, list[CachedBlock]] = defaultdict(list)
        """Records without a parent, by their seed, in ORDER."""
        self._groups = groups
        self._windowed = [group for group, window in enumerate(groups.windows) if window is not None]
        self.on_drop: Callable[[CachedBlock], None] | None = None
        self.content_of: Callable[[int], bytes] = lambda token_id: b""
        """What a token id from FIRST_CONTENT_ID on stands for. It is a part of the key: other processes may give the id
        to something else."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, record: CachedBlock) -> bool:
        return self._by_key.get(record.key) is record

    def __iter__(self) -> Iterator[CachedBlock]:
        """All records. Each comes after its parent."""
        return iter(self._by_key.values())

    def extend_keys(self, keys: list[bytes], token_ids: Sequence[int], num_tokens: int, seed: bytes = b"") -> None:
        """Append to `keys` until it has the hashes of all full blocks of the first `num_tokens` tokens. seed: what the
        KV of this sequence depends on, beside its tokens and the seed of the cache."""
        size = self._pool.block_size
        for index in range(len(keys), num_tokens // size):
            keys.append(self.key_of(keys, index, token_ids[index * size : (index + 1) * size], seed))

    def key_of(self, keys: Sequence[bytes], index: int, tokens: Sequence[int], seed: bytes = b"") -> bytes:
        """The key of a block of these tokens after the first `index` blocks of `keys`."""
        parent_key = keys[index - 1] if index else self._root + seed
        if max(tokens) >= FIRST_CONTENT_ID:
            contents = dict.fromkeys(self.content_of(token) for token in tokens if token >= FIRST_CONTENT_ID)
            parent_key += b"".join(contents)
        return hash_block(parent_key, tokens)

    def match(
        self, keys: Sequence[bytes], token_ids: Sequence[int], prefix: Sequence[CachedBlock] = ()
    ) -> list[CachedBlock]:
        """The longest chain of records for these keys and tokens that follows those of `prefix`."""
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

    def match_within(
        self,
        keys: Sequence[bytes],
        tokens: Sequence[int],
        chain: Sequence[CachedBlock],
        others: Set[CachedBlock] = frozenset(),
        origin: Origin = UNKNOWN,
    ) -> tuple[CachedBlock, int] | None:
        """The record after those of the chain, and none of `others`, that begins with most of these tokens, and how
        many these are. None if there is none. Ids of contents count only if the record has no other tokens, because
        only its key tells that they stand for the same. keys: as for `extend_keys`. origin: of the sequence."""
        siblings, wanted = chain[-1].children if chain else self._firsts.get(origin.seed, []), tuple(tokens)
        at, most = bisect_left(siblings, (origin.client, wanted), key=ORDER), NEIGHBOURS + len(others)
        best: tuple[CachedBlock, int] | None = None
        for side in (reversed(siblings[max(0, at - most) : at]), siblings[at : at + most]):
            record = next((each for each in side if each not in others and UNUSED not in each.blocks), None)
            if record is None or record.origin.client != origin.client:
                continue
            count = self._num_common(record, keys, wanted, len(chain))  # the nearest in ORDER has most
            if count > (best[1] if best is not None else 0):
                best = record, count
        return best

    def _num_common(self, record: CachedBlock, keys: Sequence[bytes], tokens: tuple[int, ...], index: int) -> int:
        """How many tokens a sequence has in common with a record after its first `index` blocks."""
        count = min(len(record.tokens), len(tokens))
        count = next((i for i in range(count) if record.tokens[i] != tokens[i]), count)
        first = next((i for i in range(count) if tokens[i] >= FIRST_CONTENT_ID), count)
        is_whole = count == len(record.tokens)
        if first < count and is_whole and record.key == self.key_of(keys, index, record.tokens, record.origin.seed):
            return count
        return first

    def usable(self, chain: Sequence[CachedBlock], firsts: Sequence[int] = (), num_own: int = 0) -> int:
        """The most leading blocks of a chain from which a sequence can go on: its next token sees only cached blocks
        and blocks that the sequence holds itself, those from `firsts[group]` to `num_own`."""

        def last_missing(group: int, length: int) -> int:
            own = range(firsts[group], num_own) if num_own else range(0)
            seen = range(self._groups.first_block(group, length * self._pool.block_size), length)
            return next((i for i in reversed(seen) if i not in own and chain[i].blocks[group] == UNUSED), UNUSED)

        length = len(chain)
        while length and self._windowed:
            missing = max(last_missing(group, length) for group in self._windowed)
            if missing == UNUSED:
                break
            length = missing
        return length

    def insert(
        self,
        key: bytes,
        parent: CachedBlock | None,
        tokens: tuple[int, ...],
        blocks: list[int],
        origin: Origin = UNKNOWN,
    ) -> CachedBlock:
        """Publish the blocks of one content, one for each group or UNUSED. Returns its record.

        If the cache has this content already, its record gets the blocks that it lacks, and the others stay private to
        their sequence. If other content has the same key (a collision), the blocks are not indexed.
        """
        record = self._by_key.get(key)
        if record is not None and (record.parent is not parent or record.tokens != tokens):
            if self._reachable(record.parent):
                return CachedBlock(key, parent, tokens, [UNUSED] * len(blocks), origin)
            self._remove(record)  # its predecessor was evicted, so no prompt can find it
            record = None
        if record is None:
            record = CachedBlock(key, parent, tokens, [UNUSED] * len(blocks), origin)
            if not self._reachable(parent):
                return record
            self._by_key[key] = record
            siblings = self._siblings(record)
            siblings.insert(bisect_left(siblings, ORDER(record), key=ORDER), record)
        for group, block in enumerate(blocks):
            if block != UNUSED and record.blocks[group] == UNUSED:
                record.blocks[group] = block
                self._pool.remember(block, Content(record, group))
        return record

    def _siblings(self, record: CachedBlock) -> list[CachedBlock]:
        """The records with the same parent, or without one and with the same seed, in ORDER."""
        return self._firsts[record.origin.seed] if record.parent is None else record.parent.children

    def _reachable(self, parent: CachedBlock | None) -> bool:
        return parent is None or parent in self

    def _drop(self, _block: int, content: Content) -> None:
        """A block of a record was evicted."""
        record, group = content
        record.blocks[group] = UNUSED
        if group not in self._windowed:
            self._remove(record)
        parent: CachedBlock | None = record
        while parent is not None and not parent.children and set(parent.blocks) == {UNUSED}:
            self._remove(parent)
            parent = parent.parent

    def _remove(self, record: CachedBlock) -> None:
        """Forget a record and the blocks that it still has."""
        if record not in self:
            return
        del self._by_key[record.key]
        siblings = self._siblings(record)
        siblings.pop(siblings.index(record, bisect_left(siblings, ORDER(record), key=ORDER)))
        if not siblings and record.parent is None:
            del self._firsts[record.origin.seed]
        if self.on_drop is not None:
            self.on_drop(record)
        for block in record.blocks:
            if block != UNUSED:
                self._pool.forget(block)

    def rename(self, moves: Mapping[int, int]) -> None:
        """Blocks were copied to others: source to target. Call it before the pool forgets the sources."""
        for source, target in moves.items():
            if content := self._pool.content(source):
                content.record.blocks[content.group] = target

    def clear(self) -> None:
        """Forget every cached block. Running sequences keep their blocks."""
        for record in list(self._by_key.values()):
            self._remove(record)
