"""Language models of mlx-vlm, for types that mlx-lm lacks. A stand-in package makes them: no test needs mlx-vlm."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.file_facts import file_facts
from mlxpaged.models.files.architectures import Source, source_of
from mlxpaged.models.fit import layers_of
from mlxpaged.models.layers import KV, Recurrent, is_per_sequence
from mlxpaged.models.loader import load_model
from mlxpaged.models.sources.gguf.directory import gguf_directory
from tests.models.encoders import make_encoder
from tests.models.gguf_models import as_gguf
from tests.models.stand_in_mlx_vlm import config_of, install, make_model, uninstall
from tests.models.test_architectures import BRIEF, Case, assert_same
from tests.support import make_tiny_model


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install(tmp_path / "site-packages", monkeypatch)
    yield
    uninstall()


@pytest.mark.parametrize(("model_type", "bits"), [("talker", None), ("talker-2", None), ("talker", 4)])
def test_a_type_of_mlx_vlm_gets_its_tokens(model_type: str, bits: int | None, tmp_path: Path) -> None:
    plain = make_model(tmp_path / "model", model_type, bits)
    case = Case(tmp_path / "model", model_type, BRIEF, plain)
    assert case.served.source is Source.MLX_VLM
    assert [type(layer) for layer in case.served.layers] == [KV, Recurrent, KV]  # rows of all sequences at once
    assert [layer.window for layer in case.served.kv_layers] == [None, 12]
    core = case.engine(max_num_batched_tokens=24)
    for _ in range(2):
        assert_same(case.generate(core, case.prompts, (0, 1, 2, 3, 4, 5)), case.answers)
    assert core.stats().scheduler.prefix_hit_tokens_total > 0
    assert_same(case.generate(core, case.branches), case.branch_answers)


def test_what_fits_is_known_before_the_download(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "talker")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert [type(layer) for layer in layers_of(tmp_path / "model")] == [KV, Recurrent, KV]


def test_a_type_that_fails_the_probe_is_refused_with_its_source_and_the_reason(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "sees_ahead")
    with pytest.raises(UnsupportedModelError) as error:
        load_model(str(tmp_path / "model"))
    assert "sees_ahead models of mlx-vlm are not supported yet, because the paged batch does not" in str(error.value)


def test_a_type_that_is_wrong_only_for_a_single_row_does_not_run_as_one_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(tmp_path / "model", "forgets")
    assert is_per_sequence(load_model(str(tmp_path / "model")).layers)
    assert "decoding alone" in caplog.text


def test_a_type_that_cannot_be_built_is_refused_with_the_reason(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "talker")
    config = config_of("talker")
    del config["text_config"]["layer_types"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"mlx-vlm cannot build its model: TypeError: .*'layer_types'"):
        load_model(str(tmp_path / "model"))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("painter", "that of mlx-vlm has no language model, so it generates no text"),
        ("listener", "that of mlx-vlm cannot be imported: No module named 'a_library_that_is_missing'"),
        ("stranger", "neither has mlx-vlm; a newer mlx-lm may have it"),
        ("interpolate", "neither has mlx-vlm"),
        ("talker.language", "neither has mlx-vlm"),
    ],
)
def test_what_is_no_language_model_is_refused_by_its_config(model_type: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"\(model_type '{model_type}'\), and {reason}"):
        source_of({"model_type": model_type})


def test_without_mlx_vlm_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[1:])
    with pytest.raises(UnsupportedModelError, match="a newer mlx-lm may have it, or mlx-vlm: `pip install requests"):
        source_of({"model_type": "talker"})


def test_a_type_that_mlx_lm_has_is_not_taken_from_mlx_vlm(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "mlx_vlm" / "models" / "llama"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError\n")
    assert source_of({"model_type": "llama"}) is Source.MLX_LM
    assert load_model(str(make_tiny_model(tmp_path / "model", "llama"))).source is Source.MLX_LM


def test_the_source_of_a_model_on_the_disk_is_known(tmp_path: Path) -> None:
    make_model(tmp_path / "talker", "talker")
    make_model(tmp_path / "painter", "talker")
    (tmp_path / "painter" / "config.json").write_text(json.dumps(config_of("painter")))
    file = as_gguf(make_tiny_model(tmp_path / "llama", "llama"), tmp_path / "tiny-Q8_0.gguf")
    paths = tmp_path / "talker", tmp_path / "llama", make_encoder(tmp_path / "bert", "bert"), tmp_path / "painter"
    found = [file_facts(path.name, path).source for path in (*paths, file, gguf_directory(file))]
    assert found == [Source.MLX_VLM, Source.MLX_LM, Source.OWN, None, Source.GGUF, Source.GGUF]


def test_code_of_a_models_directory_never_runs(tmp_path: Path) -> None:
    path = tmp_path / "model"
    make_model(path, "talker")
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    for module in ("configuration_own", "modeling_own", "tokenization_own", "processing_own", "talker"):
        (path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
    (path / "config.json").write_text(json.dumps(config_of("talker") | {"auto_map": names}))
    tokenizer = json.loads((path / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert load_model(str(path)).source is Source.MLX_VLM
    (path / "config.json").write_text(json.dumps(config_of("talker") | {"model_file": "modeling_own.py"}))
    with pytest.raises(UnsupportedModelError, match="asks for Python code"):
        load_model(str(path))
    assert not (tmp_path / "ran").exists()
