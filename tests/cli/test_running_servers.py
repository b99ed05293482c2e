"""Finding a server that runs: its file, the default port, `--url`; `ps` and `stop`."""

from __future__ import annotations

import argparse
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpaged.api.config import HttpConfig
from mlxpaged.cli import connection, ps, stop
from mlxpaged.cli.client import Client
from mlxpaged.cli.connection import server_url
from mlxpaged.cli.running_servers import directory, registered, running_servers, server_of
from mlxpaged.cli.serve import local_url
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import bearer, raw, write_keys
from tests.cli.helpers import Result, mlxpaged, serving
from tests.support import RunningServer, running_server, wait_until

pytestmark = pytest.mark.usefixtures("home")


def test_a_server_is_found_as_long_as_its_context_lasts() -> None:
    with registered("http://127.0.0.1:5", shared=True):
        [server] = running_servers()
        assert (server.pid, server.url, server.shared) == (os.getpid(), "http://127.0.0.1:5", True)
        assert server_of(os.getpid()) == server
        (file,) = directory().iterdir()
        assert [stat.S_IMODE(path.stat().st_mode) for path in (directory(), file)] == [0o700, 0o600]
    assert running_servers() == []
    assert list(directory().iterdir()) == []


def test_the_file_of_a_killed_server_is_not_believed_even_if_another_process_has_its_id() -> None:
    code = (
        "import os; from mlxpaged.cli.running_servers import registered as r\nwith r('', True): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], check=False)
    [left] = directory().glob("*.json")
    content = json.loads(left.read_text())
    own = directory() / f"{os.getpid()}.json"
    own.write_text(json.dumps(content | {"pid": os.getpid()}))
    assert running_servers() == []
    assert not left.exists()
    assert not own.exists()


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"pid": 1, "more": 2}'])
def test_a_broken_file_is_no_server(content: str) -> None:
    with registered("http://127.0.0.1:5", shared=True):
        (directory() / f"{os.getpid()}.json").write_text(content)
        assert running_servers() == []


def test_a_home_that_cannot_be_written_does_not_stop_the_server(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    home.touch()
    with registered("http://127.0.0.1:5", shared=True):
        assert "other commands cannot find this server" in caplog.text


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8080", "http://localhost:8080"),
        ("http://a/v1/", "http://a"),
        ("https://a/llm/v1", "https://a/llm"),
        (" [::1]:9 ", "http://[::1]:9"),
    ],
)
def test_addresses_are_read_as_people_write_them(text: str, url: str) -> None:
    assert server_url(text) == url


@pytest.mark.parametrize(
    "text", ["", "http://", "a:b", "http://[::1", "http://é", "a:99999", "file:///a", "http://a/?key=1"]
)
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        server_url(text)


def test_the_address_for_clients_on_this_machine() -> None:
    assert local_url(("0.0.0.0", 80)) == "http://127.0.0.1:80"
    assert local_url(("::", 80, 0, 0)) == "http://[::1]:80"
    assert local_url(("127.0.0.2", 80)) == "http://127.0.0.2:80"


def test_the_server_started_last_is_used_and_else_the_default_port(
    demo_server: RunningServer, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("ps").stderr.startswith("mlxpaged: no server runs: start one with `mlxpaged serve`")
    monkeypatch.setattr(connection, "DEFAULT_URL", demo_server.url)
    assert run("ps").stdout.startswith(f"{demo_server.url}\n")
    monkeypatch.setattr(connection, "DEFAULT_URL", "http://127.0.0.1:1")
    with registered(demo_server.url, shared=False):
        assert run("ps").status == 1, "the server of another command is not for all"
    with registered(demo_server.url, shared=True):
        assert run("ps").stdout.startswith(f"{demo_server.url}\n")
        monkeypatch.setenv("MLXPAGED_URL", "http://127.0.0.1:1")
        assert run("ps").stderr == "mlxpaged: no server runs at http://127.0.0.1:1\n", "what is named is not replaced"


def test_ps_shows_models_requests_and_json(demo_server: RunningServer, run: Callable[..., Result]) -> None:
    lines = run("ps", "--url", demo_server.url).stdout.splitlines()
    assert lines[1].split() == ["NAME", "STATE", "KIND", "SOURCE", "MEMORY", "RUNNING", "WAITING", "LAST", "USED"]
    assert lines[2].split()[:3] == ["demo", "loaded", "text"]
    assert lines[2].split()[3] == "mlx-lm"
    found = json.loads(run("ps", "--url", demo_server.url, "--json").stdout)
    assert found["url"] == demo_server.url
    assert [(each["id"], each["running"], each["waiting"]) for each in found["models"]] == [("demo", 0, 0)]


def test_ps_shows_bytes_written_to_a_disk_and_what_each_key_has_used_to_an_admin_key(
    tmp_path: Path, run: Callable[..., Result]
) -> None:
    keys = write_keys(tmp_path / "keys.json", anna={}, root={"admin": True})
    config = EngineConfig(kv_cache_bytes=16_000_000, prefix_cache_dir=tmp_path / "prefixes")
    with running_server(config, http=HttpConfig(api_keys=tmp_path / "keys.json"), data_dir=tmp_path) as server:
        with raw(server) as client:
            body = {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
            assert client.post("/v1/completions", json=body, headers=bearer(keys["anna"])).status_code == 200
        asked = ("ps", "--url", server.url, "--api-key")
        lines = run(*asked, keys["root"]).stdout.splitlines()
        assert lines[3] == "writes: 0.0 MB today, 0.0 MB since start"
        assert lines[4].split() == ["KEY", "REQUESTS", "PROMPT", "CACHED", "OUTPUT", "THIS", "MONTH"]
        assert lines[5].split() == ["anna", "1", "3", "0", "2", "5"]
        found = json.loads(run(*asked, keys["root"], "--json").stdout)
        assert (found["written_today_bytes"], found["written_bytes"]) == (0, 0)
        assert found["keys"][0]["prompt_tokens"] == 3
        assert len(run(*asked, keys["anna"]).stdout.splitlines()) == 3, "another key sees the models"
        assert json.loads(run(*asked, keys["anna"], "--json").stdout)["keys"] is None


def test_ps_counts_a_directory_that_models_share_once_and_every_swap_file() -> None:
    tier = {"directory": "/disk", "written_today_bytes": 1, "written_bytes": 10}
    swap = {"written_today_bytes": 100, "written_bytes": 1000}
    empty = {"written_today_bytes": 0, "written_bytes": 0}
    models = [{"prefix_cache_disk": tier, "swap": swap}, {"prefix_cache_disk": tier, "swap": empty}, {"swap": swap}, {}]
    assert ps.used({"models": models}) == {"written_today_bytes": 201, "written_bytes": 2010, "keys": None}
    assert list(ps.writes({"models": [{}]})) == []


def test_ps_shows_several_models_and_leaves_out_those_that_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"kind": "text", "source": "mlx-vlm", "memory_bytes": None, "running": 0, "waiting": 0, "last_used": None}
    entries = [
        {"id": "a", "state": "loaded", **facts, "memory_bytes": 5_200_000_000, "running": 3, "waiting": 1, "more": 1},
        {"id": "e", "state": "loading", **facts, "progress": "checking layers 3 of 32"},
        {"id": "b", "state": "loading", **facts, "kind": "embedding", "source": None, "last_used": time.time() - 125},
        {"id": "c", "state": "available", "kind": "text"},
        {"id": "d", "state": "failed", **facts, "error": "it is broken"},
    ]
    monkeypatch.setattr(Client, "get", lambda self, path: {"/v1/models": {"data": entries}}[path])
    models = ps.loaded_models(Client("http://x"))
    assert [ps.row(model) for model in models] == [
        ("a", "loaded", "text", "mlx-vlm", "5.2 GB", "3", "1", "-"),
        ("e", "checking layers 3 of 32", "text", "mlx-vlm", "-", "0", "0", "-"),
        ("b", "loading", "embedding", "-", "-", "0", "0", "2 min ago"),
    ]


def test_stop_ends_a_server_and_waits_for_its_end(tmp_path: Path, home: Path, run: Callable[..., Result]) -> None:
    with serving(tmp_path / "run", "none", env={"HOME": str(home)}) as command:
        result = run("stop", "--url", command.url.replace("127.0.0.1", "localhost"))
        assert (result.status, result.stderr) == (0, f"the server at {command.url} has ended\n")
        assert command.wait_end() == 0
        assert "bye" in command.stderr
    assert run("stop").status == 1


def test_stop_does_not_touch_what_it_cannot_know(demo_server: RunningServer, run: Callable[..., Result]) -> None:
    result = run("stop", "--url", demo_server.url)
    said = f"mlxpaged: the server at {demo_server.url} was not started by this user on this machine\n"
    assert result == Result(1, "", said)


def test_stop_with_a_model_unloads_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    paths: list[str] = []
    monkeypatch.setattr(Client, "post", lambda self, path: paths.append(path))
    stop.unload(Client("http://x"), "owner/a model")
    assert paths == ["/v1/models/owner%2Fa%20model/unload"]
    assert capsys.readouterr().err == "owner/a model is unloaded\n"


def test_a_server_ends_with_its_standard_input(tmp_path: Path, home: Path) -> None:
    """It is `/dev/null` here."""
    with mlxpaged(tmp_path, "serve", "none", "--port", "0", "--until-eof", env={"HOME": str(home)}) as command:
        assert command.wait_end() in (0, -15)
    wait_until(lambda: not running_servers())
