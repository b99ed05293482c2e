"""The configuration file, `mlxpaged config`, and the one line that a mistake gets."""

from __future__ import annotations

import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from mlxpaged.cli import COMMANDS, config_file, guesses, make_parser
from mlxpaged.cli.config_file import ConfigFile
from tests.cli.helpers import Result

Run = Callable[..., Result]
Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Write:
    """Writes the user's configuration file. `run` comes first: it removes variables."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    path = tmp_path / "mlxpaged" / "config.toml"

    def write(text: str) -> Path:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


def parsed(config: ConfigFile, *words: str) -> dict[str, object]:
    return vars(make_parser(COMMANDS, config).parse_args(words))


def test_every_kind_of_flag_takes_its_value_from_the_file(write: Write) -> None:
    write(
        'model = "a/b"\nmax-num-seqs = 7\nrequest-timeout = 2.5\nkv-cache-memory = "1GB"\nstrict = true\n'
        'allowed-host = ["One", "two"]\ncors-origin = "*"\ninsecure = false\nconcurrency = "2,4"\n'
    )
    args = parsed(ConfigFile.read(), "serve")
    assert (args["models"], args["max_num_seqs"], args["request_timeout"]) == (("a/b",), 7, 2.5)
    assert (args["kv_cache_bytes"], args["strict"], args["insecure"]) == (10**9, True, False)
    assert (args["allowed_hosts"], args["cors_origins"]) == (("one", "two"), ("*",))
    args = parsed(ConfigFile.read(), "bench")
    assert (args["model"], args["max_num_seqs"], args["concurrency"]) == ("a/b", 7, (2, 4))


@pytest.mark.parametrize("command", ["bench", "doctor"])
def test_a_command_of_one_model_takes_the_first_of_several(
    write: Write, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    write('model = ["quick=a/b", "c/d"]\n')
    assert parsed(ConfigFile.read(), command)["model"] == "a/b"
    assert parsed(ConfigFile.read(), command, "e/f")["model"] == "e/f"
    monkeypatch.setenv("MLXPAGED_MODEL", "g/h,quick=a/b")
    assert parsed(ConfigFile.read(), command)["model"] == "g/h"


def test_the_file_of_the_figures_is_no_switch_of_the_doctor(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(f"json = '{tmp_path}/figures.json'\n")
    assert parsed(ConfigFile.read(), "bench")["json"] == f"{tmp_path}/figures.json"
    assert parsed(ConfigFile.read(), "doctor")["json"] is False
    monkeypatch.setenv("MLXPAGED_JSON", f"{tmp_path}/others.json")
    assert parsed(ConfigFile.read(), "doctor", "--json")["json"] is True


def test_a_tilde_is_the_home_directory_in_every_path(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    paths = 'data-dir = "~/data"\nprefix-cache-dir = "~/prefixes"\nmodel-dir = ["~/models"]\nadapter = "a=~/a"\n'
    write(paths + 'report = "~/report.json"\n')
    monkeypatch.setenv("MLXPAGED_API_KEYS", "~/keys.json")
    args = parsed(ConfigFile.read(), "serve", "--hosts=~/hosts.json")
    found = [args[name] for name in ("data_dir", "prefix_cache_dir", "api_keys", "hosts")]
    assert found == [tmp_path / name for name in ("data", "prefixes", "keys.json", "hosts.json")]
    assert (args["model_dirs"], args["adapter_paths"]) == ((tmp_path / "models",), (("a", tmp_path / "a"),))
    assert parsed(ConfigFile.read(), "keys", "list")["api_keys"] == tmp_path / "keys.json"
    assert parsed(ConfigFile.read(), "doctor")["report"] == str(tmp_path / "report.json")
    with pytest.raises(SystemExit):
        parsed(ConfigFile.read(), "serve", "--data-dir", "~no-such-user/data")
    assert "--data-dir: there is no such home directory: '~no-such-user/data'" in capsys.readouterr().err


def test_the_command_line_wins_over_the_variable_and_that_over_the_file(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write('port = 1\nhost = "a"\nmax-queue = 1\nstrict = true\ntimelines = true\nallowed-host = ["a"]\nmodel = "a"\n')
    for name, value in (("PORT", "2"), ("HOST", "b"), ("STRICT", "0"), ("TIMELINES", ""), ("ALLOWED_HOST", "b,c")):
        monkeypatch.setenv(f"MLXPAGED_{name}", value)
    args = parsed(ConfigFile.read(), "serve", "--port", "3")
    assert (args["port"], args["host"], args["max_queue"], args["strict"]) == (3, "b", 1, False)
    assert (args["timelines"], args["allowed_hosts"], args["models"]) == (True, ("b", "c"), ("a",))
    assert parsed(ConfigFile.read(), "serve", "c", "--allowed-host", "d")["allowed_hosts"] == ("d",)


def test_the_configuration_is_shown_with_where_each_value_comes_from(
    write: Write, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write('# mine\nmax-num-seqs = 7\nallowed-host = ["a"]\n\n"strict" = true\nprompts = 3\n')
    monkeypatch.setenv("MLXPAGED_MAX_QUEUE", "9")
    shown = run("config")
    assert shown.status == 0
    lines = shown.stdout.splitlines()
    assert str(path) in lines[0]
    assert f"max-num-seqs = 7  # {path}, line 2" in lines
    assert f'allowed-host = ["a"]  # {path}, line 3' in lines
    assert f"strict = true  # {path}, line 5" in lines
    assert "max-queue = 9  # MLXPAGED_MAX_QUEUE" in lines
    assert 'host = "127.0.0.1"  # default' in lines
    assert "# max-model-len: the model's context length (default)" in lines
    assert not any(line.startswith("prompts") for line in lines)
    assert f"prompts = 3  # {path}, line 6" in run("config", "bench").stdout.splitlines()
    write(shown.stdout)
    assert run("config").stdout.count("config.toml, line") == sum(line[0] != "#" for line in lines) - 1
    monkeypatch.delenv("MLXPAGED_MAX_QUEUE")
    assert "max-queue = 9  #" in run("config").stdout


def test_a_name_that_looks_like_a_number_stays_as_it_is(
    write: Write, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXPAGED_SERVED_MODEL_NAME", "1.10")
    write(run("config").stdout)
    monkeypatch.delenv("MLXPAGED_SERVED_MODEL_NAME")
    assert parsed(ConfigFile.read(), "serve")["served_model_name"] == "1.10"


def test_the_help_of_a_launched_agent_is_not_that_of_the_command(write: Write, run: Run) -> None:
    path = write("port = \n")
    result = run("launch", "claude", "--", "--help")
    assert (result.status, str(path) in result.stderr) == (2, True)
    assert run("launch", "--help", "--", "x").status == 0


def test_a_key_is_not_shown(write: Write, run: Run) -> None:
    path = write('api-key = "secret"\n')
    shown = run("config", "chat").stdout
    assert f"# api-key: set, and not shown  # {path}, line 1" in shown
    assert "secret" not in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port = 1\n\nmax-num-seq = 5\n", "line 3: unknown key 'max-num-seq'; did you mean max-num-seqs?"),
        ("max_queue = 5\n", "line 1: unknown key 'max_queue'; did you mean max-queue?"),
        ("ctx-size = 5\n", "line 1: unknown key 'ctx-size'; did you mean max-model-len?"),
        ("[serve]\nport = 5\n", "line 1: unknown key 'serve'"),
        ("port = 'no'\n", "must be a whole number from 0 to 65535, got 'no' ("),
        ("port = true\n", "line 1: port must be a text or a number"),
        ("strict = 1\n", "line 1: strict must be true or false"),
        ("allowed-host = [1]\n", "line 1: allowed-host must be a list of texts"),
        ("allowed-host = ['a:1']\n", "must be the name of a host"),
        ("port = \n", "is not TOML: Invalid value (at line 1"),
    ],
)
@pytest.mark.parametrize("command", ["serve", "config"])
def test_a_mistake_in_the_file_is_one_line_that_names_the_file(
    write: Write, run: Run, text: str, message: str, command: str
) -> None:
    path = write(text)
    result = run(command)
    assert result.status == 2
    assert result.stderr.count("\n") == 1
    assert str(path) in result.stderr
    assert message in result.stderr
    assert run(command, "--help").status == 0


def test_a_bad_value_of_the_file_does_not_matter_if_the_command_line_has_one(write: Write) -> None:
    write("port = 'no'\n")
    assert parsed(ConfigFile.read(), "serve", "--port", "5")["port"] == 5


def test_another_file_can_be_named(write: Write, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("port = 1\n")
    other = tmp_path / "other.toml"
    other.write_text("port = 2\n")
    assert f"port = 2  # {other}" in run("--config", str(other), "config").stdout
    monkeypatch.setenv(config_file.VARIABLE, str(other))
    assert f"port = 2  # {other}" in run("config").stdout
    missing = run(f"--config={tmp_path}/none.toml", "config")
    assert (missing.status, missing.stderr.count("\n")) == (2, 1)
    assert "none.toml cannot be read: No such file or directory" in missing.stderr
    assert "no such home directory: '~no-such-user/a'" in run("--config", "~no-such-user/a", "config").stderr


def test_a_user_without_a_home_directory_gets_no_traceback(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(user: int) -> NoReturn:
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert "it would be /.config/mlxpaged/config.toml" in run("config").stdout
    assert run("ps").stderr.startswith("mlxpaged: no server runs")


def test_the_home_directory_of_another_user_gets_no_traceback(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `sudo -u OTHER`, which keeps HOME on a Mac. Root can read all, so it is a name that no user can read."""
    monkeypatch.setenv("HOME", f"/{'x' * 300}")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert "file: none" in run("config").stdout
    assert run("ps").stderr.startswith("mlxpaged: no server runs")


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    usual, mac = (
        tmp_path / ".config/mlxpaged/config.toml",
        tmp_path / "Library/Application Support/mlxpaged/config.toml",
    )
    monkeypatch.setattr(config_file.sys, "platform", "darwin")
    assert config_file.candidates() == [usual, mac]
    mac.parent.mkdir(parents=True)
    mac.write_text("port = 1\n")
    assert ConfigFile.read().path == mac
    usual.parent.mkdir(parents=True)
    usual.write_text("")
    assert ConfigFile.read().path == usual
    monkeypatch.setattr(config_file.sys, "platform", "linux")
    assert config_file.candidates() == [usual]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["serv"], "mlxpaged: there is no command 'serv'; did you mean serve?"),
        (
            ["serve", "--max-num-seq", "4"],
            "mlxpaged serve: there is no flag --max-num-seq; did you mean --max-num-seqs?",
        ),
        (["serve", "--model", "a", "--prot=1"], "mlxpaged serve: there is no flag --prot; did you mean --port?"),
        (["keys", "add", "a", "--teir", "low"], "mlxpaged keys add: there is no flag --teir; did you mean --tier?"),
        (["serve", "--xyzzy"], "mlxpaged serve: there is no flag --xyzzy (see"),
        (["serve", "a", "b"], "mlxpaged serve: unexpected 'b'"),
        (["config", "serv"], "mlxpaged config: there is no command 'serv'; did you mean serve?"),
        (["keys", "lst"], "mlxpaged keys: there is no command 'lst'; did you mean list?"),
        (["service", "instal", "--", "demo"], "mlxpaged service: there is no command 'instal'; did you mean install?"),
        (["list"], "mlxpaged: there is no command 'list'; did you mean ls?"),
        (["show", "qwen3:4b"], "mlxpaged: there is no command 'show'; did you mean ls?"),
        (["search", "qwen"], "mlxpaged: there is no command 'search'; did you mean pull?"),
        (["delete", "qwen"], "mlxpaged: there is no command 'delete'; did you mean rm?"),
        (["keys", "delete", "ben"], "mlxpaged keys: there is no command 'delete'; did you mean remove?"),
        (["comp"], "mlxpaged: there is no command 'comp'; did you mean completion?"),
        (["help", "frobnicate"], "mlxpaged: there is no command 'frobnicate' (see"),
        (["serve", "--ctx-size", "9"], "mlxpaged serve: there is no flag --ctx-size; did you mean --max-model-len?"),
        (["serve", "--num_ctx=9"], "mlxpaged serve: there is no flag --num_ctx; did you mean --max-model-len?"),
        (["serve", "-c", "9"], "mlxpaged serve: there is no flag -c; did you mean --max-model-len?"),
        (["serve", "-m", "demo"], "mlxpaged serve: there is no flag -m; did you mean --model?"),
        (["serve", "demo", "-p", "9"], "mlxpaged serve: there is no flag -p; did you mean --port?"),
        (["serve", "--temp", "0"], "mlxpaged serve: there is no flag --temp; did you mean --default-temperature?"),
        (["serve", "--verbose"], "mlxpaged serve: there is no flag --verbose; did you mean --log-level?"),
        (
            ["serve", "--quantize-kv"],
            "mlxpaged serve: there is no flag --quantize-kv; did you mean --kv-cache-dtype?",
        ),
        (
            ["serve", "--num-draft-tokens", "3"],
            "mlxpaged serve: there is no flag --num-draft-tokens; each step decides how many draft tokens it verifies",
        ),
        (
            ["serve", "--max-num-b", "9"],
            "mlxpaged serve: there is no flag --max-num-b; did you mean --max-num-batched-t",
        ),
        (
            ["serve", "--max_num_seqs", "9"],
            "mlxpaged serve: there is no flag --max_num_seqs; did you mean --max-num-seqs?",
        ),
        (["run", "demo", "x", "--temp", "0"], "mlxpaged run: there is no flag --temp; did you mean --temperature?"),
        (["run", "demo", "-p", "x"], "mlxpaged run: there is no flag -p; a prompt has no flag: mlxpaged run MODEL"),
        (["run", "--model", "demo", "x"], "mlxpaged run: there is no flag --model; MODEL has no flag here"),
        (["run", "demo", "x", "--ctx-size", "9"], "mlxpaged run: there is no flag --ctx-size (see"),
        (["chat", "-q"], "mlxpaged chat: there is no flag -q (see"),
    ],
)
def test_a_wrong_word_gets_one_line_with_what_was_meant(run: Run, args: list[str], message: str) -> None:
    result = run(*args)
    assert (result.status, result.stdout) == (2, "")
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert "--help)" in result.stderr


def test_what_is_guessed_exists() -> None:
    parser = make_parser(COMMANDS)
    words = {*parser.commands, *(word for each in parser.commands.values() for word in each.commands)}
    flags = {flag for each in parser.commands.values() for flag in each.flags}
    flags |= {flag for each in parser.commands.values() for verb in each.commands.values() for flag in verb.flags}
    assert {word for meanings in guesses.COMMANDS.values() for word in meanings} <= words
    assert {f"--{name}" for meanings in guesses.FLAGS.values() for name in meanings} <= flags
    for name, meanings in guesses.COMMANDS.items():
        assert name not in parser.commands, meanings


@pytest.mark.parametrize("words", [(), ("help",), ("--help",), ("--config", "/nowhere", "--help")])
def test_without_a_command_the_help_is_printed(run: Run, words: tuple[str, ...]) -> None:
    result = run(*words)
    assert (result.status, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: mlxpaged ")
    assert all(named.summary in " ".join(result.stdout.split()) for named in COMMANDS.values())


def test_help_and_version_are_commands_too(run: Run) -> None:
    assert run("help", "keys", "add") == run("keys", "add", "--help")
    assert run("help", "serve").stdout.startswith("usage: mlxpaged serve ")
    assert run("version") == run("--version")


def test_the_help_of_no_command_imports_the_engine() -> None:
    code = (
        "import contextlib, io, sys\nfrom mlxpaged.cli import COMMANDS, main\n"
        "for command in COMMANDS:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main([command, '--help'])\n"
        "print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    modules = set(result.stdout.split())
    assert {named.target.partition(":")[0] for named in COMMANDS.values()} <= modules
    heavy = {"mlx", "mlx_lm", "transformers", "starlette", "numpy", "huggingface_hub", "rich", "prompt_toolkit"}
    assert not heavy & modules
