"""A model whose tokenizer panics with one token: a panic is an error of its request, and of nothing else."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlxpaged.api.batches.runner import BatchRunner
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import DEMO_PATH
from mlxpaged.models.panics import TokenizerPanicError, guarded
from tests.api.helpers import DEADLINE, ask, raw
from tests.support import RunningServer, running_server, wait_until

BAD = "~"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A Strip decoder that takes a character from both ends of a text of one character is out of bounds."""
    path = tmp_path_factory.mktemp("model") / "m"
    shutil.copytree(DEMO_PATH, path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    strip = {"type": "Strip", "content": BAD, "start": 1, "stop": 1}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [strip, tokenizer["decoder"]]}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = EngineConfig(model=str(path), served_model_name="demo", kv_cache_bytes=16_000_000)
    with running_server(config, data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


def bad_token(server: RunningServer) -> int:
    assert server.engine.info is not None
    [token] = server.engine.info.tokenizer.encode(BAD, add_special_tokens=False)
    return token


def forced(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """A request whose answer is the bad token."""
    return ask("x", max_tokens=2, logit_bias={str(bad_token(server)): 100}) | fields


def runner_of(server: RunningServer) -> BatchRunner:
    runner: BatchRunner = server.app.state.batch_runner
    return runner


def test_a_panic_is_an_error_of_its_request(server: RunningServer) -> None:
    with raw(server) as client:
        detokenized = client.post("/detokenize", json={"model": "demo", "tokens": [bad_token(server)]})
        tokenized = client.post("/tokenize", json={"model": "demo", "prompt": BAD, "return_token_strs": True})
        echoed = client.post("/v1/completions", json={"model": "demo", "prompt": [bad_token(server)], "echo": True})
        answered = client.post(CHAT, json=forced(server))
        continued = client.post("/v1/completions", json={"model": "demo", "prompt": [bad_token(server)]})
        well = client.post(CHAT, json=ask("x", max_tokens=2))
    for response in (detokenized, tokenized, echoed, answered, continued):
        assert response.status_code == 500, response.text
        assert response.json()["error"]["type"] == "server_error"
        assert "tokenizer failed" in response.text
    assert detokenized.json()["error"]["code"] == "tokenizer_failed"
    assert well.status_code == 200
    server.wait_idle(DEADLINE)


BACKTRACE = "no entry\n<backtrace>\n  0: core::panicking::panic\n     at /rustc/90b35a6/library/core/panicking.rs:75:14"


def test_clients_see_no_backtrace_and_the_log_has_it(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class PanicException(BaseException):
        pass

    def fail(kind: type[BaseException]) -> Any:
        def raise_it(*_: Any, **__: Any) -> Any:
            raise kind(BACKTRACE)

        return raise_it

    tokenizer = type(server.core.served.tokenizer)
    monkeypatch.setattr(tokenizer, "encode", guarded(fail(PanicException)))
    monkeypatch.setattr("mlxpaged.parts.grammar.grammar.grammar_text", fail(ValueError))
    with raw(server) as client:
        panicked = client.post("/tokenize", json={"model": "demo", "prompt": "x"})
        refused = client.post("/v1/completions", json={"model": "demo", "prompt": [20], "guided_regex": "b+"})
        monkeypatch.setattr(type(server.core.sampler), "sample", fail(RuntimeError))
        failed = client.post("/v1/completions", json={"model": "demo", "prompt": [20]})
    for response, status, message in (
        (panicked, 500, "the model's tokenizer failed: no entry"),
        (refused, 400, "guided_regex: no entry"),
        (failed, 500, "the step failed: RuntimeError: no entry"),
    ):
        assert (response.status_code, response.json()["error"]["message"]) == (status, message)
    assert "panicking.rs:75:14" in caplog.text
    monkeypatch.undo()
    server.wait_idle(DEADLINE)


def test_a_panic_ends_its_line_of_a_batch_and_the_next_batch_runs(server: RunningServer) -> None:
    bodies = {"bad": forced(server), "good": ask("x", max_tokens=2)}
    lines = [
        json.dumps({"custom_id": key, "method": "POST", "url": CHAT, "body": body}) for key, body in bodies.items()
    ]
    before = runner_of(server).num_restarts
    with raw(server) as client:
        for _ in range(2):
            batch = run_batch(client, "\n".join(lines))
            assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    assert runner_of(server).num_restarts == before


def run_batch(client: httpx.Client, lines: str) -> Any:
    file = client.post("/v1/files", files={"file": lines.encode()}, data={"purpose": "batch"}).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = client.post("/v1/batches", json=body).json()
    wait_until(lambda: client.get(f"/v1/batches/{batch['id']}").json()["status"] in ("completed", "failed"), DEADLINE)
    return client.get(f"/v1/batches/{batch['id']}").json()


def test_a_task_of_batches_that_ends_is_started_again_and_health_says_so(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        pass

    def fail(*_: Any) -> None:
        raise PanicException("of something else")

    monkeypatch.setattr("mlxpaged.api.batches.runner.FileCheck.check_part", fail)
    monkeypatch.setattr("mlxpaged.api.batches.runner.DISK_SECONDS", 0.0)
    before = runner_of(server).num_restarts
    line = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": ask("x", max_tokens=2)})
    with raw(server) as client:
        assert run_batch(client, line)["status"] == "failed"
        wait_until(lambda: client.get("/health").json().get("batch_task_restarts") == before + 1, DEADLINE)
        monkeypatch.undo()
        assert run_batch(client, line)["status"] == "completed"
    assert runner_of(server).num_restarts == before + 1


def test_only_panics_are_turned_into_errors() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    def cancelled() -> None:
        raise asyncio.CancelledError

    for function, kind in ((interrupted, KeyboardInterrupt), (cancelled, asyncio.CancelledError)):
        with pytest.raises(kind):
            guarded(function)()
    assert not issubclass(TokenizerPanicError, KeyboardInterrupt)
