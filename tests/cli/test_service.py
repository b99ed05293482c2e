"""`mlxpaged service`: the files for launchd and systemd, and how their programs are called."""

from __future__ import annotations

import configparser
import os
import plistlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpaged.cli.running_servers import registered
from mlxpaged.cli.service.command import KEPT
from mlxpaged.cli.service.manager import SERVICE_VARIABLE, Job, ServiceError
from mlxpaged.cli.service.systemd import Systemd
from mlxpaged.interpreter import PYTHON
from tests.cli.helpers import Result

ODD = ("a b", "$HOME", "100%", 'a"b', "back\\slash", "it's", "new\nline", "")
PROGRAM = """#!/bin/sh
echo "$@" >> "$CALLS"
answer="$ANSWERS/$(basename "$0")"
case "$1" in
print)
    [ -e "$answer" ] || exit 113  # launchd does not know the service
    cat "$answer"
    ! [ -e "$ANSWERS/ending" ] || rm "$ANSWERS/ending" "$answer"  # it has ended after this
    exit 0;;
bootout)
    touch "$ANSWERS/ending"
    exit "${STATUS:-36}";;  # EINPROGRESS of macOS
esac
cat "$answer" 2>/dev/null
exit "${STATUS:-0}"
"""


@pytest.fixture
def calls(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Stand-ins for the programs of the service managers; how they were called since the last look."""
    for name in KEPT:
        monkeypatch.delenv(name, raising=False)
    (programs := tmp_path / "programs").mkdir()
    for name in ("launchctl", "systemctl"):
        (program := programs / name).write_text(PROGRAM)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("ANSWERS", str(tmp_path))
    (path := tmp_path / "calls").touch()
    monkeypatch.setenv("CALLS", str(path))

    def take() -> list[str]:
        lines = path.read_text().splitlines()
        path.write_text("")
        return lines

    return take


@pytest.fixture
def on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")


@pytest.fixture
def on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")


@pytest.mark.usefixtures("on_a_mac")
def test_launchd_is_told_what_to_run(
    calls: Callable[[], list[str]], home: Path, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"HF_HOME": "/models", "OLLAMA_MODELS": "/ollama", "XDG_CACHE_HOME": "/cache"}
    for name, value in (places | {"HF_TOKEN": "hf_secret"}).items():
        monkeypatch.setenv(name, value)
    result = run("service", "install", "--", "demo", "--port", "8090")
    path = home / "Library" / "LaunchAgents" / "mlxpaged.server.plist"
    assert (result.status, result.stdout) == (0, "")
    assert str(path) in result.stderr
    found = plistlib.loads(path.read_bytes())
    assert found["ProgramArguments"] == [*PYTHON, "-m", "mlxpaged", "serve", "demo", "--port", "8090"]
    assert found["WorkingDirectory"] == os.getcwd()
    assert found["EnvironmentVariables"] == places | {SERVICE_VARIABLE: "1"}
    assert found["ExitTimeOut"] == 60, "running requests have 30 s to finish"
    assert found["KeepAlive"] == {"SuccessfulExit": False}, "`mlxpaged stop` is not undone"
    assert Path(found["StandardErrorPath"]).parent == home / "Library" / "Logs" / "mlxpaged"
    assert Path(found["StandardErrorPath"]).parent.is_dir()
    domain = f"gui/{os.getuid()}"
    assert calls() == [f"print {domain}/mlxpaged.server", f"bootstrap {domain} {path}"]


@pytest.mark.usefixtures("on_a_mac")
def test_the_server_of_the_launch_agent_ends_before_another_one_is_started(
    calls: Callable[[], list[str]], tmp_path: Path, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "launchctl").write_text("mlxpaged.server = {\n\tstate = running\n}\n")
    assert run("service", "install").status == 0
    verbs = [line.partition(" ")[0] for line in calls()]
    assert verbs == ["print", "bootout", "print", "bootout", "print", "bootstrap"]
    (tmp_path / "launchctl").write_text("mlxpaged.server = {\n\tstate = running\n}\n")
    monkeypatch.setenv("STATUS", "1")
    said = f"mlxpaged: `launchctl bootout gui/{os.getuid()}/mlxpaged.server` has failed: status 1\n"
    assert run("service", "remove") == Result(1, "", said)


@pytest.mark.usefixtures("on_a_mac")
def test_the_launch_agent_is_shown_and_removed(
    calls: Callable[[], list[str]], tmp_path: Path, home: Path, run: Callable[..., Result]
) -> None:
    run("service", "install")
    (tmp_path / "launchctl").write_text(f"mlxpaged.server = {{\n\tstate = running\n\tpid = {os.getpid()}\n}}\n")
    with registered("http://127.0.0.1:8080", shared=True):
        shown = run("service", "status")
    assert shown.status == 0
    assert shown.stdout.startswith(f"running: process {os.getpid()}, http://127.0.0.1:8080\nfile: {home}")
    (tmp_path / "launchctl").write_text("mlxpaged.server = {\n\tstate = not running\n}\n")
    shown = run("service", "status")
    assert (shown.status, shown.stdout.splitlines()[0]) == (1, "not running")
    calls()
    assert run("service", "remove").status == 0
    assert f"bootout gui/{os.getuid()}/mlxpaged.server" in calls()
    assert not (home / "Library" / "LaunchAgents" / "mlxpaged.server.plist").exists()
    assert run("service", "status") == Result(1, "not installed\n", "")
    assert run("service", "remove") == Result(1, "", "mlxpaged: the service is not installed\n")


@pytest.mark.usefixtures("on_linux")
def test_systemd_is_told_what_to_run_and_to_forget_it(
    calls: Callable[[], list[str]], tmp_path: Path, home: Path, run: Callable[..., Result]
) -> None:
    path = home / ".config" / "systemd" / "user" / "mlxpaged.service"
    assert run("service", "install", "--", "--port", "8090", "--drain-timeout", "99.5").status == 0
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(path)
    words = [*PYTHON, "-m", "mlxpaged", "serve", "--port", "8090", "--drain-timeout", "99.5"]
    assert unit["Service"]["ExecStart"] == " ".join(f'"{word}"' for word in words)
    assert unit["Service"]["TimeoutStopSec"] == "130"
    assert unit["Service"]["Restart"] == "on-failure"
    assert calls() == [
        f"--user {words}" for words in ("daemon-reload", "enable mlxpaged.service", "restart mlxpaged.service")
    ]
    (tmp_path / "systemctl").write_text(f"{os.getpid()}\n")
    assert run("service", "status").stdout.startswith(f"running: process {os.getpid()}\n")
    (tmp_path / "systemctl").write_text("0\n")
    assert run("service", "status").status == 1
    calls()
    assert run("service", "remove").status == 0
    assert calls() == ["--user disable --now mlxpaged.service"]
    assert not path.exists()


@pytest.mark.usefixtures("on_linux")
def test_a_manager_that_refuses_is_quoted(
    calls: Callable[[], list[str]], tmp_path: Path, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATUS", "1")
    (tmp_path / "systemctl").write_text("No medium found\n")
    said = "mlxpaged: `systemctl --user daemon-reload` has failed: No medium found\n"
    assert run("service", "install") == Result(1, "", said)
    monkeypatch.setenv("PATH", "/nowhere")
    assert run("service", "remove") == Result(1, "", "mlxpaged: systemctl cannot be run: No such file or directory\n")
    assert run("service", "status").stdout == "not installed\n", "the file is gone all the same"


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_dry_run_prints_the_file_and_changes_nothing(
    calls: Callable[[], list[str]],
    home: Path,
    run: Callable[..., Result],
    platform: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    result = run("service", "install", "--dry-run", "--", "--served-model-name", "a b")
    assert result.status == 0
    assert "a b" in result.stdout
    assert str(home) in result.stderr
    assert calls() == []
    assert not home.exists()


@pytest.mark.usefixtures("on_linux")
def test_the_configuration_file_of_the_command_is_that_of_the_service(
    calls: Callable[[], list[str]], tmp_path: Path, run: Callable[..., Result]
) -> None:
    (file := tmp_path / "mine.toml").write_text("port = 8090\n")
    shown = run("--config", str(file), "service", "install", "--dry-run")
    assert f'"-m" "mlxpaged" "--config" "{file}" "serve"\n' in shown.stdout
    file.write_text("port = 'many'\n")
    assert run("--config", str(file), "service", "install", "--dry-run").status == 2
    assert calls() == []


def test_flags_that_serve_refuses_are_refused_before_anything_is_installed(
    calls: Callable[[], list[str]], home: Path, run: Callable[..., Result]
) -> None:
    assert run("service", "install", "--", "--port", "many").status == 2
    assert run("service", "install", "--", "--prot", "8080").status == 2
    assert not home.exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    job = Job((sys.executable, "-m", "mlxpaged", *ODD), tmp_path, {"HF_HOME": '/a b%$"\\c'}, 60)
    path = tmp_path / "odd.service"
    path.write_bytes(Systemd().content(job))
    done = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["a\nExecStartPre=/bin/evil", "a\rb", "a\x7f", "ends\\"])
def test_a_directory_cannot_add_a_directive_to_a_unit(name: str) -> None:
    with pytest.raises(ServiceError, match="cannot be the working directory of a service"):
        Systemd().content(Job(("mlxpaged", "serve"), Path(f"/{name}"), {}, 60))


def test_a_directory_with_specifiers_and_quotes_is_taken_as_it_is() -> None:
    """systemd takes quotes in this directive as letters, and %h as the home."""
    unit = Systemd().content(Job(("mlxpaged", "serve"), Path("/a %h\"b'"), {}, 60)).decode()
    assert "\nWorkingDirectory=/a %%h\"b'\n" in unit


def test_a_word_cannot_add_a_directive_to_a_unit() -> None:
    unit = Systemd().content(Job(("mlxpaged", "a\nb\x1b"), Path("/a"), {"NAME": "c\nd"}, 60)).decode()
    assert r'ExecStart="mlxpaged" "a\x0ab\x1b"' in unit
    assert r'Environment="NAME=c\x0ad"' in unit
