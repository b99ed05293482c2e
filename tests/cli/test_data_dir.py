"""`mlxpaged serve --data-dir`: batches and the end of the process, sudden or not."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxpaged.cli.service.manager import SERVICE_VARIABLE
from mlxpaged.journal import suspects_in
from tests.cli import forked
from tests.cli.forked import DEADLY_MODEL, DEADLY_SEED, ENDLESS_MODEL
from tests.cli.helpers import DEADLINE, Command, Result, mlxpaged, serving
from tests.support import wait_until

COMPLETIONS = "/v1/completions"


def http(command: Command) -> httpx.Client:
    # verify=False: loading certificates takes longer than an answer, and the tests ask again and again.
    return httpx.Client(base_url=command.url, timeout=DEADLINE, trust_env=False, verify=False)


def request_of(i: int, length: int) -> dict[str, Any]:
    return {"prompt": f"Once {i}", "temperature": 0, "max_tokens": length, "ignore_eos": True}


def submit(command: Command, lengths: list[int], deadly: int | None = None) -> str:
    """deadly: the number of a request that kills the server."""
    bodies = [
        request_of(i, length) | ({"seed": DEADLY_SEED} if i == deadly else {}) for i, length in enumerate(lengths)
    ]
    lines = [{"custom_id": str(i), "method": "POST", "url": COMPLETIONS, "body": body} for i, body in enumerate(bodies)]
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
    # What ran at a sudden end runs after what did not: whether line 3 had begun is a question of time.
    assert sorted(json.loads(line)["custom_id"] for line in text.splitlines()[2:]) == ["2", "3"]


def lines_of(command: Command, file_id: str) -> dict[str, dict[str, Any]]:
    """By custom id."""
    with http(command) as client:
        text = client.get(f"/v1/files/{file_id}/content").text
    lines = [json.loads(line) for line in text.splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


forked_only = pytest.mark.skipif(not forked.IS_SUPPORTED, reason="only a forked server dies when it is asked to")


@forked_only
def test_a_request_that_kills_the_server_is_given_up_after_two_deaths_and_no_other_one_is(tmp_path: Path) -> None:
    flags = ("--data-dir", str(tmp_path / "data"), "--max-num-seqs", "8")
    lengths, deadly = [30, 31, 32, 3, 4, 5, 6, 7], 2
    with serving(tmp_path / "first", *flags, slow=True) as command:
        batch_id = submit(command, lengths, deadly)
        assert command.wait_end() == -signal.SIGKILL
    noted = suspects_in((tmp_path / "data" / "batches" / f"{batch_id}.running").read_bytes())
    assert 3 <= len(noted) <= 5, "of four that run at a time, and one that waits for them"
    suspects, others = list("01234567")[: len(noted)], list("01234567")[len(noted) :]
    with serving(tmp_path / "second", *flags) as command:
        assert command.wait_end() == -signal.SIGKILL
    done = (tmp_path / "data" / "files" / f"file-{batch_id}-output").read_text().splitlines()
    before = [json.loads(line)["custom_id"] for line in done]
    assert sorted(before[: len(others)]) == others, "what is no suspect waits for none"
    assert before[len(others) :] == suspects[:2], "the suspects did not run one after the other"
    with serving(tmp_path / "third", *flags) as command:
        wait_until(lambda: batch_of(command, batch_id)["status"] == "completed", DEADLINE)
        batch = batch_of(command, batch_id)
        assert batch["request_counts"] == {"total": 8, "completed": 7, "failed": 1}
        with http(command) as client:
            answers = [client.post(COMPLETIONS, json=request_of(i, n)).json()["choices"] for i, n in enumerate(lengths)]
        succeeded, failed = lines_of(command, batch["output_file_id"]), lines_of(command, batch["error_file_id"])
    assert {name: line["response"]["body"]["choices"] for name, line in succeeded.items()} == {
        str(i): answer for i, answer in enumerate(answers) if i != deadly
    }
    (error,) = (line["error"] for line in failed.values())
    assert failed.keys() == {str(deadly)}
    assert error == {
        "code": "process_died",
        "message": "the server process died twice while it ran this request, so it is not run again",
    }
    assert not list((tmp_path / "data" / "batches").glob("*.running"))


@forked_only
@pytest.mark.parametrize("of_a_service", [False, True], ids=["data directory", "service"])
def test_a_model_whose_load_kills_the_server_twice_is_refused(tmp_path: Path, of_a_service: bool) -> None:
    flags = ["serve", "demo", "--port", "0", "--served-model-name", DEADLY_MODEL]
    home = {"HOME": str(tmp_path), SERVICE_VARIABLE: "1"}
    journal = tmp_path / ".mlxpaged" / "service" / "loads"
    if not of_a_service:
        flags += ["--data-dir", str(tmp_path / "data")]
        home, journal = {}, tmp_path / "data" / "loads"
    for i in range(2):
        with mlxpaged(tmp_path / f"death {i}", *flags, env=home) as command:
            assert command.wait_end() == -signal.SIGKILL
    for i in range(2):
        with mlxpaged(tmp_path / f"refused {i}", *flags, env=home) as command:
            assert command.wait_end() == 1
            assert (
                "mlxpaged: 'demo' is not loaded: the process died 2 times while it loaded the model" in command.stderr
            )
            assert f"`rm {journal}`" in command.stderr
            assert "Traceback" not in command.stderr
    with mlxpaged(tmp_path / "other flags", *flags, "--max-num-seqs", "3", env=home) as command:
        assert command.wait_end() == -signal.SIGKILL
    journal.unlink()
    with mlxpaged(tmp_path / "again", *flags, env=home) as command:
        assert command.wait_end() == -signal.SIGKILL


@forked_only
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_load_that_a_signal_ends_is_no_death_of_it(tmp_path: Path, number: signal.Signals) -> None:
    data = tmp_path / "data"
    flags = ("serve", "demo", "--port", "0", "--served-model-name", ENDLESS_MODEL, "--data-dir", str(data))
    for i in range(2):
        with mlxpaged(tmp_path / str(i), *flags) as command:
            wait_until(lambda: (data / "loads").exists() and b"demo" in (data / "loads").read_bytes(), DEADLINE)
            command.process.send_signal(number)
            command.wait_end()
        assert not (data / "loads").exists()


@forked_only
def test_a_load_is_no_suspect_after_its_end(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    for i in range(3):
        with serving(tmp_path / str(i), "--data-dir", data) as command:
            command.process.kill()


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
