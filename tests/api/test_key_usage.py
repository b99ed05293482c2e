"""What each API key has used: counted by every API, kept in a file, and shown to admin keys."""

from __future__ import annotations

import asyncio
import json
import logging
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from mlxpaged.api.access import key_usage
from mlxpaged.api.access.key_file import KeyFile, write
from mlxpaged.api.access.key_file import read as read_keys
from mlxpaged.api.access.key_ring import KeyRing
from mlxpaged.api.access.key_usage import Usage, UsageLedger
from mlxpaged.api.config import HttpConfig
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import FakeClock, ask, bearer, raw, run_on, write_keys
from tests.api.test_rerank import NAME, make_judge
from tests.support import RunningServer, make_embedding_model, running_server, wait_until, with_embeddings

NOVEMBER, DECEMBER = 1795996800.0, 1796083200.0  # noon of 2026-11-30 and of 2026-12-01 in UTC


class Shared(NamedTuple):
    """A server with keys, and a reader of the usage of one of them."""

    server: RunningServer
    keys: dict[str, str]

    def usage(self, name: str) -> dict[str, Any]:
        with raw(self.server) as client:
            found = client.get("/v1/status", headers=bearer(self.keys["root"])).json()["keys"]
        usages = {each.pop("name"): each for each in found}
        return dict(usages[name])

    def post(self, path: str, body: dict[str, Any], key: str = "anna") -> dict[str, Any]:
        with raw(self.server) as client:
            response = client.post(path, json=body, headers=bearer(self.keys[key]))
        assert response.status_code == 200, response.text
        return dict(json.loads(response.text.splitlines()[-1]))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("usage")
    keys = write_keys(folder / "keys.json", anna={}, ben={}, root={"admin": True})
    vectors = make_embedding_model(folder / "vectors")
    registry = with_embeddings(EngineConfig(kv_cache_bytes=16_000_000), vectors)
    http = HttpConfig(api_keys=folder / "keys.json")
    with running_server(registry, http=http, data_dir=folder / "data") as server:
        yield Shared(server, keys)


MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]
CALLS: dict[str, tuple[str, dict[str, Any], Callable[[Any], tuple[int, int]]]] = {
    "chat": (
        "/v1/chat/completions",
        ask("What is 17 + 25?"),
        lambda answer: (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]),
    ),
    "two answers to each of two prompts": (
        "/v1/completions",
        run_on(["blue river", "a stone"], 4, n=2, temperature=1),
        lambda answer: (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]),
    ),
    "responses": (
        "/v1/responses",
        {"model": "demo", "input": "What is 17 + 25?"},
        lambda answer: (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]),
    ),
    "messages": (
        "/v1/messages",
        {"model": "demo", "messages": MESSAGES, "max_tokens": 8},
        lambda answer: (
            answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"],
            answer["usage"]["output_tokens"],
        ),
    ),
    "ollama chat": (
        "/api/chat",
        {"model": "demo", "messages": MESSAGES},
        lambda answer: (answer["prompt_eval_count"], answer["eval_count"]),
    ),
    "ollama embed": (
        "/api/embed",
        {"model": "vectors", "input": ["blue river", "a stone"]},
        lambda answer: (answer["prompt_eval_count"], 0),
    ),
    "embeddings": (
        "/v1/embeddings",
        {"model": "vectors", "input": ["blue river", "a stone"]},
        lambda answer: (answer["usage"]["prompt_tokens"], 0),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_each_api_counts_what_it_tells_the_client(shared: Shared, name: str) -> None:
    path, body, told = CALLS[name]
    before = shared.usage("anna")
    prompt, output = told(shared.post(path, body))
    after = shared.usage("anna")
    assert {each: after[each] - before[each] for each in ("requests", "prompt_tokens", "output_tokens")} == {
        "requests": 1,
        "prompt_tokens": prompt,
        "output_tokens": output,
    }
    assert after["month_tokens"] - before["month_tokens"] == prompt + output
    assert after["last_used"] is not None


def test_cached_tokens_count_once_for_all_answers_to_a_prompt(shared: Shared) -> None:
    body = run_on("the blue river and a stone " * 12, 2, n=3, temperature=1)
    shared.post("/v1/completions", body)
    before = shared.usage("anna")["cached_tokens"]
    told = shared.post("/v1/completions", body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert told > 0
    assert shared.usage("anna")["cached_tokens"] - before == told


def test_decisions_are_one_request_whose_input_counts_once(shared: Shared) -> None:
    questions = [{"type": "predicate", "instructions": f"Is {i} in it?"} for i in range(20)]
    body = {"input": "a stone " * 100, "questions": questions, "calibration": "none", "orders": 1}
    before = shared.usage("anna")
    shared.post("/v1/decisions", body)
    after = shared.usage("anna")
    assert after["requests"] - before["requests"] == 1
    counted, cached = (after[name] - before[name] for name in ("prompt_tokens", "cached_tokens"))
    assert 100 < counted < 20 * 100
    assert 0 <= cached < counted, "what a row has computed for the next ones was not cached before"
    shared.post("/v1/decisions", body)
    again = shared.usage("anna")
    assert again["prompt_tokens"] - after["prompt_tokens"] == counted
    assert cached < again["cached_tokens"] - after["cached_tokens"] <= counted


def test_the_lines_of_a_batch_count_for_the_key_that_made_it(shared: Shared) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": run_on("x y z", 3)}
    before = shared.usage("ben")
    with raw(shared.server) as client:
        client.headers.update(bearer(shared.keys["ben"]))
        files = {"file": ("lines.jsonl", json.dumps(line).encode())}
        file = client.post("/v1/files", files=files, data={"purpose": "batch"}).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=asked).json()
        wait_until(lambda: client.get(f"/v1/batches/{batch['id']}").json()["status"] == "completed")
    after = shared.usage("ben")
    assert after["requests"] - before["requests"] == 1
    assert after["output_tokens"] - before["output_tokens"] == 3
    assert after["prompt_tokens"] > before["prompt_tokens"]


def test_reranking_counts_the_pairs(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", anna={}, root={"admin": True})
    model = make_judge(tmp_path / NAME)
    config = EngineConfig(str(model), served_model_name="judge", kv_cache_bytes=16_000_000)
    with running_server(config, http=HttpConfig(api_keys=tmp_path / "keys.json")) as server:
        shared = Shared(server, keys)
        told = shared.post("/v1/rerank", {"model": "judge", "query": "blue?", "documents": ["a river", "a stone"]})
        usage = shared.usage("anna")
    assert (usage["requests"], usage["prompt_tokens"]) == (1, told["usage"]["prompt_tokens"])


def test_requests_at_the_same_time_are_all_counted(shared: Shared) -> None:
    before = {name: shared.usage(name) for name in ("anna", "ben")}
    with ThreadPoolExecutor(8) as threads:
        names = ["anna", "ben"] * 12
        list(threads.map(lambda name: shared.post("/v1/completions", run_on("x", 5), name), names))
    for name, earlier in before.items():
        after = shared.usage(name)
        assert after["requests"] - earlier["requests"] == 12
        assert after["output_tokens"] - earlier["output_tokens"] == 60


def test_only_admin_keys_see_usage_and_metrics_have_no_names(shared: Shared) -> None:
    shared.post("/v1/completions", run_on("x", 1))
    with raw(shared.server) as client:
        assert client.get("/v1/status", headers=bearer(shared.keys["anna"])).status_code == 403
        metrics = client.get("/metrics", headers=bearer(shared.keys["root"])).text
    assert "mlxpaged_prompt_tokens_total" in metrics
    assert "anna" not in metrics


def test_a_server_without_keys_counts_for_none(server: RunningServer) -> None:
    assert "keys" not in httpx.get(f"{server.url}/v1/status", trust_env=False).json()


# -- the file --------------------------------------------------------------------------------------------------------


def saved(ledger: UsageLedger) -> dict[str, Usage]:
    asyncio.run(ledger.save())
    return key_usage.read(ledger.path)


def test_the_sums_go_on_after_a_restart_and_in_a_new_month(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.usage.json", FakeClock()
    clock.now = NOVEMBER
    first = UsageLedger(path, clock)
    first.meter("anna").count(requests=1, prompt=10, cached=4, output=5)
    assert saved(first)["anna"] == Usage(1, 10, 4, 5, int(NOVEMBER), "2026-11", 15)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    meter = UsageLedger(path, clock).meter("anna")
    meter.count(requests=1, prompt=1)
    assert meter.total == Usage(2, 11, 4, 5, int(NOVEMBER), "2026-11", 16)
    clock.now = DECEMBER
    assert (meter.total.month, meter.total.month_tokens, meter.total.tokens) == ("2026-12", 0, 16)
    meter.count(prompt=2, output=1)
    assert (meter.total.month_tokens, meter.total.tokens) == (3, 19)
    clock.now = NOVEMBER  # a clock that is set back does not bring the month back
    meter.count(output=1)
    assert (meter.total.month, meter.total.month_tokens) == ("2026-12", 4)


def test_two_servers_add_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.usage.json"
    ledgers = [UsageLedger(path), UsageLedger(path)]
    for ledger in ledgers:
        ledger.meter("anna").count(requests=1, output=5)
    assert saved(ledgers[0])["anna"].requests == 1
    assert saved(ledgers[1])["anna"].requests == 2
    assert ledgers[1].describe()[0]["output_tokens"] == 10
    ledgers[0].meter("anna").count(output=1)
    assert saved(ledgers[0])["anna"].output_tokens == 11


def test_without_use_nothing_is_written(tmp_path: Path) -> None:
    ledger = UsageLedger(tmp_path / "keys.usage.json")
    ledger.meter("anna").count(output=1)
    assert saved(ledger)
    ledger.path.unlink()
    assert saved(ledger) == {}


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"anna": {"requests": -1}}', b'{"anna": {"month": "now"}}', b"\xff" * 100, b"[" * 100_000],
)
def test_a_damaged_file_is_one_line_in_the_log(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.usage.json"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        ledger = UsageLedger(path)
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} is damaged; the usage of the API keys is counted from 0"
    ]
    ledger.meter("anna").count(requests=1)
    assert saved(ledger)["anna"].requests == 1


def test_a_file_that_is_damaged_later_gets_what_it_had(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ledger = UsageLedger(tmp_path / "keys.usage.json")
    for name in ("anna", "ben"):
        ledger.meter(name).count(requests=1)
    saved(ledger)
    ledger.path.write_text("{")
    ledger.meter("anna").count(requests=1)
    assert {name: usage.requests for name, usage in saved(ledger).items()} == {"anna": 2, "ben": 1}
    assert "is written anew" in caplog.text


def test_counts_wait_for_a_file_that_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = UsageLedger(tmp_path / "keys.usage.json")

    def fail(path: Path, usages: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(key_usage, "write", fail)
        for _ in range(2):
            ledger.meter("anna").count(requests=1, output=3)
            assert saved(ledger) == {}
    assert caplog.text.count("cannot be written: No space left on device") == 1
    assert ledger.meter("anna").total.output_tokens == 6
    assert saved(ledger)["anna"].output_tokens == 6


def test_usage_follows_the_file_of_keys(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", FakeClock()
    keys = write_keys(path, anna={}, ben={}, cid={})
    ring = KeyRing(path, clock)
    for key in keys.values():
        caller = ring.find(key)
        assert caller is not None
        caller.count(requests=1, prompt=7)
    asyncio.run(ring.usage.save())
    entries = {entry.name: entry for entry in read_keys(path)[0].keys}
    other = write_keys(tmp_path / "other.json", ben={})["ben"]
    [ben] = read_keys(tmp_path / "other.json")[0].keys
    write(path, KeyFile(keys=(entries["anna"], ben)))  # cid is removed, and ben has another key
    clock.advance(2)
    assert ring.find(keys["cid"]) is None
    assert {each["name"]: each["prompt_tokens"] for each in ring.usage.describe()} == {"anna": 7, "ben": 0}
    assert ring.find(other) is not None
    asyncio.run(ring.usage.save())
    assert {name: usage.prompt_tokens for name, usage in key_usage.read(ring.usage.path).items()} == {"anna": 7}
    write(path, KeyFile(keys=(entries["anna"],)))
    assert KeyRing(path, clock).usage.describe() == ring.usage.describe()[:1]
