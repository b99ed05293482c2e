"""Blocks in files: found whole or not at all, within the budgets, whatever becomes of the files and the clock."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.journal import Journal
from mlxpaged.parts.disk import disk_journal, disk_store
from mlxpaged.parts.disk.disk_index import Name
from mlxpaged.parts.disk.disk_store import DiskStore, StoredBlock, StoreError

DAY = 86_400
HEADER = 2 * 8 + 4 * 8 + 16
"""Bytes of a block beside its data, if it has a predecessor and four tokens."""


class Clock:
    now = 20_000.0 * DAY

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "prefixes"


@pytest.fixture
def store(directory: Path, clock: Clock) -> Iterator[DiskStore]:
    store = DiskStore(directory, 10**6, 10**6, clock)
    yield store
    store.close()


def content(number: int, part: int = 0) -> StoredBlock:
    return StoredBlock(Name(number.to_bytes(16, "big"), part), bytes(16), (number, 2, 3, 4))


def data(number: int, size: int = 100) -> memoryview:
    return memoryview(random.Random(number).randbytes(size))


def write(store: DiskStore, numbers: range, model: str = "m", size: int = 100) -> None:
    for number in numbers:  # one after the other, as blocks leave a pool
        store.write(model, [(content(number), data(number, size))])
    assert store.flush()


def read(store: DiskStore, numbers: range, size: int = 100) -> list[int]:
    """The numbers of the blocks that are found. Their data must be what was written."""
    found = store.read([content(number) for number in numbers]).result(10)
    for number, each in zip(numbers, found, strict=True):
        assert each is None or each == data(number, size), number
    return [number for number, each in zip(numbers, found, strict=True) if each is not None]


def bytes_in(directory: Path, pattern: str = "*.segment") -> int:
    return sum(path.stat().st_size for path in directory.glob(pattern))


def test_blocks_are_read_as_they_were_written_also_by_the_next_process(store: DiskStore, directory: Path) -> None:
    store.write("m", [(content(number), data(number)) for number in range(50)])
    store.flush()
    assert read(store, range(60)) == list(range(50))
    assert content(3).name in store
    assert content(55).name not in store
    assert content(3, part=1).name not in store
    store.close()
    other = DiskStore(directory, 10**6, 10**6)
    assert read(other, range(60)) == list(range(50))
    assert [(each.model, each.blocks) for each in other.usage()] == [("m", 50)]
    other.close()


def test_a_block_of_other_tokens_or_another_predecessor_is_not_found(store: DiskStore) -> None:
    write(store, range(1))
    other_tokens = content(0)._replace(tokens=(9, 2, 3, 4))
    other_parent = content(0)._replace(parent=b"x" * 16)
    fewer = content(0)._replace(tokens=(0, 2, 3))
    assert store.read([other_tokens, other_parent, fewer]).result(10) == [None, None, None]
    assert read(store, range(1)) == [0]
    assert store.stats().damaged == 0


def test_only_the_owner_may_read_the_files(store: DiskStore, directory: Path) -> None:
    write(store, range(3))
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    files = list(directory.iterdir())
    assert len(files) >= 3
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files), files


def test_an_index_that_is_truncated_while_it_is_open_loses_no_process(store: DiskStore, directory: Path) -> None:
    """A truncated file that is mapped into memory would end it with SIGBUS."""
    write(store, range(3))
    for path in directory.glob("index*"):
        os.truncate(path, 0)
    write(store, range(3, 10))
    assert set(read(store, range(10))) >= {0, 1, 2}
    store.close()
    other = DiskStore(directory, 10**6, 10**6)
    write(other, range(3))
    assert read(other, range(3)) == [0, 1, 2]
    other.close()


def test_a_directory_has_one_store_at_a_time(store: DiskStore, directory: Path) -> None:
    with pytest.raises(StoreError, match=rf"^another server uses {directory} \(process {os.getpid()}\)$"):
        DiskStore(directory, 10**6, 10**6)
    store.close()
    DiskStore(directory, 10**6, 10**6).close()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be used"):
        DiskStore(tmp_path / "file" / "below", 10**6, 10**6)


def test_1000_prompts_through_100_blocks_stay_within_the_budget_and_nothing_is_written_twice(directory: Path) -> None:
    check_prompts(directory, 1000)


def check_prompts(directory: Path, count: int) -> float:
    """Prompts of four blocks. Returns the bytes written for each byte of them."""
    size = 1000
    budget = 100 * (size + HEADER)
    store = DiskStore(directory, budget, 10**9)
    for prompt in range(count):
        store.write("m", [(content(4 * prompt + i), data(4 * prompt + i, size)) for i in range(4)])
        if prompt % 50 == 0:
            store.flush()
            assert bytes_in(directory) <= budget
            assert bytes_in(directory, "index*") < 2_000_000
    store.flush()
    assert bytes_in(directory) <= budget
    written, num_blocks = store.stats().written_today, 4 * count
    assert written <= 1.3 * num_blocks * size
    last = read(store, range(num_blocks - 100, num_blocks), size)
    assert len(last) >= 80
    assert last == list(range(num_blocks - len(last), num_blocks)), "the latest are kept"
    store.close()
    assert len(list(directory.glob("*.segment"))) <= 20
    return written / (num_blocks * size)


def test_blocks_that_are_read_stay_and_others_go(directory: Path, clock: Clock) -> None:
    store = DiskStore(directory, 160 * (100 + HEADER), 10**9, clock)
    write(store, range(10))
    for first in range(10, 1000, 10):
        assert read(store, range(10)) == list(range(10))
        write(store, range(first, first + 10))
    assert not store.can_read(content(10).name)
    store.close()


def test_several_models_share_the_budget_and_one_can_be_cleared(store: DiskStore, directory: Path) -> None:
    write(store, range(10), "one")
    write(store, range(10, 30), "two")
    assert [(each.model, each.blocks) for each in store.usage()] == [("two", 20), ("one", 10)]
    assert store.clear("two").result(10) == 20
    assert read(store, range(30)) == list(range(10))
    assert len(list(directory.glob("*.segment"))) == 1
    assert store.clear().result(10) == 10
    assert store.stats().size == bytes_in(directory) == 0
    write(store, range(5), "one")
    assert read(store, range(5)) == list(range(5))


def test_no_more_is_written_a_day_than_allowed_whatever_the_clock_does(directory: Path, clock: Clock) -> None:
    budget, number = 20 * (100 + HEADER), 0
    store = DiskStore(directory, 10**6, budget, clock)

    def written_of(count: int) -> int:
        nonlocal number
        first, number = number, number + count
        write(store, range(first, number))
        return len(read(store, range(first, number)))

    assert written_of(50) == 20
    assert store.stats()[3:5] == (budget, budget)
    clock.now -= 400 * DAY  # set back: no other day
    assert written_of(50) == 0
    clock.now += DAY
    assert written_of(50) == 20
    clock.now += 10_000 * DAY  # and back again
    assert written_of(50) == 20
    clock.now -= 10_000 * DAY
    assert written_of(50) == 0
    assert store.stats().written_total == 3 * budget
    store.close()
    store = DiskStore(directory, 10**6, budget, clock)
    assert written_of(50) == 0, "a restart is no other day"
    store.close()


@pytest.mark.parametrize("failing", ["write", "index"])
def test_a_full_disk_stops_the_writing_and_says_so(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    write(store, range(10))
    if failing == "write":
        monkeypatch.setattr(os, "open", full)
        store.clear("other").result(10)
        write(store, range(10, 20), "new")
        monkeypatch.undo()
    else:
        monkeypatch.setattr(disk_store.DiskIndex, "add", lambda *_: (_ for _ in ()).throw(sqlite3.OperationalError()))
        write(store, range(10, 20))
    assert store.room == 0
    assert "no more prefixes are written" in caplog.text
    assert read(store, range(20)) == list(range(10)), "what is there can still be read"
    write(store, range(30, 40))
    assert caplog.text.count("no more prefixes") == 1


def test_files_that_the_index_does_not_know_are_deleted(store: DiskStore, directory: Path) -> None:
    write(store, range(3))
    store.close()
    (directory / "00000077.segment").write_bytes(b"torn")
    next(directory.glob("00000001.segment")).unlink()
    other = DiskStore(directory, 10**6, 10**6)
    assert other.stats()[:2] == (0, 0)
    assert not list(directory.glob("*.segment"))
    other.close()


def test_another_format_is_deleted(store: DiskStore, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(store, range(3))
    store.close()
    index = sqlite3.connect(directory / "index.sqlite3")
    index.execute("PRAGMA user_version = 99")
    index.close()
    (directory / "of another program").write_text("")
    other = DiskStore(directory, 10**6, 10**6)
    assert other.stats().blocks == 0
    assert "format 99" in caplog.text
    assert not list(directory.glob("*.segment"))
    assert (directory / "of another program").exists()
    write(other, range(3))
    assert read(other, range(3)) == [0, 1, 2]
    other.close()


def damage(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        del content[rng.randrange(len(content)) :]
    else:
        for _ in range(rng.choice([1, 1, 20])):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def test_damaged_files_never_give_other_data(tmp_path: Path) -> None:
    """80 times a file is truncated or some of its bits are flipped, the index too."""
    whole = tmp_path / "whole"
    store = DiskStore(whole, 10**6, 10**6)
    write(store, range(60))
    store.close()
    rng = random.Random(1)
    found = 0
    for trial in range(80):
        directory = tmp_path / str(trial)
        shutil.copytree(whole, directory)
        files = [path for path in sorted(directory.iterdir()) if path.stat().st_size]
        damage(rng.choice(files), rng)
        store = DiskStore(directory, 10**6, 10**6)
        found += len(read(store, range(60)))
        write(store, range(60, 65))
        read(store, range(65))
        store.close()
        shutil.rmtree(directory)
    assert found > 80 * 20, "most blocks are found"


def test_data_that_is_damaged_while_the_store_is_open_is_not_found(store: DiskStore, directory: Path) -> None:
    write(store, range(20))
    path = next(directory.glob("*.segment"))
    raw = bytearray(path.read_bytes())
    raw[5 * (100 + HEADER) + HEADER + 7] ^= 1
    path.write_bytes(raw)
    assert read(store, range(20)) == [number for number in range(20) if number != 5]
    assert content(5).name not in store
    path.unlink()
    assert read(store, range(20)) == []
    assert store.stats().damaged == 20
    write(store, range(20, 22))


WRITER = """
import sys
from pathlib import Path
from tests.cache.test_disk_store import DiskStore, content, data
store = DiskStore(Path(sys.argv[1]), 20_000, 10**9)
number = int(sys.argv[2])
while True:
    store.write("m", [(content(number + i), data(number + i)) for i in range(3)])
    store.flush()
    print(number, flush=True)
    number += 3
"""


READER = """
import os, signal, sys
from pathlib import Path
from tests.cache.test_disk_store import content
from mlxpaged.parts.disk.disk_store import DiskStore

store = DiskStore(Path(sys.argv[1]), 10**6, 10**6)
for number in (1, 2):
    store.read([content(number)]).result()
store.end_reading([content(2)])
store.read([content(3)]).result()
store.read([content(4)]).result()
store.end_reading([content(4)])
store.clear("another model").result()  # after that
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_blocks_that_were_being_used_in_two_deaths_are_dropped(
    store: DiskStore, directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(store, range(6))
    store.close()
    for deaths in range(2):
        other = DiskStore(directory, 10**6, 10**6)
        assert all(other.can_read(content(number).name) for number in range(6)), f"{deaths} deaths are enough"
        other.close()
        process = subprocess.run([sys.executable, "-c", READER, str(directory)], check=False)
        assert process.returncode == -signal.SIGKILL
    for _ in range(2):
        other = DiskStore(directory, 10**6, 10**6)
        assert read(other, range(6)) == [0, 2, 4, 5]
        other.close()
    assert "two processes died while they read 2 blocks: dropped" in caplog.text
    other = DiskStore(directory, 10**6, 10**6)
    write(other, range(1, 4))
    assert read(other, range(6)) == list(range(6)), "they are not stored again"
    other.close()


def test_an_index_that_was_being_opened_in_two_deaths_is_deleted(store: DiskStore, directory: Path) -> None:
    write(store, range(6))
    store.close()
    for deaths in range(1, 4):
        for _ in range(deaths):
            journal = Journal(directory / disk_journal.FILE)
            journal.begin(disk_journal.INDEX)
            written = (directory / disk_journal.FILE).read_bytes()
            journal.close()
            (directory / disk_journal.FILE).write_bytes(written)
        other = DiskStore(directory, 10**6, 10**6)
        assert read(other, range(6)) == (list(range(6)) if deaths == 1 else [])
        write(other, range(6))
        other.close()


def test_a_full_disk_without_room_for_the_journal_is_read(
    store: DiskStore, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, range(3))
    store.close()
    monkeypatch.setattr("os.write", lambda file, data: 0)
    other = DiskStore(directory, 10**6, 10**6)
    assert read(other, range(3)) == [0, 1, 2]
    other.end_reading([content(0)])
    other.close()


def test_a_process_that_is_killed_leaves_whole_blocks_within_the_budget(directory: Path) -> None:
    number = 0
    for kill in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory), str(number)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(40 + kill):
            number = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        process.communicate()
        store = DiskStore(directory, 20_000, 10**9)
        assert read(store, range(number + 300)), "what was stored is found"
        assert bytes_in(directory) <= 20_000
        store.close()
        number += 300
