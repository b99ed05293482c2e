"""The files of a model give its tensors by their names, whatever the names of the files are."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.sources.gguf.directory import gguf_directory
from mlxpaged.models.sources.model_files import ModelFiles
from tests.models.gguf_models import as_gguf
from tests.support import make_tiny_model


def test_tensors_of_all_files_have_their_names_and_say_who_wrote_them(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "model-1.safetensors"), {"a": mx.ones(3)}, {"format": "mlx"})
    mx.save_safetensors(str(tmp_path / "model-2.safetensors"), {"b": mx.zeros((2, 4))}, {"format": "pt"})
    mx.save_safetensors(str(tmp_path / "other.safetensors"), {"c": mx.ones(1)})
    files = ModelFiles(tmp_path)
    assert {name: array.shape for name, array in files.tensors().items()} == {"a": (3,), "b": (2, 4)}
    assert files.shapes == [[3], [2, 4]]
    assert [each.is_converted for each in files.stored()] == [True, False]
    alone = ModelFiles(tmp_path / "other.safetensors")
    assert list(alone.tensors()) == ["c"]
    assert alone.directory == tmp_path


def test_a_gguf_file_has_shapes_and_a_config_and_no_tensors_but_those_that_are_loaded(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m", "llama")
    files = ModelFiles(gguf_directory(as_gguf(directory, tmp_path / "m.gguf")))
    own = ModelFiles(directory)
    assert files.is_gguf
    assert files.tensors() == {}
    assert files.config["hidden_size"] == own.config["hidden_size"]
    assert sorted(files.shapes) == sorted(own.shapes)


def test_a_damaged_file_is_refused_before_mlx_opens_it(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"a": mx.ones(3)})
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-4])
    with pytest.raises(UnsupportedModelError, match="cut short"):
        ModelFiles(tmp_path).tensors()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(UnsupportedModelError, match="not usable"):
        ModelFiles(tmp_path).check_sizes({})
