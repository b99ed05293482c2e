"""What is whole on the disk is served if the hub cannot be reached, and what is not says how to go on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlxpaged.models.errors import HubError
from mlxpaged.models.sources.completeness import missing_files
from mlxpaged.models.sources.downloads import downloads
from mlxpaged.models.sources.hub import download_weights
from mlxpaged.models.sources.resolve import resolve
from mlxpaged.registry.catalog import Catalog
from tests.cli.helpers import hub
from tests.models.architectures import make_architecture
from tests.models.gguf_models import as_gguf
from tests.support import DEMO_PATH

NAME = "someone/model"
GGUF = "m-Q8_0.gguf"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Unavailable(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def point_to(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.fixture(params=["offline mode", "no network", "503"])
def go_offline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it when all is downloaded."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Unavailable)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def go() -> None:
        if request.param == "offline mode":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        address = f"http://127.0.0.1:{server.server_port}" if request.param == "503" else "http://127.0.0.1:9"
        point_to(address, monkeypatch)

    yield go
    server.shutdown()
    server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "made"))
    return tmp_path / "cache" / "models--someone--model"


@pytest.fixture
def repository(tmp_path: Path, cache: Path) -> Path:
    """Safetensors in two shards, and a GGUF file, as many repositories have both."""
    path = Path(shutil.copytree(DEMO_PATH, tmp_path / "repository"))
    (path / "model.safetensors").rename(path / SHARDS[0])
    shutil.copy(path / SHARDS[0], path / SHARDS[1])
    names = {"a": SHARDS[0], "b": SHARDS[1]}
    (path / "model.safetensors.index.json").write_text(f'{{"weight_map": {names}}}'.replace("'", '"'))
    llama = make_architecture(tmp_path / "llama", "llama", layer_types=None, sliding_window=None)
    shutil.copy(as_gguf(llama, tmp_path / "model.gguf"), path / GGUF)
    (path / "README.md").write_text("# A model")
    return path


def fetch(repository: Path, monkeypatch: pytest.MonkeyPatch, name: str = NAME) -> None:
    """Download it from a stand-in of the hub. The hub's library notes the files of the repository."""
    sizes = {path.name: path.stat().st_size for path in repository.iterdir()}
    with hub(NAME, repository, sizes) as (address, _):
        point_to(address, monkeypatch)
        resolve(name) if name != NAME else download_weights(name, SHARDS)


def snapshot(cache: Path) -> Path:
    [found] = (cache / "snapshots").iterdir()
    return found


def listed() -> list[str]:
    return [found.name for found in Catalog(()).all()]


def test_a_gguf_file_is_served_although_the_repository_has_safetensors(
    cache: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, go_offline: Callable[[], None]
) -> None:
    fetch(repository, monkeypatch, f"{NAME}:Q8_0")
    assert not any((snapshot(cache) / name).exists() for name in SHARDS)
    go_offline()
    assert (resolve(f"{NAME}:Q8_0").directory / "model.gguf").resolve() == (snapshot(cache) / GGUF).resolve()
    assert resolve(NAME).directory == resolve(f"{NAME}:Q8_0").directory
    with pytest.raises(HubError, match=r"\*Q4_K_M\*\.gguf is missing beside m-Q8_0\.gguf: `mlxpaged pull"):
        resolve(f"{NAME}:Q4_K_M")
    assert listed() == [NAME]


def test_safetensors_are_served_without_files_that_a_load_does_not_need(
    cache: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, go_offline: Callable[[], None]
) -> None:
    fetch(repository, monkeypatch)
    assert not (snapshot(cache) / "README.md").exists()
    (snapshot(cache) / "generation_config.json").unlink()
    go_offline()
    assert download_weights(NAME) == snapshot(cache)
    assert [download.path for download in downloads()] == [snapshot(cache)]
    assert listed() == [NAME]


@pytest.mark.parametrize("is_dangling", [False, True])
def test_a_missing_shard_says_how_to_resume(
    cache: Path,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    go_offline: Callable[[], None],
    is_dangling: bool,
) -> None:
    fetch(repository, monkeypatch)
    shard = snapshot(cache) / SHARDS[1]
    if is_dangling:
        (snapshot(cache) / "model.safetensors.index.json").unlink()
        shard.unlink()
        shard.symlink_to("../../blobs/gone")
    else:
        shard.unlink()
    go_offline()
    reason = rf"{SHARDS[1]} is missing: `mlxpaged pull someone/model` resumes the download"
    with pytest.raises(HubError, match=reason):
        download_weights(NAME)
    assert listed() == []


def test_a_revision_that_is_whole_is_served_if_the_newest_is_not(
    cache: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, go_offline: Callable[[], None]
) -> None:
    fetch(repository, monkeypatch)
    whole, newer = snapshot(cache), cache / "snapshots" / ("f" * 40)
    newer.mkdir()
    shutil.copy(whole / "config.json", newer)
    (cache / "refs" / "main").write_text(newer.name)
    go_offline()
    assert download_weights(NAME) == whole
    assert [download.path for download in downloads()] == [whole]
    assert listed() == [NAME]


def test_a_revision_is_served_although_no_branch_names_it(
    cache: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, go_offline: Callable[[], None]
) -> None:
    fetch(repository, monkeypatch)
    shutil.rmtree(cache / "refs")
    go_offline()
    assert download_weights(NAME) == snapshot(cache)
    assert listed() == [NAME]


def test_of_two_whole_revisions_that_of_main_is_served(
    cache: Path, repository: Path, monkeypatch: pytest.MonkeyPatch, go_offline: Callable[[], None]
) -> None:
    fetch(repository, monkeypatch)
    main = snapshot(cache)
    shutil.copytree(main, cache / "snapshots" / ("f" * 40), symlinks=True)
    go_offline()
    assert download_weights(NAME) == main


def test_what_is_not_downloaded_is_not_found(cache: Path, go_offline: Callable[[], None]) -> None:
    go_offline()
    with pytest.raises(HubError, match=r"someone/model could not be fetched from the hub"):
        resolve(NAME)


def test_of_a_model_in_parts_all_must_be_there(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"m-Q8_0-0000{number}-of-00003.gguf").write_bytes(b"GGUF")
    assert missing_files(tmp_path) == []
    (tmp_path / "m-Q8_0-00002-of-00003.gguf").unlink()
    assert missing_files(tmp_path) == ["m-Q8_0-00002-of-00003.gguf"]
    assert missing_files(tmp_path, "Q4_K_M") == ["*Q4_K_M*.gguf"]
