"""What is on the disk when the server or the machine ends suddenly, when the disk is full, and who may read it."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from mlxpaged import durable_files
from mlxpaged.api.app import create_app
from mlxpaged.api.batches import runner
from mlxpaged.api.batches.lines import FileCheck, LinePlace
from mlxpaged.api.batches.records import BatchRecord, FileRecord, LineError, LineErrors, OutputLine
from mlxpaged.api.batches.requests import LineRequests, response_line
from mlxpaged.api.batches.runner import BatchRunner
from mlxpaged.api.batches.store import Store
from mlxpaged.api.ignored_fields import IgnoredFields
from mlxpaged.core.engine.errors import EngineState, EngineUnavailableError
from mlxpaged.engine_config import EngineConfig
from mlxpaged.journal import Journal
from tests.api.helpers import DEADLINE, raw, run_on
from tests.support import RunningServer, running_server, wait_until

COMPLETIONS = "/v1/completions"
FULL = OSError(errno.ENOSPC, "No space left on device", "/secret/path")
LINES = ["a", "b", "refused", "c", "d"]
"""Custom ids of a batch. The third request is refused, so its line is among the errors."""


class ScriptedModels:
    """In place of the registry. After `num_answers`, the server ends."""

    base = SimpleNamespace(max_num_seqs=4)
    num_unfinished = 0

    def __init__(self, num_answers: int, watch: Callable[[LinePlace], object] | None = None) -> None:
        """watch: is called while a request runs, after a time in which another one may have begun."""
        self.num_answers = num_answers
        self.watch = watch
        self.asked: list[str] = []

    def require_ready(self) -> None:
        pass

    async def wait_loaded(self) -> None:
        pass

    def answer(self, place: LinePlace) -> OutputLine:
        if len(self.asked) == self.num_answers:
            raise EngineUnavailableError(EngineState.DEAD, "the server ends")
        self.asked.append(place.custom_id)
        return response_line(place, "req", 200, {"text": place.custom_id})


class ScriptedRequests(LineRequests):
    async def answer(self, batch: BatchRecord, place: LinePlace, body: Any) -> OutputLine:
        models: Any = self._registry
        if models.watch is not None:
            await asyncio.sleep(0.01)
            models.watch(place)
        return models.answer(place)  # type: ignore[no-any-return]


class ScriptedRunner(BatchRunner):
    """Runs all batches of a store with scripted answers, until all are finished or the server ends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.requests = ScriptedRequests(*args)
        self.ended = asyncio.Event()
        self._task.add_done_callback(lambda _: self.ended.set())

    @staticmethod
    def run(store: Store, num_answers: int = 99, watch: Callable[[LinePlace], object] | None = None) -> list[str]:
        """Returns the custom ids of the requests that were run."""
        models: Any = ScriptedModels(num_answers, watch)
        server = SimpleNamespace(http=SimpleNamespace(strict=False), ignored_fields=IgnoredFields())
        app: Any = SimpleNamespace(state=SimpleNamespace(server=server))

        async def run() -> None:
            batches = ScriptedRunner(app, models, store)
            while not batches.ended.is_set() and any(batch.unfinished for batch in store.batches.values()):
                await asyncio.sleep(0.001)
            await batches.stop()

        asyncio.run(run())
        return models.asked  # type: ignore[no-any-return]


def make(directory: Path, num_answers: int) -> None:
    """A directory with a batch, of which so many requests were run."""
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": COMPLETIONS,
            "body": {"prompt": name, "temperature": 9 if name == "refused" else 0},
        }
        for name in LINES
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    store = Store(directory)
    file = FileRecord(id="file-in", bytes=len(content), created_at=1, filename="in.jsonl", purpose="batch")
    store.add_file(file, io.BytesIO(content))
    store.save_batch(
        BatchRecord(
            id="batch-1",
            endpoint=COMPLETIONS,
            input_file_id="file-in",
            completion_window="24h",
            created_at=2,
            expires_at=2**33,
        )
    )
    ScriptedRunner.run(store, num_answers)
    store.close()


def results(directory: Path) -> dict[str, bytes]:
    """The whole lines on the disk, by custom id."""
    found: dict[str, bytes] = {}
    for path in sorted((directory / "files").glob("file-batch-1-*")):
        if path.suffix == "":
            for line in path.read_bytes().splitlines():
                try:
                    custom_id = json.loads(line)["custom_id"]
                except ValueError:
                    continue
                assert custom_id not in found
                found[custom_id] = line
    return found


def check_damage(whole: Path, broken: Path, name: str, size: int, zeros: int) -> None:
    """Cut a file of a copy of the directory to `size` bytes, add zeros, and start a server on it."""
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(whole, broken)
    path = broken / name
    path.write_bytes(path.read_bytes()[:size] + bytes(zeros))
    before, kept = results(whole), results(broken)
    was_over = json.loads((whole / "batches" / "batch-1.json").read_bytes())["status"] == "completed"
    is_content = path.suffix == ""
    assert kept == before or is_content
    store = Store(broken)
    asked = ScriptedRunner.run(store)
    store.close()
    batch, after = store.batches["batch-1"], results(broken)
    damaged = {file.id for file in store.files.values() if file.status == "error"}
    assert kept.items() <= after.items(), "a finished line is lost, or was run again"
    if was_over:
        assert (batch.status, asked, after) == ("completed", [], kept)
        assert damaged == ({path.name} if is_content else set())
    elif path.name == "file-in":
        assert (batch.status, asked, after) == ("failed", [], kept)
        assert batch.errors is not None
        assert batch.errors.data[0].code == "input_file_damaged"
        assert damaged == {"file-in"}
    else:
        assert (batch.status, sorted(after), damaged) == ("completed", sorted(LINES), set())
        assert sorted(asked) == sorted(set(LINES) - kept.keys() - {"refused"})
        assert (batch.request_counts.completed, batch.request_counts.failed) == (4, 1)
    assert (batch.output_file_id is not None) == bool(after.keys() - {"refused"}) or was_over
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is not None and file_id not in damaged:
            lines = (broken / "files" / file_id).read_text().splitlines()
            assert [OutputLine.model_validate_json(line) for line in lines]


def check_all_damages(directory: Path, num_answers: int, step: int) -> int:
    """Cut each file of a directory at every `step`-th byte, with and without zeros after that. Returns how many damages
    were checked."""
    whole, count = directory / "whole", 0
    make(whole, num_answers)
    for path in sorted(whole.glob("*/*")):
        length, name = path.stat().st_size, str(path.relative_to(whole))
        for size in range(count % step, length, step):
            check_damage(whole, directory / "broken", name, size, 0)
            count += 1
            if "." in path.name or (num_answers < len(LINES) and "batch" in path.name):
                check_damage(whole, directory / "broken", name, size, length - size)
                count += 1
    return count


@pytest.fixture
def no_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is cut off here was on the disk: flushes would only take time."""
    monkeypatch.setattr(durable_files, "flush_to_disk", lambda descriptor: None)


@pytest.mark.parametrize("num_answers", [0, 2, 99])
@pytest.mark.usefixtures("no_flushes")
def test_no_cut_file_loses_a_finished_line_or_runs_it_again(tmp_path: Path, num_answers: int) -> None:
    assert check_all_damages(tmp_path, num_answers, step=307) > 10


def place_of(directory: Path, custom_id: str) -> str:
    """The name of a request in the batch's journal."""
    check = FileCheck(directory / "files" / "file-in", COMPLETIONS)
    while not check.is_done:
        check.check_part()
    return next(place.name for place in check.places if place.custom_id == custom_id)


def let_die(directory: Path, *running: str) -> None:
    """A server died while these ran."""
    path = directory / "batches" / "batch-1.running"
    journal = Journal(path)
    journal.begin(*running)
    written = path.read_bytes()
    journal.close()
    path.write_bytes(written)


@pytest.mark.usefixtures("no_flushes")
def test_what_ran_when_a_server_died_runs_after_the_others_one_at_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, 0)
    let_die(tmp_path, place_of(tmp_path, "a"), place_of(tmp_path, "refused"), place_of(tmp_path, "c"))
    store = Store(tmp_path)
    journal = tmp_path / "batches" / "batch-1.running"
    running: list[set[str]] = []

    def watch(place: LinePlace) -> None:
        _, _, own = journal.read_bytes().rpartition(b'{"boot"')
        noted = [json.loads(line) for line in own.splitlines()[1:] if line]
        begun = {name for sign, *names in noted if sign == "+" for name in names[1:]}
        running.append(begun - {name for sign, *names in noted if sign == "-" for name in names} - {place.name})

    asked = ScriptedRunner.run(store, watch=watch)
    store.close()
    assert asked == ["b", "d", "a", "c"]
    assert running[2:] == [set(), set()], "another one ran beside a suspect"
    assert store.batches["batch-1"].request_counts.completed == 4
    assert "batch-1: 2 requests ran when a server died, and run one at a time" in caplog.text
    assert not journal.exists()


@pytest.mark.usefixtures("no_flushes")
def test_an_end_of_the_server_that_is_no_death_makes_no_suspects(tmp_path: Path) -> None:
    make(tmp_path, 2)
    assert not (tmp_path / "batches" / "batch-1.running").exists()


@pytest.mark.usefixtures("no_flushes")
def test_a_batch_whose_files_kill_the_server_twice_fails_and_keeps_its_answers(tmp_path: Path) -> None:
    make(tmp_path, 2)
    kept = results(tmp_path)
    for _ in range(2):
        let_die(tmp_path, runner.READING)
    store = Store(tmp_path)
    assert ScriptedRunner.run(store) == []
    batch = store.batches["batch-1"]
    assert (batch.status, batch.errors) == (
        "failed",
        LineErrors(
            data=[
                LineError(
                    code="process_died",
                    message="the server process died twice while it read the files of this batch",
                )
            ]
        ),
    )
    assert batch.output_file_id is not None
    assert results(tmp_path) == kept
    store.close()


@pytest.mark.usefixtures("no_flushes")
def test_a_batch_whose_files_were_read_when_the_server_died_is_read_again(tmp_path: Path) -> None:
    make(tmp_path, 2)
    let_die(tmp_path, runner.READING)
    store = Store(tmp_path)
    ScriptedRunner.run(store)
    assert store.batches["batch-1"].status == "completed"
    store.close()


@pytest.mark.usefixtures("no_flushes")
def test_the_journal_of_a_batch_that_has_ended_is_deleted(tmp_path: Path) -> None:
    make(tmp_path, 99)
    let_die(tmp_path, "0")
    Store(tmp_path).close()
    assert not (tmp_path / "batches" / "batch-1.running").exists()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    config = EngineConfig(kv_cache_bytes=16_000_000, max_num_seqs=4)
    with running_server(config, data_dir=tmp_path_factory.mktemp("data") / "new") as server:
        yield server


def fill_disk(monkeypatch: pytest.MonkeyPatch, num_flushes: int) -> list[int]:
    """The disk is full after so many flushes. Returns how many are left, to be changed."""
    flush, left = durable_files.flush_to_disk, [num_flushes]

    def flush_if_there_is_room(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise FULL
        flush(descriptor)

    monkeypatch.setattr(durable_files, "flush_to_disk", flush_if_there_is_room)
    return left


def upload(http: httpx.Client, content: bytes) -> httpx.Response:
    return http.post("/v1/files", data={"purpose": "batch"}, files={"file": content})


def test_on_a_full_disk_uploads_are_refused_and_a_batch_waits_until_there_is_room(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, runner.__name__)
    monkeypatch.setattr(runner, "DISK_SECONDS", 0.01)
    lines = [{"custom_id": str(i), "method": "POST", "url": COMPLETIONS, "body": run_on("x", 2)} for i in range(6)]
    content = "\n".join(map(json.dumps, lines)).encode()
    data = server.app.state.store.content("x").parent.parent
    with raw(server) as http:
        body = {"input_file_id": upload(http, content).json()["id"], "endpoint": COMPLETIONS}
        before = sorted(data.glob("files/*"))
        room = fill_disk(monkeypatch, 9)
        batch = http.post("/v1/batches", json=body | {"completion_window": "24h"}).json()

        def shown() -> dict[str, Any]:
            found: dict[str, Any] = http.get(f"/v1/batches/{batch['id']}").json()
            return found

        wait_until(lambda: shown()["errors"] is not None, DEADLINE)
        waiting = shown()
        assert waiting["status"] in ("validating", "in_progress")
        assert waiting["request_counts"]["completed"] == 0
        message = "answers cannot be saved: No space left on device. The batch goes on when they can be"
        (error,) = waiting["errors"]["data"]
        assert (error["code"], error["message"]) == ("not_stored", message)
        for refused in (upload(http, b"x"), http.post(f"/v1/batches/{batch['id']}/cancel")):
            assert refused.status_code == 507, refused.text
            assert refused.json()["error"]["code"] == "not_stored"
            assert "/secret/path" not in refused.text
        results = f"file-{batch['id']}-"
        assert [path for path in sorted(data.glob("files/*")) if results not in path.name] == before
        room[0] = 10**9
        wait_until(lambda: shown()["status"] == "completed", DEADLINE)
        done = shown()
        assert (done["errors"], done["request_counts"]["completed"]) == (None, 6)
        text = http.get(f"/v1/files/{done['output_file_id']}/content").text
    assert sorted(json.loads(line)["custom_id"] for line in text.splitlines()) == list("012345")
    logged = [record.getMessage() for record in caplog.records if batch["id"] in record.getMessage()]
    reason = "waits, because its answers cannot be saved: No space left on device"
    assert logged.count(f"{batch['id']} {reason}") == 1
    assert f"{batch['id']} goes on" in logged


@pytest.mark.parametrize("room", range(4))
def test_nothing_stays_of_a_batch_that_cannot_be_saved(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """A record is two files, each flushed with its directory. What is left of one would run after a restart."""
    data = server.app.state.store.content("x").parent.parent
    with raw(server) as http:
        body = {"input_file_id": upload(http, b"{}").json()["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        before = sorted(data.glob("batches/*"))
        fill_disk(monkeypatch, room)
        assert http.post("/v1/batches", json=body).status_code == 507
    assert sorted(data.glob("batches/*")) == before


def test_only_the_owner_may_read_what_is_written(server: RunningServer) -> None:
    with raw(server) as http:
        body = {"input_file_id": upload(http, b"not a batch").json()["id"], "endpoint": COMPLETIONS}
        http.post("/v1/batches", json=body | {"completion_window": "24h"})
    data = server.app.state.store.content("x").parent.parent
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (data, *data.rglob("*")) if path.exists()}
    assert {"lock", "files", "batches", body["input_file_id"]} <= modes.keys()
    assert modes == {name: 0o700 if name in ("new", "files", "batches") else 0o600 for name in modes}


def test_directories_that_others_could_enter_are_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "files").mkdir(mode=0o755)
    Store(tmp_path).close()
    assert stat.S_IMODE((tmp_path / "files").stat().st_mode) == 0o700
    assert f"other users could enter {tmp_path / 'files'} (mode 755): now only you can" in caplog.text


def test_a_directory_without_the_permission_to_write_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(**_: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setattr("tempfile.TemporaryFile", refused)
    with pytest.raises(OSError, match="Read-only file system"):
        create_app(None, data_dir=tmp_path)


@pytest.mark.usefixtures("no_flushes")
def test_a_part_of_a_line_that_a_full_disk_took_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    durable_files.append(path, b"one\n")

    with monkeypatch.context() as patch:
        fill_disk(patch, 0)
        with pytest.raises(OSError, match="No space left"):
            durable_files.append(path, b"two\n")
    assert path.read_bytes() == b"one\n"
    durable_files.append(path, b"three\n")
    assert path.read_bytes() == b"one\nthree\n"


def test_the_drive_empties_its_cache_if_the_system_has_a_call_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("fcntl.F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr("fcntl.fcntl", lambda descriptor, command: asked.append((descriptor, command)))
    with (tmp_path / "lines").open("wb") as file:
        durable_files.flush_to_disk(file.fileno())
        assert (file.fileno(), 51) in asked  # a server of another test may flush meanwhile


@pytest.mark.usefixtures("no_flushes")
def test_a_file_whose_upload_was_cut_short_is_not_there_and_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    file = FileRecord(id="file-in", bytes=1, created_at=1, filename="in", purpose="batch")
    store.add_file(file, io.BytesIO(b"x"))
    store.close()
    (tmp_path / "files" / "file-in").unlink()  # its content never got its name
    (tmp_path / "files" / ".file-in.00").write_bytes(b"x")
    store = Store(tmp_path)
    assert (store.files, list((tmp_path / "files").iterdir())) == ({}, [])
    store.close()


@pytest.mark.usefixtures("no_flushes")
def test_hidden_files_of_others_stay(tmp_path: Path) -> None:
    for name in ("files", "batches"):
        (tmp_path / name / ".git").mkdir(parents=True)
        (tmp_path / name / ".DS_Store").touch()
    Store(tmp_path).close()
    assert {path.name for path in tmp_path.glob("*/.*")} == {".git", ".DS_Store"}


@pytest.mark.usefixtures("no_flushes")
def test_a_record_of_which_both_copies_are_damaged_stops_no_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, 2)
    for name in ("batch-1.json", "batch-1.copy"):
        (tmp_path / "batches" / name).write_bytes(b"{")
    store = Store(tmp_path)
    assert not store.batches
    assert list(store.files) == ["file-in"]
    store.close()
    assert "the record batch-1 is damaged and left out" in caplog.text
    assert set(results(tmp_path)) >= {"a", "b"}


@pytest.mark.usefixtures("no_flushes")
def test_a_copy_with_the_id_of_another_record_is_damaged(tmp_path: Path) -> None:
    make(tmp_path, 0)
    first, second = (tmp_path / "batches" / name for name in ("batch-1.json", "batch-1.copy"))
    first.write_bytes(first.read_bytes().replace(b'"batch-1"', b'"batch-9"'))
    store = Store(tmp_path)
    assert [(name, batch.id) for name, batch in store.batches.items()] == [("batch-1", "batch-1")]
    assert first.read_bytes() == second.read_bytes()
    store.close()
