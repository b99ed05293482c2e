"""Open WebUI, asked what its page asks it: a first chat, its title and a tool. It sends 28 tools of its own with every
chat."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import DEMO_PATH
from tests.clients.conftest import NUMBER, installed
from tests.support import RunningServer, running_server, wait_until

pytestmark = pytest.mark.clients

START_S = 300.0
ANSWER_S = 60.0
TOOL = '''class Tools:
    def weather(self, city: str) -> str:
        """
        The weather in a city.
        :param city: The name of the city.
        """
        return "21 degrees"
'''


@dataclass
class Page:
    client: httpx.Client
    models: dict[str, Any]

    def chat(self, model: str, text: str | list[dict[str, Any]], *tools: str, title: bool = False) -> dict[str, Any]:
        """Returns the answer in a new chat, with the chat's title. title: wait until the chat has one."""
        question, answer = str(uuid.uuid4()), str(uuid.uuid4())
        message = {"id": question, "parentId": None, "childrenIds": [answer], "role": "user", "content": text}
        features = dict.fromkeys(("voice", "image_generation", "code_interpreter", "web_search"), False)
        tasks = dict.fromkeys(("title_generation", "tags_generation", "follow_up_generation"), title)
        body = {
            "stream": True,
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "params": {},
            "tool_ids": list(tools),
            "tool_servers": [],
            "features": features,
            "variables": {"{{USER_NAME}}": "User"},
            "model_item": self.models[model],
            "session_id": str(uuid.uuid4()),
            "id": answer,
            "parent_id": None,
            "user_message": message | {"timestamp": int(time.time()), "models": [model]},
            "background_tasks": tasks,
        }
        chat_id = self.post("/api/chat/completions", body)["chat_id"]
        chat: dict[str, Any] = {}

        def done() -> bool:
            chat.update(self.client.get(f"/api/v1/chats/{chat_id}").raise_for_status().json())
            titled = not title or chat["title"] != "New Chat"
            return titled and bool(chat["chat"]["history"]["messages"][answer].get("done"))

        wait_until(done, ANSWER_S, pause=0.2)
        return {"title": chat["title"]} | chat["chat"]["history"]["messages"][answer]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.client.post(path, json=body).raise_for_status().json()


@pytest.fixture(scope="module")
def demo() -> Iterator[RunningServer]:
    """Open WebUI's tools take more than half of its context."""
    config = EngineConfig(str(DEMO_PATH), served_model_name="demo", kv_cache_bytes=16_000_000, default_temperature=0.0)
    with running_server(config) as running:
        yield running


@pytest.fixture(scope="module")
def page(
    server: RunningServer, demo: RunningServer, seeing: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Page]:
    """Starts Open WebUI, connected to the servers, with a tool. It downloads nothing."""
    command = installed("open_webui") / "bin" / "open-webui"
    home = tmp_path_factory.mktemp("open_webui")
    env = {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "DATA_DIR": str(home / "data"),
        "ENABLE_OLLAMA_API": "False",
        "HF_HUB_OFFLINE": "1",
        "OFFLINE_MODE": "True",
        "OPENAI_API_BASE_URLS": f"{server.url}/v1;{demo.url}/v1;{seeing.url}/v1",
        "OPENAI_API_KEYS": "unused;unused;unused",
        "RAG_EMBEDDING_ENGINE": "openai",
        "WEBUI_AUTH": "False",
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ("serve", "--host", "127.0.0.1", "--port", str(port))
    with (home / "log").open("w") as log:
        process = subprocess.Popen([command, *arguments], cwd=home, env=env, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=ANSWER_S) as client:

            def started() -> bool:
                assert process.poll() is None, (home / "log").read_text()[-2000:]
                try:
                    return client.get("/health").is_success
                except httpx.TransportError:
                    return False

            wait_until(started, START_S, pause=0.5)
            page = Page(client, {})
            token = page.post("/api/v1/auths/signin", {"email": "", "password": ""})["token"]
            client.headers["authorization"] = f"Bearer {token}"
            page.models |= {model["id"]: model for model in client.get("/api/models").json()["data"]}
            tool = {"id": "weather", "name": "Weather", "content": TOOL, "meta": {}, "access_grants": []}
            page.post("/api/v1/tools/create", tool)
            yield page
    finally:
        process.terminate()
        process.wait(ANSWER_S)


def test_it_lists_the_models_of_all_servers(page: Page) -> None:
    assert set(page.models) == {"scripted", "demo", "demo-vision"}


def test_an_image_is_seen(page: Page, images: list[Path]) -> None:
    for path in images:
        url = f"data:image/{path.suffix[1:]};base64,{base64.b64encode(path.read_bytes()).decode()}"
        text = {"type": "text", "text": "What number is in the picture?"}
        answer = page.chat("demo-vision", [text, {"type": "image_url", "image_url": {"url": url}}])
        assert answer["content"] == str(NUMBER)


def test_the_first_chat_with_a_model_that_cannot_be_told_of_the_tools_is_answered(page: Page) -> None:
    answer = page.chat("demo", "What is 17 + 25?", title=True)
    assert answer["content"] == "42"
    assert "error" not in answer


def test_the_first_chat_is_answered_and_gets_a_title(page: Page) -> None:
    answer = page.chat("scripted", "Hello", title=True)
    assert (answer["title"], answer["content"]) == ("A greeting", "Hello there.")


def test_a_tool_is_called_and_its_result_is_used(page: Page) -> None:
    answer = page.chat("scripted", "Weather in Rome?", "weather")
    assert answer["content"] == "It is 21 degrees in Rome."
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "function_call", "function_call_output", "message"]
