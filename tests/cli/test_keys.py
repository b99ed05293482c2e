"""`mlxpaged keys`, and what `serve` does with keys: refused addresses, broken files, and logs without secrets."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shlex
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.helpers import DEADLINE, Result, environment, serving
from tests.support import wait_until


@pytest.fixture
def keys(run: Callable[..., Result]) -> Callable[..., Result]:
    return lambda path, *args: run("keys", *args, *(["--api-keys", str(path)] if args else []))


@pytest.fixture
def make(keys: Callable[..., Result]) -> Callable[..., str]:
    def make(path: Path, *args: str) -> str:
        result = keys(path, "add", *args)
        assert result.status == 0, result.stderr
        assert re.fullmatch(r"sk-mlxpaged-[0-9a-f]{64}\n", result.stdout)
        assert f"mlxpaged serve --api-keys {path}" in result.stderr
        return result.stdout.strip()

    return make


def test_the_command_starts_without_the_engine() -> None:
    engine = ("mlx", "transformers", "starlette")
    code = "import sys, mlxpaged.cli.keys.command; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "mlxpaged.cli.keys.command" in modules
    assert not set(engine) & set(modules)


def test_a_command_that_is_named_can_be_pasted_into_a_shell(tmp_path: Path, run: Callable[..., Result]) -> None:
    path = tmp_path / "my keys.json"
    words = shlex.split(run("keys", "add", "bob", "--api-keys", str(path)).stderr)
    assert words[-4:] == ["mlxpaged", "serve", "--api-keys", str(path)]
    words = shlex.split(run("pull", str(path)).stdout)
    assert words[-3:] == ["mlxpaged", "serve", str(path)]


def test_a_key_is_made_used_listed_and_removed(
    tmp_path: Path, keys: Callable[..., Result], make: Callable[..., str]
) -> None:
    path = tmp_path / "new" / "keys.json"
    key = make(path, "anna", "--tier", "HIGH", "--rate-limit", "60", "--token-limit", "5000", "--admin")
    other = make(path, "ben", "--tier", "low", "--max-priority", "normal", "--models", "a, b", "--metrics")
    assert key != other
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key.removeprefix("sk-mlxpaged-") not in path.read_text()
    listed = keys(path, "list")
    today = json.loads(path.read_text())["keys"][0]["created"]
    header, *rows = [re.split("  +", line) for line in listed.stdout.splitlines()]
    settings = ["NAME", "TIER", "MAX", "REQUESTS/MIN", "TOKENS/MIN", "ADMIN", "METRICS", "CREATED"]
    assert header == [*settings, "LAST USED", "TOKENS THIS MONTH", "TOKENS", "MODELS"]
    assert rows == [
        ["anna", "high", "high", "60", "5000", "yes", "yes", today, "-", "0", "0", "all"],
        ["ben", "low", "normal", "-", "-", "no", "yes", today, "-", "0", "0", "a,b"],
    ]
    with serving(tmp_path / "run", "none", "--api-keys", str(path), "--log-level", "debug") as command:
        with httpx.Client(base_url=command.url, timeout=DEADLINE, trust_env=False) as client:
            for secret in (key, "sk-ant-another-service-0123456789"):
                given = {"Authorization": f"Bearer {secret}", "X-Request-Id": "mine"}
                status = 200 if secret == key else 401
                assert client.get(f"/v1/models?key={secret}", headers=given).status_code == status
                answer = client.delete(f"/v1/requests/{secret}", headers=given | {"x-api-key": key})
                assert answer.status_code == 404
                assert secret not in answer.text
            gone = keys(path, "remove", "anna")
            assert (gone.status, gone.stderr) == (0, "anna is removed\n")

            def status_of(secret: str) -> int:
                return client.get("/v1/models", headers={"x-api-key": secret}).status_code

            wait_until(lambda: status_of(key) == 401)
            assert status_of(other) == 200
        command.process.send_signal(signal.SIGINT)
        assert command.wait_end() == 0
        assert "mlxpaged.api.request_id: mine GET /v1/models: 200" in command.stderr
        assert "mine DELETE /v1/requests/sk-***: 404" in command.stderr
        everything = command.stderr + command.stdout
        assert not [secret for secret in (key, other, "sk-ant-another") if secret in everything]
        assert "anna" not in keys(path, "list").stdout


def test_usage_is_kept_by_key_and_across_restarts(
    tmp_path: Path, keys: Callable[..., Result], make: Callable[..., str]
) -> None:
    path = tmp_path / "keys.json"
    made = {name: make(path, name) for name in ("anna", "ben", "cid")}
    told = dict.fromkeys(made, 0)
    for names in (("anna", "ben"), ("anna",)):
        with serving(tmp_path / "run", "--api-keys", str(path)) as command:
            for name in names:
                body = {"messages": [{"role": "user", "content": "What is 17 + 25?"}]}
                headers = {"Authorization": f"Bearer {made[name]}"}
                options: Any = {"headers": headers, "timeout": DEADLINE, "trust_env": False}
                answer = httpx.post(f"{command.url}/v1/chat/completions", json=body, **options)
                told[name] += answer.json()["usage"]["total_tokens"]
            command.process.send_signal(signal.SIGTERM)
            assert command.wait_end() == 0
    assert told["anna"] > told["ben"] > told["cid"] == 0
    file = path.with_name("keys.usage.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not [key for key in made.values() if key.removeprefix("sk-mlxpaged-") in file.read_text()]
    listed = json.loads(keys(path, "list", "--json").stdout)
    assert {each["name"]: each["usage"]["requests"] for each in listed} == {"anna": 2, "ben": 1, "cid": 0}
    tokens = {each["name"]: each["usage"]["prompt_tokens"] + each["usage"]["output_tokens"] for each in listed}
    assert tokens == told
    assert not [each for each in listed if {"salt", "hash"} & each.keys()]
    rows = [re.split("  +", line)[-4:] for line in keys(path, "list").stdout.splitlines()[1:]]
    assert [row[2] for row in rows] == [str(told[name]) for name in made]
    assert rows[0][0].endswith(" ago")
    assert rows[2][0] == "-"
    assert keys(path, "remove", "ben").status == 0
    assert list(json.loads(file.read_text())) == ["anna"]
    file.write_text("{")
    listing = keys(path, "list")
    assert (listing.status, listing.stderr) == (0, f"mlxpaged: the usage of the keys is not known: {file} is damaged\n")


def test_mistakes_are_said_in_a_sentence_and_change_nothing(
    tmp_path: Path, keys: Callable[..., Result], make: Callable[..., str]
) -> None:
    path = tmp_path / "keys.json"
    make(path, "anna")
    before = path.read_bytes()
    for args, reason in (
        (("add", "anna"), "there is already a key named anna"),
        (("remove", "ben"), "there is no key named ben"),
        (("add", "c", "--tier", "high", "--max-priority", "low"), "max_priority low must not be lower than tier high"),
    ):
        result = keys(path, *args)
        assert (result.status, result.stdout) == (1, "")
        assert result.stderr == f"mlxpaged: {path}: {reason}\n"
    for args in (("add", "a b"), ("add", "c", "--tier", "best"), ("add", "c", "--rate-limit", "0"), ("add",), ()):
        assert keys(path, *args).status == 2
    assert path.read_bytes() == before
    path.write_text("{")
    for args in (("add", "ben"), ("list",), ("remove", "anna")):
        result = keys(path, *args)
        assert result.status == 1
        assert result.stderr.startswith(f"mlxpaged: {path}: Invalid JSON")
    missing = keys(tmp_path / "nothing", "list")
    assert (missing.status, missing.stderr) == (1, f"mlxpaged: {tmp_path / 'nothing'}: No such file or directory\n")


def test_keys_added_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    command = [sys.executable, "-m", "mlxpaged", "keys", "add", "--api-keys", str(path)]
    running = [subprocess.Popen([*command, f"k{n}"], stdout=-1, stderr=-1, env=environment({})) for n in range(3)]
    for process in running:
        process.communicate(timeout=DEADLINE)
        assert process.returncode == 0
    assert {entry["name"] for entry in json.loads(path.read_text())["keys"]} == {f"k{n}" for n in range(3)}


def test_other_machines_are_not_let_in_without_keys(run: Callable[..., Result]) -> None:
    result = run("serve", "none", "--host", "0.0.0.0", "--port", "0")
    assert result.status == 2
    assert "--host 0.0.0.0 can be reached from other machines" in result.stderr
    assert "--api-keys" in result.stderr
    assert "--insecure" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("host", ["::", "", "255.255.255.255"])
def test_no_spelling_of_all_addresses_needs_no_key(run: Callable[..., Result], host: str) -> None:
    result = run("serve", "none", "--port", "0", "--host", host)
    assert result.status in (1, 2)  # 1: no address of this machine
    assert "mlxpaged" in result.stderr
    assert result.stdout == ""


def test_other_machines_are_let_in_with_keys_or_expressly(tmp_path: Path, make: Callable[..., str]) -> None:
    path = tmp_path / "keys.json"
    key = make(path, "anna")
    for flags, env, status in (
        (("--insecure",), {}, 200),
        (("--api-keys", str(path)), {"MLXPAGED_INSECURE": "1"}, 401),
    ):
        with serving(tmp_path / "run", "none", "--host", "0.0.0.0", *flags, env=env) as command:
            url = command.url.replace("0.0.0.0", "127.0.0.1")
            assert httpx.get(f"{url}/v1/models", trust_env=False, timeout=DEADLINE).status_code == status
            answer = httpx.get(f"{url}/v1/models", headers={"x-api-key": key}, trust_env=False, timeout=DEADLINE)
            assert answer.status_code == 200


@pytest.mark.more
def test_more_connections_are_taken_than_a_shell_on_a_mac_allows_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        command = stack.enter_context(serving(tmp_path, "none", fork=False))
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        host, port = command.url.removeprefix("http://").split(":")
        for _ in range(300):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=DEADLINE))
        assert httpx.get(f"{command.url}/v1/models", trust_env=False, timeout=DEADLINE).status_code == 200
        assert "out of system resource" not in command.stderr


@pytest.mark.parametrize("content", [None, "", '{"keys": [{"name": "a", "key": "sk-mlxpaged-0123456789"}]}'])
def test_a_key_file_that_cannot_be_used_is_an_error_at_start(
    tmp_path: Path, run: Callable[..., Result], content: str | None
) -> None:
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_text(content)
    result = run("serve", "none", "--port", "0", "--api-keys", str(path))
    assert (result.status, result.stdout) == (1, "")
    assert result.stderr.startswith(f"mlxpaged: {path}: ")
    assert "0123456789" not in result.stderr


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--allowed-host", "http://mac.local"),
        ("--allowed-host", "mac.local:8080"),
        ("--allowed-host", ""),
        ("--cors-origin", "localhost:3000"),
        ("--cors-origin", "http://localhost:3000/"),
        ("--max-connections", "0"),
        ("--max-body-size", "0"),
    ],
)
def test_a_limit_or_a_name_that_means_nothing_is_refused(run: Callable[..., Result], flag: str, value: str) -> None:
    result = run("serve", "none", "--port", "0", flag, value)
    assert (result.status, result.stdout) == (2, "")
    assert flag in result.stderr


def test_the_banners_curl_line_has_a_place_for_the_key(tmp_path: Path, make: Callable[..., str]) -> None:
    path = tmp_path / "keys.json"
    key = make(path, "anna")
    with serving(tmp_path / "run", "--api-keys", str(path)) as command:
        wait_until(lambda: "}'\n" in command.stdout, DEADLINE)  # a reader may see the first lines alone
        curl = command.stdout[command.stdout.index("curl ") :].replace("curl ", "curl -s --noproxy '*' ", 1)
        script = ["sh", "-c", f"KEY={key}; {curl}"]
        answer = subprocess.run(script, capture_output=True, timeout=DEADLINE, check=True)
        assert json.loads(answer.stdout)["choices"][0]["message"]["role"] == "assistant"
