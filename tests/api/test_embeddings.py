"""/v1/embeddings over real HTTP with the official client: what comes back, what is refused, who waits for whom."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import itertools
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import openai
import pytest
from mlx_lm.utils import load_model as load_plain_model
from openai import AsyncOpenAI, OpenAI

from mlxpaged.api.config import HttpConfig
from mlxpaged.api.embeddings import check_dimensions
from mlxpaged.api.errors import ApiError
from mlxpaged.core.engine.errors import EngineState
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.encoders.embedding import EmbeddingSpec, Pooling
from mlxpaged.models.loader import DEMO_PATH
from mlxpaged.parts.embeddings.embedder import NO_EMBEDDINGS
from mlxpaged.registry.registry import Registry
from tests.api.helpers import (
    DEADLINE,
    Background,
    EmbeddingGate,
    FakeClock,
    StepGate,
    ask,
    bearer,
    finish_round,
    metrics,
    queued_commands,
    random_tokens,
    raw,
    raw_post,
    run_on,
    tokens_of,
    within_one_step,
    write_keys,
)
from tests.support import (
    RunningServer,
    make_embedding_model,
    running_server,
    wait_until,
    with_embeddings,
    write_modules,
)

TEXTS = ["blue river", "a passkey", "x", "blue river stone and much else besides"]
PATH = "/v1/embeddings"

clock = FakeClock()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_embedding_model(tmp_path_factory.mktemp("models") / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [16, 32]}))
    return path


def config(path: Path, **options: Any) -> Registry:
    pool = {"kv_cache_bytes": 16_000_000}
    return dataclasses.replace(with_embeddings(EngineConfig(**(pool | options)), path), clock=clock)


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[RunningServer]:
    with running_server(config(model_path)) as server:
        yield server


@pytest.fixture(autouse=True)
def _leaves_nothing(server: RunningServer) -> Iterator[None]:
    yield
    server.wait_idle()
    assert list(server.app.state.server.open_requests) == []
    wait_until(lambda: waiting(server) == 0)  # a client's timeout can come before the step's end


def reference(path: Path, inputs: list[list[int]], dimensions: int = 64) -> Any:
    """Straight with mlx-lm, one by one: the last token's state, cut, of length 1."""
    model, _ = load_plain_model(path.with_name(f"{path.name}-whole"))
    states = [np.array(model.model(mx.array([tokens]))[0, -1])[:dimensions] for tokens in inputs]
    return np.stack([state / np.linalg.norm(state) for state in states])


def ended(server: RunningServer, text: str) -> list[int]:
    """Its tokens, and the one that the embedding model's tokenizer adds."""
    return [*tokens_of(server, text), 0]


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(found), expected, atol=2e-6)


@pytest.mark.parametrize("encoding", [openai.omit, "float", "base64"])
def test_texts_come_back_as_the_vectors_that_mlx_lm_computes(
    client: OpenAI, server: RunningServer, model_path: Path, encoding: Any
) -> None:
    """The client asks for base64 itself where it is not told."""
    answer = client.embeddings.create(model="vectors", input=TEXTS, encoding_format=encoding, user="u")
    inputs = [ended(server, text) for text in TEXTS]
    assert [each.index for each in answer.data] == [0, 1, 2, 3]
    vectors: list[Any] = [each.embedding for each in answer.data]
    if encoding == "base64":
        vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
    close(vectors, reference(model_path, inputs))
    assert (answer.model, answer.object, answer.data[0].object) == ("vectors", "list", "embedding")
    num_tokens = sum(map(len, inputs))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)


def test_a_text_and_tokens_in_all_their_shapes(client: OpenAI, model_path: Path, server: RunningServer) -> None:
    one, many = random_tokens(20, 1), [random_tokens(length, length) for length in (1, 300, 40, 2)]
    for given, inputs in (
        (TEXTS[0], [ended(server, TEXTS[0])]),
        (one, [one]),
        ([one], [one]),
        (many, many),
    ):
        answer = client.embeddings.create(model="vectors", input=given)
        close([each.embedding for each in answer.data], reference(model_path, inputs))


def test_ollamas_endpoints_give_the_same_vectors(
    server: RunningServer, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedder = server.core_of("vectors").embedder
    assert embedder is not None
    step = embedder.step
    monkeypatch.setattr(embedder, "step", lambda alone: (clock.advance(2), step(alone)))
    expected = reference(model_path, [ended(server, text) for text in TEXTS])
    with raw(server) as client:
        several = client.post("/api/embed", json={"model": "vectors:latest", "input": TEXTS}).json()
        cut = client.post("/api/embed", json={"model": "vectors", "input": TEXTS[0], "dimensions": 16}).json()
        one = client.post("/api/embeddings", json={"model": "vectors", "prompt": TEXTS[0]}).json()
        shown = client.post("/api/show", json={"model": "vectors"}).json()
    close(several["embeddings"], expected)
    assert several["prompt_eval_count"] == sum(len(ended(server, text)) for text in TEXTS)
    assert several["total_duration"] == 2 * 10**9
    close(cut["embeddings"], reference(model_path, [ended(server, TEXTS[0])], 16))
    close(one["embedding"], expected[0])
    assert shown["capabilities"] == ["embedding"]


def test_ollamas_endpoint_gives_each_text_of_a_list_a_vector(server: RunningServer, model_path: Path) -> None:
    with raw(server) as client:
        for inputs in ([""], ["", ""], ["", "x"]):
            found = client.post("/api/embed", json={"model": "vectors", "input": inputs}).json()
            close(found["embeddings"], reference(model_path, [ended(server, text) for text in inputs]))


def test_ollamas_endpoints_cut_a_text_that_is_too_long_before_its_end_token(
    server: RunningServer, model_path: Path
) -> None:
    long = "blue river " * 2000
    body = {"model": "vectors", "input": [TEXTS[0], long]}
    with raw(server) as client:
        found = client.post("/api/embed", json=body).json()["embeddings"]
        refused = client.post("/api/embed", json=body | {"truncate": False})
    tokens = [*tokens_of(server, long)[:511], 0]
    close(found, reference(model_path, [ended(server, TEXTS[0]), tokens]))
    assert refused.status_code == 400
    assert "the input at index 1 has" in refused.json()["error"]


def test_asynchronous_clients_at_the_same_time_get_their_own(server: RunningServer, model_path: Path) -> None:
    inputs = [[random_tokens(10 * i + j, 100 * i + j) for j in range(1, 4)] for i in range(12)]

    async def together() -> list[Any]:
        async with (
            httpx.AsyncClient(timeout=DEADLINE, trust_env=False, verify=False) as http,
            AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http) as client,
        ):
            answers = [client.embeddings.create(model="vectors", input=each) for each in inputs]
            return await asyncio.gather(*answers)

    for each, answer in zip(inputs, asyncio.run(together()), strict=True):
        close([found.embedding for found in answer.data], reference(model_path, each))


def test_dimensions_are_those_that_the_model_states(client: OpenAI, model_path: Path) -> None:
    tokens = random_tokens(20, 1)
    for size in (16, 32, 64):
        answer = client.embeddings.create(model="vectors", input=tokens, dimensions=size)
        close([answer.data[0].embedding], reference(model_path, [tokens], size))
    for size in (17, 65):
        with pytest.raises(openai.BadRequestError, match="must be 16 or 32 or 64") as error:
            client.embeddings.create(model="vectors", input=tokens, dimensions=size)
        assert (error.value.param, error.value.code) == ("dimensions", "unsupported_dimensions")


def test_a_model_that_states_no_sizes_is_refused_with_the_way_to_state_them() -> None:
    facts = SimpleNamespace(name="a", dimensions=64, spec=EmbeddingSpec(Pooling.MEAN, False))
    with pytest.raises(ApiError, match=r"must be 64 .*set is_matryoshka there to true"):
        check_dimensions(facts, 32)  # type: ignore[arg-type]
    assert check_dimensions(facts, 64) == 64  # type: ignore[arg-type]


def test_both_models_are_listed_with_what_they_can_do(client: OpenAI, server: RunningServer) -> None:
    assert [model.id for model in client.models.list()] == ["demo", "vectors"]
    with raw(server) as http:
        found = {name: http.get(f"/v1/models/{name}").json() for name in ("demo", "vectors")}
    can = {name: {what for what, yes in found[name]["capabilities"].items() if yes} for name in found}
    assert can == {"demo": {"chat", "completions", "decisions", "tools"}, "vectors": {"embeddings"}}
    sizes = ("context_length", "max_model_len", "embedding_dimensions")
    assert [found["vectors"][name] for name in sizes] == [512, 512, 64]


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "too long": ({"input": [[5], [7] * 513]}, "input", "index 1 has 513 tokens; the limit of 'vectors' is 512"),
    "too long however tokenized": ({"input": "a" * 1_000_000}, "input", "index 0 has at least .* tokens"),
    "unknown token": ({"input": [[5, 100_000]]}, "input", "token id 100000 is not in the vocabulary"),
    "nothing": ({"input": []}, "input", "must be a string"),
    "an empty text": ({"input": ["a", ""]}, "input.1", "must not be empty"),
    "no tokens": ({"input": [[]]}, "input.0", "must not be empty"),
    "of two kinds": ({"input": ["a", [5]]}, "input.1", "same kind"),
    "too many": ({"input": ["a"] * 2049}, "input", "has 2049 inputs; the limit is 2048"),
    "too many together": ({"input": [[5] * 147] * 2048}, "input", "at least 301056 tokens together; .* is 300000"),
    "no input": ({}, "input", "required"),
    "encoding": ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
    "dimensions": ({"input": "a", "dimensions": 0}, "dimensions", "must be at least 1"),
    "cut inputs": ({"input": "a", "truncate_prompt_tokens": 9}, "truncate_prompt_tokens", "never cut"),
    "other model": ({"input": "a", "model": "demo"}, "model", "'demo' cannot be used for embeddings.*; use 'vectors'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_embedded_is_refused_by_name(server: RunningServer, case: str) -> None:
    body, param, message = REFUSED[case]
    with raw(server) as client:
        response = client.post(PATH, json={"model": "vectors"} | body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert re.search(message, error["message"])


def test_each_model_is_refused_where_the_other_one_is_meant(client: OpenAI, server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError, match="'unknown' does not exist; this server has 'demo', 'vectors'"):
        client.embeddings.create(model="unknown", input="x")
    with pytest.raises(
        openai.BadRequestError, match="'vectors' makes embeddings; use 'demo' to generate text"
    ) as error:
        client.completions.create(model="vectors", prompt="x")
    assert (error.value.param, error.value.code) == ("model", "generation_not_supported")


def test_a_model_that_states_its_pooling_serves_both(tmp_path: Path) -> None:
    path = Path(shutil.copytree(DEMO_PATH, tmp_path / "both"))
    write_modules(path, "mean", ("Transformer", "Pooling"))
    options: dict[str, Any] = {"kv_cache_bytes": 8_000_000, "served_model_name": "both"}
    with running_server(EngineConfig(model=str(path), **options)) as server, server.client() as client:
        assert [model.id for model in client.models.list()] == ["both"]
        tokens = random_tokens(300, 1)
        found = client.embeddings.create(model="both", input=tokens).data[0].embedding
        plain, _ = load_plain_model(path)
        close(found, np.array(plain.model(mx.array([tokens]))[0]).mean(axis=0))
        chat: Any = client.chat.completions.create(**ask("What is 17 + 25?", model="both"))
        assert chat.choices[0].message.content == "42"
        with raw(server) as http:
            assert http.get("/v1/models/both").json()["capabilities"]["embeddings"]


def test_a_decoder_without_a_head_is_served_as_the_model_too(tmp_path: Path) -> None:
    path = make_embedding_model(tmp_path / "m")
    with running_server(EngineConfig(str(path), served_model_name="vectors")) as server, server.client() as client:
        tokens = random_tokens(30, 1)
        close(client.embeddings.create(model="vectors", input=tokens).data[0].embedding, *reference(path, [tokens]))
        with pytest.raises(openai.BadRequestError, match="vectors"):
            client.completions.create(model="vectors", prompt="x")


def beside_a_stream(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, num_tokens: int, inputs: list[list[int]]
) -> None:
    """Embed the inputs. The request for them arrives in the first step of a stream. On the server's clock, a step takes
    a second."""
    runner = server.core.runner
    forward = runner.forward

    def timed(*args: Any) -> Any:
        clock.advance(1)
        return forward(*args)

    monkeypatch.setattr(runner, "forward", timed)
    with StepGate(server) as gate:
        stream = Background.post(server, "/v1/completions", run_on(random_tokens(5, 1), num_tokens, stream=True))
        gate.wait_held()
        large = Background.post(server, PATH, {"model": "vectors", "input": inputs})
        wait_until(lambda: queued_commands(server) == 1)
        gate.open()
        assert stream.text
        assert large.result().status_code == 200


def test_streams_go_on_beside_a_large_request_and_it_does_not_starve(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of its steps every stream draws a token; none of its steps is longer than it may be."""
    steps: list[str] = []
    embedder, observe = server.core_of("vectors").embedder, server.core.scheduler.times.observe
    assert embedder is not None
    decode = embedder.model.decode

    def watching_decode(tokens: mx.array, cache: Any) -> mx.array:
        assert tokens.size <= 256 or not server.core.has_work()
        steps.append("embed")
        clock.advance(0.5)
        return decode(tokens, cache)

    def watching_observe(*args: Any) -> None:
        steps.append("generate")
        observe(*args)

    object.__setattr__(embedder.model, "decode", watching_decode)
    monkeypatch.setattr(server.core.scheduler.times, "observe", watching_observe)
    try:
        beside_a_stream(server, monkeypatch, 100, [random_tokens(400, i) for i in range(12)])
    finally:
        object.__setattr__(embedder.model, "decode", decode)
    first = steps.index("embed")
    last_generated = len(steps) - 1 - steps[::-1].index("generate")
    beside = steps[first:last_generated]
    assert beside.count("embed") == 24
    assert "embed,embed" not in ",".join(beside)


def test_what_embeddings_take_is_not_learned_as_the_time_of_a_step_under_way(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "overlaps", True)
    events: list[float | None] = []  # the seconds of a step, None for embeddings
    embedder, scheduler = server.core_of("vectors").embedder, server.core.scheduler
    assert embedder is not None
    step = embedder.step

    def slow(alone: bool) -> None:
        events.append(None)
        clock.advance(3)
        step(alone)

    monkeypatch.setattr(embedder, "step", slow)
    monkeypatch.setattr(scheduler.times, "observe", lambda batch, seconds: events.append(seconds))
    beside_a_stream(server, monkeypatch, 60, [random_tokens(400, i) for i in range(5)])
    beside = [after for before, after in itertools.pairwise(events) if before is None and after is not None]
    assert len(beside) >= 9
    assert max(beside) < 3


LARGE = {"model": "vectors", "input": [[7] * 500] * 200}


def vectors(server: RunningServer) -> AsyncEngine:
    """The engine of the embedding model."""
    engine = server.registry.models["vectors"].engine
    assert engine is not None
    return engine


def waiting(server: RunningServer) -> int:
    stats = vectors(server).stats
    return 0 if stats is None else stats.of(NO_EMBEDDINGS).waiting


def test_a_client_that_leaves_ends_its_request(server: RunningServer) -> None:
    with EmbeddingGate(server, "vectors") as gate:
        with raw_post(server, PATH, LARGE):
            gate.allow(1)
            gate.wait_held()
            wait_until(lambda: 0 < waiting(server) < 200)
        before = vectors(server).stats
        wait_until(lambda: vectors(server).num_unfinished == 0)
        finish_round(server)
        gate.open()
        wait_until(lambda: waiting(server) == 0)
        assert before is not None
        assert vectors(server).stats.of(NO_EMBEDDINGS).requests_total == before.of(NO_EMBEDDINGS).requests_total


def test_a_request_is_cancelled_by_its_id_and_by_its_timeout(server: RunningServer) -> None:
    with EmbeddingGate(server, "vectors") as gate:
        pending = Background.post(server, PATH, LARGE, X_Request_Id="mine")
        gate.allow(1)
        gate.wait_held()
        asked = Background.request(server, "GET", "/v1/status")
        for _ in server.registry.models:  # one after the other replies between two steps
            wait_until(lambda: queued_commands(server) == 1)
            gate.allow(1)
            gate.wait_held()
        status = asked.result().json()["models"][1]["embeddings"]
        assert status["model"] == "vectors"
        assert 0 < status["inputs_waiting"] < 200
        assert within_one_step(server, gate, "DELETE", "/v1/requests/mine").json()["cancelled"]
        assert pending.result().status_code == 499
        assert pending.result().json()["error"]["code"] == "request_cancelled"
        timed = Background.post(server, PATH, LARGE | {"timeout": 0.2})
        gate.wait_held()
        clock.advance(1)
        late = timed.result()
        assert (late.status_code, late.json()["error"]["code"]) == (408, "deadline_exceeded")
        assert late.headers["x-should-retry"] == "false"


def test_the_time_in_the_tokenizers_queue_counts(server: RunningServer) -> None:
    go_on = threading.Event()
    info = vectors(server).info
    assert info is not None
    assert info.embedding_model is not None
    tokenizer = info.embedding_model.tokenizer
    lanes = server.app.state.server.tokenizer_lanes
    server.run(lanes.run("another", tokenizer, 1, lambda: go_on.wait(DEADLINE)))
    pending = Background.post(server, PATH, {"input": "x", "timeout": 0.2})
    wait_until(lambda: not vectors(server).is_idle)
    finish_round(server)
    clock.advance(1)
    go_on.set()
    assert pending.result().json()["error"]["code"] == "deadline_exceeded"


def test_its_tokens_and_requests_are_counted(server: RunningServer) -> None:
    names = ("requests", "tokens", "steps")
    before = metrics(server)

    def moved() -> list[float]:
        now = metrics(server)
        return [now[f"mlxpaged_embedding_{name}_total"] - before[f"mlxpaged_embedding_{name}_total"] for name in names]

    with raw(server) as client:
        response = client.post(PATH, json={"model": "vectors", "input": [[5] * 30, [6] * 300]})
    assert (response.status_code, response.headers["x-request-id"][:5]) == (200, "embd-")
    wait_until(lambda: moved()[0] >= 1)  # the answer can be there before the numbers of its last step
    assert moved() == [1, 330, 2]
    assert metrics(server)["mlxpaged_embedding_inputs_waiting"] == 0


def test_keys_and_their_limits_apply(tmp_path: Path, model_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", anna={"tokens_per_minute": 100})
    http = HttpConfig(api_keys=tmp_path / "keys.json")
    body = {"model": "vectors", "input": [[5] * 150]}
    with running_server(config(model_path), http=http) as server, raw(server) as client:
        assert client.post(PATH, json=body).status_code == 401
        first = client.post(PATH, json=body, headers=bearer(keys["anna"]))
        assert first.status_code == 200
        second = client.post(PATH, json=body, headers=bearer(keys["anna"]))
        assert (second.status_code, second.json()["error"]["type"]) == (429, "tokens")


def test_a_full_server_refuses_more(model_path: Path) -> None:
    with (
        running_server(config(model_path, max_num_seqs=1, max_queue=0)) as server,
        EmbeddingGate(server, "vectors") as gate,
        raw(server) as client,
    ):
        pending = Background.post(server, PATH, LARGE, X_Request_Id="first")
        gate.wait_held()
        refused = client.post(PATH, json={"model": "vectors", "input": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        within_one_step(server, gate, "DELETE", "/v1/requests/first")
        assert pending.result().status_code == 499


def test_a_stopping_server_ends_its_requests_with_an_error(model_path: Path) -> None:
    with running_server(config(model_path)) as server, EmbeddingGate(server, "vectors") as gate:
        pending = Background.post(server, PATH, LARGE)
        gate.wait_held()
        server.registry.end_all("the server is shutting down")
        gate.open()
        assert pending.result().status_code == 500
        assert "shutting down" in pending.result().json()["error"]["message"]


def test_a_draining_server_completes_them_and_takes_no_more(model_path: Path) -> None:
    with running_server(config(model_path)) as server, EmbeddingGate(server, "vectors") as gate:
        pending = Background.post(server, PATH, {"model": "vectors", "input": [[7] * 500] * 8})
        gate.wait_held()
        drained = server.run(server.registry.drain(DEADLINE))
        wait_until(lambda: server.registry.state is EngineState.DRAINING)
        with raw(server) as client:
            refused = client.post(PATH, json={"model": "vectors", "input": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        gate.open()
        assert pending.result().status_code == 200
        assert drained.result(DEADLINE)


def test_a_second_model_that_makes_none_is_reported_at_the_start() -> None:
    with running_server(with_embeddings(EngineConfig(), DEMO_PATH), wait_loaded=False) as server:
        wait_until(lambda: vectors(server).state is EngineState.DEAD)
        assert "cannot be used for embeddings: its directory has no modules.json" in (vectors(server).reason or "")
