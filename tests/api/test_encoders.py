"""Encoders over real HTTP: OpenAI's and Ollama's embeddings, rerank and score, and what is said of such models."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from mlxpaged.cli.banner import banner
from mlxpaged.engine_config import EngineConfig
from mlxpaged.registry.model import Model
from mlxpaged.registry.registry import Registry
from tests.api.helpers import Background, post, random_tokens, raw, run_on
from tests.models.encoders import CONFIGS, PAIRS, VOCABULARY, WIDTH, Reference, make_encoder
from tests.support import RunningServer, running_server

CLS, SEP = (VOCABULARY.index(token) for token in ("[CLS]", "[SEP]"))
TEXTS = ["blue river", "a passkey", "the stone is blue", "count to nine and count the river of blue stone"]
QUERY = "which river is blue"


def words(text: str) -> list[int]:
    return [VOCABULARY.index(word) for word in text.split()]


def whole(text: str) -> list[int]:
    return [CLS, *words(text), SEP]


@pytest.fixture(scope="module")
def models_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    for kind in CONFIGS:
        make_encoder(path / kind, kind)
    for kind in PAIRS:
        make_encoder(path / f"{kind}-pairs", kind, pairs=True)
    return path


@pytest.fixture(scope="module")
def server(models_path: Path) -> Iterator[RunningServer]:
    """The demo model is loaded at the start, and the encoders on first use: their names are those of no flag."""
    base = EngineConfig(kv_cache_bytes=8_000_000)
    registry = Registry.of(base)
    for path in sorted(models_path.iterdir()):
        config = dataclasses.replace(base, model=str(path), served_model_name=path.name)
        registry.models[path.name] = Model(path.name, config)
    with running_server(registry) as server:
        yield server


def send(server: RunningServer, path: str, body: dict[str, Any], status: int = 200) -> Any:
    with raw(server) as client:
        response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("kind", CONFIGS)
def test_embeddings_of_both_apis_are_those_of_the_paper(server: RunningServer, models_path: Path, kind: str) -> None:
    reference = Reference(models_path / kind, kind)
    means = np.stack([reference.states(whole(text)).mean(axis=0) for text in TEXTS])
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    with server.client() as client:
        answer = client.embeddings.create(model=kind, input=TEXTS)
    np.testing.assert_allclose([each.embedding for each in answer.data], expected, atol=5e-5)
    assert answer.usage.prompt_tokens == sum(len(whole(text)) for text in TEXTS)
    ollama = send(server, "/api/embed", {"model": kind, "input": TEXTS})
    np.testing.assert_allclose(ollama["embeddings"], expected, atol=5e-5)


@pytest.mark.parametrize("kind", PAIRS)
def test_rerank_and_score_are_those_of_the_paper(server: RunningServer, models_path: Path, kind: str) -> None:
    reference, name = Reference(models_path / f"{kind}-pairs", kind), f"{kind}-pairs"
    scores, num_tokens = [], 0
    for text in TEXTS:
        between = [SEP, SEP] if "roberta" in kind else [SEP]
        first = [CLS, *words(QUERY), *between]
        tokens = [*first, *words(text), SEP]
        scores.append(reference.score(tokens, len(tokens) if "roberta" in kind else len(first)))
        num_tokens += len(tokens)
    assert np.ptp(scores) > 1e-3
    order = np.argsort(scores)[::-1].tolist()
    answer = send(server, "/v1/rerank", {"model": name, "query": QUERY, "documents": TEXTS, "top_n": 3})
    assert [each["index"] for each in answer["results"]] == order[:3]
    found = [each["relevance_score"] for each in answer["results"]]
    np.testing.assert_allclose(found, [scores[index] for index in order[:3]], atol=1e-5)
    assert answer["results"][0]["document"]["text"] == TEXTS[order[0]]
    assert (answer["model"], answer["usage"]["total_tokens"]) == (name, num_tokens)
    listed = send(server, "/v1/score", {"model": name, "text_1": QUERY, "text_2": TEXTS})
    np.testing.assert_allclose([each["score"] for each in listed["data"]], scores, atol=1e-5)


def test_a_long_text_is_cut_by_ollamas_endpoint_and_refused_by_openais(
    server: RunningServer, models_path: Path
) -> None:
    long = "blue " * 300
    with server.client() as client, pytest.raises(openai.BadRequestError, match=r"index 1 .* limit of 'bert' is 128"):
        client.embeddings.create(model="bert", input=["blue", long])
    [found] = send(server, "/api/embed", {"model": "bert", "input": long})["embeddings"]
    mean = Reference(models_path / "bert", "bert").states([CLS, *words("blue") * 126, SEP]).mean(axis=0)
    np.testing.assert_allclose(found, mean / np.linalg.norm(mean), atol=5e-5)


def test_a_request_chooses_one_of_the_models_prompts(models_path: Path, tmp_path: Path) -> None:
    path = shutil.copytree(models_path / "bert", tmp_path / "bert")
    named = {"query": "which ", "document": "the "}
    prompts = {"prompts": named, "default_prompt_name": "document"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with running_server(EngineConfig(str(path), served_model_name="vectors")) as server:

        def vector(given: str | list[int], **fields: Any) -> Any:
            return send(server, "/v1/embeddings", {"input": given} | fields)["data"][0]["embedding"]

        for name, prompt in named.items():
            assert vector("river", prompt_name=name) == vector(whole(f"{prompt}river"))
        assert vector("river") == vector("river", prompt_name="document")
        error = send(server, "/v1/embeddings", {"input": "a", "prompt_name": "x"}, status=400)["error"]
        assert error["param"] == "prompt_name"
        assert "must be one of query, document for 'vectors'" in error["message"]


def test_white_space_and_an_unknown_word_of_any_length_are_few_tokens(server: RunningServer) -> None:
    for text, num_tokens in (("blue" + " " * 20_000 + "river", 4), ("x" * 20_000, 3)):
        assert send(server, "/v1/embeddings", {"model": "bert", "input": text})["usage"]["prompt_tokens"] == num_tokens
        found = send(server, "/v1/score", {"model": "bert-pairs", "text_1": "blue", "text_2": text})
        assert found["usage"]["prompt_tokens"] == num_tokens + 2


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/v1/rerank", {"documents": ["a", "blue " * 200]}, "documents.1", "207 tokens with its query; the limit of"),
        ("/v1/rerank", {"documents": ["a"], "instruction": "Find stones"}, "instruction", "takes no instruction"),
        ("/v1/rerank", {"documents": ["a"], "model": "bert"}, "model", "'bert' is no reranker: it makes embeddings"),
        ("/v1/embeddings", {"input": "a"}, "model", "cannot be used for embeddings, because it is a reranker"),
        ("/v1/completions", {"prompt": "a"}, "model", "'bert-pairs' reranks; use 'demo' to generate text"),
    ],
)
def test_what_such_a_model_does_not_do_is_refused_by_name(
    server: RunningServer, path: str, fields: dict[str, Any], param: str, message: str
) -> None:
    query = {"query": QUERY} if "documents" in fields else {}
    error = send(server, path, {"model": "bert-pairs", **query, **fields}, status=400)["error"]
    assert error["param"] == param
    assert re.search(message, error["message"]), error["message"]


def test_lists_of_models_say_what_each_is_for(server: RunningServer) -> None:
    send(server, "/v1/embeddings", {"model": "bert", "input": "a"})
    send(server, "/v1/score", {"model": "bert-pairs", "text_1": "a", "text_2": "a"})
    with raw(server) as client:
        listed = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
        shown = client.post("/api/show", json={"model": "bert"}).json()
    kinds = {name: listed[name]["kind"] for name in ("demo", "bert", "bert-pairs", "new")}
    assert kinds == {"demo": "text", "bert": "embedding", "bert-pairs": "reranker", "new": "embedding"}
    sources = {name: listed[name]["source"] for name in kinds}
    assert sources == {"demo": "mlx-lm", "bert": "mlxpaged", "bert-pairs": "mlxpaged", "new": "mlxpaged"}
    can = {name: {what for what, yes in listed[name]["capabilities"].items() if yes} for name in ("bert", "bert-pairs")}
    assert can == {"bert": {"embeddings"}, "bert-pairs": {"rerank"}}
    assert listed["bert"]["embedding_dimensions"] == WIDTH
    assert "embedding_dimensions" not in listed["bert-pairs"]
    assert shown["capabilities"] == ["embedding"]


def test_an_encoder_is_served_as_the_only_model(models_path: Path) -> None:
    config = EngineConfig(str(models_path / "bert-pairs"), served_model_name="judge")
    with running_server(config) as server:
        found = send(server, "/v1/rerank", {"query": QUERY, "documents": TEXTS})
        assert (found["model"], len(found["results"])) == ("judge", len(TEXTS))
        error = send(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, status=400)
        assert "'judge' reranks" in error["error"]["message"]
        text = banner(server.registry, server.url, needs_key=False)
        assert "judge: 0.1 MB of weights, inputs up to 128 tokens" in text
        assert "/v1/rerank -H" in text


def test_a_thousand_texts_and_an_answer_do_not_wait_for_each_other_forever(server: RunningServer) -> None:
    texts = [f"{TEXTS[i % 4]} {'blue ' * (i % 90)}" for i in range(1000)]
    large = Background.post(server, "/v1/embeddings", {"model": "modernbert", "input": texts})
    answer = post(server, run_on(random_tokens(5, 1), 20, model="demo"))
    assert answer["usage"]["completion_tokens"] == 20
    vectors = np.array([each["embedding"] for each in large.result().json()["data"]])
    assert vectors.shape == (1000, WIDTH)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
