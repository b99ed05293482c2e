"""Writes GGUF files for the tests, as https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 32
NUMBERS = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}
TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24),
    "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84),
    "Q3_K": (11, 256, 110),
    "Q4_K": (12, 256, 144),
    "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210),
    "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74),
    "IQ3_XXS": (18, 256, 98),
    "IQ1_S": (19, 256, 50),
    "IQ4_NL": (20, 32, 18),
    "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82),
    "IQ4_XS": (23, 256, 136),
    "IQ1_M": (29, 256, 56),
    "BF16": (30, 1, 2),
    "MXFP4": (39, 32, 17),
}
"""Number, items of a block and its bytes."""


class Stored:
    """A tensor as a file has it. data: bytes [rows, bytes of a row]. shape: with the rows' dimension last."""

    def __init__(self, kind: str, shape: Sequence[int], data: Any) -> None:
        self.kind, self.shape, self.data = kind, tuple(shape), bytes(data)


def plain(array: Any, kind: str = "F32") -> Stored:
    """A tensor that is not quantized."""
    array = np.asarray(array, np.float32)
    if kind == "F16":
        return Stored(kind, array.shape, array.astype(np.float16).tobytes())
    if kind == "BF16":
        bits = array.view(np.uint32)
        return Stored(kind, array.shape, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes())
    return Stored("F32", array.shape, array.tobytes())


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value(given: Any) -> bytes:
    """A value of the metadata with its type before it."""
    if isinstance(given, str):
        return struct.pack("<I", 8) + text(given)
    if isinstance(given, bool):
        return struct.pack("<I?", NUMBERS["?"], given)
    if isinstance(given, int):
        code = "I" if 0 <= given < 2**32 else "q"
        return struct.pack("<I" + code, NUMBERS[code], given)
    if isinstance(given, float):
        return struct.pack("<If", NUMBERS["f"], given)
    items = list(given)
    if items and isinstance(items[0], str):
        return struct.pack("<IIQ", 9, 8, len(items)) + b"".join(map(text, items))
    code = "?" if items and isinstance(items[0], bool) else "f" if items and isinstance(items[0], float) else "i"
    return struct.pack(f"<IIQ{len(items)}{code}", 9, NUMBERS[code], len(items), *items)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored], version: int = 3) -> Path:
    """A file with these metadata and tensors, in this order."""
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))
    head += b"".join(text(key) + value(each) for key, each in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        data += b"\0" * (-len(data) % ALIGNMENT)
        shape = tensor.shape[::-1]
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, TYPES[tensor.kind][0], len(data))
        data += tensor.data
    path.write_bytes(head + b"\0" * (-len(head) % ALIGNMENT) + data + b"\0" * (-len(data) % ALIGNMENT))
    return path


def tokenizer_metadata(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a tokenizer.json of bytes, but for what splits a text."""
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    added = {each["id"]: each for each in tokenizer["added_tokens"]}
    tokens = [""] * (1 + max(*vocab.values(), *added))
    for token, i in vocab.items():
        tokens[i] = token
    for i, each in added.items():
        tokens[i] = each["content"]
    kinds = [1 if i not in added else 3 if added[i]["special"] else 4 for i in range(len(tokens))]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    fields = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": kinds, "merges": merges}
    return {f"tokenizer.ggml.{name}": each for name, each in fields.items()}
