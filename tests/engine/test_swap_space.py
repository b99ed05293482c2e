"""KV blocks out to swap slots and back, bit for bit, over real pools of either backend, in memory and in a file."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import KV_DTYPES, KVLayout
from mlxpaged.core.engine import swap_space
from mlxpaged.core.engine.swap_space import SwapSpace, SwapSpaceError, WrittenBytes, bytes_per_slot

Bytes = npt.NDArray[np.uint8]

BLOCKS, SLOTS = 7, 5

MIXED = ((2, 32, mx.float16), (1, 64, mx.bfloat16), (3, 32, mx.float32), (2, 32, mx.float16))
"""Heads, head_dim and type of layers that share nothing but their blocks."""

LAYOUTS = {str(dtype): [KVLayout(2, 32, 32, dtype, 8)] * 2 for dtype in KV_DTYPES} | {
    "unequal and latent": [
        KVLayout(1, 24, 16, mx.float16, 8, latent=True),
        KVLayout(2, 24, 16, mx.bfloat16, 8),
        KVLayout(1, 40, 32, mx.float32, 8, latent=True),
    ]
}


@pytest.fixture(params=["auto", "gather", "metal"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "metal":
        request.getfixturevalue("metal")
    return str(request.param)


@pytest.fixture(params=["memory", "file"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "file" else None


def make_layers(
    backend: str = "gather", shapes: Sequence[tuple[int, int, mx.Dtype]] = MIXED, num_blocks: int = BLOCKS
) -> list[LayerKVCache]:
    return [LayerKVCache(num_blocks, heads, dim, dtype, block_size=8, backend=backend) for heads, dim, dtype in shapes]


def fill(layers: Sequence[LayerKVCache], blocks: Sequence[int], seed: int) -> None:
    """Random bits: every kind of number, NaNs with all their payloads, infinities, denormals, negative zeros."""
    random = np.random.default_rng(seed)
    for kv in layers:
        pieces = [(random.integers(0, 256, (len(blocks), plane.nbytes), np.uint8), plane) for plane in kv.layout.planes]
        planes = (mx.array(piece).view(plane.dtype).reshape(-1, *plane.shape) for piece, plane in pieces)
        kv.write_blocks(blocks, *planes)


def bits(layers: Sequence[LayerKVCache]) -> Bytes:
    """All that the pools hold, one row a block."""
    count = layers[0].num_blocks
    arrays = [np.array(array.view(mx.uint8)) for kv in layers for array in kv.read_blocks(range(count))]
    return np.concatenate([array.reshape(count, array[0].size) for array in arrays], axis=1)


def filled(layers: Sequence[LayerKVCache], seed: int = 0) -> Bytes:
    fill(layers, range(BLOCKS), seed)
    return bits(layers)


@pytest.fixture
def layers() -> list[LayerKVCache]:
    return make_layers()


# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_overwritten_blocks_come_back_bit_for_bit(
    backend: str, directory: Path | None, layouts: Sequence[KVLayout]
) -> None:
    layers = [LayerKVCache.from_layout(BLOCKS, layout, backend) for layout in layouts]
    before = filled(layers)
    assert np.isnan(np.array(layers[0].read_blocks([3])[0].astype(mx.float32))).any()
    space = SwapSpace(layers, SLOTS, directory)
    space.store([(3, 4), (0, 1), (6, 0)])
    fill(layers, [0, 3, 6], seed=1)  # not waited for: what was stored must have been read by now
    overwritten = bits(layers)
    assert (overwritten[[0, 3, 6]] != before[[0, 3, 6]]).any(axis=1).all()
    space.load([(1, 0), (0, 6), (4, 3)])
    np.testing.assert_array_equal(bits(layers), before)
    space.close()


def test_a_block_may_come_back_as_another_one_and_the_rest_stays(backend: str, directory: Path | None) -> None:
    layers = make_layers(backend)
    before = filled(layers)
    space = SwapSpace(layers, SLOTS, directory)
    space.store([(2, 3), (5, 0)])
    space.load([(3, 6), (0, 2), (3, 1)])
    expected = before.copy()
    expected[[6, 2, 1]] = before[[2, 5, 2]]
    np.testing.assert_array_equal(bits(layers), expected)
    space.close()


def test_any_order_of_calls_does_what_plain_arrays_do(
    backend: str, directory: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = make_layers(backend)
    monkeypatch.setattr(swap_space, "PIECE_BYTES", 2 * bytes_per_slot(layers))
    blocks = filled(layers)
    space = SwapSpace(layers, SLOTS, directory)
    space.store([(0, slot) for slot in range(SLOTS)])
    slots = blocks[[0] * SLOTS]
    random = np.random.default_rng(2)
    for step in range(12):
        count = int(random.integers(0, SLOTS + 1))
        chosen_blocks, chosen_slots = random.permutation(BLOCKS)[:count], random.permutation(SLOTS)[:count]
        if step % 3 == 2:
            fill(layers, chosen_blocks.tolist(), seed=step)
            blocks = bits(layers)
        elif step % 3:
            space.load(list(zip(chosen_slots.tolist(), chosen_blocks.tolist(), strict=True)))
            blocks[chosen_blocks] = slots[chosen_slots]
        else:
            space.store(list(zip(chosen_blocks.tolist(), chosen_slots.tolist(), strict=True)))
            slots[chosen_slots] = blocks[chosen_blocks]
        np.testing.assert_array_equal(bits(layers), blocks)
    space.close()


def test_slots_outlive_pools_that_are_made_anew(layers: list[LayerKVCache], directory: Path | None) -> None:
    before = filled(layers)
    space = SwapSpace(layers, SLOTS, directory)
    space.store([(block, block) for block in range(SLOTS)])
    for kv in layers:
        kv.clear()
    space.load([(block, block) for block in range(SLOTS)])
    np.testing.assert_array_equal(bits(layers)[:SLOTS], before[:SLOTS])
    assert not bits(layers)[SLOTS:].any()
    space.close()


def test_a_slot_is_one_block_of_every_layer(layers: list[LayerKVCache]) -> None:
    elements = 2 * 8 * (2 * 32 * 2 + 1 * 64 * 2 + 3 * 32 * 4 + 2 * 32 * 2)
    assert bytes_per_slot(layers) == elements
    others = [LayerKVCache.from_layout(BLOCKS, layout, "gather") for layout in LAYOUTS["unequal and latent"]]
    assert bytes_per_slot(others) == 8 * (24 * 2 + 2 * (24 + 16) * 2 + 40 * 4)
    space = SwapSpace(layers, SLOTS)
    assert space.nbytes == SLOTS * elements
    space.close()
    one_block_more = make_layers(num_blocks=BLOCKS + 1)
    assert [b.nbytes - a.nbytes for a, b in zip(layers, one_block_more, strict=True)] == [
        kv.layout.bytes_per_block for kv in layers
    ]


def test_bytes_that_go_into_the_file_are_counted(layers: list[LayerKVCache], directory: Path | None) -> None:
    space = SwapSpace(layers, SLOTS, directory)
    space.store([(2, 3), (5, 0)])
    space.load([(3, 6)])
    assert space.written.today == space.written.total == (2 * bytes_per_slot(layers) if directory else 0)
    space.close()


def test_a_day_of_writes_begins_at_midnight() -> None:
    days = [100.9]
    written = WrittenBytes(lambda: days[0] * 86_400)
    written.add(10)
    assert (written.total, written.today) == (10, 10)
    days[0] = 101.1
    assert (written.total, written.today) == (10, 0)
    written.add(5)
    days[0] = 100.9  # a clock that is set back begins no day
    written.add(1)
    assert (written.total, written.today) == (16, 6)


# -- pieces ------------------------------------------------------------------------------------------------------------


def calls(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """Blocks of each call of the method of LayerKVCache, from here on."""
    counts: list[int] = []
    original: Callable[..., Any] = getattr(LayerKVCache, name)

    def counting(kv: LayerKVCache, ids: Sequence[int], *args: Any) -> Any:
        counts.append(len(ids))
        return original(kv, ids, *args)

    monkeypatch.setattr(LayerKVCache, name, counting)
    return counts


def test_a_call_moves_all_its_blocks_of_a_layer_together(
    layers: list[LayerKVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    space = SwapSpace(layers, SLOTS)
    reads, writes = calls(monkeypatch, "read_blocks"), calls(monkeypatch, "write_blocks")
    space.store([(2, 3), (5, 0), (1, 1)])
    space.load([(0, 5), (1, 1)])
    assert reads == [3] * len(layers)
    assert writes == [2] * len(layers)
    space.store([])
    space.load([])
    assert len(reads) == len(writes) == len(layers)


@pytest.mark.parametrize(("slots_in_a_piece", "expected"), [(2.9, [2, 2, 1]), (0.1, [1] * 5), (5, [5])])
def test_a_large_call_is_cut_in_pieces(
    layers: list[LayerKVCache], monkeypatch: pytest.MonkeyPatch, slots_in_a_piece: float, expected: list[int]
) -> None:
    monkeypatch.setattr(swap_space, "PIECE_BYTES", int(slots_in_a_piece * bytes_per_slot(layers)))
    before = filled(layers)
    space = SwapSpace(layers, SLOTS)
    reads, writes = calls(monkeypatch, "read_blocks"), calls(monkeypatch, "write_blocks")
    space.store([(block, 4 - block) for block in range(5)])
    assert reads == [count for count in expected for _ in layers]
    fill(layers, range(5), seed=1)
    del writes[:]
    space.load([(4 - block, block) for block in range(5)])
    assert writes == [count for count in expected for _ in layers]
    np.testing.assert_array_equal(bits(layers), before)


def test_what_a_call_copies_is_bounded_however_much_it_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = make_layers(shapes=[(4, 64, mx.float32)] * 4, num_blocks=128)
    mx.eval([kv.arrays for kv in layers])
    space = SwapSpace(layers, 128)
    piece = 4 * bytes_per_slot(layers)
    monkeypatch.setattr(swap_space, "PIECE_BYTES", piece)
    assert space.nbytes == 32 * piece
    for move in (space.store, space.load):
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        move([(i, 127 - i) for i in range(128)])
        assert mx.get_peak_memory() - held < 3 * piece
    space.close()


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([(0, 0), (BLOCKS, 1)], "block 7 is out of range: there are 7"),
        ([(0, 0), (-1, 1)], "block -1 is out of range"),
        ([(0, 0), (1, SLOTS)], "slot 5 is out of range: there are 5"),
        ([(0, 0), (1, -1)], "slot -1 is out of range"),
        ([(0, 0), (1.0, 1)], r"block 1\.0 is out of range"),
        ([(0, 0), (1, 1.0)], r"slot 1\.0 is out of range"),
    ],
)
def test_blocks_and_slots_out_of_range_are_refused_before_anything_is_moved(
    layers: list[LayerKVCache], monkeypatch: pytest.MonkeyPatch, pairs: list[tuple[int, int]], message: str
) -> None:
    monkeypatch.setattr(swap_space, "PIECE_BYTES", 1)
    before = filled(layers)
    space = SwapSpace(layers, SLOTS)
    space.store([(3, 0)])
    with pytest.raises(ValueError, match=message):
        space.store(pairs)
    with pytest.raises(ValueError, match=message):
        space.load([(slot, block) for block, slot in pairs])
    np.testing.assert_array_equal(bits(layers), before)
    space.load([(0, 3)])
    np.testing.assert_array_equal(bits(layers), before)


def test_one_place_written_twice_is_refused_before_anything_is_moved(
    layers: list[LayerKVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_space, "PIECE_BYTES", 1)
    before = filled(layers)
    space = SwapSpace(layers, SLOTS)
    space.store([(3, 0), (3, 1)])  # one block to two slots is fine
    with pytest.raises(ValueError, match=r"a slot is written twice: \[0, 1, 0\]"):
        space.store([(4, 0), (5, 1), (6, 0)])
    with pytest.raises(ValueError, match=r"a block is written twice: \[2, 4, 2\]"):
        space.load([(0, 2), (0, 4), (1, 2)])
    space.load([(0, 3)])
    np.testing.assert_array_equal(bits(layers), before)


def test_no_slots_take_no_memory_and_no_blocks(layers: list[LayerKVCache]) -> None:
    space = SwapSpace(layers, 0)
    space.store([])
    space.load([])
    assert space.nbytes == 0
    with pytest.raises(ValueError, match="has no slots"):
        space.store([(0, 0)])
    SwapSpace([], 0).load([])
    space.close()


def test_a_swap_space_that_cannot_be_is_refused(layers: list[LayerKVCache]) -> None:
    with pytest.raises(ValueError, match="num_slots must be at least 0, got -1"):
        SwapSpace(layers, -1)
    for bad in ([], [*layers, *make_layers(num_blocks=BLOCKS + 1)], [LayerKVCache(BLOCKS, 1, 32, mx.float16), *layers]):
        with pytest.raises(ValueError, match="equally many blocks of equally many tokens"):
            SwapSpace(bad, SLOTS)


def test_more_memory_than_is_free_is_refused_with_both_figures(
    layers: list[LayerKVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_space, "system_free_memory", lambda: 10_000_000)
    with pytest.raises(MemoryError, match=r"--swap-space takes 12\.3 MB, but only 10\.0 MB of memory are free"):
        SwapSpace(layers, 1000)
    SwapSpace(layers, 800).close()


# -- the file ----------------------------------------------------------------------------------------------------------


def nameless_files(size: int) -> list[os.stat_result]:
    """This process's open files of that size that are in no directory."""
    found = []
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:  # the one that listed the directory
            continue
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 0 and status.st_size == size:
            found.append(status)
    return found


@pytest.fixture(params=["reserving", "not reserving"])
def reserving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways of making the file, where this system has both."""
    if request.param == "reserving":
        if not hasattr(os, "posix_fallocate"):
            pytest.skip("this system cannot reserve room for a file")
        return True
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    return False


def test_the_file_has_no_name_and_is_its_owners_only(
    layers: list[LayerKVCache], tmp_path: Path, reserving: bool
) -> None:
    before = filled(layers)
    space = SwapSpace(layers, 1000, tmp_path)
    (status,) = nameless_files(space.nbytes)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_dev == tmp_path.stat().st_dev
    assert (status.st_blocks * 512 >= space.nbytes) == reserving
    assert not list(tmp_path.iterdir())
    space.store([(1, 999), (2, 0)])
    fill(layers, [1, 2], seed=1)
    space.load([(999, 1), (0, 2)])
    np.testing.assert_array_equal(bits(layers), before)
    assert not list(tmp_path.iterdir())
    space.close()
    assert not nameless_files(space.nbytes)
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
import mlx.core as mx
from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.core.engine.swap_space import SwapSpace

space = SwapSpace([LayerKVCache(4, 1, 32, mx.float16)], 4, Path(sys.argv[1]))
space.store([(0, 0)])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, tmp_path], check=False).returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_directory_without_room_is_refused_with_path_and_size(
    layers: list[LayerKVCache], tmp_path: Path, reserving: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10_000_000))
    with pytest.raises(SwapSpaceError, match=rf"swap file of 12\.3 MB in {tmp_path}: only 10\.0 MB are free"):
        SwapSpace(layers, 1000, tmp_path)
    SwapSpace(layers, 800, tmp_path).close()


@pytest.fixture
def files_up_to_a_megabyte() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("files_up_to_a_megabyte")
def test_a_file_that_does_not_get_its_room_is_refused_and_gone(
    layers: list[LayerKVCache], tmp_path: Path, reserving: bool
) -> None:
    """The disk seemed to have room: there is a quota, or another process took it."""
    with pytest.raises(SwapSpaceError, match=rf"swap file of 12\.3 MB in {tmp_path}: File too large"):
        SwapSpace(layers, 1000, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_none_is_refused_with_path_and_size(layers: list[LayerKVCache], tmp_path: Path) -> None:
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.touch()
    for path, reason in ((missing, "No such file or directory"), (file, "Not a directory")):
        with pytest.raises(SwapSpaceError, match=rf"no room for a swap file of 12\.3 MB in {path}: {reason}"):
            SwapSpace(layers, 1000, path)


def test_a_directory_that_cannot_be_written_is_refused(layers: list[LayerKVCache], tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    if os.access(tmp_path, os.W_OK):
        pytest.skip("permissions do not bind this user")
    with pytest.raises(SwapSpaceError, match=rf"{tmp_path}: Permission denied"):
        SwapSpace(layers, SLOTS, tmp_path)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_a_closed_swap_space_moves_nothing_and_may_be_closed_again(
    layers: list[LayerKVCache], directory: Path | None
) -> None:
    before = filled(layers)
    space = SwapSpace(layers, SLOTS, directory)
    space.store([(1, 1)])
    space.close()
    space.close()
    for move in (space.store, space.load):
        with pytest.raises(ValueError, match="the swap space is closed"):
            move([(1, 1)])
    np.testing.assert_array_equal(bits(layers), before)


def test_the_mapping_is_gone_after_close(
    layers: list[LayerKVCache], directory: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappings: list[weakref.ref[mmap.mmap]] = []
    make = mmap.mmap

    def remembering(*args: Any, **options: Any) -> mmap.mmap:
        mapping = make(*args, **options)
        mappings.append(weakref.ref(mapping))
        return mapping

    monkeypatch.setattr(mmap, "mmap", remembering)
    space = SwapSpace(layers, SLOTS, directory)
    space.store([(block, block) for block in range(SLOTS)])
    space.load([(block, block) for block in range(SLOTS)])
    (mapping,) = mappings
    assert mapping() is not None
    space.close()
    assert mapping() is None


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no way here to see the memory of this process")
def test_memory_is_committed_slot_by_slot_and_given_back_at_close() -> None:
    layers = make_layers(shapes=[(8, 256, mx.float32)] * 8)
    assert bytes_per_slot(layers) == 2**20
    space = SwapSpace(layers, 256)
    space.store([(block, block) for block in range(4)])
    few = resident_bytes()
    for first in range(0, 128, 4):
        space.store([(block, first + block) for block in range(4)])
    half = resident_bytes()
    space.close()
    none = resident_bytes()
    assert 0.9 * 124 * 2**20 < half - few < 1.1 * 124 * 2**20
    assert half - none > 0.9 * 124 * 2**20
