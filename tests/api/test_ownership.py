"""What the server keeps for one key, another key can neither see nor use."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from mlxpaged.api.config import HttpConfig
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import StepGate, bearer, raw, run_on, start, within_one_step, write_keys
from tests.support import RunningServer, running_server, wait_until

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}


@pytest.fixture
def clients(tmp_path: Path) -> Iterator[dict[str, openai.OpenAI]]:
    keys = write_keys(tmp_path / "keys.json", anna={}, ben={}, root={"admin": True})
    http = HttpConfig(api_keys=tmp_path / "keys.json")
    config = EngineConfig(kv_cache_bytes=16_000_000)
    with running_server(config, http=http, data_dir=tmp_path / "data") as server, clients_of(server, keys) as clients:
        yield clients


@contextlib.contextmanager
def clients_of(server: RunningServer, keys: dict[str, str]) -> Iterator[dict[str, openai.OpenAI]]:
    with contextlib.ExitStack() as stack:
        yield {
            name: stack.enter_context(openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0))
            for name, key in keys.items()
        }


def cached_tokens(client: openai.OpenAI, prompt: str, **salt: str) -> int:
    usage = client.completions.create(model="demo", prompt=prompt, max_tokens=1, extra_body=salt).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.parametrize("isolates", [False, True])
def test_prompts_of_other_keys_cannot_be_detected_in_the_prefix_cache(tmp_path: Path, isolates: bool) -> None:
    """By default, keys of the same tier share it."""
    keys = write_keys(tmp_path / "keys.json", anna={}, ben={}, vip={"tier": "high"})
    http = HttpConfig(api_keys=tmp_path / "keys.json", isolate_prefix_cache=isolates)
    config = EngineConfig(kv_cache_bytes=16_000_000)
    with running_server(config, http=http) as server, clients_of(server, keys) as clients:
        anna, ben, vip = clients.values()
        secret = "blue river stone " * 30
        assert cached_tokens(anna, secret) == 0
        assert cached_tokens(anna, secret) > 0
        assert cached_tokens(vip, secret) == 0
        assert (cached_tokens(ben, secret) == 0) == isolates
        assert cached_tokens(anna, secret, cache_salt="a") == 0
        assert cached_tokens(anna, secret, cache_salt="b") == 0
        assert cached_tokens(anna, secret, cache_salt="a") > 0
        with pytest.raises(openai.BadRequestError, match="cache_salt"):
            cached_tokens(anna, secret, cache_salt="")


def test_files_and_batches_belong_to_the_key_that_made_them(clients: dict[str, openai.OpenAI]) -> None:
    anna, ben, root = clients["anna"], clients["ben"], clients["root"]
    file = anna.files.create(file=("in.jsonl", json.dumps(LINE).encode()), purpose="batch")
    with pytest.raises(openai.NotFoundError):
        ben.files.retrieve(file.id)
    with pytest.raises(openai.BadRequestError, match="input_file_id"):
        ben.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    batch = anna.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: anna.batches.retrieve(batch.id).status == "completed")
    with pytest.raises(openai.NotFoundError):
        ben.batches.retrieve(batch.id)
    assert ben.files.list().data == ben.batches.list().data == []
    output = anna.batches.retrieve(batch.id).output_file_id
    assert output is not None
    assert "owner" not in anna.files.retrieve(output).to_dict()
    assert json.loads(anna.files.content(output).text)["custom_id"] == "a"
    assert {each.id for each in root.files.list().data} == {file.id, output}


def test_responses_belong_to_the_key_that_asked(clients: dict[str, openai.OpenAI]) -> None:
    anna, ben = clients["anna"], clients["ben"]
    first = anna.responses.create(model="demo", input="Repeat: blue river stone", temperature=0)
    assert anna.responses.retrieve(first.id).output_text == "blue river stone"
    with pytest.raises(openai.NotFoundError):
        ben.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        ben.responses.create(model="demo", input="x", previous_response_id=first.id)


def test_ids_are_private_to_a_key(tmp_path: Path) -> None:
    """No key learns from an error, or by a cancellation, which ids the requests of another one have."""
    keys = write_keys(tmp_path / "keys.json", anna={}, ben={}, root={"admin": True})
    http = HttpConfig(api_keys=tmp_path / "keys.json")
    path, body = "/v1/requests", run_on("Once", 5)
    with running_server(EngineConfig(kv_cache_bytes=16_000_000), http=http) as server, raw(server) as client:
        headers = {name: bearer(key) for name, key in keys.items()}
        with StepGate(server) as gate:
            hers = start(server, body | {"n": 2}, "mine", **headers["anna"])
            his = start(server, body, "mine-0", **headers["ben"])
            taken = client.post("/v1/completions", json=body, headers=headers["anna"] | {"X-Request-Id": "mine-0"})
            assert taken.json()["error"]["code"] == "request_id_in_use"
            gate.wait_held()
            assert client.delete(f"{path}/mine", headers=headers["ben"]).status_code == 404
            ended = within_one_step(server, gate, "DELETE", f"{path}/mine-0", headers=headers["ben"])
            assert [choice["id"] for choice in ended.json()["choices"]] == ["mine-0"]
            assert his.result().status_code == 499
            other = start(server, body, "mine-1", **headers["ben"])
            names = {name for each in server.app.state.server.open_requests for name in each.names}
            [unlike] = names - {"mine-0", "mine-1"}
            ended = within_one_step(server, gate, "DELETE", f"{path}/{unlike}", headers=headers["root"])
            assert [choice["id"] for choice in ended.json()["choices"]] == ["mine-1"]
            assert other.result().status_code == 499
            again = start(server, body, "mine", **headers["ben"])
            gate.open()
            assert [each.result().json()["id"] for each in (hers, again)] == ["mine", "mine"]
        for name in ("anna", "ben"):
            answer = client.post(
                "/v1/responses",
                json={"model": "demo", "input": name, "max_output_tokens": 1},
                headers=headers[name] | {"X-Request-Id": "resp_1"},
            )
            assert answer.status_code == 200, answer.text
        items = {
            name: client.get("/v1/responses/resp_1/input_items", headers=headers[name]).json()["data"]
            for name in ("anna", "ben")
        }
        assert [found[0]["content"][0]["text"] for found in items.values()] == ["anna", "ben"]
        assert client.delete("/v1/responses/resp_1", headers=headers["ben"]).json()["deleted"]
        assert client.get("/v1/responses/resp_1", headers=headers["ben"]).status_code == 404
        for name in ("anna", "root"):
            assert client.get("/v1/responses/resp_1", headers=headers[name]).json()["id"] == "resp_1"
