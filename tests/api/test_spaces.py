"""A tokenizer whose decoder takes a space from the beginning of a text, as those of Llama 2 and Mistral do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import DEMO_PATH
from tests.api.helpers import answer_text, ask, post, run_on
from tests.support import RunningServer, running_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("model") / "m"
    shutil.copytree(DEMO_PATH, path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    tokenizer["decoder"] = {"type": "Sequence", "decoders": [tokenizer["decoder"], {"type": "Fuse"}, strip]}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = EngineConfig(model=str(path), served_model_name="demo", kv_cache_bytes=16_000_000)
    with running_server(config) as server:
        yield server


def spaces(server: RunningServer) -> dict[str, Any]:
    """Fields of a request whose answer is two spaces, a token each."""
    assert server.engine.info is not None
    [token] = server.engine.info.tokenizer.encode(" ", add_special_tokens=False)
    return {"max_tokens": 2, "ignore_eos": True, "logit_bias": {str(token): 100}}


def test_an_answer_that_goes_on_with_a_text_begins_with_its_space(server: RunningServer) -> None:
    fields = spaces(server)
    assert answer_text(server, run_on("Look at", 2) | fields) == "  "
    assert answer_text(server, run_on("Look at", 2, echo=True) | fields) == "Look at  "
    messages = [{"role": "user", "content": "Look"}, {"role": "assistant", "content": "at", "prefix": True}]
    assert answer_text(server, {"model": "demo", "messages": messages} | fields) == "  "
    assert answer_text(server, ask("Look") | fields) == " "


def test_tokens_with_log_probabilities_join_to_the_text(server: RunningServer) -> None:
    [choice] = post(server, run_on("Look at", 2, logprobs=2) | spaces(server))["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"] == "  "
    assert logprobs["text_offset"] == [0, 1]
    [choice] = post(server, ask("Look", logprobs=True) | spaces(server))["choices"]
    assert [bytes(each["bytes"]) for each in choice["logprobs"]["content"]] == [b" ", b" "]
