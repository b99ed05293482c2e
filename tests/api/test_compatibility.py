"""docs/compatibility.md is true: every row is tried on a running server, and no field lacks a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import (
    BatchCreateParams,
    EmbeddingCreateParams,
    FileCreateParams,
    completion_create_params,
    decision_create_params,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params

from mlxpaged.api.body import validate
from mlxpaged.api.config import HttpConfig
from mlxpaged.api.endpoints import ENDPOINTS
from mlxpaged.api.fields.table import Outcome, Table
from mlxpaged.api.reading import Reading, names_of, places
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.encoders.reranker import Reranker
from tests.api.helpers import ask, raw, run_on
from tests.compatibility.claims import ALIAS, HONOURED, IGNORED, MODEL, REFUSED, Claim
from tests.compatibility.page import CLAIMS, MARK, markdown, tables
from tests.support import make_embedding_model, running_server, with_embeddings

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
STATUS = {MODEL: 400, REFUSED: 400}
"""Statuses other than 200, by outcome."""
FILE_ID = {"POST /v1/batches": {"input_file_id": "f"}}

CHAT, COMPLETIONS = "POST /v1/chat/completions", "POST /v1/completions"
MESSAGES, COUNT = "POST /v1/messages", "POST /v1/messages/count_tokens"
RESPONSES, INPUT_TOKENS = "POST /v1/responses", "POST /v1/responses/input_tokens"
EMBEDDINGS = "POST /v1/embeddings"
DECISIONS, SYSTEM_ONE = "POST /v1/decisions", "POST /v1/systemone"
OLLAMA_CHAT, OLLAMA_GENERATE = "POST /api/chat", "POST /api/generate"
OTHER_ERRORS = (
    MESSAGES,
    COUNT,
    SYSTEM_ONE,
    *(f"POST /api/{name}" for name in ("chat", "generate", "embed", "embeddings", "show", "pull")),
)
"""Their errors have no `param`."""

SMALLEST: dict[str, dict[str, Any]] = {
    CHAT: ask("x", max_tokens=2),
    "POST /apply-template": ask("x", max_tokens=2),
    COMPLETIONS: run_on("x", 2),
    RESPONSES: {"input": "x", "max_output_tokens": 2},
    INPUT_TOKENS: {"input": "x"},
    MESSAGES: ask("x", model="demo", max_tokens=2),
    COUNT: {"model": "demo", "messages": [{"role": "user", "content": "x"}]},
    EMBEDDINGS: {"model": "vectors", "input": "x"},
    "POST /v1/rerank": {"query": "x", "documents": ["x"]},
    "POST /v1/score": {"text_1": "x", "text_2": "x"},
    DECISIONS: {"input": "x", "questions": [{"type": "predicate", "instructions": "x"}]},
    SYSTEM_ONE: {"state": "x", "questions": {"q": {"type": "noul", "instructions": "x"}}},
    OLLAMA_CHAT: {"model": "demo", "messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 2}},
    OLLAMA_GENERATE: {"model": "demo", "prompt": "x", "options": {"num_predict": 2}},
    "POST /api/embed": {"model": "vectors", "input": "x"},
    "POST /api/embeddings": {"model": "vectors", "prompt": "x"},
    "POST /api/show": {"model": "demo"},
    "POST /api/pull": {"model": "demo"},
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
    DECISIONS: set(decision_create_params.DecisionCreateParams.__annotations__),
    MESSAGES: set(message_create_params.MessageCreateParamsBase.__annotations__) | {"stream"},
    COUNT: set(message_count_tokens_params.MessageCountTokensParams.__annotations__),
    "POST /v1/files": set(FileCreateParams.__annotations__),
    "POST /v1/batches": set(BatchCreateParams.__annotations__),
}
"""What the official clients can send."""


TABLES = tables()
ROWS = [(endpoint, row) for endpoint, rows in TABLES.items() for row in rows]


def outcome_of(rows: Iterable[Claim], row: Claim) -> str:
    """An alias has the outcome of its field."""
    if row.outcome != ALIAS:
        return row.outcome
    return next((each.outcome for each in rows if each.field == row.of.split(".")[0]), HONOURED)


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    second = make_embedding_model(tmp_path_factory.mktemp("models") / "m")
    (second / "config_sentence_transformers.json").write_text('{"prompts": {"query": "find: "}}')
    config = with_embeddings(EngineConfig(kv_cache_bytes=16_000_000), second)
    data_dir, allowed = tmp_path_factory.mktemp("data"), HttpConfig(allow_downloads=True)
    with running_server(config, data_dir=data_dir, http=allowed) as server, raw(server) as client:
        info = server.engine.info
        assert info is not None
        info.reranker = Reranker(info.tokenizer, yes=20, no=21)  # the demo model has no token "yes"
        yield client


def send(client: httpx.Client, endpoint: str, fields: dict[str, Any]) -> httpx.Response:
    method, path = endpoint.split()
    if path == "/v1/files":
        data = {name: value for name, value in fields.items() if name != "file"}
        return client.request(method, path, data=data, files={"file": fields["file"].encode()})
    if path == "/v1/batches":
        file_id = send(client, "POST /v1/files", SMALLEST["POST /v1/files"]).json()["id"]
        fields = {"input_file_id": file_id} | fields
    return client.request(method, path, json=fields)


@pytest.mark.parametrize(
    ("endpoint", "row"), ROWS, ids=[f"{path.split('/')[-1]}-{row.field}-{row.outcome}" for path, row in ROWS]
)
def test_a_row_is_true(http: httpx.Client, endpoint: str, row: Claim) -> None:
    response = send(http, endpoint, SMALLEST[endpoint] | dict(row.example))
    status = STATUS.get(outcome_of(TABLES[endpoint], row), 200)
    assert response.status_code == status, response.text
    named = response.headers.get("x-mlxpaged-ignored", "").split(", ")
    assert (row.field in named) == (row.outcome == IGNORED)
    if row.outcome in (REFUSED, MODEL):
        error = response.json()["error"]
        if endpoint not in OTHER_ERRORS:
            assert error["param"].split(".")[0] == row.field.split(".")[0]
        assert row.field.split(".")[0] in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("endpoint", TABLES)
def test_what_changes_nothing_is_accepted_and_not_named(endpoint: str) -> None:
    [model] = [each.body for each in ENDPOINTS if f"{each.method} {each.path}" == endpoint]
    assert model is not None
    for row in TABLES[endpoint]:
        for value in (*row.neutral, None) if row.field not in model.model_fields and "." not in row.field else ():
            reading = Reading(model, strict=True)
            body = SMALLEST[endpoint] | FILE_ID.get(endpoint, {}) | {row.field: value}
            if endpoint != "POST /v1/files":
                validate(body, model, reading)
            assert reading.ignored == [], row.field


@pytest.mark.parametrize("endpoint", SMALLEST)
def test_no_field_lacks_a_row(endpoint: str) -> None:
    [body] = [each.body for each in ENDPOINTS if f"{each.method} {each.path}" == endpoint]
    assert body is not None
    rows = TABLES[endpoint]
    listed = {row.field for row in rows}
    accepted = {row.field for row in rows if row.outcome in (HONOURED, MODEL)}
    assert accepted <= set(body.model_fields) <= listed
    assert OFFICIAL.get(endpoint, set()) <= {field.split(".")[0] for field in listed} | {"cache_control"}


@pytest.mark.parametrize("endpoint", SMALLEST)
def test_a_row_of_a_field_that_its_model_lacks_is_the_only_one(endpoint: str) -> None:
    [body] = [each.body for each in ENDPOINTS if f"{each.method} {each.path}" == endpoint]
    assert body is not None
    fields = [row.field for row in TABLES[endpoint] if row.field.split(".")[0] not in body.model_fields]
    assert sorted(fields) == sorted(set(fields))


def test_every_row_of_the_server_acts_when_a_body_is_read() -> None:
    """The others are claims of tests/compatibility. A row that endpoints share may act for one of them only."""
    acting, rows = set[str](), set[str]()
    for endpoint in ENDPOINTS:
        table: Table = getattr(endpoint.body, "table", Table())
        rows |= set(map(repr, table.rows))
        for model, place in places(endpoint.body).items() if endpoint.body is not None else ():
            for row in table.rows:
                name = row.field.rpartition(".")[2]
                is_plain = row.outcome is Outcome.IGNORED and not row.neutral and not row.only_with
                if name not in names_of(model) and table.find(place, name) is row and not is_plain:
                    acting.add(repr(row))
    assert rows == acting


def test_every_json_body_of_the_server_has_a_table() -> None:
    assert set(TABLES) == set(SMALLEST) == set(CLAIMS)
    assert all(TABLES.values())


def test_the_page_has_these_tables() -> None:
    """`python -m tests.compatibility docs/compatibility.md` writes them."""
    head, mark, made = PAGE.read_text().partition(MARK)
    assert head
    assert mark
    assert made == markdown()
