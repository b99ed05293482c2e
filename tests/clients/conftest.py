"""Libraries and command lines that people already have, against the server; `make test-clients`.

install.py installs each into a folder of its own. The other tests need none of them.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from demo_model.vision.pictures import BUILT_IN, picture
from mlxpaged.engine_config import EngineConfig
from tests.clients.install import NotInstalled, folder_of
from tests.formats.written import WRITTEN
from tests.scripted import scripted_server
from tests.support import RunningServer, running_server

REPLY = '{"city": "Rome", "degrees": 21}'


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "Weather in Rome?": ("weather", {"city": "Rome"}),
    "It is hot.": ("final_answer", {"answer": "It is 21 degrees in Rome."}),
    "Describe it": ("Weather", {"city": "Rome", "degrees": 21}),
    "Describe a part": ("PartialWeather", {"city": "Rome", "degrees": 21}),
    "Say that it is done": ("Bash", {"command": "echo it is done", "description": "Say it"}),
    "Let it be done": ("bash", {"command": "echo it is done"}),
    "Carry it out": ("exec_command", {"cmd": "echo it is done"}),
}
TEXTS = {
    "Hello": "Hello there.",
    "Predict a greeting": "[[ ## answer ## ]]\nHello there.\n\n[[ ## completed ## ]]",
    "21 degrees": "It is 21 degrees in Rome.",
    "Describe Rome": REPLY,
    "</chat_history>": '{"title": "A greeting", "tags": ["Greeting"], "follow_ups": ["How are you?"]}',
    "\nit is done": "Done, as you said.",
    "Write the greeting": "greeting.txt\n```\nGood morning\n```\n",
}
FORMATS = {"json_tools": "Qwen3", "qwen3_coder": "Qwen3.5", "glm47": "GLM", "harmony": "gpt-oss", "gemma4": "Gemma 4"}


def script(form: str) -> dict[str, str]:
    """What a model of this format answers, by the last of these texts in the prompt."""
    calls = {question: WRITTEN[form](*call) for question, call in CALLS.items()}
    if form != "harmony":
        calls["Weather in Rome?"] = f"<think>\nI should look.\n</think>\n{calls['Weather in Rome?']}"
        return calls | TEXTS
    thought = "<|channel|>analysis<|message|>I should look.<|end|><|start|>assistant"
    texts = {question: f"<|channel|>final<|message|>{text}<|return|>" for question, text in TEXTS.items()}
    return {question: thought + call for question, call in calls.items()} | texts


SCRIPT = script("json_tools")
NUMBER = 407
"""In the images."""
OPTIONS = {"context_length": 131072, "kv_cache_bytes": 70_000_000}
"""Room for the long prompts of agents: a token is a letter."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if "not clients" in config.getoption("markexpr") else None


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", SCRIPT, **OPTIONS) as server:
        yield server


@pytest.fixture(scope="session", params=FORMATS, ids=FORMATS.values())
def any_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Models of several families, one after the other."""
    form = request.param
    with scripted_server(tmp_path_factory.mktemp(form), form, script(form), **OPTIONS) as server:
        yield server


@pytest.fixture(scope="session")
def seeing() -> Iterator[RunningServer]:
    config = EngineConfig(model="demo-vision", kv_cache_bytes=64_000_000, default_temperature=0.0)
    with running_server(config) as running:
        yield running


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The image of a number as PNG, JPEG and WEBP."""
    image = picture(random.Random(NUMBER), NUMBER, 320, 200, [BUILT_IN], 2.5)
    paths = [tmp_path_factory.mktemp("images") / f"number.{kind}" for kind in ("png", "jpeg", "webp")]
    for path in paths:
        image.save(path)
    return paths


@pytest.fixture(autouse=True)
def _idle_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in {"server", "any_server", "seeing"} & set(request.fixturenames):
        request.getfixturevalue(name).wait_idle()


def installed(name: str) -> Path:
    """The folder of a program. Without the program, the test is skipped, with the reason."""
    try:
        return folder_of(name)
    except NotInstalled as reason:
        pytest.skip(str(reason))


def run(home: Path, *command: str | Path, **env: str) -> str:
    """What a program prints. It finds nothing of the user's: no settings, no keys."""
    work = home / "work"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        command,
        cwd=work,
        env={"HOME": str(home), "PATH": os.environ["PATH"]} | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
