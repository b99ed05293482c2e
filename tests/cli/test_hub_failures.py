"""What is whole on the disk is served if the hub fails at any point, and all commands agree on what is whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from mlxpaged.models.errors import HubError, ModelNotFoundError
from mlxpaged.models.loader import load_model, resolve_mtp
from mlxpaged.models.sources import hub as hub_source
from mlxpaged.models.sources.hub import download_small_files, download_weights
from mlxpaged.models.sources.resolve import resolve
from mlxpaged.registry.catalog import Catalog
from tests.cli.helpers import Result, hub
from tests.models.encoders import make_dense, make_encoder
from tests.models.test_offline import NAME, SHARDS, cache, point_to, repository, snapshot
from tests.support import DEMO_PATH

__all__ = ["cache", "repository"]  # fixtures

Run = Callable[..., Result]
NOWHERE = "http://127.0.0.1:9"


def sizes_of(directory: Path) -> dict[str, int]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.stat().st_size for path in files}


def fetch(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str = NAME, files: tuple[str, ...] = SHARDS) -> Path:
    """Download a repository from the stand-in."""
    with hub(NAME, directory, sizes_of(directory)) as (address, _):
        point_to(address, monkeypatch)
        return download_weights(name, files)


@pytest.fixture
def model(cache: Path, tmp_path: Path) -> Path:
    """A repository that can be loaded."""
    return Path(shutil.copytree(DEMO_PATH, tmp_path / "model"))


def listed() -> dict[str, Path]:
    return {found.name: found.path for found in Catalog(()).all()}


def ls(run: Run) -> tuple[bool, str]:
    [row] = json.loads(run("ls", "--json").stdout)
    return row["served"], str(row["reason"])


# -- a hub that fails --------------------------------------------------------------------------------------------------


class Broken(Exception):
    """What the HTTP library raises."""


@pytest.mark.parametrize("fails", ["small files", "weights"])
def test_a_hub_that_lists_a_new_revision_and_does_not_send_it_leaves_the_old_one(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    fetch(model, monkeypatch, files=("model.safetensors",))
    whole = snapshot(cache)

    def broken(name: str, allow_patterns: list[str]) -> str:
        if fails == "small files" or len(allow_patterns) > len(hub_source.SMALL_FILES):
            raise Broken("502 Bad Gateway")
        newer = cache / "snapshots" / ("f" * 40)
        newer.mkdir()
        for path in DEMO_PATH.glob("*.json"):
            shutil.copy(path, newer)
        (cache / "refs" / "main").write_text(newer.name)
        return str(newer)

    monkeypatch.setattr(hub_source, "snapshot_download", broken)
    with hub(NAME, model, sizes_of(model)) as (address, _):
        point_to(address, monkeypatch)
        assert resolve(NAME).directory == whole
        small = download_small_files(NAME)
        assert download_weights(NAME, () if small is None else ("model.safetensors",)) == whole  # as `pull` does
    assert listed() == {NAME: whole}


def test_what_is_whole_is_served_after_one_request_that_fails(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that answers nothing takes as long as the timeout."""
    fetch(model, monkeypatch, files=("model.safetensors",))
    asked = []

    def fail(*_: Any, **__: Any) -> None:
        asked.append("once")
        raise Broken("timed out")

    monkeypatch.setattr(HfApi, "model_info", fail)
    monkeypatch.setattr(hub_source, "snapshot_download", fail)
    assert resolve(NAME).directory == snapshot(cache)
    assert asked == ["once"]


def test_a_repository_that_is_gone_from_the_hub_is_served(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fetch(model, monkeypatch, files=("model.safetensors",))
    (tmp_path / "other").mkdir()
    with hub("someone/other", tmp_path / "other") as (address, _):
        point_to(address, monkeypatch)
        assert resolve(NAME).directory == snapshot(cache)
        (snapshot(cache) / "model.safetensors").unlink()
        # Before huggingface_hub 1.22, the library returned the folder.
        with pytest.raises(ModelNotFoundError, match=r"nor a repository on the hub|files are missing; on this machine"):
            resolve(NAME)


def test_what_is_here_in_part_says_what_is_missing_beside_the_error(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    fetch(model, monkeypatch, files=("model.safetensors",))
    (snapshot(cache) / "model.safetensors").unlink()
    point_to(NOWHERE, monkeypatch)
    with pytest.raises(HubError) as raised:
        resolve(NAME)
    assert str(raised.value).startswith(f"{NAME} could not be fetched from the hub: ")
    assert str(raised.value).endswith(
        f"model*.safetensors or *.gguf is missing: `mlxpaged pull {NAME}` resumes the download"
    )
    assert ls(run) == (False, f"model*.safetensors or *.gguf is missing: `mlxpaged pull {NAME}` resumes the download")
    pulled = run("pull", NAME)
    assert (pulled.status, "is missing" in pulled.stderr) == (1, True)


def test_pull_says_that_the_hub_was_not_there(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    directory = fetch(model, monkeypatch, files=("model.safetensors",))
    point_to(NOWHERE, monkeypatch)
    pulled = run("pull", NAME)
    assert pulled.status == 0
    assert pulled.stdout.splitlines()[:2] == [
        f"the hub does not list the files of {NAME} now; what is on this machine is whole",
        f"it is in {directory}",
    ]


# -- what is whole -----------------------------------------------------------------------------------------------------


def numbered(directory: Path) -> None:
    """The first of two parts, without an index: another program has downloaded it."""
    (directory / "model.safetensors").rename(directory / SHARDS[0])


MISSING: dict[str, tuple[Callable[[Path], Any], str]] = {
    "config": (lambda path: (path / "config.json").unlink(), "config.json"),
    "tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json"),
    "parts": (numbered, SHARDS[1]),
    "weights": (lambda path: (path / "model.safetensors").unlink(), "model*.safetensors or *.gguf"),
}


@pytest.mark.parametrize("kind", MISSING)
def test_all_agree_on_what_is_missing(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, run: Run, kind: str
) -> None:
    fetch(model, monkeypatch, files=("model.safetensors",))
    remove, name = MISSING[kind]
    remove(snapshot(cache))
    point_to(NOWHERE, monkeypatch)
    assert listed() == {}
    served, reason = ls(run)
    assert (served, reason) == (False, f"{name} is missing: `mlxpaged pull {NAME}` resumes the download")
    for call in (resolve, load_model):
        with pytest.raises(HubError) as raised:
            call(NAME)
        assert reason in str(raised.value)
    assert reason in run("pull", NAME).stderr


def test_files_that_a_load_does_not_need_are_not_missing(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    (model / "README.md").write_text("# A model")
    fetch(model, monkeypatch, files=("model.safetensors",))
    for name in ("generation_config.json", "chat_template.jinja"):
        (snapshot(cache) / name).unlink(missing_ok=True)
    point_to(NOWHERE, monkeypatch)
    assert (ls(run)[0], list(listed()), resolve(NAME).directory) == (True, [NAME], snapshot(cache))


@pytest.mark.parametrize("file", ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"])
def test_the_modules_of_an_embedding_model_are_parts_of_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, file: str
) -> None:
    path = make_encoder(tmp_path / "encoder", "bert")
    make_dense(path, "torch.nn.modules.activation.Tanh", outputs=8)
    fetch(path, monkeypatch, files=("model.safetensors",))
    point_to(NOWHERE, monkeypatch)
    assert (resolve(NAME).directory, list(listed())) == (snapshot(cache), [NAME])
    (snapshot(cache) / file).unlink()
    assert listed() == {}
    assert ls(run) == (False, f"{file} is missing: `mlxpaged pull {NAME}` resumes the download")
    with pytest.raises(HubError, match=f"{file} is missing"):
        resolve(NAME)


def test_of_two_quantizations_the_one_with_all_its_parts_is_served(
    repository: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """The larger one would be chosen if it were whole."""
    fetch(repository, monkeypatch, f"{NAME}:Q8_0", ("m-Q8_0.gguf",))
    with (snapshot(cache) / "m-BF16-00001-of-00002.gguf").open("wb") as file:
        file.truncate(2 * (repository / "m-Q8_0.gguf").stat().st_size)
    point_to(NOWHERE, monkeypatch)
    assert listed() == {NAME: snapshot(cache) / "m-Q8_0.gguf"}
    assert (resolve(NAME).directory / "model.gguf").readlink().name == "m-Q8_0.gguf"
    assert ls(run)[0]
    with pytest.raises(HubError, match=r"m-BF16-00002-of-00002\.gguf is missing beside m-BF16-00001"):
        resolve(f"{NAME}:BF16")
    assert Catalog(()).find(f"{NAME}:BF16") is None


def test_an_older_revision_is_served_for_the_quantization_that_it_has(
    repository: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(repository, monkeypatch, f"{NAME}:Q8_0", ("m-Q8_0.gguf",))
    older, newer = snapshot(cache), cache / "snapshots" / ("f" * 40)
    newer.mkdir()
    shutil.copy(repository / "m-Q8_0.gguf", newer / "m-Q4_K_M.gguf")
    (cache / "refs" / "main").write_text(newer.name)
    point_to(NOWHERE, monkeypatch)
    for kind, place in (("Q8_0", older), ("Q4_K_M", newer)):
        assert (resolve(f"{NAME}:{kind}").directory / "model.gguf").readlink().parent == place
        found = Catalog(()).find(f"{NAME}:{kind}")
        assert found is not None
        assert found.path.parent == place


def test_a_quantization_is_found_although_safetensors_are_here_too(
    repository: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(repository, monkeypatch)
    shutil.copy(repository / "m-Q8_0.gguf", snapshot(cache))
    found = Catalog(()).find(f"{NAME}:Q8_0")
    assert found is not None
    assert found.path == snapshot(cache) / "m-Q8_0.gguf"


# -- draft heads, and directories --------------------------------------------------------------------------------------


def test_a_draft_head_needs_weights_only(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (head := tmp_path / "head").mkdir()
    shutil.copy(DEMO_PATH / "model.safetensors", head / "model.safetensors")
    (head / "README.md").write_text("# A draft head")
    with hub(NAME, head, sizes_of(head)) as (address, _):
        point_to(address, monkeypatch)
        directory = resolve_mtp(NAME).directory
    point_to(NOWHERE, monkeypatch)
    assert resolve_mtp(NAME).directory == directory == snapshot(cache)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_mtp(NAME).directory == directory


def test_a_directory_without_a_shard_says_which_one(model: Path) -> None:
    """It is asked only if the load fails: an index may name files of before a conversion."""
    names = {"model.embed_tokens.weight": SHARDS[0], "model.norm.weight": SHARDS[1]}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    shutil.copy(model / "model.safetensors", model / SHARDS[0])
    (model / "model.safetensors").unlink()
    assert load_model(str(model)).num_parameters > 0
    truncated(model / SHARDS[0])
    with pytest.raises(Exception, match=rf"model cannot be loaded: {SHARDS[1]} is missing"):
        load_model(str(model))


def truncated(path: Path) -> None:
    """Leave half of the tensors in a file."""
    import mlx.core as mx

    tensors: Any = mx.load(str(path))
    path.unlink()
    mx.save_safetensors(str(path), {name: tensors[name] for name in sorted(tensors)[::2]})
