"""Records of a DiskStore: a block by its content, a segment, and what the store has."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from mlxpaged.parts.disk.disk_index import Name

Data = memoryview


class StoredBlock(NamedTuple):
    """A block by its content. parent: key of the block before it, empty for the first one."""

    name: Name
    parent: bytes
    tokens: tuple[int, ...]

    @property
    def header(self) -> bytes:
        """What a segment has before the KV."""
        return array("q", [len(self.parent), len(self.tokens), *self.tokens]).tobytes() + self.parent

    def checksum(self, header: bytes | Data, data: Data) -> bytes:
        found = hashlib.sha256(self.name.key + bytes([self.name.part]))
        found.update(header)
        found.update(data)
        return found.digest()[:16]


@dataclass(eq=False)
class Segment:
    """used: the store's count of reads and writes when a block of it was read or written last."""

    model: str
    used: int = 0
    size: int = 0
    names: set[Name] = field(default_factory=set)


class ModelUsage(NamedTuple):
    model: str
    blocks: int
    size: int


class StoreStats(NamedTuple):
    """size, max_size: bytes of all models. damaged: blocks since the start. stopped: why nothing is written any more;
    empty if it is. written_total: bytes since the start."""

    blocks: int = 0
    size: int = 0
    max_size: int = 0
    written_today: int = 0
    max_written: int = 0
    damaged: int = 0
    stopped: str = ""
    written_total: int = 0
