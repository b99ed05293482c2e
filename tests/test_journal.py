"""What a journal knows after the death of a process, after an orderly end, and after the end of the machine."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxpaged import journal as journals
from mlxpaged.journal import MOST_BYTES, Journal

Work = Callable[[Journal], object]


def died(path: Path, work: Work) -> dict[str, int]:
    """Let a process do something with the journal and die. Returns what the next one counts."""
    journal = Journal(path)
    work(journal)
    written = path.read_bytes()
    journal.close()
    path.write_bytes(written)
    return counted(path)


def ended(path: Path, work: Work) -> dict[str, int]:
    """The same for a process that ends as it should."""
    journal = Journal(path)
    work(journal)
    journal.close()
    return counted(path)


def counted(path: Path) -> dict[str, int]:
    return {name: deaths.times for name, deaths in journals.suspects_in(read(path)).items()}


def read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_what_runs_in_two_deaths_has_killed(path: Path) -> None:
    assert died(path, lambda journal: (journal.begin("a"), journal.begin("b"), journal.end("b"))) == {"a": 1}
    journal = Journal(path)
    assert journal.is_suspect("a")
    assert not journal.has_killed("a")
    assert not journal.is_suspect("b")
    journal.close()
    assert died(path, lambda journal: journal.begin("a")) == {"a": 2}
    journal = Journal(path)
    assert journal.has_killed("a")
    journal.close()


def test_what_ends_after_a_death_is_no_suspect_any_more(path: Path) -> None:
    died(path, lambda journal: journal.begin("a"))
    assert died(path, lambda journal: (journal.begin("a"), journal.end("a"))) == {}


def test_a_suspect_that_does_not_run_stays_one_through_deaths_and_orderly_ends(path: Path) -> None:
    died(path, lambda journal: (journal.begin("a"), journal.begin("b")))
    assert died(path, lambda journal: journal.begin("b")) == {"a": 1, "b": 2}
    assert ended(path, lambda journal: journal.begin("a")) == {"a": 1, "b": 2}


def test_an_orderly_end_counts_for_nothing_and_leaves_no_file(path: Path) -> None:
    assert ended(path, lambda journal: journal.begin("a")) == {}
    assert not path.exists()


def test_nothing_is_noted_after_an_orderly_end(path: Path) -> None:
    died(path, lambda journal: journal.begin("a"))
    journal = Journal(path)
    journal.close()
    journal.begin("b")
    journal.end("a")
    journal.close()
    assert counted(path) == {"a": 1}


def test_what_is_not_to_be_kept_is_forgotten(path: Path) -> None:
    died(path, lambda journal: journal.begin("a"))
    Journal(path).close(keep=False)
    assert not path.exists()


def test_the_end_of_the_machine_makes_suspects_and_counts_as_no_death(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died(path, lambda journal: journal.begin("a"))
    Journal(path).close()
    boots = iter("12345")
    for _ in range(3):
        boot = next(boots)
        monkeypatch.setattr(journals, "boot_id", lambda: boot)  # noqa: B023
        assert counted(path).get("b", 0) == 0
        died(path, lambda journal: (journal.begin("a"), journal.begin("b")))
    monkeypatch.setattr(journals, "boot_id", lambda: "last")
    assert counted(path) == {"a": 1, "b": 0}
    journal = Journal(path)
    assert journal.is_suspect("b")
    assert not journal.has_killed("b")
    journal.close()


def test_the_system_names_the_time_since_its_start() -> None:
    assert journals.boot_id() == journals.boot_id() != ""


def test_macos_names_the_time_since_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "BOOT_ID", tmp_path / "linux only")
    monkeypatch.setattr(journals, "sysctl_text", {b"kern.bootsessionuuid": "5F0E"}.__getitem__)
    assert journals.boot_id.__wrapped__() == "5F0E"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV], ids=lambda number: number.name)
def test_a_process_that_is_killed_has_noted_what_it_ran(path: Path, number: signal.Signals) -> None:
    program = (
        "import os, sys; from pathlib import Path; from mlxpaged.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1])); journal.begin('a'); journal.begin('b'); journal.end('a')\n"
        "os.kill(os.getpid(), int(sys.argv[2]))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path), str(int(number))], check=False)
    assert done.returncode == -number
    assert counted(path) == {"b": 1}


def test_two_processes_do_not_share_a_journal(path: Path) -> None:
    journal = Journal(path)
    journal.begin("a")
    with pytest.raises(BlockingIOError):
        Journal(path)
    assert counted(path) == {"a": 1}
    journal.close()
    Journal(path).close()


def test_only_its_owner_may_read_it(path: Path) -> None:
    journal = Journal(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    journal.close()


@pytest.mark.parametrize("junk", [b"\0" * 40, b"\n[", b"\n[[]]", b'\n["-", [1], null]', b'\n{"deaths": 3}'], ids=repr)
def test_what_is_no_record_is_left_out(path: Path, junk: bytes) -> None:
    died(path, lambda journal: journal.begin("a"))
    path.write_bytes(junk + path.read_bytes() + junk)
    assert counted(path) == {"a": 1}
    assert died(path, lambda journal: journal.begin("a")) == {"a": 2}


def test_names_may_have_any_characters(path: Path) -> None:
    name = 'a"\n\0[]\ud800 ü'
    assert died(path, lambda journal: journal.begin(name)) == {name: 1}


def test_a_full_disk_loses_no_suspect(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died(path, lambda journal: journal.begin("a"))
    write: Any = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:3]))
        with pytest.raises(OSError, match="No space left") as raised:
            Journal(path)
    assert raised.value.errno == errno.ENOSPC
    assert counted(path) == {"a": 1}
    journal = Journal(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:3]))
        with pytest.raises(OSError, match="No space left"):
            journal.begin("b")
        journal.end("a")
    journal.begin("c")
    assert counted(path) == {"a": 1, "c": 1}
    journal.close()


def test_a_long_journal_begins_again_while_nothing_runs(path: Path) -> None:
    def work(journal: Journal) -> None:
        journal.begin("b")
        for i in range(MOST_BYTES // 40):
            journal.begin(f"{i}" * 10)
            journal.end(f"{i}" * 10)
        assert path.stat().st_size > MOST_BYTES, "b would be forgotten"
        journal.end("b")
        assert path.stat().st_size < 1000
        journal.begin("c")

    died(path, lambda journal: journal.begin("a"))
    assert died(path, work) == {"a": 1, "c": 1}
    assert all(json.loads(line) for line in path.read_bytes().splitlines() if line)
