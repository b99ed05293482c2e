"""What is refused by config.json, the names of the files and their sizes, before weights are downloaded or read."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from huggingface_hub import HfApi, constants

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import DEMO_PATH, LoadOptions, load_model
from mlxpaged.models.sources import local
from mlxpaged.models.sources.preflight import Reserved, check_model
from mlxpaged.models.sources.resolve import resolve
from tests.cli.helpers import hub
from tests.support import make_tiny_model

GB = 10**9
LLAMA = {"model_type": "llama"}
FILES: dict[str, int | None] = {
    "config.json": 700,
    "model-00001-of-00002.safetensors": 4 * GB,
    "model-00002-of-00002.safetensors": 3 * GB,
    "tokenizer.json": 2_000_000,
}
CODE_TOKENIZER = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}


def check(
    config: Mapping[str, Any] | None = LLAMA,
    tokenizer_config: Mapping[str, Any] | None = None,
    sizes: Mapping[str, int | None] = FILES,
    free_bytes: int = 8 * GB,
) -> None:
    check_model(config, tokenizer_config or {}, sizes, free_bytes)


def without(*names: str, **more: int) -> dict[str, int | None]:
    return {name: size for name, size in FILES.items() if name not in names} | more


# -- architectures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "mistral", "phi-msft", "kimi_k2", "lille-130m"])
def test_an_architecture_of_mlx_lm_passes_by_its_own_and_its_other_names(model_type: str) -> None:
    check({"model_type": model_type})


@pytest.mark.parametrize("model_type", ["albert", "deberta-v2", "distilbert", "eurobert"])
def test_an_encoder_of_an_unknown_kind_is_refused_with_what_can_be_used_instead(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"encoder .*'{model_type}'.*use BERT"):
        check({"model_type": model_type})


@pytest.mark.parametrize("model_type", ["llama9", "Llama", "", ".", "llama.", "..utils", "a/b", "a\0b"])
def test_an_unknown_architecture_is_named_with_the_version_of_mlx_lm(model_type: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        check({"model_type": model_type})
    message = str(error.value)
    assert f"mlx-lm {mlx_lm.__version__} does not have its architecture (model_type {model_type!r})" in message
    assert "a newer mlx-lm may have it" in message


def test_to_look_for_an_architecture_does_not_import_it() -> None:
    name = "mlx_lm.models.rwkv7"
    was_imported = name in sys.modules
    check({"model_type": "rwkv7"})
    assert (name in sys.modules) == was_imported


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": ["llama"]}], ids=str)
def test_a_config_without_model_type_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json has no model_type"):
        check(config)


def test_a_model_that_is_python_code_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Python code of the repository \(model_file\)"):
        check(LLAMA | {"model_file": "own.py"})


# -- tokenizers --------------------------------------------------------------------------------------------------------


def test_a_tokenizer_that_is_only_python_code_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="its tokenizer is only Python code"):
        check(tokenizer_config=CODE_TOKENIZER, sizes=without("tokenizer.json", **{"tokenization_own.py": 5000}))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "qwen.tiktoken"])
def test_a_tokenizer_with_code_beside_its_files_passes(file: str) -> None:
    check(tokenizer_config=CODE_TOKENIZER, sizes=without("tokenizer.json", **{file: 1_000_000}))


# -- weights -----------------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_refused_with_both_sizes() -> None:
    with pytest.raises(UnsupportedModelError) as error:
        check(free_bytes=5_700_000_000)
    assert str(error.value) == (
        "its weights take 7.0 GB, but only 5.7 GB of memory are free; use a smaller model, or a variant with fewer "
        "bits per weight"
    )


def test_weights_that_just_fit_pass() -> None:
    check(free_bytes=7 * GB)
    with pytest.raises(UnsupportedModelError, match=r"7\.0 GB"):
        check(free_bytes=7 * GB - 1)


def test_files_that_are_not_loaded_do_not_count() -> None:
    """Mistral's repositories hold the same weights a second time."""
    check(sizes=FILES | {"consolidated.safetensors": 7 * GB, "model/extra.safetensors": 7 * GB, "model.bin": 7 * GB})


def test_unknown_sizes_refuse_nothing() -> None:
    check(sizes=FILES | {"model-00002-of-00002.safetensors": None}, free_bytes=1)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_weights_that_are_only_pickled_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"only in files named pytorch_model\*\.bin, which can run code"):
        check({"model_type": "bert"}, sizes={name: GB, "tokenizer.json": 7})


@pytest.mark.parametrize("others", [["consolidated.safetensors"], []])
def test_a_model_without_weights_that_are_loaded_is_refused(others: list[str]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no weights, .* model\*\.safetensors"):
        check(sizes={"config.json": 700, "tokenizer.json": 7, **dict.fromkeys(others, GB)})


@pytest.mark.parametrize("config", [None, LLAMA], ids=["without config", "with config"])
@pytest.mark.parametrize("file", ["qwen3-4b-q4_k_m.gguf", "BF16/qwen3-00001-of-00002.GGUF"])
def test_of_a_repository_of_gguf_files_only_the_memory_is_checked(file: str, config: dict[str, Any] | None) -> None:
    check(config, sizes={"README.md": 900, file: 2 * GB})
    with pytest.raises(UnsupportedModelError, match=r"its weights take 9\.0 GB, but only 8\.0 GB"):
        check(config, sizes={"README.md": 900, file: 8 * GB})


def test_a_gguf_file_beside_safetensors_passes() -> None:
    check(sizes=FILES | {"model-q4.gguf": 2 * GB})


# -- local directories -------------------------------------------------------------------------------------------------


def test_a_directory_whose_weights_do_not_fit_is_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / "m", "llama")
    size = (path / "model.safetensors").stat().st_size
    (path / "model.safetensors").write_bytes(bytes(size))  # not readable as weights
    monkeypatch.setattr(local, "free_device_memory", lambda: size - 1)
    with pytest.raises(UnsupportedModelError, match=rf"{path} cannot be loaded: its weights take"):
        load_model(str(path))


def test_weights_that_do_not_fit_beside_the_kv_cache_and_a_step_are_refused_with_all_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_tiny_model(tmp_path / "m", "llama")
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(bytes(len(weights)))  # not readable as weights
    monkeypatch.setattr(local, "free_device_memory", lambda: 5_700_000_000)
    numbers = r"its weights take 0\.0 GB and --kv-cache-memory 4\.8 GB and a step 1\.0 GB, but only 5\.7 GB of memory"
    with pytest.raises(UnsupportedModelError, match=numbers):
        load_model(str(path), LoadOptions(reserved=Reserved(4_800_000_000, 1_000_000_000)))
    (path / "model.safetensors").write_bytes(weights)
    assert load_model(str(path), LoadOptions(reserved=Reserved(4_000_000_000, 1_000_000_000))).weight_bytes > 0


def test_a_limit_above_the_context_length_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "llama")
    assert load_model(str(path), LoadOptions(max_model_len=512)).max_model_len == 512
    (path / "model.safetensors").write_bytes(bytes(100))  # not readable as weights
    with pytest.raises(UnsupportedModelError, match="--max-model-len is 513, but its context length is 512"):
        load_model(str(path), LoadOptions(max_model_len=513))


# -- the hub -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the demo model, to be changed and served by the stand-in for the hub, and an empty cache."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(DEMO_PATH, tmp_path / "repository"))


def sizes_of(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in directory.iterdir()}


def point_to(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_ENDPOINT does, which is read at import."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")


def resolved(
    directory: Path, monkeypatch: pytest.MonkeyPatch, sizes: Mapping[str, int] | None
) -> tuple[Path | None, str, list[str]]:
    """The directory that `resolve` finds, what it says, and the paths that were requested of the hub."""
    with hub("someone/model", directory, sizes) as (address, requests):
        point_to(address, monkeypatch)
        try:
            return resolve("someone/model").directory, "", requests
        except UnsupportedModelError as error:
            return None, str(error), requests


def requested_weights(requests: list[str]) -> bool:
    return any("/resolve/" in request and request.endswith(".safetensors") for request in requests)


@pytest.mark.parametrize(
    ("file", "change", "reason"),
    [
        ("config.json", {"model_type": "llama9"}, "'llama9'"),
        ("tokenizer_config.json", CODE_TOKENIZER, "only Python code"),
    ],
)
def test_a_hub_repository_is_refused_by_its_small_files_before_its_weights_are_requested(
    repository: Path, monkeypatch: pytest.MonkeyPatch, file: str, change: dict[str, Any], reason: str
) -> None:
    (repository / file).write_text(json.dumps(json.loads((repository / file).read_text()) | change))
    (repository / "tokenizer.json").rename(repository / "tokenization.json")
    path, message, requests = resolved(repository, monkeypatch, sizes_of(repository))
    assert path is None
    assert message.startswith("someone/model cannot be loaded: ")
    assert reason in message
    assert not requested_weights(requests)


def test_a_hub_repository_too_large_for_the_memory_is_refused_before_its_weights_are_requested(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = sizes_of(repository) | {"model.safetensors": 10**18}
    path, message, requests = resolved(repository, monkeypatch, sizes)
    assert path is None
    assert "someone/model cannot be loaded: its weights take 1000000000.0 GB" in message
    assert not requested_weights(requests)


@pytest.mark.parametrize("knows_sizes", [True, False])
def test_a_hub_repository_that_fits_is_downloaded(
    repository: Path, monkeypatch: pytest.MonkeyPatch, knows_sizes: bool
) -> None:
    path, _, requests = resolved(repository, monkeypatch, sizes_of(repository) if knows_sizes else None)
    assert path is not None
    assert (path / "model.safetensors").read_bytes() == (repository / "model.safetensors").read_bytes()
    assert requested_weights(requests)


def test_without_sizes_from_the_hub_the_memory_is_checked_after_the_download(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "free_device_memory", lambda: 1_000_000)
    _, message, requests = resolved(repository, monkeypatch, None)
    assert "its weights take 0.0 GB" in message
    assert requested_weights(requests)


def test_a_hub_that_refuses_to_tell_sizes_does_not_prevent_the_download(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_info = HfApi.model_info

    def without_sizes(*args: Any, files_metadata: bool = False, **fields: Any) -> Any:
        if files_metadata:
            raise ConnectionError("no sizes here")
        return model_info(*args, **fields)

    monkeypatch.setattr(HfApi, "model_info", without_sizes)
    with hub("someone/model", repository) as (address, _):
        point_to(address, monkeypatch)
        assert (resolve("someone/model").directory / "model.safetensors").is_file()


def test_a_downloaded_model_is_found_without_the_hub(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _, _ = resolved(repository, monkeypatch, sizes_of(repository))
    point_to("http://127.0.0.1:9", monkeypatch)  # nothing listens there
    assert resolve("someone/model").directory == path
