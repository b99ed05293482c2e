"""Add-ons of other packages: a source, a format, an API and a command that the server does not know, in a real one.

`example/` is such a package. CLASH makes one of which nothing can be used.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxpaged import addons
from mlxpaged.api.endpoint import Api
from mlxpaged.formats import FORMATS, Format
from mlxpaged.models.sources.source import SOURCES, Source
from tests.api.helpers import DEADLINE, bearer, write_keys
from tests.cli.helpers import Command, environment, serving
from tests.scripted import PLAIN, TEMPLATE, make_scripted_model

EXAMPLE = Path(__file__).parent / "example"

CLASH_POINTS = """[mlxpaged]
format.mistral = clash:FORM
format.renamed = clash:FORM
format.run_tags = clash:FORM
format.absent = clash:ABSENT
format.text = clash:TEXT
source.ollama = clash:SOURCE
source.qwen3 = clash:SOURCE
source.fails = clash:SOURCE
source.ends = clash_ends:SOURCE
api.path = clash:PATH
api.every_path = clash:EVERY_PATH
api.open = clash:OPEN
api.errors = clash:ERRORS
api.outside = clash:OUTSIDE
api.model = clash:MODEL
command.ls = clash:add_parser
command.broken = no_such_module:add_parser
colour.red = clash:RED
"""

CLASH = """
from pydantic import BaseModel
from mlxpaged.api.endpoint import Access, Api, get, post
from mlxpaged.api.error_format import ErrorFormat
from mlxpaged.formats import HERMES
from mlxpaged.models.sources.source import Source

class ChatRequest(BaseModel):
    pass

async def handle(request): ...

def fail(*names):
    raise ZeroDivisionError("of the add-on")

FORM, TEXT, SOURCE = HERMES, "text", Source(fail, fail)
PATH = Api((post("/chat/completions", handle, "ours"),))
EVERY_PATH = Api((get("/{rest:path}", handle, "all"),))
OPEN = Api((get("/clash", handle, "without a key", access=Access.OPEN),))
ERRORS = Api((post("/messages/x", handle, "x"),), ErrorFormat("/messages", "X-Id", str, ChatRequest))
OUTSIDE = Api((get("/clash", handle, "x"),), ErrorFormat("/elsewhere", "X-Id", str, ChatRequest))
MODEL = Api((post("/clash", handle, "x", ChatRequest),))
"""

LEFT_OUT = (
    "'mistral' of its formats is left out: mlxpaged has this name",
    "'renamed' of its formats is left out: its own name is 'json_tools'",
    "'run_tags' of its formats is left out: mlxpaged-example 1.0 has this name",
    "'absent' of its formats is left out: AttributeError: module 'clash' has no attribute 'ABSENT'",
    "'text' of its formats is left out: it is no Format",
    "'ollama' of its sources is left out: mlxpaged has this name",
    "'qwen3' of its sources is left out: short names of models begin with qwen3:",
    "'ends' of its sources is left out: SystemExit: 3",
    "'path' of its apis is left out: POST /chat/completions is there already",
    "'every_path' of its apis is left out: GET /{rest:path} is there already",
    "'open' of its apis is left out: GET /clash needs no key",
    "'errors' of its apis is left out: the paths of another API begin with /messages/",
    "'outside' of its apis is left out: GET /clash does not begin with /elsewhere/",
    "'model' of its apis is left out: there is another model with the name ChatRequest",
    "colour.red is left out: it must begin with source., format., api., command.",
)
"""What the log says of clash. Of its commands, the one who calls them is told."""

TOOL = {
    "type": "function",
    "function": {
        "name": "greet",
        "parameters": {
            "type": "object",
            "properties": {"word": {"enum": ["hi"]}},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both packages, as pip installs them. The example's wheel is made by the backend that it names."""
    folder, wheels = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    subprocess.run(build, cwd=EXAMPLE, check=True, capture_output=True)
    [wheel] = wheels.iterdir()
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)
    (folder / "clash.py").write_text(CLASH)
    (folder / "clash_ends.py").write_text("raise SystemExit(3)\n")
    info = folder / "mlxpaged_zclash-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mlxpaged-zclash\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(CLASH_POINTS)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model in a tar file. Its chat template shows calls as the example's format has them."""
    folder, made = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("model")
    call = "<run>{{ tool_call | tojson }}</run>"
    plain = (*PLAIN, "<run>", "</run>")
    make_scripted_model(made, "json_tools", plain=plain, template=TEMPLATE.replace("CALL", call))
    with tarfile.open(folder / "tiny.tar", "w") as tar:
        for path in made.iterdir():
            tar.add(path, f"tiny/{path.name}")
    return folder


def variables(packages: Path, models: Path, **more: str) -> dict[str, str]:
    return {"PYTHONPATH": str(packages), "EXAMPLE_MODELS": str(models), **more}


KEYS: dict[str, str] = {}
"""The key of the server."""


@pytest.fixture(scope="module")
def server(packages: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A server of the model in the tar file, with both packages, a key and a limit for bodies."""
    home = tmp_path_factory.mktemp("home")
    KEYS.update(write_keys(home / "keys.json", anna={}))
    limits = "--api-keys", str(home / "keys.json"), "--max-body-size", "100KB"
    with serving(home, "tar:tiny", *limits, env=variables(packages, models)) as command:
        yield command


@pytest.fixture
def client(server: Command) -> Iterator[httpx.Client]:
    headers = bearer(KEYS["anna"])
    with httpx.Client(base_url=server.url, headers=headers, timeout=DEADLINE, trust_env=False, verify=False) as client:
        yield client


def mlxpaged(packages: Path, models: Path, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = environment({"HOME": str(models), **variables(packages, models, **more)})
    return subprocess.run(
        [sys.executable, "-m", "mlxpaged", *args], env=env, capture_output=True, text=True, check=False
    )


def test_a_model_of_another_packages_source_is_served_and_listed(client: httpx.Client) -> None:
    listed = [each["id"] for each in client.get("/v1/models").json()["data"]]
    assert listed == ["tar:tiny"]


@pytest.mark.parametrize("name", ["tar:absent", "tar:../tiny", "tar:/tiny", "fails:x"])
def test_a_request_gets_no_model_outside_of_the_source(client: httpx.Client, name: str) -> None:
    answer = client.post("/v1/chat/completions", json={"model": name, "messages": [{"role": "user", "content": "x"}]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_calls_are_written_and_read_in_another_packages_format(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL], "tool_choice": "required"}
    [choice] = client.post("/v1/chat/completions", json=body | {"parallel_tool_calls": False}).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("greet", {"word": "hi"})
    shown = client.post("/tokenize", json={"prompt": "<run>"}).json()
    assert shown["count"] == 1  # the format's tag is a token of the model


def test_another_packages_api_answers_at_once_and_as_a_stream(client: httpx.Client) -> None:
    body = {"text": "once upon", "max_tokens": 5}
    whole = client.post("/example/generate", json=body | {"seed": 1})
    assert (whole.status_code, whole.json()["tokens"]) == (200, 5)
    assert whole.headers["x-example-id"] == whole.headers["x-request-id"]
    streamed = client.post("/example/generate", json=body | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *texts, end = (json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line)
    assert end == {"tokens": 5}
    assert all(text.keys() == {"text"} for text in texts)


ENDPOINTS = ("/example/generate", "/example/size")


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Host": "rebound.example.com"}, 403),
        ({"Origin": "https://foreign.example.com"}, 403),
    ],
    ids=["no key", "a wrong key", "a foreign name", "a foreign page"],
)
def test_the_checks_of_the_server_hold_for_another_packages_api(
    client: httpx.Client, path: str, headers: dict[str, str], status: int
) -> None:
    answer = client.post(path, json={"text": "x"}, headers=headers)
    assert (answer.status_code, answer.json().keys()) == (status, {"problem", "field"})


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit_is_refused_however_it_is_read(client: httpx.Client, path: str, announced: bool) -> None:
    text = b'{"text": "%s"}' % (b"x" * 200_000)
    answer = client.post(path, content=text if announced else iter([text[:150_000], text[150_000:]]))
    assert answer.status_code == 413
    assert "the request body is larger than 100000 bytes" in answer.json()["problem"]
    assert client.post("/example/size", content=text[:100_000]).json() == {"bytes": 100_000}


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/example/generate", {"text": 5}, 400, "text"),
        ("/example/generate", {"text": "x", "model": "absent"}, 404, "model"),
        ("/example/nothing", {}, 404, None),
    ],
)
def test_errors_have_the_format_of_another_packages_api(
    client: httpx.Client, path: str, body: dict[str, Any], status: int, field: str | None
) -> None:
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["field"]) == (status, field)
    assert "problem" in answer.json()


def test_another_packages_endpoints_are_described(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {path for path in paths if path.startswith(("/example", "/clash"))} == set(ENDPOINTS)


def test_what_cannot_be_used_is_left_out_with_a_warning_and_the_server_goes_on(
    server: Command, client: httpx.Client, packages: Path, models: Path
) -> None:
    assert client.get("/v1/models").status_code == 200  # asks each source
    formats = "from mlxpaged.formats import FORMATS; assert 'run_tags' in list(FORMATS)"  # searched to the end
    env = environment(variables(packages, models))
    asked = subprocess.run([sys.executable, "-c", formats], env=env, capture_output=True, text=True, check=True)
    logged = [line for line in server.stderr.splitlines() if " is left out: " in line]
    assert all(" WARNING mlxpaged.addons: " in line for line in logged)
    found = re.findall("add-on mlxpaged-zclash 2.0: (.* is left out: .*)", f"{server.stderr}{asked.stderr}")
    assert sorted(set(found)) == sorted(LEFT_OUT)


def test_commands_of_other_packages_run_and_can_be_turned_off(packages: Path, models: Path) -> None:
    done = mlxpaged(packages, models, "hello", "world")
    assert (done.returncode, done.stdout) == (0, "hello world\n")
    for args, more in ((("hello", "--no-addons"), {}), (("hello", "x"), {addons.OFF: "1"})):
        refused = mlxpaged(packages, models, *args, **more)
        assert refused.returncode == 2
        assert "there is no command 'hello'" in refused.stderr
    broken = mlxpaged(packages, models, "broken")
    assert broken.returncode == 2
    assert (
        "'broken' of its commands is left out: ModuleNotFoundError: No module named 'no_such_module'" in broken.stderr
    )
    assert "there is no command 'broken'" in broken.stderr


def test_the_version_and_the_doctor_list_the_add_ons(packages: Path, models: Path) -> None:
    lines = mlxpaged(packages, models, "version").stdout.splitlines()
    assert lines[1] == "add-on mlxpaged-example 1.0: sources tar; formats run_tags; apis example; commands hello"
    assert lines[2].startswith("add-on mlxpaged-zclash 2.0: ")
    code = "from mlxpaged.cli.doctor.machine import machine; print(dict(machine())['add-on mlxpaged-example 1.0'])"
    env = environment(variables(packages, models))
    doctor = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert doctor.stdout == "sources tar; formats run_tags; apis example; commands hello\n"
    assert len(mlxpaged(packages, models, "version", "--no-addons").stdout.splitlines()) == 1


def test_the_help_looks_for_no_add_ons() -> None:
    """To read the metadata of all packages takes longer than the help."""
    code = "import sys; from mlxpaged.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "sys.exit('importlib.metadata' in sys.modules)"
    for command in ((), ("serve",), ("pull",)):
        done = subprocess.run([sys.executable, "-c", code, *command, "--help"], capture_output=True, check=False)
        assert done.returncode == 0, command


@pytest.mark.parametrize("kind", addons.KINDS.values())
def test_everything_in_the_table_is_there(kind: str) -> None:
    kinds: dict[str, type] = {"sources": Source, "formats": Format, "apis": Api}
    table: addons.Table[Any] = addons.Table(kind, kinds.get(kind, object))
    assert list(table) == [name for addon in addons.ADDONS for name in getattr(addon, kind)]
    assert all(isinstance(each, kinds[kind]) if kind in kinds else callable(each) for each in table.values())


def test_tables_without_add_ons_have_what_is_ours() -> None:
    assert os.environ.get(addons.OFF) is None
    assert addons.from_outside() == ()
    assert list(SOURCES) == ["ollama", "lmstudio"]
    assert "absent" not in SOURCES
    assert FORMATS.keys() == addons.ours("formats").keys()
