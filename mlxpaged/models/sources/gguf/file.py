"""The header of a GGUF file: metadata, and where each tensor is. No weights are read.

The file may be hostile: each count, length and offset is compared with the size of the file before anything of this
size is made. Tokens and merges take several times as much memory as in the file, so they are made last.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.sources.gguf.choice import has_code_books
from mlxpaged.models.sources.gguf.ollama import as_llama_cpp

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 2**26
"""Metadata and tensor infos. The tokenizer of gpt-oss, 200,000 tokens and 446,000 merges, takes 14 MB."""
MAX_KEYS = 10_000
MAX_ITEMS = 2**20
"""Items of an array of the metadata, such as tokens or merges."""
MAX_TENSORS = 2**17
MAX_NAME_BYTES = 2**16
"""Bytes of a key or of a tensor's name, which have at most 65,535."""
MAX_DIMENSIONS = 4
MAX_SPLITS = 1000
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**16

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Formats of the module struct, and of numpy, by the number of a metadata type."""
STRING, ARRAY = 8, 9
LAYOUTS = {code: struct.Struct("<" + code) for code in NUMBERS.values()}
LENGTH = LAYOUTS["Q"]

SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
"""The name of a part of a model."""


class BlockType(NamedTuple):
    """A tensor type: `nbytes` bytes for each block of `items` numbers of a row."""

    name: str
    items: int
    nbytes: int


TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
"""Types by their numbers in the file (ggml.h, enum ggml_type; sizes of ggml-common.h)."""

CODE_BOOKS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
"""Types whose numbers are indices of large tables, which the package `gguf` has."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file. shape: the rows' dimension last, as numpy has it. offset: in the file, in bytes."""

    name: str
    path: Path
    type: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) // self.type.items * self.type.nbytes

    def read(self, first: int, end: int) -> Any:
        """Bytes [end - first, bytes of a row] of these rows. Raises UnsupportedModelError if the file became
        shorter."""
        row = self.shape[-1] // self.type.items * self.type.nbytes
        with self.path.open("rb") as file:
            file.seek(self.offset + first * row)
            found = np.fromfile(file, np.uint8, (end - first) * row)
        if found.size != (end - first) * row:
            raise UnsupportedModelError(f"{self.path.name} is cut short")
        return found.reshape(end - first, row)


@dataclass(frozen=True)
class GgufFile:
    """metadata: values by their keys; strings, numbers, lists of strings, and numpy arrays of numbers. tensors: by
    their names, of all parts of the model."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def parts(self) -> list[Path]:
        return split_paths(self.path)


class Texts(NamedTuple):
    """An array of strings that is not read yet."""

    start: int
    num_texts: int


class Header:
    """A cursor in the bytes of a file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0
        self.end = min(len(data), MAX_HEADER_BYTES)

    def skip(self, num_bytes: int) -> int:
        """The place of the next `num_bytes` bytes. Raises ValueError if the header ends before."""
        start = self.at
        if num_bytes > self.end - start:
            long = len(self.data) > self.end and num_bytes <= len(self.data) - start
            raise ValueError(f"its header has more than {MAX_HEADER_BYTES:,} bytes" if long else "it is cut short")
        self.at += num_bytes
        return start

    def number(self, code: str) -> Any:
        layout = LAYOUTS[code]
        return layout.unpack_from(self.data, self.skip(layout.size))[0]

    def text(self, most: int = MAX_HEADER_BYTES) -> str:
        size = self.number("Q")
        if size > most:
            raise ValueError(f"a name has {size:,} bytes; at most {most:,} are allowed")
        start = self.skip(size)
        # Tokens of some models are no UTF-8, and llama.cpp writes what it gets.
        return self.data[start : start + size].decode("utf-8", "replace")

    def skip_texts(self, count: int) -> Texts:
        """Their places are checked. There may be 100,000."""
        end, most, length = self.at, self.end - LENGTH.size, LENGTH.unpack_from
        for _ in range(count):
            if end > most:
                self.skip(end + LENGTH.size - self.at)  # raises
            end += LENGTH.size + length(self.data, end)[0]
        return Texts(self.skip(end - self.at), count)

    def texts(self, found: Texts) -> list[str]:
        self.at = found.start
        return [self.text() for _ in range(found.num_texts)]

    def value(self) -> Any:
        """A number, a string, `Texts`, or an array of numbers."""
        kind = self.number("I")
        if kind == STRING:
            return self.text()
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind != ARRAY:
            raise ValueError(f"its metadata has the unknown type {kind}")
        of, count = self.number("I"), self.number("Q")
        if count > MAX_ITEMS:
            raise ValueError(f"an array of its metadata has {count:,} items; the limit is {MAX_ITEMS:,}")
        if of == STRING:
            return self.skip_texts(count)
        if of not in NUMBERS:
            raise ValueError(f"its metadata has an array of the type {of}")
        layout = np.dtype("<" + NUMBERS[of]) if NUMBERS[of] not in "Bb?" else np.dtype(NUMBERS[of])
        return np.frombuffer(self.data, layout, count, self.skip(count * layout.itemsize)).copy()


def read_gguf(path: Path, texts: bool = True) -> GgufFile:
    """The header of a file, or of all parts of a model whose first part is `path`. texts: whether its lists of strings
    are read, which take most of the time. Raises UnsupportedModelError if it is damaged."""
    first, *others = split_paths(path)
    metadata, tensors = read_part(first, texts)
    for part in others:
        if not part.is_file():
            raise UnsupportedModelError(f"{part.name} is missing")
        for name, tensor in read_part(part, texts)[1].items():
            if name in tensors:
                raise UnsupportedModelError(f"{part.name} is not usable: {name} is in another part too")
            tensors[name] = tensor
    if len(tensors) > MAX_TENSORS:
        raise UnsupportedModelError(f"it has {len(tensors):,} tensors; the limit is {MAX_TENSORS:,}")
    metadata, names = as_llama_cpp(metadata, tensors)
    renamed = {own: replace(tensors[name], name=own) for name, own in names.items()}
    if len(renamed) < len(tensors):
        raise UnsupportedModelError("it has tensors under the names of Ollama and under those of llama.cpp")
    return GgufFile(first, metadata, renamed)


def split_paths(path: Path) -> list[Path]:
    """All parts of the model of a file, in order. Raises UnsupportedModelError for too many."""
    found = SPLIT.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found[3])
    if not 1 <= count <= MAX_SPLITS:
        raise UnsupportedModelError(f"{path.name} is one of {count:,} parts; at most {MAX_SPLITS:,} are supported")
    return [path.with_name(f"{found[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def read_part(path: Path, texts: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Metadata and tensors of one file. Raises UnsupportedModelError."""
    try:
        with path.open("rb") as file:
            return read_header(path, file, texts)
    except (ValueError, OSError, struct.error) as error:
        raise UnsupportedModelError(f"{path.name} is not usable: {error}") from error


def read_header(path: Path, file: BinaryIO, texts: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Raises ValueError."""
    size = path.stat().st_size
    if size < 24 or file.read(4) != MAGIC:
        raise ValueError("it is not a GGUF file, or is cut short")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = Header(data)
        header.skip(4)
        version, num_tensors, num_keys = (header.number(code) for code in "IQQ")
        if version not in VERSIONS:
            raise ValueError(f"it has version {version} of the format; {VERSIONS} are supported")
        if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
            raise ValueError(f"it has {num_tensors:,} tensors and {num_keys:,} keys; {MAX_TENSORS:,} and {MAX_KEYS:,}")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = header.text(MAX_NAME_BYTES)
            if key in metadata:
                raise ValueError(f"the key {key!r} comes twice")
            metadata[key] = header.value()
        infos = [read_info(header) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"its alignment is {alignment!r:.40}")
        start = -(-header.at // alignment) * alignment
        tensors = {name: Tensor(name, path, kind, shape, start + offset) for name, kind, shape, offset in infos}
        if len(tensors) < len(infos):
            raise ValueError("two tensors have the same name")
        check_places(list(tensors.values()), start, alignment, size)
        lists = {key: found for key, found in metadata.items() if isinstance(found, Texts)}
        read = {key: header.texts(found) if texts else None for key, found in lists.items()}
    return metadata | read, tensors


def read_info(header: Header) -> tuple[str, BlockType, tuple[int, ...], int]:
    """Name, type, shape and offset in the data of a tensor. Raises ValueError."""
    name, num_dimensions = header.text(MAX_NAME_BYTES), header.number("I")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise ValueError(f"{name} has {num_dimensions} dimensions")
    shape = tuple(header.number("Q") for _ in range(num_dimensions))[::-1]
    kind, offset = header.number("I"), header.number("Q")
    if kind not in TYPES:
        raise ValueError(f"{name} has the type {kind}, which is not supported; take another quantization, as Q4_K_M")
    if TYPES[kind].name in CODE_BOOKS and not has_code_books():
        raise ValueError(
            f"{name} has the type {TYPES[kind].name}, whose tables are in the package gguf: install mlxpaged[gguf], or "
            "take another quantization, as Q4_K_M"
        )
    if not all(shape) or shape[-1] % TYPES[kind].items:
        raise ValueError(f"{name} has the shape {shape}, which is none of {TYPES[kind].name}")
    return name, TYPES[kind], shape, offset


def check_places(tensors: list[Tensor], start: int, alignment: int, size: int) -> None:
    """Raises ValueError if a tensor is beyond the end of the file, overlaps with another one, or is not aligned."""
    end = start
    for tensor in sorted(tensors, key=lambda each: each.offset):
        if (tensor.offset - start) % alignment:
            raise ValueError(f"{tensor.name} is not aligned to {alignment} bytes")
        if tensor.offset < end:
            raise ValueError(f"{tensor.name} overlaps with another tensor")
        end = tensor.offset + tensor.nbytes
        if end > size:
            raise ValueError(f"{tensor.name} is cut short")
