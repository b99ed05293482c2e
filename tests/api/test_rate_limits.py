"""Requests and tokens per minute of a key, over HTTP and on a clock of the tests' own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpaged.api.access.rate_limit import Bucket
from mlxpaged.api.config import HttpConfig
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import DEADLINE, FakeClock, ask, bearer, raw, run_on, write_keys
from tests.support import RunningServer, running_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PEOPLE: dict[str, dict[str, Any]] = {
    "free": {},
    "three": {"requests_per_minute": 3},
    "tokens": {"tokens_per_minute": 600},
    "few": {"tokens_per_minute": 60},
    "both": {"requests_per_minute": 120, "tokens_per_minute": 1200},
}
MESSAGES: list[Any] = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.fixture(scope="module")
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def keys(path: Path) -> dict[str, str]:
    return write_keys(path, **PEOPLE)


@pytest.fixture(scope="module")
def server(path: Path, keys: dict[str, str], clock: FakeClock) -> Iterator[RunningServer]:
    config = EngineConfig(kv_cache_bytes=16_000_000)
    with running_server(config, clock=clock, http=HttpConfig(api_keys=path)) as server:
        yield server


@pytest.fixture(autouse=True)
def _everything_is_there_again(clock: FakeClock) -> None:
    clock.advance(3600)


def limits_of(response: httpx.Response) -> dict[str, str]:
    start = "x-ratelimit-"
    return {name.removeprefix(start): value for name, value in response.headers.items() if name.startswith(start)}


def post(server: RunningServer, key: str, body: dict[str, Any]) -> httpx.Response:
    with raw(server) as client:
        return client.post(CHAT if "messages" in body else COMPLETIONS, json=body, headers=bearer(key))


def test_the_official_client_sees_what_is_left_and_then_a_429(
    server: RunningServer, keys: dict[str, str], clock: FakeClock
) -> None:
    options: dict[str, Any] = {"api_key": keys["three"], "max_retries": 0, "timeout": DEADLINE}
    with openai.OpenAI(base_url=f"{server.url}/v1", **options) as client:

        def ask_officially() -> Any:
            return client.chat.completions.with_raw_response.create(model="demo", messages=MESSAGES, temperature=0)

        for left in ("2", "1", "0"):
            answer = ask_officially()
            assert answer.parse().choices[0].message.content == "42"
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-remaining-requests"] == left
            assert answer.headers["x-ratelimit-reset-requests"] == f"{(3 - int(left)) * 20:.3f}s"
            assert "x-ratelimit-limit-tokens" not in answer.headers
        clock.advance(5)
        with pytest.raises(openai.RateLimitError) as error:
            ask_officially()
        assert (error.value.type, error.value.code) == ("requests", "rate_limit_exceeded")
        assert "3 requests per minute" in str(error.value)
        response = error.value.response
        assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("15", "15000")
        assert limits_of(response) == {"limit-requests": "3", "remaining-requests": "0", "reset-requests": "55.000s"}
        assert response.headers["x-request-id"].startswith("req-")
        clock.advance(14.9)
        with pytest.raises(openai.RateLimitError):
            ask_officially()
        clock.advance(0.2)  # a refusal costs nothing
        assert ask_officially().parse().choices[0].message.content == "42"


def test_the_official_client_waits_as_long_as_it_is_told(
    server: RunningServer, keys: dict[str, str], clock: FakeClock
) -> None:
    for _ in range(3):
        assert post(server, keys["three"], ask("x", max_tokens=1)).status_code == 200
    clock.advance(19.9)
    options: dict[str, Any] = {"api_key": keys["three"], "max_retries": 1, "timeout": DEADLINE}
    waits = []
    with openai.OpenAI(base_url=f"{server.url}/v1", **options) as client, pytest.MonkeyPatch.context() as patch:

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            clock.advance(seconds)

        patch.setattr("openai._base_client.time.sleep", sleep)
        answer = client.chat.completions.create(model="demo", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == "42"
    assert waits == [pytest.approx(0.1, abs=0.002)]


def test_only_what_uses_the_model_counts(server: RunningServer, keys: dict[str, str]) -> None:
    with raw(server) as client:
        for _ in range(10):
            response = client.get("/v1/models", headers=bearer(keys["three"]))
            assert response.status_code == 200
            assert limits_of(response) == {}
        for _ in range(3):  # refused for what they say, and counted: that is work too
            response = client.post(CHAT, json={"messages": []}, headers=bearer(keys["three"]))
            assert response.status_code == 400
            assert limits_of(response)["limit-requests"] == "3"
        assert post(server, keys["three"], ask("x")).status_code == 429
        assert client.delete("/v1/requests/x", headers=bearer(keys["three"])).status_code == 404
        assert client.get("/v1/models", headers=bearer(keys["three"])).status_code == 200


def test_one_keys_limit_is_not_anothers(server: RunningServer, keys: dict[str, str]) -> None:
    for _ in range(3):
        post(server, keys["three"], ask("x", max_tokens=1))
    assert post(server, keys["three"], ask("x", max_tokens=1)).status_code == 429
    for _ in range(5):
        response = post(server, keys["free"], ask("x", max_tokens=1))
        assert (response.status_code, limits_of(response)) == (200, {})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"prompt": ["abc", "de"], "n": 2}])
def test_the_tokens_of_prompt_and_answers_are_counted(
    server: RunningServer, keys: dict[str, str], clock: FakeClock, fields: dict[str, Any], stream: bool
) -> None:
    body = run_on("abc", 20) | fields
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    first = post(server, keys["tokens"], body | options)
    assert first.status_code == 200
    usage = json.loads(first.text.split("data: ")[-2])["usage"] if stream else first.json()["usage"]
    server.wait_idle()
    with raw(server) as client:
        second = client.post("/v1/nothing", headers=bearer(keys["tokens"]))
    assert limits_of(second)["remaining-tokens"] == str(600 - usage["total_tokens"])
    assert limits_of(second)["reset-tokens"] == f"{usage['total_tokens'] / 10:.3f}s"
    assert usage["total_tokens"] >= 20 * fields.get("n", 1) * len(body["prompt"] if "prompt" in fields else "x")


def test_who_overdraws_its_tokens_waits_that_much_longer(
    server: RunningServer, keys: dict[str, str], clock: FakeClock
) -> None:
    used = post(server, keys["few"], run_on("abc", 70)).json()["usage"]["total_tokens"]
    refused = post(server, keys["few"], run_on("abc", 1))
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
    wait = float(used - 60 + 1)
    assert int(refused.headers["retry-after-ms"]) == pytest.approx(wait * 1000, abs=1)
    assert limits_of(refused)["remaining-tokens"] == "0"
    clock.advance(wait + 0.01)
    assert post(server, keys["few"], run_on("abc", 1)).status_code == 200


def test_both_limits_are_told(server: RunningServer, keys: dict[str, str]) -> None:
    assert limits_of(post(server, keys["both"], ask("x", max_tokens=1))).keys() == {
        f"{what}-{name}" for what in ("limit", "remaining", "reset") for name in ("requests", "tokens")
    }


def test_a_file_that_changes_elsewhere_gives_nothing_back(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", FakeClock()
    key = write_keys(path, one={"requests_per_minute": 1})["one"]
    content = json.loads(path.read_text())

    def change(**fields: Any) -> None:
        content["keys"][0] |= fields
        path.write_text(json.dumps(content))
        clock.advance(1)

    with running_server(None, clock=clock, http=HttpConfig(api_keys=path)) as server:
        assert post(server, key, ask("x")).status_code == 503
        assert post(server, key, ask("x")).status_code == 429
        change(tier="high")
        assert post(server, key, ask("x")).status_code == 429
        change(requests_per_minute=2)
        assert post(server, key, ask("x")).status_code == 503


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50)), max_size=50))
def test_no_minute_lets_more_in_than_twice_the_limit_and_no_wait_is_in_vain(
    per_minute: int, tries: list[tuple[float, int]]
) -> None:
    clock = FakeClock()
    bucket = Bucket(per_minute, clock)
    taken: list[float] = []
    for pause, number in tries:
        clock.advance(pause)
        for _ in range(number):
            if bucket.seconds_until(1) == 0:
                bucket.take(1)
                taken.append(clock.now)
        assert len([at for at in taken if at > clock.now - 60]) <= 2 * per_minute
        assert bucket.level <= per_minute
    clock.advance(bucket.seconds_until(1) + 1e-6)
    assert bucket.seconds_until(1) == 0
