"""`mlxpaged serve --data-dir`: batches and the end of the process, sudden or not."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.helpers import DEADLINE, Command, Result, serving
from tests.support import wait_until

COMPLETIONS = "/v1/completions"


def http(command: Command) -> httpx.Client:
    # verify=False: loading certificates takes longer than an answer, and the tests ask again and again.
    return httpx.Client(base_url=command.url, timeout=DEADLINE, trust_env=False, verify=False)


def submit(command: Command, lengths: list[int]) -> str:
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": COMPLETIONS,
            "body": {"prompt": f"Once {i}", "temperature": 0, "max_tokens": length, "ignore_eos": True},
        }
        for i, length in enumerate(lengths)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    with http(command) as client:
        file = client.post("/v1/files", data={"purpose": "batch"}, files={"file": content}).json()
        body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        return str(client.post("/v1/batches", json=body).json()["id"])


def batch_of(command: Command, batch_id: str) -> dict[str, Any]:
    with http(command) as client:
        found: dict[str, Any] = client.get(f"/v1/batches/{batch_id}").json()
        return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
def test_a_batch_survives_the_end_of_the_process(tmp_path: Path, number: signal.Signals) -> None:
    flags = ("--data-dir", str(tmp_path / "data"), "--max-num-seqs", "2")
    with serving(tmp_path / "first", *flags, slow=True) as command:
        batch_id = submit(command, [2, 2, 400, 2])
        wait_until(lambda: batch_of(command, batch_id)["request_counts"]["completed"] == 2, DEADLINE)
        command.process.send_signal(number)
        status = command.wait_end()
        if number is signal.SIGTERM:
            assert status == 0
            assert "are ended now" not in command.stderr
            assert "Traceback" not in command.stderr
    kept = (tmp_path / "data" / "files" / f"file-{batch_id}-output").read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in kept] == ["0", "1"], "the drain waited for the batch"
    with serving(tmp_path / "second", *flags) as command:
        wait_until(lambda: batch_of(command, batch_id)["status"] == "completed", DEADLINE)
        with http(command) as client:
            text = client.get(f"/v1/files/{batch_of(command, batch_id)['output_file_id']}/content").text
    assert text.splitlines()[:2] == kept
    assert [json.loads(line)["custom_id"] for line in text.splitlines()] == ["0", "1", "2", "3"]


def test_a_directory_that_cannot_be_used_is_said_in_a_sentence(tmp_path: Path, run: Callable[..., Result]) -> None:
    (tmp_path / "file").touch()
    result = run("serve", "none", "--port", "0", "--data-dir", str(tmp_path / "file"))
    assert result.status == 1
    assert result.stderr.startswith(f"mlxpaged: --data-dir {tmp_path / 'file'}: ")
    assert "Traceback" not in result.stderr
    data = str(tmp_path / "data")
    with serving(tmp_path / "first", "none", "--data-dir", data):
        result = run("serve", "none", "--port", "0", "--data-dir", data)
    assert result.status == 1
    assert f"another server uses {data} (process " in result.stderr
