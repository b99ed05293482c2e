"""Models of Ollama and LM Studio are served where they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlxpaged.models.errors import ModelNotFoundError
from mlxpaged.models.sources.resolve import resolve
from mlxpaged.models.sources.source import source_models

DIGEST = "0a" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("OLLAMA_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def pull(root: Path, place: str, gguf: Path, digest: str = DIGEST) -> Path:
    """What `ollama pull` leaves. Returns the blob."""
    blob = root / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(gguf, blob)
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{'1' * 64}", "size": 1},
        {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": 1},
    ]
    manifest = root / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


@pytest.mark.parametrize(
    ("place", "name", "listed"),
    [
        ("registry.ollama.ai/library/tiny/1b", "ollama:tiny:1b", "ollama:tiny:1b"),
        ("registry.ollama.ai/library/tiny/latest", "ollama:tiny", "ollama:tiny:latest"),
        ("registry.ollama.ai/someone/tiny/1b", "ollama:someone/tiny:1b", "ollama:someone/tiny:1b"),
        (
            "localhost:5000/someone/tiny/1b",
            "ollama:localhost:5000/someone/tiny:1b",
            "ollama:localhost:5000/someone/tiny:1b",
        ),
        ("hf.co/someone/tiny/Q4_K_M", "ollama:hf.co/someone/tiny:Q4_K_M", "ollama:hf.co/someone/tiny:Q4_K_M"),
    ],
)
def test_a_model_of_ollama_is_used_where_it_is(place: str, name: str, listed: str, home: Path, gguf: Path) -> None:
    blob = pull(home / ".ollama" / "models", place, gguf)
    assert (resolve(name).directory / "model.gguf").readlink() == blob
    assert [(each.name, each.path, each.bytes) for each in source_models()] == [(listed, blob, gguf.stat().st_size)]


def test_the_directory_of_ollama_can_be_another(home: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "other"))
    blob = pull(home / "other", "registry.ollama.ai/library/tiny/latest", gguf)
    assert [each.path for each in source_models()] == [blob]


def test_a_folder_that_cannot_be_read_has_no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of another user. Root can read all, so the name is one that no user can read."""
    for variable in ("HOME", "OLLAMA_MODELS"):
        monkeypatch.setenv(variable, f"/{'x' * 300}")
    assert source_models() == []


@pytest.mark.parametrize(("folder", "other"), [(".lmstudio", ".cache/lm-studio"), (".cache/lm-studio", None)])
def test_models_of_lm_studio_are_used_where_they_are(
    folder: str, other: str | None, home: Path, gguf: Path, mlx: Path
) -> None:
    models = home / folder / "models"
    if other is not None:
        (home / other / "models").mkdir(parents=True)
    shutil.copytree(mlx, models / "someone" / "tiny-mlx")
    (files := models / "someone" / "tiny-GGUF").mkdir()
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "mmproj-tiny.gguf"):
        shutil.copy(gguf, files / name)
    (files / "._tiny-Q8_0.gguf").write_bytes(b"Mac OS X")  # as on a disk of another system
    names = [f"lmstudio:someone/tiny-GGUF/tiny-{kind}.gguf" for kind in ("Q4_K_M", "Q8_0")]
    assert [each.name for each in source_models()] == [*names, "lmstudio:someone/tiny-mlx"]
    assert resolve("lmstudio:someone/tiny-mlx").directory == models / "someone" / "tiny-mlx"
    for name in (names[0], "lmstudio:someone/tiny-GGUF:Q4_K_M"):
        assert (resolve(name).directory / "model.gguf").readlink() == files / "tiny-Q4_K_M.gguf"


@pytest.mark.parametrize(
    "name",
    [
        *("ollama:absent", "ollama:../../x/y:z", "ollama:", "ollama:/etc/x/y:z", "ollama:x:/etc/hosts"),
        *("lmstudio:absent", "lmstudio:../..", "lmstudio:a/b:Q8_0", "lmstudio:/etc/hosts", "lmstudio:."),
    ],
)
def test_a_model_that_is_not_there_is_named(name: str, home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no model .*`mlxpaged ls` lists them"):
        resolve(name)


DAMAGED = [
    "",
    "[]",
    '{"layers": 1}',
    '{"layers": [1]}',
    '{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../etc/passwd"}]}',
    "[" * 100_000,
    " " * (2**20 + 1),
]


def test_weights_that_are_gone_are_no_model(home: Path, gguf: Path) -> None:
    pull(home / ".ollama" / "models", "registry.ollama.ai/library/tiny/latest", gguf).unlink()
    assert source_models() == []
    with pytest.raises(ModelNotFoundError, match="Ollama has no model tiny"):
        resolve("ollama:tiny")


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_manifest_is_no_model(content: str, home: Path, gguf: Path) -> None:
    pull(home / ".ollama" / "models", "registry.ollama.ai/library/tiny/latest", gguf)
    (home / ".ollama/models/manifests/registry.ollama.ai/library/tiny/latest").write_text(content)
    assert source_models() == []
    with pytest.raises(ModelNotFoundError):
        resolve("ollama:tiny")
