"""A chat template that the user gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import DEMO_PATH, LoadOptions, load_model, read_tokenizer
from tests.support import RunningServer, running_server

MESSAGES = [{"role": "user", "content": "stone"}]
TEMPLATE = "{% for message in messages %}[{{ message.role }}] {{ message.content }}{% endfor %}"


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "given.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture
def untemplated(tmp_path: Path) -> Path:
    """A model without a template."""
    path = tmp_path / "model"
    shutil.copytree(DEMO_PATH, path, ignore=shutil.ignore_patterns("chat_template.jinja"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60, trust_env=False)


@pytest.mark.parametrize("has_own", [True, False])
def test_a_given_template_renders_the_messages(has_own: bool, template: Path, untemplated: Path) -> None:
    model = str(DEMO_PATH if has_own else untemplated)
    with running_server(EngineConfig(model, chat_template=template)) as server:
        tokens = post(server, "/tokenize", messages=MESSAGES).json()["tokens"]
        assert post(server, "/detokenize", tokens=tokens).json()["prompt"] == "[user] stone"
        assert post(server, "/v1/chat/completions", messages=MESSAGES, max_tokens=4).status_code == 200


def test_without_one_the_error_says_how_to_give_it(untemplated: Path) -> None:
    with running_server(EngineConfig(str(untemplated))) as server:
        reply = post(server, "/v1/chat/completions", messages=MESSAGES)
        assert reply.status_code == 400
        assert "--chat-template" in reply.json()["error"]["message"]


def test_a_template_that_cannot_be_read_is_an_error_of_the_load(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"the chat template .*missing\.jinja cannot be read"):
        load_model(str(DEMO_PATH), LoadOptions(chat_template=tmp_path / "missing.jinja"))
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    with pytest.raises(UnsupportedModelError, match=r"the chat template .*latin\.jinja cannot be read"):
        read_tokenizer(str(DEMO_PATH), chat_template=tmp_path / "latin.jinja")
