"""`mlxpaged pull`, `ls` and `rm`, with a stand-in for the hub, and short names."""

from __future__ import annotations

import fcntl
import io
import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from mlxpaged.cli.flags import name_and_path
from mlxpaged.models import device_memory, disk, loader
from mlxpaged.models.files.architectures import has_module, modules_of
from mlxpaged.models.files.kinds import ENCODERS, Kind
from mlxpaged.models.fit import fit, layers_of
from mlxpaged.models.layers import KV, PerSequence
from mlxpaged.models.loader import DEMO_PATH, load_embedding_model
from mlxpaged.models.sources.downloads import downloads
from mlxpaged.models.sources.resolve import resolve
from mlxpaged.models.sources.short_names import (
    default_name,
    full_name,
    largest_within,
    near_names,
    short_name,
    short_names,
    without_address,
)
from mlxpaged.models.vision.loading import FAMILIES
from mlxpaged.registry.catalog import Catalog
from tests.cli.helpers import DEADLINE, Result, hub, mlxpaged
from tests.models.architectures import ARCHITECTURES, REFUSED, make_architecture
from tests.models.encoders import make_dense, make_encoder
from tests.models.gguf_models import as_gguf
from tests.models.stand_in_mlx_vlm import config_of, install, make_model, uninstall
from tests.models.test_preflight import point_to, requested_weights, sizes_of
from tests.support import make_tiny_model, since_mlx_lm_0_32, wait_until

Run = Callable[..., Result]
NAME = "mlx-community/Qwen3-4B-4bit"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no proxy between the library and the stand-in."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The files of the repository, to be changed. As on the hub, one of them is for people only."""
    path = Path(shutil.copytree(DEMO_PATH, tmp_path / "repository"))
    (path / "README.md").write_text("# Qwen3")
    return path


@pytest.fixture
def online(cache: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The stand-in, which has the repository as NAME. Yields the requests that it got."""
    with hub(NAME, repository, sizes_of(repository)) as (address, requests):
        point_to(address, monkeypatch)
        yield requests


@pytest.fixture
def offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    point_to("http://127.0.0.1:9", monkeypatch)  # nothing listens there


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the free memory of the machine, all of which models may take."""
    monkeypatch.setattr(device_memory, "CPU_MARGIN", 0)

    def set(size: int) -> None:
        monkeypatch.setattr(device_memory, "system_free_memory", lambda: size)

    return set


@pytest.fixture
def mlx_vlm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A stand-in for mlx-vlm."""
    install(tmp_path / "site-packages", monkeypatch)
    yield
    uninstall()


# -- pull --------------------------------------------------------------------------------------------------------------


def test_a_model_is_pulled_by_its_short_name_listed_found_by_serve_and_removed(
    run: Run, online: list[str], cache: Path, free: Callable[[int], None]
) -> None:
    free(8 * 10**9)
    pulled = run("pull", "Qwen3:4B")
    assert pulled.status == 0, pulled.stderr
    assert f"{NAME}: text, qwen3 (mlx-lm), float32" in pulled.stdout
    assert "its whole context fits" in pulled.stdout
    assert "serve it: mlxpaged serve qwen3:4b" in pulled.stdout
    [download] = downloads()
    assert download.path.is_relative_to(cache)
    assert resolve("qwen3:4b").directory == download.path
    found = Catalog().find("qwen3:4b")  # as a request names it
    assert found is not None
    assert (found.name, found.path) == (NAME, download.path)
    assert run("pull", NAME).status == 0
    assert sum("GET" in request and requested_weights([request]) for request in online) == 1

    [row] = json.loads(run("ls", "--json").stdout)
    assert (row["name"], row["short_name"], row["kind"], row["served"]) == (NAME, "qwen3:4b", "text", True)
    assert row["bytes"] == sum(path.stat().st_size for path in DEMO_PATH.iterdir())
    assert (row["quantization"], row["context_length"], row["path"]) == ("float32", 4096, str(download.path))
    header, line = run("ls").stdout.splitlines()
    assert header.split() == ["NAME", "SIZE", "KIND", "SOURCE", "QUANTIZATION", "CONTEXT", "SERVED"]
    assert line.split()[:2] == [NAME, "(qwen3:4b)"]
    assert line.split()[-1] == "yes"
    profiles = (
        "--profile",
        "fast=qwen3:4b,thinking=off",
        "--profile",
        f"cold={NAME},temperature=0",
        "--profile",
        "x=other",
    )
    rows = json.loads(run("ls", "--json", *profiles).stdout)
    assert [(each["name"], each.get("profile_of")) for each in rows] == [(NAME, None), ("fast", NAME), ("cold", NAME)]
    assert rows[1] | {"name": NAME, "short_name": row["short_name"]} == row | {"profile_of": NAME}
    assert f"fast (profile of {NAME})" in run("ls", *profiles).stdout

    removed = run("rm", "qwen3:4b", "--yes")
    assert (removed.status, downloads()) == (0, [])
    assert not list(cache.glob("models--*/**/*.safetensors"))
    assert "pull qwen3:4b" in run("ls").stderr
    assert run("ls", "--json").stdout == "[]\n"


def test_a_download_that_breaks_off_goes_on_where_it_was(
    run: Run, cache: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = "model.safetensors"
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 2**16)  # the library keeps whole chunks: usually 10 MB
    with hub(NAME, repository, sizes_of(repository), breaks_off=file) as (address, requests):
        point_to(address, monkeypatch)
        assert run("pull", NAME).status == 0
    assert (downloads()[0].path / file).read_bytes() == (repository / file).read_bytes()
    assert any(re.search(rf"{file} bytes=\d{{4,}}-", request) for request in requests)


def test_a_connection_that_is_reset_ends_a_pull_with_a_message(
    run: Run, cache: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the HTTP library of the hub's library raises is none of its own errors."""
    with hub(NAME, repository, sizes_of(repository), resets="model.safetensors") as (address, _):
        point_to(address, monkeypatch)
        result = run("pull", NAME)
    assert result.status == 1
    assert f"mlxpaged: {NAME} could not be fetched from the hub: " in result.stderr


def test_the_context_that_fits_beside_the_weights_is_said(
    run: Run, online: list[str], free: Callable[[int], None]
) -> None:
    weights = (DEMO_PATH / "model.safetensors").stat().st_size
    per_token = fit(layers_of(DEMO_PATH), 0).bytes_per_token
    free(2 * (weights + 1000 * per_token))  # by default the server takes half of it
    result = run("pull", NAME)
    assert result.status == 0
    assert "a context of 1000 tokens fits" in result.stdout
    assert "a context of 3200 tokens, with --kv-cache-dtype int8" in result.stdout
    assert "a context of 4000 tokens, with --kv-cache-dtype int4" in result.stdout
    assert "--max-model-len 1000" in result.stdout


def test_what_is_too_large_is_refused_before_its_weights_with_a_model_that_would_fit(
    run: Run, online: list[str], cache: Path, free: Callable[[int], None]
) -> None:
    free(2_000_000)
    result = run("pull", NAME)
    assert (result.status, result.stdout) == (1, "")
    assert "cannot be loaded: its weights take" in result.stderr
    assert "would fit" not in result.stderr
    free(10 * 10**9)
    sizes = sizes_of(DEMO_PATH) | {"model.safetensors": 20 * 10**9}
    with hub(NAME, DEMO_PATH, sizes) as (address, requests), pytest.MonkeyPatch.context() as patch:
        point_to(address, patch)
        result = run("pull", NAME)
    assert result.status == 1
    assert "its weights take 20.0 GB, but only 10.0 GB of memory are free" in result.stderr
    assert f"; {largest_within(3.5e9)} would fit (" in result.stderr
    assert not requested_weights(online + requests)


def test_what_cannot_be_served_is_refused_before_its_weights(run: Run, cache: Path, repository: Path) -> None:
    config = json.loads((repository / "config.json").read_text())
    (repository / "config.json").write_text(json.dumps(config | {"model_type": "llama9"}))
    with hub(NAME, repository, sizes_of(repository)) as (address, requests), pytest.MonkeyPatch.context() as patch:
        point_to(address, patch)
        result = run("pull", NAME)
    assert (result.status, result.stdout) == (1, "")
    assert "'llama9'" in result.stderr
    assert not requested_weights(requests)


def test_weights_that_the_disk_cannot_hold_are_not_downloaded(
    run: Run, online: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_disk", lambda directory: 0)
    result = run("pull", NAME)
    assert result.status == 1
    assert "but the disk has 0.0 GB" in result.stderr
    with pytest.raises(disk.DiskFullError):
        resolve(NAME)  # as `serve` does
    assert not requested_weights(online)


def test_what_an_interrupted_download_has_left_takes_no_room_from_the_next_one(
    run: Run, online: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = f"models--{NAME.replace('/', '--')}"
    (cache / folder / "blobs").mkdir(parents=True)
    (part := cache / folder / "blobs" / "abc.0123.incomplete").touch()
    (lock := cache / ".locks" / folder / "abc.lock").parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setattr(disk, "free_disk", lambda directory: 0 if part.exists() else 10**9)
    assert run("pull", NAME).status == 0


ADDRESSES = (
    f"https://huggingface.co/{NAME}",
    f"http://hf.co/{NAME}/",
    f"hf.co/{NAME}",
    f"huggingface.co/{NAME}",
    f"https://huggingface.co/{NAME}/tree/main",
    f"https://huggingface.co/{NAME}/blob/main/config.json?download=true#L5",
    f"https://www.huggingface.co/{NAME}?library=mlx",
    f"hf://{NAME}",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_of_the_hub_is_its_repository(address: str) -> None:
    assert without_address(address) == full_name(address) == NAME
    assert name_and_path(address) == (NAME, NAME)
    assert name_and_path(f"mine={address}") == ("mine", NAME)


@pytest.mark.parametrize(
    "name", ["https://huggingface.co/a/b/tree/v1", "https://example.com/a/b", "hf.co/a", "xhf.co/a/b", "a/b", "./hf.co"]
)
def test_other_addresses_and_names_are_left_as_they_are(name: str) -> None:
    assert without_address(name) == full_name(name) == name


def test_what_an_address_names_is_pulled_found_and_removed(run: Run, online: list[str]) -> None:
    address = f"https://huggingface.co/{NAME}/tree/main"
    assert run("pull", address).status == 0
    [download] = downloads()
    assert resolve(address).directory == download.path
    found = Catalog().find(address)
    assert found is not None
    assert found.name == NAME
    assert run("rm", address, "--yes").status == 0
    other = run("pull", "https://huggingface.co/a/b/tree/v1")
    assert other.status == 1
    assert "there is no model named 'https://huggingface.co/a/b/tree/v1'" in other.stderr


def test_a_family_without_a_tag_is_its_default_and_the_message_says_so(run: Run, offline: None) -> None:
    for name in ("qwen3", "Qwen3:latest"):
        result = run("pull", name)
        assert result.stdout == f"{name} stands for qwen3:8b (mlx-community/Qwen3-8B-4bit)\n"
    assert full_name("llama3") == short_names()["llama3.1:8b"].repository
    assert full_name("gemma3") == short_names()["gemma3:4b"].repository
    assert full_name("smollm3") == short_names()["smollm3:3b"].repository
    assert default_name("qwen3:4b") is default_name("demo") is default_name("x" * 5000) is None


def test_a_directory_comes_before_the_family_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "qwen3").mkdir()
    monkeypatch.chdir(tmp_path)
    assert full_name("qwen3") == "qwen3"


def test_every_family_has_one_default() -> None:
    families: dict[str, list[bool]] = {}
    for name, row in short_names().items():
        families.setdefault(name.partition(":")[0], []).append(row.default)
    for family, defaults in families.items():
        assert len(defaults) == 1 or sum(defaults) == 1, family
        assert default_name(family) is not None


@pytest.mark.parametrize("name", ["mlx-community/Qwen3-4B-5bit", "qwen3:5b", "qwen3-4b"])
def test_a_name_that_does_not_exist_gets_near_ones(run: Run, online: list[str], name: str) -> None:
    result = run("pull", name)
    assert (result.status, result.stdout) == (1, "")
    assert "mlxpaged: " in result.stderr
    near = {"qwen3:5b": "qwen3:0.6b, qwen3:1.7b, qwen3:4b", "qwen3-4b": "qwen3:4b, "}
    assert f"short names: {near.get(name)}" in result.stderr or "/" in name
    found = "on the hub: " + NAME in result.stderr
    assert found == (name == "qwen3-4b")


def test_without_the_hub_a_miss_says_so(run: Run, offline: None) -> None:
    result = run("pull", "qwen3:5b")
    assert result.status == 1
    assert "the hub was not searched: " in result.stderr
    assert "Traceback" not in result.stderr
    failed = run("pull", "mlx-community/Qwen3-4B-4bit").stderr
    assert "could not be fetched from the hub" in failed
    assert "short names" not in failed, "the name is right"


@pytest.mark.parametrize("name", ["demo", str(DEMO_PATH)])
def test_what_is_on_this_machine_is_not_pulled(run: Run, offline: None, name: str) -> None:
    result = run("pull", name)
    assert (result.status, result.stderr) == (0, "")
    assert f"mlxpaged serve {name}" in result.stdout


def test_a_sigint_during_the_download_ends_it_without_a_traceback(tmp_path: Path, repository: Path) -> None:
    """In a real process: the library's threads hold an interrupted process until their files are complete."""
    with hub(NAME, repository, sizes_of(repository), stalls="model.safetensors") as (address, requests):
        env = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(tmp_path / "cache"), "NO_PROXY": "*", "no_proxy": "*"}
        with mlxpaged(tmp_path / "out", "pull", NAME, env=env) as command:
            wait_until(lambda: requested_weights([each for each in requests if "GET" in each]), DEADLINE)
            command.process.send_signal(signal.SIGINT)
            assert command.wait_end() == 130
    assert "Traceback" not in command.stderr
    assert "resumes the download" in command.stderr


def test_what_an_interrupted_download_has_left_is_deleted_by_the_next_one(
    run: Run, cache: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """But not what is being downloaded now: its lock is held."""
    with hub(NAME, repository, sizes_of(repository), stalls="model.safetensors") as (address, requests):
        env = {"HF_ENDPOINT": address, "HF_HUB_CACHE": str(cache), "NO_PROXY": "*", "no_proxy": "*"}
        with mlxpaged(tmp_path / "out", "pull", NAME, env=env) as command:
            wait_until(lambda: requested_weights([each for each in requests if "GET" in each]), DEADLINE)
            command.process.send_signal(signal.SIGINT)
            assert command.wait_end() == 130
    folder = f"models--{NAME.replace('/', '--')}"
    held = cache / folder / "blobs" / "abc.123.incomplete"
    held.touch()
    with (
        hub(NAME, repository, sizes_of(repository)) as (address, _),
        (cache / ".locks" / folder / "abc.lock").open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        point_to(address, monkeypatch)
        assert run("pull", NAME).status == 0
    assert [*held.parent.glob("*.incomplete")] == [held]


# -- ls and rm ---------------------------------------------------------------------------------------------------------


def test_an_encoder_is_pulled_with_its_modules_and_listed_as_what_it_is(
    run: Run, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_encoder(tmp_path / "encoder", "xlm-roberta", torch_dtype="float32")
    make_dense(path, "torch.nn.modules.activation.Tanh", outputs=8)
    sizes = {each.relative_to(path).as_posix(): each.stat().st_size for each in path.rglob("*") if each.is_file()}
    with hub("someone/tiny-encoder", path, sizes) as (address, _):
        point_to(address, monkeypatch)
        pulled = run("pull", "someone/tiny-encoder")
        assert "xlm-roberta (mlxpaged), float32" in pulled.stdout
        assert "context length 128\n" in pulled.stdout
        assert "are free beside its weights\n" in pulled.stdout
    [row] = json.loads(run("ls", "--json").stdout)
    assert (row["kind"], row["source"], row["served"]) == ("embedding", "mlxpaged", True)
    assert row["context_length"] == 128
    assert load_embedding_model(str(downloads()[0].path), None, 8192).dimensions == 8
    assert run("bench", str(path)).stderr.endswith("generates no text, so there is nothing to measure\n")


def test_pull_says_that_a_type_comes_from_mlx_vlm_and_refuses_one_that_nothing_has(
    run: Run, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlx_vlm: None
) -> None:
    path = tmp_path / "model"
    make_model(path, "talker")
    with hub("someone/talker", path, sizes_of(path)) as (address, requests):
        point_to(address, monkeypatch)
        pulled = run("pull", "someone/talker")
        assert pulled.stdout.startswith("someone/talker: vision, talker (mlx-vlm), ?, 0.5 MB, context length 512\n")
        assert "its whole context fits" in pulled.stdout
        [row] = json.loads(run("ls", "--json").stdout)
        assert (row["source"], row["served"]) == ("mlx-vlm", True)
        assert requested_weights(requests)
    (path / "config.json").write_text(json.dumps(config_of("painter")))
    with hub("someone/painter", path, sizes_of(path)) as (address, requests):
        point_to(address, monkeypatch)
        refused = run("pull", "someone/painter")
        assert refused.status == 1
        assert "that of mlx-vlm has no language model" in refused.stderr
        assert not requested_weights(requests)


def test_ls_says_why_a_model_is_not_served(run: Run, online: list[str], free: Callable[[int], None]) -> None:
    assert run("pull", NAME).status == 0
    path = downloads()[0].path
    (path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
    )
    assert "no: model-2.safetensors is missing: `mlxpaged pull" in run("ls").stdout
    (path / "model.safetensors.index.json").unlink()
    free(1_000_000)
    assert "no: its weights take" in run("ls").stdout
    free(10**10)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").unlink()
    (path / "config.json").write_text(json.dumps(config | {"model_type": "deberta", "quantization": {"bits": 4}}))
    [row] = json.loads(run("ls", "--json").stdout)
    assert (row["served"], row["quantization"]) == (False, "4-bit")
    assert "encoder" in row["reason"]


HOSTILE: list[dict[str, Any]] = [
    {"model_type": []},
    {"max_position_embeddings": None, "text_config": "x"},
    {"model_type": "xlm-roberta", "pad_token_id": "x"},
    {"model_type": "bert", "hidden_act": []},
    {"model_type": "modernbert", "rope_parameters": "x"},
    {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "sentence_transformers": "x"},
]


@pytest.mark.parametrize("fields", HOSTILE, ids=str)
def test_ls_shows_a_config_without_sense(run: Run, home: Path, offline: None, fields: dict[str, Any]) -> None:
    path = Path(shutil.copytree(DEMO_PATH, home / ".lmstudio" / "models" / "someone" / "odd"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    listed = run("ls", "--json")
    assert [row["name"] for row in json.loads(listed.stdout)] == ["lmstudio:someone/odd"]


def test_an_encoder_that_does_not_state_its_pooling_is_refused_before_its_weights_come(
    run: Run, cache: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_encoder(tmp_path / "encoder", "bert")
    (path / "modules.json").unlink()
    shutil.rmtree(path / "1_Pooling")
    with hub("someone/tiny-encoder", path, sizes_of(path)) as (address, requests):
        point_to(address, monkeypatch)
        refused = run("pull", "someone/tiny-encoder")
        assert (refused.status, "has no modules.json" in refused.stderr) == (1, True)
        assert not requested_weights(requests)
    shutil.copytree(path, home / ".lmstudio" / "models" / "someone" / "encoder")
    rows = {row["name"]: row for row in json.loads(run("ls", "--json").stdout)}
    assert "has no modules.json" in rows["lmstudio:someone/encoder"]["reason"]


def test_files_and_models_of_other_apps_are_not_pulled(
    run: Run, home: Path, offline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = as_gguf(make_tiny_model(tmp_path / "m", "llama"), tmp_path / "tiny.gguf")
    (folder := home / ".lmstudio" / "models" / "someone" / "tiny").mkdir(parents=True)
    shutil.copy(gguf, folder / "tiny-Q8_0.gguf")
    monkeypatch.chdir(tmp_path)
    for name in (str(gguf), "./tiny.gguf", "tiny.gguf", "m", "lmstudio:someone/tiny:Q8_0"):
        pulled = run("pull", name)
        assert (pulled.status, pulled.stdout) == (0, f"{name} is on this machine: mlxpaged serve {name}\n")
    for name in ("ollama:absent", "lmstudio:someone/absent"):
        assert f"has no model {name.partition(':')[2]}: " in run("pull", name).stderr


def test_rm_asks_and_deletes_only_downloads(
    run: Run, online: list[str], monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    assert run("pull", NAME).status == 0
    unasked = run("rm", NAME)
    assert (unasked.status, "use --yes" in unasked.stderr) == (1, True)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for answer, left in (("n\n", 1), ("", 1), ("y\n", 0)):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        result = run("rm", NAME)
        assert f"Delete {NAME}, " in result.stdout
        assert (len(downloads()), result.status) == (left, left)
    directory = run("rm", str(repository), "--yes")
    assert directory.status == 1
    assert "rm does not delete directories" in directory.stderr
    assert repository.is_dir()
    for name in ("qwen3:4b", "~no-such-user/model", 300 * "x"):
        assert "is not a downloaded model" in run("rm", name, "--yes").stderr


# -- short names and what fits -----------------------------------------------------------------------------------------


def test_every_short_name_is_of_an_architecture_that_the_probe_passes() -> None:
    repositories = [row.repository for row in short_names().values()]
    assert len(set(repositories)) == len(repositories)
    for name, row in short_names().items():
        assert name == name.lower()
        assert (row.kind is Kind.VISION) == (row.model_type in FAMILIES), name
        bytes_of_parameter = row.bytes / (row.parameters * 1e9)
        if row.model_type in ENCODERS:
            assert not row.kind.generates
            assert bytes_of_parameter == pytest.approx(2, abs=0.02) or bytes_of_parameter == pytest.approx(4, abs=0.02)
            continue
        assert row.repository.startswith("mlx-community/")
        modules = {module for module in modules_of(row.model_type) if has_module(module)}
        assert modules & (ARCHITECTURES.keys() - REFUSED.keys()), name
        assert 0.45 < bytes_of_parameter < 0.75, name


def test_a_short_name_stands_for_its_repository() -> None:
    assert full_name("QWEN3.6:35b") == "mlx-community/Qwen3.6-35B-A3B-4bit"
    assert short_name("mlx-community/Qwen3.6-35B-A3B-4bit") == "qwen3.6:35b"
    assert [full_name(name) for name in ("demo", "a/b:c", "./qwen3:4b", "qwen3:5b")] == [
        *("demo", "a/b:c", "./qwen3:4b", "qwen3:5b")
    ]
    assert short_name("someone/model") is None
    assert "llama3.2:1b" in near_names("llama3.2:2b")
    assert near_names("gema4:26b")[0] == "gemma4:26b"
    with pytest.raises(loader.ModelNotFoundError, match=r"did you mean llama3\.2:1b, llama3\.2:3b\?"):
        resolve("llama3.2:2b")


def test_the_model_that_is_suggested_is_the_largest_that_fits() -> None:
    rows = short_names()
    for free in (10**9, 5 * 10**9, 30 * 10**9):
        name = largest_within(free)
        assert name is not None
        assert rows[name].bytes <= free
        assert not any(rows[name].bytes < row.bytes <= free for row in rows.values() if row.kind.generates)
    assert largest_within(10**8) is None


QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "quantization": {"group_size": 64, "bits": 4},
}


def test_what_fits_is_computed_from_the_config_alone(tmp_path: Path) -> None:
    """The figure of docs/models.md, of 4 billion parameters that would take 16 GB."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    found = fit(layers_of(tmp_path), 5 * 10**9)
    assert found.bytes_per_token == 144 * 1024
    assert found.tokens == 5 * 10**9 // (144 * 1024)


LLAMA4 = pytest.param("llama4", marks=since_mlx_lm_0_32)  # before, its chunks must not be shorter than 256 tokens


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5_moe", "deepseek_v3", LLAMA4, "falcon_h1", "gpt_oss"])
def test_what_layers_keep_is_known_without_the_weights(tmp_path: Path, name: str) -> None:
    path = make_architecture(tmp_path / "model", name)
    for weights in path.glob("*.safetensors"):
        weights.unlink()
    found = fit(layers_of(path), 10**6)
    assert found.tokens > 0
    assert fit(layers_of(path), 2 * 10**6).tokens > found.tokens
    assert fit(layers_of(path), 0).tokens == 0


def test_a_window_takes_memory_up_to_its_length_only() -> None:
    import mlx.core as mx

    everywhere, window = KV(1, 8, 8, mx.float16), KV(1, 8, 8, mx.float16, window=100)
    assert fit([everywhere], 3200).tokens == 100
    assert fit([everywhere, window], 6400).tokens == 100
    assert fit([everywhere, window], 9600).tokens == 200
    assert fit([PerSequence(lambda: None, 64)], 6400).tokens == 100


# -- GGUF --------------------------------------------------------------------------------------------------------------


def test_a_gguf_file_is_pulled_listed_found_and_removed(
    run: Run, cache: Path, free: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(8 * 10**9)
    (repository := tmp_path / "gguf").mkdir()
    path = as_gguf(make_tiny_model(tmp_path / "m", "llama"), repository / "tiny-Q8_0.gguf")
    sizes = {path.name: path.stat().st_size, "tiny-BF16.gguf": 10**18}
    with hub("someone/tiny-GGUF", repository, sizes) as (address, _):
        point_to(address, monkeypatch)
        pulled = run("pull", "someone/tiny-GGUF")
        assert pulled.status == 0, pulled.stderr
        assert run("pull", "someone/tiny-GGUF:Q5_0").status == 1
    assert "someone/tiny-GGUF: gguf, tiny-Q8_0.gguf, " in pulled.stdout
    assert "someone/tiny-GGUF: text, llama (gguf), F32, " in pulled.stdout
    assert "its whole context fits" in pulled.stdout
    [row] = json.loads(run("ls", "--json").stdout)
    assert (row["name"], row["quantization"], row["context_length"], row["served"]) == (
        "someone/tiny-GGUF",
        "F32",
        512,
        True,
    )
    for name in ("someone/tiny-GGUF", "someone/tiny-GGUF:Q8_0"):
        found = Catalog().find(name)
        assert found is not None
        assert (found.path.name, found.size_bytes) == ("tiny-Q8_0.gguf", path.stat().st_size)
    assert Catalog().find("someone/tiny-GGUF:Q5_0") is None
    assert [each.name for each in Catalog((repository,)).all()] == ["tiny-Q8_0.gguf", "someone/tiny-GGUF"]
    assert run("rm", "someone/tiny-GGUF", "--yes").status == 0
    assert Catalog().find("someone/tiny-GGUF") is None
