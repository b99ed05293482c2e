"""Servers that are killed at random moments of a batch, files that are cut at any byte, and a disk without room."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxpaged.parts.grammar.schema_limits import MAX_NESTING
from tests.api.test_durability import check_all_damages, no_flushes
from tests.cli.helpers import DEADLINE, Command, mlxpaged, serving
from tests.engine.constraints import nested
from tests.faults.fault import SHARE
from tests.support import wait_until

__all__ = ["no_flushes"]

pytestmark = pytest.mark.faults

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NUM_KILLS, NUM_LINES = max(1, round(50 * SHARE)), 40
START_SECONDS, RUN_SECONDS = 1.5, 0.8
"""A kill comes at most this long after the start of a process, or after its model is loaded."""


@pytest.mark.parametrize("num_answers", [0, 2, 99])
@pytest.mark.usefixtures("no_flushes")
def test_no_byte_at_which_a_file_is_cut_loses_a_finished_line_or_runs_it_again(
    tmp_path: Path, num_answers: int
) -> None:
    print(f"{check_all_damages(tmp_path, num_answers, step=1)} damages")


def request_of(i: int) -> dict[str, Any]:
    return {"prompt": f"Once {i}", "temperature": 0, "max_tokens": 20 + i, "ignore_eos": True}


def http(command: Command) -> httpx.Client:
    return httpx.Client(base_url=command.url, timeout=DEADLINE, trust_env=False, verify=False)


def submit(client: httpx.Client, bodies: Sequence[dict[str, Any]] = (), url: str = COMPLETIONS) -> str:
    bodies = bodies or [request_of(i) for i in range(NUM_LINES)]
    lines = [{"custom_id": str(i), "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": content}).json()
    body = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
    return str(client.post("/v1/batches", json=body).json()["id"])


def whole_lines(path: Path) -> list[bytes]:
    """Those that end: the last one may be cut."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def lines_of(client: httpx.Client, file_id: str | None) -> list[dict[str, Any]]:
    text = "" if file_id is None else client.get(f"/v1/files/{file_id}/content").text
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_survives_many_kills(tmp_path: Path, seed: int) -> None:
    """Each finished line stays as it is, byte for byte. None is there twice, and each has the right answer, but for
    those that were running in two kills: a server that is killed has died."""
    rng = random.Random(seed)
    data = tmp_path / "data"
    flags = ("--data-dir", str(data), "--max-num-seqs", "4")
    with serving(tmp_path / "answers", *flags) as command, http(command) as client:
        bodies = [client.post(COMPLETIONS, json=request_of(i)).json() for i in range(NUM_LINES)]
        answers = {str(i): body["choices"][0]["text"] for i, body in enumerate(bodies)}
        batches = [submit(client)]
        command.process.kill()
    num_grown = num_given_up = 0
    for kill in range(NUM_KILLS):
        results = data / "files" / f"file-{batches[-1]}-output"
        before, counted = whole_lines(results), 0
        flags_of_start = ("--port", "0", "--kv-cache-memory", "16MB", *flags)
        with mlxpaged(tmp_path / f"kill-{kill}", "serve", *flags_of_start) as command:
            if kill % 4 == 0:
                time.sleep(rng.uniform(0, START_SECONDS))
            else:
                command.wait_started()
                end = time.monotonic() + rng.uniform(0, RUN_SECONDS)
                with http(command) as client:
                    while (left := end - time.monotonic()) > 0:
                        batch = client.get(f"/v1/batches/{batches[-1]}").json()
                        counted = batch["request_counts"]["completed"]
                        if batch["status"] == "completed":
                            batches.append(submit(client))
                            break
                        time.sleep(min(left, rng.uniform(0, 0.1)))
            command.process.kill()
            command.wait_end()
            assert "Traceback" not in command.stderr
        after = whole_lines(results)
        assert after[: len(before)] == before, "a finished line is lost"
        assert len(after) >= counted, "a line counted before it was on the disk"
        num_grown += len(after) > len(before)
    with serving(tmp_path / "end", *flags) as command, http(command) as client:
        for batch_id in batches:
            wait_until(lambda: client.get(f"/v1/batches/{batch_id}").json()["status"] == "completed", 60)  # noqa: B023
            done = client.get(f"/v1/batches/{batch_id}").json()
            lines, errors = lines_of(client, done["output_file_id"]), lines_of(client, done["error_file_id"])
            assert done["request_counts"] == {"total": NUM_LINES, "completed": len(lines), "failed": len(errors)}
            given_up = {line["custom_id"] for line in errors if line["error"]["code"] == "process_died"}
            assert len(given_up) == len(errors)
            assert {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines} == {
                name: answer for name, answer in answers.items() if name not in given_up
            }
            num_given_up += len(given_up)
    assert num_given_up <= NUM_KILLS / 2
    assert num_grown > 0 or SHARE < 1  # a few kills may all come before the first answer
    print(f"{NUM_KILLS} kills, {num_grown} after new answers, {len(batches)} batches, {num_given_up} lines given up")


def test_of_1000_lines_those_that_are_refused_fail_and_the_others_are_answered_whatever_ends_the_server(
    tmp_path: Path,
) -> None:
    """Ten schemas are nested too deeply for the native compiler. Servers are killed and ended in between."""
    data, refused = tmp_path / "data", range(50, 1000, 100)
    too_deep = {"type": "json_schema", "json_schema": {"name": "deep", "schema": nested(MAX_NESTING + 1)}}
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "ignore_eos": True}
    bodies = [body | ({"response_format": too_deep} if i in refused else {}) for i in range(1000)]
    flags = ("--data-dir", str(data), "--max-num-seqs", "16")
    with serving(tmp_path / "first", *flags) as command, http(command) as client:
        batch_id = submit(client, bodies, CHAT)
        command.process.kill()
    results = data / "files" / f"file-{batch_id}-output"
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        before = len(whole_lines(results))
        with serving(tmp_path / f"{before} lines", *flags) as command:
            wait_until(lambda: len(whole_lines(results)) >= before + 150, 120)  # noqa: B023
            command.process.send_signal(number)
            command.wait_end()
            assert "Traceback" not in command.stderr
    assert 600 <= len(whole_lines(results)) < 990
    with serving(tmp_path / "last", *flags) as command, http(command) as client:
        wait_until(lambda: client.get(f"/v1/batches/{batch_id}").json()["status"] == "completed", 120)
        done = client.get(f"/v1/batches/{batch_id}").json()
        lines, errors = lines_of(client, done["output_file_id"]), lines_of(client, done["error_file_id"])
    assert done["request_counts"] == {"total": 1000, "completed": 990, "failed": 10}
    assert sorted(int(line["custom_id"]) for line in lines) == [i for i in range(1000) if i not in refused]
    assert sorted(int(line["custom_id"]) for line in errors) == list(refused)
    assert {line["response"]["status_code"] for line in errors} == {400}
    assert all(str(MAX_NESTING) in line["response"]["body"]["error"]["message"] for line in errors)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this process may not mount a file system")
    with ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", "-l", str(path)], check=True)
        yield path


def test_a_batch_on_a_disk_without_room_goes_on_when_there_is_some(tmp_path: Path, small_disk: Path) -> None:
    with serving(tmp_path / "server", "--data-dir", str(small_disk)) as command, http(command) as client:
        batch_id = submit(client)
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(512)):
                    pass
            except OSError:
                pass

        def shown() -> dict[str, Any]:
            found: dict[str, Any] = client.get(f"/v1/batches/{batch_id}").json()
            return found

        wait_until(lambda: shown()["errors"] is not None, DEADLINE)
        assert "No space left on device" in shown()["errors"]["data"][0]["message"]
        upload = client.post("/v1/files", data={"purpose": "batch"}, files={"file": bytes(300_000)})
        assert (upload.status_code, upload.json()["error"]["code"]) == (507, "not_stored")
        assert len(client.get("/v1/files").json()["data"]) == 1
        assert not list(small_disk.glob("files/.*"))
        filler.unlink()
        wait_until(lambda: shown()["status"] == "completed", DEADLINE)
        assert (shown()["errors"], shown()["request_counts"]["completed"]) == (None, NUM_LINES)


def test_a_read_only_file_system_is_refused_at_the_start(tmp_path: Path, small_disk: Path) -> None:
    with serving(tmp_path / "first", "none", "--data-dir", str(small_disk)):
        pass
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    flags = ("--port", "0", "--data-dir", str(small_disk))
    with mlxpaged(tmp_path / "second", "serve", "none", *flags) as command:
        assert command.wait_end() == 1
        assert command.stderr.startswith(f"mlxpaged: --data-dir {small_disk}: ")
        assert "Read-only file system" in command.stderr
