"""Flags and their environment variables. In this process: only what they come to is looked at."""

from __future__ import annotations

import importlib
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpaged import __version__, addons, cli
from mlxpaged.api.config import HttpConfig
from mlxpaged.cli import http_server, main, serve
from mlxpaged.cli.flags import parse_size
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.core.text.thinking_limit import ThinkingLimit
from mlxpaged.engine.watchdog import StallLimits
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models import device_memory
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.registry.profile import Profile
from mlxpaged.registry.registry import Registry

DEFAULTS = EngineConfig()

A_IN_X = AdapterPath("a", Path("x"))

SETTINGS: list[tuple[str, str, str, str, Any, Any]] = [
    # flag, value, another value, attribute, what the value means, what the other one means
    ("--host", "127.0.0.2", "127.0.0.3", "host", "127.0.0.2", "127.0.0.3"),
    ("--served-model-name", "a", "b", "served_model_name", "a", "b"),
    ("--chat-template", __file__, cli.__file__, "chat_template", Path(__file__), Path(cli.__file__)),
    ("--embedding-model", "a/b", "c", "embedding_model", ("a/b", "a/b"), ("c", "c")),
    ("--embedding-max-model-len", "512", "7", "embedding_max_model_len", 512, 7),
    ("--kv-cache-memory", "256MB", "1.5GiB", "kv_cache_bytes", 256_000_000, 1_610_612_736),
    ("--cpu-dtype", "Model", "auto", "cpu_dtype", "model", "auto"),
    ("--kv-cache-dtype", "INT8", "auto", "kv_cache_dtype", "int8", "auto"),
    ("--swap-space", "4GB", "512MiB", "swap_space_bytes", 4_000_000_000, 536_870_912),
    ("--swap-space", "0", "1GB", "swap_space_bytes", 0, 1_000_000_000),
    ("--prefix-cache-dir", "some/where", "else", "prefix_cache_dir", Path("some/where"), Path("else")),
    ("--prefix-cache-disk", "4GB", "1GiB", "prefix_cache_disk_bytes", 4_000_000_000, 1_073_741_824),
    ("--prefix-cache-writes", "0", "1GB", "prefix_cache_write_bytes", 0, 1_000_000_000),
    ("--block-size", "8", "16", "block_size", 8, 16),
    ("--max-num-seqs", "3", "4", "max_num_seqs", 3, 4),
    ("--max-num-batched-tokens", "99", "77", "max_num_batched_tokens", 99, 77),
    ("--max-step-ms", "0", "12.5", "max_step_ms", 0.0, 12.5),
    ("--speculative", "ngram", "off", "speculative", "ngram", "off"),
    ("--speculative", "mtp", "auto", "speculative", "mtp", "auto"),
    ("--end-loops", "ON", "off", "end_loops", "on", "off"),
    ("--max-queue", "0", "5", "max_queue", 0, 5),
    ("--attention-backend", "gather", "auto", "attention_backend", "gather", "auto"),
    ("--attention-tuning", "paged:256", "CONTIGUOUS", "attention_tuning", "paged:256", "contiguous"),
    ("--default-priority", "LOW", "high", "default_priority", Priority.LOW, Priority.HIGH),
    ("--request-timeout", "60", "0.5", "request_timeout", 60.0, 0.5),
    ("--request-timeout", "0", "5", "request_timeout", None, 5.0),
    ("--ttft-timeout", "1.5", "3", "ttft_timeout", 1.5, 3.0),
    ("--ttft-timeout", "0", "5", "ttft_timeout", None, 5.0),
    ("--default-temperature", "0", "0.7", "default_temperature", 0.0, 0.7),
    ("--default-top-p", "0.9", "1", "default_top_p", 0.9, 1.0),
    ("--default-top-k", "-1", "20", "default_top_k", -1, 20),
    ("--default-min-p", "0", "0.05", "default_min_p", 0.0, 0.05),
    ("--default-repetition-penalty", "1.05", "1", "default_repetition_penalty", 1.05, 1.0),
    ("--default-presence-penalty", "-1", "1.5", "default_presence_penalty", -1.0, 1.5),
    ("--default-frequency-penalty", "-0.5", "2", "default_frequency_penalty", -0.5, 2.0),
    ("--drain-timeout", "0", "2.5", "drain_timeout", 0.0, 2.5),
    ("--data-dir", "some/where", "else", "data_dir", Path("some/where"), Path("else")),
    ("--log-level", "WARNING", "debug", "log_level", "warning", "debug"),
    ("--api-keys", "a.json", "b.json", "api_keys", Path("a.json"), Path("b.json")),
    ("--allowed-host", "My.Mac", "a,b", "allowed_hosts", ("my.mac",), ("a", "b")),
    ("--cors-origin", "*", "http://a:1, https://b", "cors_origins", ("*",), ("http://a:1", "https://b")),
    ("--max-body-size", "2MB", "1GiB", "max_body_bytes", 2_000_000, 1_073_741_824),
    ("--max-connections", "7", "8", "max_connections", 7, 8),
    ("--write-timeout", "5", "0", "write_timeout", 5.0, None),
    ("--max-loaded-models", "2", "3", "max_loaded", 2, 3),
    ("--swap-wait", "45", "2m", "swap_wait", 45.0, 120.0),
    ("--idle-unload", "10m", "1.5h", "idle_unload", 600.0, 5400.0),
    ("--idle-unload", "0", "90", "idle_unload", None, 90.0),
    ("--step-timeout", "45", "0", "step_timeout", 45.0, math.inf),
    ("--thinking-budget", "40%", "0", "thinking_limit", ThinkingLimit(share=0.4), None),
    (
        "--profile",
        "a=demo,top_k=3",
        "b=demo",
        "profiles",
        {"a": Profile("a", "demo", {"top_k": 3})},
        {"b": Profile("b", "demo")},
    ),
    ("--alias", "a=demo", "b=demo,c=demo", "aliases", {"a": "demo"}, {"b": "demo", "c": "demo"}),
    (
        "--adapter",
        "a=x",
        "b=y,demo:c=z",
        "adapters",
        (A_IN_X,),
        (AdapterPath("b", Path("y")), AdapterPath("c", Path("z"))),
    ),
    ("--memory", "8GB", "1GiB", "memory", 8_000_000_000, 2**30),
]

SWITCHES = [
    ("--no-prefix-cache", "prefix_caching", False),
    ("--no-batching", "max_num_seqs", 1),
    ("--timelines", "timelines", True),
    ("--no-generation-config", "generation_config", False),
    ("--retune", "retune", True),
    ("--no-joins", "joins", False),
    ("--exit-when-stalled", "exits", True),
]

ALL_FLAGS = (
    [setting[0] for setting in SETTINGS]
    + [switch for switch, _, _ in SWITCHES]
    + [
        "--port",
        "--ollama-port",
        "--swap-dir",
        "--served-embedding-model-name",
        "--pin",
        "--model-dir",
        "--model-kv-cache-dtype",
    ]
)


def variable(flag: str) -> str:
    return "MLXPAGED_" + flag.removeprefix("--").replace("-", "_").upper()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MLXPAGED_"):
            monkeypatch.delenv(name)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `serve` would have started: everything but the engine thread and the server is real."""
    found: dict[str, Any] = {}

    def no_server(
        registry: Registry | None,
        listeners: list[socket.socket],
        http: HttpConfig,
        data_dir: Path | None,
        drain_timeout: float,
    ) -> int:
        (found["host"], found["port"]), *found["others"] = [listener.getsockname() for listener in listeners]
        for listener in listeners:
            listener.close()
        found["data_dir"], found["drain_timeout"] = data_dir, drain_timeout
        found["config"] = None if registry is None else registry.default.config
        found.update(vars(http))
        if registry is not None:
            found.update(vars(registry.default.config) | vars(registry.limits) | vars(registry.watchdog))
            found["models"] = {model.name: model for model in registry.models.values()}
            found["num_at_start"], found["aliases"] = registry.num_at_start, registry.aliases
            found["profiles"] = registry.profiles
            second = next((model for model in registry.models.values() if model.config.only_embeds), None)
            found["embedding_model"] = None if second is None else (second.name, second.config.model)
        return 0

    def no_logging(level: str) -> None:
        found["log_level"] = level

    monkeypatch.setattr(Registry, "start", lambda self, loop: loop.close())
    monkeypatch.setattr(http_server, "run_server", no_server)
    monkeypatch.setattr(serve, "exit_status", lambda status, has_engine: status)
    monkeypatch.setattr(serve, "set_up", no_logging)
    monkeypatch.setattr(device_memory, "limit_memory", lambda limit: found.update(memory=limit))
    monkeypatch.setenv("MLXPAGED_PORT", "0")
    return found


def test_the_defaults_are_those_of_the_engine(started: dict[str, Any]) -> None:
    assert main(["serve"]) == 0
    assert started["config"] == DEFAULTS
    assert started["host"] == "127.0.0.1"
    assert started["drain_timeout"] == 30


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also if the tests run in the background of a shell, where it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
def test_a_sigint_before_the_server_handles_it_ends_the_process_with_status_0(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine thread may load its model then: the process must end as it does after a signal to the server."""
    ended: list[tuple[Any, int]] = []

    def interrupted(registry: Registry | None, listeners: list[socket.socket], *others: Any) -> int:
        with listeners[0]:
            signal.raise_signal(signal.SIGINT)
        return 1

    def noted(status: int, has_engine: bool) -> int:
        ended.append((has_engine, status))
        return status

    monkeypatch.setattr(http_server, "run_server", interrupted)
    monkeypatch.setattr(serve, "exit_status", noted)
    assert main(["serve"]) == 0
    assert ended == [(True, 0)]


@pytest.mark.parametrize(("flag", "value", "other", "name", "meant", "other_meant"), SETTINGS)
def test_a_flag_can_be_a_variable_and_the_flag_wins(
    started: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    value: str,
    other: str,
    name: str,
    meant: Any,
    other_meant: Any,
) -> None:
    assert main(["serve", flag, value]) == 0
    assert started[name] == meant
    monkeypatch.setenv(variable(flag), other)
    assert main(["serve"]) == 0
    assert started[name] == other_meant
    assert main(["serve", flag, value]) == 0
    assert started[name] == meant


@pytest.mark.parametrize(("flag", "name", "value"), SWITCHES)
@pytest.mark.parametrize(("on", "off"), [("1", "0"), ("true", "false"), ("YES", ""), (" on ", "No")])
def test_a_switch_can_be_a_variable(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, flag: str, name: str, value: Any, on: str, off: str
) -> None:
    assert main(["serve", flag]) == 0
    assert started[name] == value
    monkeypatch.setenv(variable(flag), on)
    assert main(["serve"]) == 0
    assert started[name] == value
    monkeypatch.setenv(variable(flag), off)
    assert main(["serve"]) == 0
    assert started[name] == getattr(StallLimits() if name == "exits" else DEFAULTS, name)
    assert main(["serve", flag]) == 0
    assert started[name] == value


def test_the_port_and_the_model_can_be_variables_too(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MLXPAGED_PORT", str(port))
    monkeypatch.setenv("MLXPAGED_MODEL", "someone/model")
    assert main(["serve"]) == 0
    assert (started["port"], started["model"]) == (port, "someone/model")
    assert main(["serve", "--port", "0", "demo"]) == 0
    assert started["port"] != port
    assert list(started["models"]) == ["demo"]
    assert main(["serve", "someone/model", "--model", "b/c"]) == 0
    assert list(started["models"]) == ["someone/model", "b/c"]
    assert main(["serve", "none"]) == 0
    assert started["config"] is None
    monkeypatch.setenv("MLXPAGED_MODEL", "none")
    assert main(["serve"]) == 0
    assert started["config"] is None


def test_an_adapter_belongs_to_the_first_model_or_to_a_named_one(started: dict[str, Any]) -> None:
    assert main(["serve", "--model", "demo", "--model", "two=demo", "--adapter", "a=x", "--adapter", "two:a=x"]) == 0
    assert [model.config.adapters for model in started["models"].values()] == [(A_IN_X,), (A_IN_X,)]


def test_a_model_may_have_another_type_of_its_kv_cache(started: dict[str, Any]) -> None:
    one = ["--model", "demo", "--model", "two=demo", "--kv-cache-dtype", "int4", "--model-kv-cache-dtype", "two=int8"]
    assert main(["serve", *one]) == 0
    assert [model.config.kv_cache_dtype for model in started["models"].values()] == ["int4", "int8"]


@pytest.mark.parametrize(
    ("value", "message"),
    [("int8", "must be NAME=TYPE"), ("a=fp8", "auto, int8, int4"), ("a=int8", "no model 'a' is served")],
)
def test_a_type_of_the_kv_cache_that_no_model_can_have_is_refused(
    started: dict[str, Any], capsys: pytest.CaptureFixture[str], value: str, message: str
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--model-kv-cache-dtype", value])
    assert message in capsys.readouterr().err
    assert "config" not in started


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--adapter", "a"], "must be NAME=DIR"),
        (["--adapter", "latest=x"], "is not 'latest'"),
        (["--adapter", "a=x", "--adapter", "a=y"], "cannot both be named 'a'"),
        (["--adapter", "other:a=x"], "no model 'other' is served"),
        (["--embedding-model", "e", "--adapter", "e:a=x"], "no model 'e' is served that generates text"),
        (["none", "--adapter", "a=x"], "--adapter needs a MODEL"),
    ],
)
def test_adapters_that_cannot_be_served_are_refused(
    started: dict[str, Any], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", *flags])
    assert message in capsys.readouterr().err
    assert "config" not in started


def test_a_second_port_is_for_ollamas_clients(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["serve"]) == 0
    assert (started["others"], started["ollama_port"]) == ([], None)
    monkeypatch.setenv("MLXPAGED_OLLAMA_PORT", "0")
    assert main(["serve", "--host", "127.0.0.2"]) == 0
    [(host, port)] = started["others"]
    assert (host, port) == ("127.0.0.2", started["ollama_port"])
    assert port not in (0, started["port"])


def test_a_second_port_in_use_is_said_at_once(started: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--ollama-port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert "config" not in started


def test_a_switch_of_http_is_off_by_default(started: dict[str, Any]) -> None:
    for flags, isolates in (([], False), (["--isolate-prefix-cache"], True)):
        assert main(["serve", *flags]) == 0
        assert started["isolate_prefix_cache"] == isolates


def test_the_model_can_be_a_flag_too(started: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPAGED_MODEL", "someone/model")
    assert main(["serve", "--model", "demo"]) == 0
    assert started["model"] == "demo"


def test_the_embedding_models_name_can_be_a_variable_too(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["serve", "--embedding-model", "a", "--served-embedding-model-name", "b"]) == 0
    assert started["embedding_model"] == ("b", "a")
    monkeypatch.setenv("MLXPAGED_SERVED_EMBEDDING_MODEL_NAME", "c")
    assert main(["serve", "--embedding-model", "a"]) == 0
    assert started["embedding_model"] == ("c", "a")


def test_several_models_have_names_and_only_the_first_one_is_loaded_at_the_start(started: dict[str, Any]) -> None:
    flags = ["--model", "fast=some/where", "--model", "b/c", "--alias", "gpt=fast", "--pin", "gpt"]
    assert main(["serve", "demo", *flags, "--max-num-seqs", "3"]) == 0
    models = started["models"]
    assert {name: (model.config.model, model.pinned) for name, model in models.items()} == {
        "demo": ("demo", False),
        "fast": ("some/where", True),
        "b/c": ("b/c", False),
    }
    assert {model.config.max_num_seqs for model in models.values()} == {3}
    assert started["num_at_start"] == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--served-embedding-model-name", "b"],
            "--served-embedding-model-name needs --embedding-model",
        ),
        (["--embedding-model", "demo"], "two models cannot both be named 'demo'"),
        (["none", "--embedding-model", "a"], "--embedding-model needs a MODEL"),
        (["none", "--swap-space", "1GB"], "--swap-space needs a MODEL; it cannot be used with 'none'"),
        (["none", "--model", "demo"], "cannot be served together with other models"),
        (["demo", "--model", "demo"], "two models cannot both be named 'demo'"),
        (["--alias", "a"], "must be NAME=MODEL, got 'a'"),
        (["--alias", "a=b"], "alias 'a' stands for 'b', which is not served"),
        (["--pin", "b"], "--pin 'b': no such model is served"),
        (["--idle-unload", "soon"], "must be a time such as 90s, 10m or 1h"),
        (["--embedding-max-model-len", "0"], "--embedding-max-model-len"),
    ],
)
def test_flags_that_contradict_others_are_refused(
    started: dict[str, Any], capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", *flags])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert "config" not in started


def test_the_swap_directory_can_be_a_variable_too(
    started: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLXPAGED_SWAP_SPACE", "1GB")
    assert main(["serve", "--swap-dir", str(tmp_path)]) == 0
    assert started["swap_dir"] == tmp_path
    monkeypatch.setenv("MLXPAGED_SWAP_DIR", str(tmp_path))
    assert main(["serve"]) == 0
    assert started["swap_dir"] == tmp_path
    assert main(["serve", "--swap-dir", str(tmp_path.parent)]) == 0
    assert started["swap_dir"] == tmp_path.parent


@pytest.mark.parametrize("size", [[], ["--swap-space", "0"]], ids=["no size", "off"])
def test_a_swap_directory_without_a_size_is_refused(
    started: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, size: list[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--swap-dir", str(tmp_path), *size])
    assert end.value.code == 2
    assert "swap_dir needs swap_space_bytes (--swap-space)" in capsys.readouterr().err
    assert "config" not in started


@pytest.mark.parametrize("address", ["::1", "localhost"])
def test_the_server_listens_on_ipv6_and_on_names_too(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    try:
        listener = serve.listen(address, 0)
    except OSError as error:
        pytest.skip(f"{address}: {error}")
    with listener:
        assert listener.getsockname()[1] > 0


BAD = [
    ("--chat-template", "missing.jinja"),
    ("--port", "abc"),
    ("--port", "-1"),
    ("--port", "65536"),
    ("--port", "99999999999999999999"),
    ("--kv-cache-memory", "lots"),
    ("--kv-cache-memory", "0"),
    ("--kv-cache-memory", "-5GB"),
    ("--kv-cache-memory", "5 bananas"),
    ("--kv-cache-memory", " "),
    ("--swap-space", "lots"),
    ("--swap-space", "-1GB"),
    ("--swap-space", "0.1"),
    ("--swap-space", " "),
    ("--swap-dir", "/no/such/directory"),
    ("--swap-dir", __file__),
    ("--swap-dir", " "),
    ("--data-dir", " "),
    ("--prefix-cache-dir", " "),
    ("--api-keys", " "),
    ("--block-size", "24"),
    ("--block-size", "0"),
    ("--max-num-seqs", "0"),
    ("--max-num-seqs", "1.5"),
    ("--max-num-seqs", "many"),
    ("--max-num-batched-tokens", "-1"),
    ("--max-step-ms", "-1"),
    ("--max-step-ms", "inf"),
    ("--max-step-ms", "soon"),
    ("--max-num-batched-tokens", "8"),
    ("--speculative", "always"),
    ("--max-queue", "-1"),
    ("--attention-backend", "cuda"),
    ("--attention-backend", "metal"),
    ("--attention-tuning", "fast"),
    ("--attention-tuning", "paged:"),
    ("--attention-tuning", "paged:63"),
    ("--attention-tuning", "paged:1048577"),
    ("--attention-tuning", "paged:-512"),
    ("--attention-tuning", "paged:5x"),
    ("--attention-tuning", "contiguous:512"),
    ("--default-priority", "urgent"),
    ("--default-priority", "0"),
    ("--request-timeout", "-1"),
    ("--request-timeout", "0.0"),
    ("--request-timeout", "nan"),
    ("--request-timeout", "inf"),
    ("--request-timeout", "soon"),
    ("--ttft-timeout", "-1"),
    ("--ttft-timeout", "inf"),
    ("--drain-timeout", "-1"),
    ("--drain-timeout", "nan"),
    ("--drain-timeout", "inf"),
    ("--drain-timeout", "soon"),
    ("--log-level", "loud"),
]


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--speculative=draft"], "speculative draft needs a draft_model"),
        (["--draft-model=x", "--speculative=ngram"], "a draft_model needs speculative auto or draft"),
        (["--draft-model=x", "--batch-invariant"], "a draft_model needs speculative auto or draft"),
        (["--mtp=x", "--speculative=off"], "mtp needs speculative auto or mtp"),
        (["--mtp=x", "--draft-model=y"], "mtp needs speculative auto or mtp"),
        (["--retune", "--attention-tuning=paged:512"], "retune works only with attention_tuning auto"),
        (["--retune", "--attention-tuning=default"], "retune works only with attention_tuning auto"),
        (["--retune", "--attention-backend=gather"], "only with the metal backend"),
        (["--retune", "--attention-backend=cpu"], "not with attention_backend cpu"),
        (["--attention-tuning=contiguous", "--attention-backend=gather"], "only with the metal backend"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    started: dict[str, Any], capsys: pytest.CaptureFixture[str], args: list[str], error: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", *args])
    assert end.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("speculative", ["auto", "draft"])
def test_a_draft_model_drafts_for_the_first_model_only(started: dict[str, Any], speculative: str) -> None:
    """The others have no drafts if only those of a model are wanted."""
    flags = [f"--speculative={speculative}", "--draft-model=x", "--embedding-model=vectors"]
    assert main(["serve", "--model=demo", "--model=other=/m", *flags]) == 0
    found = {name: (model.config.speculative, model.config.draft_model) for name, model in started["models"].items()}
    others = "off" if speculative == "draft" else "auto"
    assert found == {"demo": (speculative, "x"), "other": (others, None), "vectors": (others, None)}


@pytest.mark.parametrize("value", ["auto", "default"])
def test_a_backend_without_choices_takes_a_tuning_that_makes_none(started: dict[str, Any], value: str) -> None:
    assert main(["serve", "--attention-backend=gather", f"--attention-tuning={value}"]) == 0
    assert started["attention_tuning"] == value


def named(flag: str, text: str) -> bool:
    return flag in text or flag.removeprefix("--").replace("-", "_") in text


@pytest.mark.parametrize(("flag", "value"), BAD)
@pytest.mark.parametrize("from_environment", [False, True], ids=["flag", "variable"])
def test_a_bad_value_ends_with_status_2_and_names_the_flag(
    started: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
    value: str,
    from_environment: bool,
) -> None:
    if from_environment:
        monkeypatch.setenv(variable(flag), value)
    args = ["serve"] if from_environment else ["serve", f"{flag}={value}"]
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 2
    streams = capsys.readouterr()
    assert named(flag, streams.err)
    assert streams.out == ""
    assert "config" not in started


@pytest.mark.parametrize("flag", [switch for switch, _, _ in SWITCHES])
def test_a_bad_value_of_a_switchs_variable_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    monkeypatch.setenv(variable(flag), "maybe")
    with pytest.raises(SystemExit) as end:
        main(["serve"])
    assert end.value.code == 2
    assert variable(flag) in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "bench", "doctor", "chat", "run", "launch claude", "stop", "pull", "rm"])
def test_an_empty_name_of_a_model_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), ""])
    assert end.value.code == 2
    assert "MODEL: must be the name of a model, got ''" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--nothing"], ["bake"], ["serve", "--nothing"], ["serve", "a", "b"]])
def test_an_unknown_command_or_flag_ends_with_status_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("mlxpaged")
    assert message.count("\n") == 1


@pytest.mark.usefixtures("_interrupts")
def test_a_sigint_during_the_imports_ends_with_status_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "PARSERS", addons.Table("commands", Callable))  # it has imported nothing
    monkeypatch.setattr(importlib, "import_module", lambda name: signal.raise_signal(signal.SIGINT))
    assert main(["serve"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == ""


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"mlxpaged {__version__}\n"


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_what_needs_no_model_does_not_import_the_engine(flag: str) -> None:
    code = f"import sys; from mlxpaged.cli import main\ntry: main([{flag!r}])\nfinally: print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "mlxpaged.cli" in result.stdout.split()
    assert not {"mlx.core", "transformers", "mlxpaged.engine", "pydantic"} & set(result.stdout.split())


def test_help_lists_every_flag_with_its_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out.replace("\n", " ")
    for flag in [*ALL_FLAGS, "MODEL"]:
        assert flag in text
        assert variable(flag) in "".join(text.split()) or flag == "MODEL"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("256MB", 256_000_000),
        ("8GB", 8_000_000_000),
        ("8gb", 8_000_000_000),
        ("1.5GiB", 3 * 2**29),
        ("1KiB", 1024),
        ("2MiB", 2 * 2**20),
        ("3kb", 3000),
        ("1TB", 10**12),
        ("1TiB", 2**40),
        (" 64 MB ", 64_000_000),
        ("1048576", 1048576),
        ("0.5KB", 500),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_read_with_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "GB", "-1GB", "+1GB", "1e9", "8 G", "8GBs", "0", "0GB", "0.1", "1,5GB", "1.GB", ".5GB", "1 2MB"),
        *("nan", "inf", "0x10", "9" * 400 + "GB", "9" * 400 + ".0"),
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a memory size.*8GB"):
        parse_size(text)
