"""A damaged or hostile GGUF file is refused by its header, with bounded memory."""

from __future__ import annotations

import importlib.util
import struct
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.sources.gguf import file as gguf_file
from mlxpaged.models.sources.gguf.config import config_of
from mlxpaged.models.sources.gguf.directory import directory_files
from mlxpaged.models.sources.gguf.file import read_gguf
from tests.models.gguf_damage import damaged, enlarge
from tests.models.gguf_files import Stored, plain, text, value, write_gguf
from tests.models.gguf_models import as_gguf
from tests.support import make_tiny_model

FOR_ANY_FILE = 2**16
"""Bytes of memory for an error message, and objects of the header."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of a model, all of which is read. Its tokens take more memory than its header."""
    path = tmp_path_factory.mktemp("whole")
    make_tiny_model(path / "m", "llama")
    return as_gguf(path / "m", path / "m.gguf", change=lambda metadata, _: enlarge(metadata, 5_000)).read_bytes()


def test_300_damaged_files_are_refused_with_no_memory_beyond_their_size(whole: bytes, tmp_path: Path) -> None:
    path, refused = tmp_path / "m.gguf", 0
    read_gguf(Path(path.write_bytes(whole) and path))
    tracemalloc.start()
    try:
        for data in damaged(whole):
            path.write_bytes(data)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(UnsupportedModelError, match=r"m\.gguf is not usable: "):
                read_gguf(path)
            refused += 1
            assert tracemalloc.get_traced_memory()[1] - before < len(data) + FOR_ANY_FILE
    finally:
        tracemalloc.stop()
    assert refused == 300


def test_files_with_other_bytes_are_read_or_refused(whole: bytes, tmp_path: Path) -> None:
    random, path, refused = Random(1), tmp_path / "m.gguf", 0
    end = whole.rindex(b"output_norm.weight") + 60  # of the header, about
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            data[random.randrange(end)] = random.randrange(256)
        path.write_bytes(data)
        try:
            directory_files(read_gguf(path))
        except UnsupportedModelError:
            refused += 1
    assert 0 < refused < 300


def with_tensors(path: Path, *infos: tuple[str, list[int], int, int], alignment: Any = None) -> Path:
    """A file with tensors of these names, dimensions, types and offsets, and 1,024 bytes of data."""
    keys = b"" if alignment is None else text("general.alignment") + value(alignment)
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(infos), alignment is not None) + keys
    for name, shape, kind, offset in infos:
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(1024))
    return path


BROKEN: list[tuple[str, list[tuple[str, list[int], int, int]]]] = [
    ("overlaps", [("a", [64], 0, 0), ("b", [64], 0, 128)]),
    ("overlaps", [("a", [64], 0, 0), ("b", [64], 0, 0)]),
    ("same name", [("a", [64], 0, 0), ("a", [64], 0, 256)]),
    ("cut short", [("a", [64], 0, 1024)]),
    ("cut short", [("a", [512], 0, 0)]),
    ("cut short", [("a", [2**20, 2**20, 2**20], 0, 0)]),
    ("not aligned", [("a", [64], 0, 4)]),
    ("has 0 dimensions", [("a", [], 0, 0)]),
    ("has 5 dimensions", [("a", [1] * 5, 0, 0)]),
    ("shape", [("a", [64, 0], 0, 0)]),
    ("shape", [("a", [33], 8, 0)]),
    ("type 77", [("a", [64], 77, 0)]),
]


@pytest.mark.parametrize(("reason", "infos"), BROKEN)
def test_a_tensor_that_cannot_be_is_refused(
    reason: str, infos: list[tuple[str, list[int], int, int]], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        read_gguf(with_tensors(tmp_path / "m.gguf", *infos))


def test_code_books_need_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModelError, match=r"a has the type IQ2_XXS, .* install mlxpaged\[gguf\], or take"):
        read_gguf(with_tensors(tmp_path / "m.gguf", ("a", [256], 16, 0)))


@pytest.mark.parametrize("alignment", [0, 3, 48, 2**31, 2**20, "32", -32, 32.0])
def test_an_alignment_that_is_no_small_power_of_two_is_refused(alignment: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="alignment"):
        read_gguf(with_tensors(tmp_path / "m.gguf", ("a", [4], 0, 0), alignment=alignment))


@pytest.mark.parametrize("version", [0, 1, 4, 2**24 * 3])
def test_another_version_and_big_endian_files_are_refused(version: int, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="version"):
        read_gguf(write_gguf(tmp_path / "m.gguf", {}, {"a": plain([1.0])}, version))


def test_metadata_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", {"key": "x" * 5000}, {"a": plain([1.0] * 5000)})
    assert read_gguf(path).metadata == {"key": "x" * 5000}
    monkeypatch.setattr(gguf_file, "MAX_HEADER_BYTES", 4096)
    with pytest.raises(UnsupportedModelError, match="header has more than 4,096 bytes"):
        read_gguf(path)
    nested = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1)
    path.write_bytes(nested)
    with pytest.raises(UnsupportedModelError, match="an array of the type 9"):
        read_gguf(path)
    write_gguf(path, {"a": 1, "b": 2}, {})
    path.write_bytes(path.read_bytes().replace(text("b"), text("a")))
    with pytest.raises(UnsupportedModelError, match="'a' comes twice"):
        read_gguf(path)


HOSTILE_KEYS: list[tuple[str, Any]] = [
    ("llama.block_count", 2**31),
    ("llama.block_count", 0),
    ("llama.block_count", "3"),
    ("llama.attention.head_count", 1.5),
    ("llama.attention.layer_norm_rms_epsilon", float("nan")),
    ("llama.rope.scaling.type", "unheard"),
    ("general.architecture", "unheard"),
    ("general.architecture", ["llama"]),
    ("tokenizer.ggml.model", "bert"),
    ("tokenizer.ggml.pre", "unheard"),
    ("tokenizer.ggml.tokens", "none"),
    ("tokenizer.ggml.token_type", [1, 1]),
    ("tokenizer.ggml.merges", 1),
]


@pytest.mark.parametrize(("key", "given"), HOSTILE_KEYS)
def test_metadata_without_sense_are_refused(key: str, given: Any, whole: bytes, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "llama")
    as_gguf(path, tmp_path / "m.gguf", change=lambda metadata, _: metadata.update({key: given}))
    with pytest.raises(UnsupportedModelError):
        directory_files(read_gguf(tmp_path / "m.gguf"))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "llama")
    as_gguf(path, tmp_path / "m.gguf", change=lambda metadata, _: metadata.pop("llama.context_length"))
    with pytest.raises(UnsupportedModelError, match=r"its key llama\.context_length is missing"):
        config_of(read_gguf(tmp_path / "m.gguf"))


def test_a_file_that_becomes_shorter_is_refused_when_it_is_read(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", {}, {"a": Stored("F32", (128,), bytes(512))})
    tensor = read_gguf(path).tensors["a"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UnsupportedModelError, match="cut short"):
        tensor.read(0, 1)
