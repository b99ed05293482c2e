"""/v1/rerank and /v1/score with a tiny model that is named as a reranker: scores are computed as Qwen3-Reranker's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as load_plain_model
from mlx_lm.utils import load_tokenizer

from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.encoders.reranker import INSTRUCT, JUDGE, make_reranker
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import DEMO_PATH
from mlxpaged.models.text.tokenizer import Tokenizer
from tests.api.helpers import metrics, post, raw, run_on
from tests.support import RunningServer, demo_vocab_size, make_tiny_model, running_server

QUERY = "which river is blue?"
DOCUMENTS = ["the blue river", "a stone", "count to nine and say what you are", "river river river blue"]
NAME = "Tiny-Qwen3-Reranker"


def make_judge(path: Path) -> Path:
    """Its vocabulary has "no" of the demo model's, and "yes" beside it."""
    size = demo_vocab_size()
    make_tiny_model(path, "qwen3", vocab_size=size + 1)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    yes = tokenizer["added_tokens"][-1] | {"id": size, "content": "yes", "special": False}
    tokenizer["added_tokens"].append(yes)
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_judge(tmp_path_factory.mktemp("models") / NAME)


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[RunningServer]:
    with running_server(EngineConfig(str(model_path), served_model_name="judge", kv_cache_bytes=16_000_000)) as server:
        yield server


def prompt(query: str, document: str, instruct: str = INSTRUCT) -> str:
    """As the model's authors write it, for a template that does not know of thinking."""
    text = f"<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}"
    return f"<|im_start|>system\n{JUDGE}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def expected(server: RunningServer, path: Path, prompts: list[str]) -> tuple[list[float], list[int]]:
    """The scores that mlx-lm's own model gives, and the ranks of "yes" among its most likely tokens."""
    assert server.engine.info is not None
    reranker = server.engine.info.reranker
    assert reranker is not None
    model, _ = load_plain_model(path)
    scores, ranks = [], []
    for text in prompts:
        tokens = server.engine.info.tokenizer.encode(text, add_special_tokens=False)
        logits = np.array(model(mx.array([tokens]))[0, -1], dtype=np.float64)
        yes, no = np.exp(logits[reranker.yes]), np.exp(logits[reranker.no])
        scores.append(yes / (yes + no))
        ranks.append(int((logits > logits[reranker.yes]).sum()))
    return scores, ranks


def send(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with raw(server) as client:
        response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_documents_come_in_the_order_of_their_exact_scores(server: RunningServer, model_path: Path) -> None:
    scores, ranks = expected(server, model_path, [prompt(QUERY, document) for document in DOCUMENTS])
    assert max(ranks) > 20, "no list of the most likely tokens would have this one"
    documents: list[Any] = [*DOCUMENTS[:2], {"text": DOCUMENTS[2]}, DOCUMENTS[3]]
    answer = send(server, "/v1/rerank", {"model": "judge", "query": QUERY, "documents": documents})
    order = sorted(range(4), key=lambda index: -scores[index])
    assert [each["index"] for each in answer["results"]] == order
    found = [each["relevance_score"] for each in answer["results"]]
    np.testing.assert_allclose(found, [scores[index] for index in order], rtol=1e-5)
    assert [each["document"]["text"] for each in answer["results"]] == [DOCUMENTS[index] for index in order]
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 4 * len(QUERY.split())
    best = send(server, "/rerank", {"query": QUERY, "documents": documents, "top_n": 1, "return_documents": False})
    score = pytest.approx(scores[order[0]], rel=1e-5)
    assert best["results"] == [{"index": order[0], "relevance_score": score}]


def test_an_instruction_replaces_that_of_the_model(server: RunningServer, model_path: Path) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS[:1], "instruction": "Find stones"}
    [found] = send(server, "/v1/rerank", body)["results"]
    [score], _ = expected(server, model_path, [prompt(QUERY, DOCUMENTS[0], "Find stones")])
    assert found["relevance_score"] == pytest.approx(score, rel=1e-5)


def test_scores_are_of_one_query_or_of_pairs(server: RunningServer, model_path: Path) -> None:
    one = send(server, "/v1/score", {"model": "judge", "text_1": QUERY, "text_2": DOCUMENTS})
    scores, _ = expected(server, model_path, [prompt(QUERY, document) for document in DOCUMENTS])
    np.testing.assert_allclose([each["score"] for each in one["data"]], scores, rtol=1e-5)
    assert [each["index"] for each in one["data"]] == [0, 1, 2, 3]
    pairs = send(server, "/score", {"text_1": DOCUMENTS[:2], "text_2": DOCUMENTS[1:3]})
    scores, _ = expected(server, model_path, [prompt(*pair) for pair in pairwise(DOCUMENTS[:3])])
    np.testing.assert_allclose([each["score"] for each in pairs["data"]], scores, rtol=1e-5)


def test_documents_of_one_query_share_what_is_before_them(server: RunningServer) -> None:
    before = metrics(server)["mlxpaged_prefix_hit_tokens_total"]
    send(server, "/v1/rerank", {"query": "a new query of many words, none of which was there", "documents": DOCUMENTS})
    assert metrics(server)["mlxpaged_prefix_hit_tokens_total"] - before >= 3 * 64


def test_a_reranker_still_generates(server: RunningServer) -> None:
    assert post(server, run_on("blue", 3, model="judge"))["usage"]["completion_tokens"] == 3
    with raw(server) as client:
        assert client.get("/v1/models/judge").json()["capabilities"]["rerank"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/rerank", {"query": "x", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["x"]}, "query"),
        ("/v1/rerank", {"query": "x", "documents": ["x", "blue " * 4000]}, "documents.1"),
        ("/v1/rerank", {"query": "x", "documents": ["x", "blue " * 500]}, "documents.1"),
        ("/v1/rerank", {"query": "x", "documents": ["x"] * 289}, "documents"),
        ("/v1/rerank", {"query": "x", "documents": ["x"], "top_n": 0}, "top_n"),
        ("/v1/score", {"text_1": ["x", "y"], "text_2": ["x", "y", "z"]}, "text_1"),
    ],
)
def test_what_cannot_be_judged_is_refused(server: RunningServer, path: str, fields: dict[str, Any], param: str) -> None:
    with raw(server) as client:
        response = client.post(path, json=fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_user_can_say_that_a_model_is_a_reranker(server: RunningServer) -> None:
    assert server.engine.info is not None
    tokenizer = server.engine.info.tokenizer
    with pytest.raises(UnsupportedModelError, match="its name does not contain"):
        make_reranker("some-model", tokenizer, asked=False)
    assert make_reranker("some-model", tokenizer, asked=True) == server.engine.info.reranker
    demo = Tokenizer(load_tokenizer(DEMO_PATH))
    with pytest.raises(UnsupportedModelError, match="not one token each"):
        make_reranker("some-model", demo, asked=True)
