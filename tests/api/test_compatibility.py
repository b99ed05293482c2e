"""docs/compatibility.md is true: every row is tried on a running server, and no field lacks a row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import BatchCreateParams, EmbeddingCreateParams, FileCreateParams, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params

from mlxpaged.api.endpoints import ENDPOINTS
from mlxpaged.engine import EngineConfig
from mlxpaged.models.reranker import Reranker
from tests.api.helpers import ask, raw, run_on
from tests.support import RunningServer, make_embedding_model, running_server

TABLE = Path(__file__).parents[2] / "docs" / "compatibility.md"
ROW = re.compile(r"\| `(?P<field>\w+)` \| `(?P<example>{.*?})` \| (?P<outcome>\w+) \| .*\|")
OUTCOMES = {"honoured": 200, "label": 200, "model": 400, "refused": 400}

CHAT, COMPLETIONS = "POST /v1/chat/completions", "POST /v1/completions"
MESSAGES, COUNT = "POST /v1/messages", "POST /v1/messages/count_tokens"
RESPONSES, INPUT_TOKENS = "POST /v1/responses", "POST /v1/responses/input_tokens"
EMBEDDINGS = "POST /v1/embeddings"
OLLAMA_CHAT, OLLAMA_GENERATE = "POST /api/chat", "POST /api/generate"
OTHER_ERRORS = (MESSAGES, COUNT, *(f"POST /api/{name}" for name in ("chat", "generate", "embed", "embeddings", "show")))
"""Their errors have no `param`."""

SMALLEST: dict[str, dict[str, Any]] = {
    CHAT: ask("x", max_tokens=2),
    COMPLETIONS: run_on("x", 2),
    RESPONSES: {"input": "x", "max_output_tokens": 2},
    INPUT_TOKENS: {"input": "x"},
    MESSAGES: ask("x", model="demo", max_tokens=2),
    COUNT: {"model": "demo", "messages": [{"role": "user", "content": "x"}]},
    EMBEDDINGS: {"model": "vectors", "input": "x"},
    "POST /v1/rerank": {"query": "x", "documents": ["x"]},
    "POST /v1/score": {"text_1": "x", "text_2": "x"},
    OLLAMA_CHAT: {"model": "demo", "messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 2}},
    OLLAMA_GENERATE: {"model": "demo", "prompt": "x", "options": {"num_predict": 2}},
    "POST /api/embed": {"model": "vectors", "input": "x"},
    "POST /api/embeddings": {"model": "vectors", "prompt": "x"},
    "POST /api/show": {"model": "demo"},
    "POST /tokenize": {"prompt": "x"},
    "POST /detokenize": {"tokens": [20]},
    "POST /v1/files": {"purpose": "batch", "file": "{}"},
    "POST /v1/batches": {"endpoint": "/v1/completions", "completion_window": "24h"},
}
"""Bodies that the examples are added to, by the table's headings."""

OFFICIAL: dict[str, set[str]] = {
    CHAT: set(chat_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"},
    COMPLETIONS: set(completion_create_params.CompletionCreateParamsBase.__annotations__) | {"stream"},
    RESPONSES: set(response_create_params.ResponseCreateParamsBase.__annotations__) | {"stream"},
    INPUT_TOKENS: set(input_token_count_params.InputTokenCountParams.__annotations__),
    EMBEDDINGS: set(EmbeddingCreateParams.__annotations__),
    MESSAGES: set(message_create_params.MessageCreateParamsBase.__annotations__) | {"stream"},
    COUNT: set(message_count_tokens_params.MessageCountTokensParams.__annotations__),
    "POST /v1/files": set(FileCreateParams.__annotations__),
    "POST /v1/batches": set(BatchCreateParams.__annotations__),
}
"""What the official clients can send."""


@dataclass(frozen=True)
class Row:
    endpoint: str
    field: str
    example: dict[str, Any]
    outcome: str


def rows() -> list[Row]:
    """Raises where a line of a table is not a row."""
    found, endpoint = [], ""
    for line in TABLE.read_text().splitlines():
        if line.startswith("## "):
            endpoint = line.removeprefix("## ")
        elif line.startswith("| `"):
            match = ROW.fullmatch(line)
            assert match is not None, line
            found.append(Row(endpoint, match["field"], json.loads(match["example"]), match["outcome"]))
    return found


ROWS = rows()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    second = make_embedding_model(tmp_path_factory.mktemp("models") / "m")
    config = EngineConfig(kv_cache_bytes=16_000_000, embedding_model=str(second), served_embedding_model_name="vectors")
    with running_server(config, data_dir=tmp_path_factory.mktemp("data")) as server:
        info = server.engine.info
        assert info is not None
        info.reranker = Reranker(info.tokenizer, yes=20, no=21)  # the demo model has no token "yes"
        yield server


def send(client: httpx.Client, endpoint: str, fields: dict[str, Any]) -> httpx.Response:
    method, path = endpoint.split()
    if path == "/v1/files":
        data = {name: value for name, value in fields.items() if name != "file"}
        return client.request(method, path, data=data, files={"file": fields["file"].encode()})
    if path == "/v1/batches":
        file_id = send(client, "POST /v1/files", SMALLEST["POST /v1/files"]).json()["id"]
        fields = {"input_file_id": file_id} | fields
    return client.request(method, path, json=fields)


@pytest.mark.parametrize("row", ROWS, ids=[f"{row.endpoint.split('/')[-1]}-{row.field}-{row.outcome}" for row in ROWS])
def test_a_row_is_true(server: RunningServer, row: Row) -> None:
    with raw(server) as client:
        response = send(client, row.endpoint, SMALLEST[row.endpoint] | row.example)
    assert response.status_code == OUTCOMES[row.outcome], response.text
    if OUTCOMES[row.outcome] == 400:
        error = response.json()["error"]
        assert row.endpoint in OTHER_ERRORS or error["param"].split(".")[0] == row.field
        assert row.field in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("endpoint", SMALLEST)
def test_no_field_lacks_a_row(endpoint: str) -> None:
    [body] = [each.body for each in ENDPOINTS if f"{each.method} {each.path}" == endpoint]
    assert body is not None
    listed = {row.field for row in ROWS if row.endpoint == endpoint}
    accepted = {row.field for row in ROWS if row.endpoint == endpoint and row.outcome != "refused"}
    assert accepted <= set(body.model_fields) <= listed
    assert OFFICIAL.get(endpoint, set()) <= listed


def test_every_heading_is_an_endpoint_that_is_tried() -> None:
    assert {row.endpoint for row in ROWS} == set(SMALLEST)


def test_every_json_body_of_the_server_has_a_table() -> None:
    assert {f"{each.method} {each.path}" for each in ENDPOINTS if each.body is not None} == set(SMALLEST)
