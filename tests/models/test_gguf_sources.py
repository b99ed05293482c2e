"""A GGUF file is found by its path, in a directory and on the hub, and served like an MLX directory."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from huggingface_hub import constants

from mlxpaged.models.errors import ModelNotFoundError, UnsupportedModelError
from mlxpaged.models.fingerprint import fingerprint
from mlxpaged.models.loader import load_model, read_tokenizer
from mlxpaged.models.sources import local
from mlxpaged.models.sources.gguf import directory
from mlxpaged.models.sources.gguf.choice import choose, memory_of, models_with
from mlxpaged.models.sources.resolve import resolve
from mlxpaged.registry.catalog import Catalog, Found
from tests.cli.helpers import hub
from tests.models.gguf_blocks import random_tensor
from tests.models.gguf_files import Stored, plain
from tests.models.gguf_models import as_gguf

GB = 10**9
PROMPT = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_a_gguf_file_is_served_like_the_directory_with_the_same_weights(mlx: Path, gguf: Path) -> None:
    own, theirs = load_model(str(gguf)), load_model(str(mlx))
    assert mx.allclose(own.model(PROMPT), theirs.model(PROMPT), rtol=1e-5, atol=1e-5)
    assert own.layers == theirs.layers
    assert own.num_parameters == theirs.num_parameters
    assert own.tokenizer.encode("What is 17 + 25?") == theirs.tokenizer.encode("What is 17 + 25?")
    assert own.model_type == "llama"
    assert own.context_length == theirs.context_length
    assert 2 in own.tokenizer.eos_token_ids


def test_weights_are_linked_and_never_copied(gguf: Path) -> None:
    directory = resolve(str(gguf)).directory
    assert (directory / "model.gguf").readlink() == gguf
    assert sum(path.lstat().st_size for path in directory.iterdir()) < gguf.stat().st_size


def test_a_file_that_changes_gets_new_small_files(gguf: Path, mlx: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(gguf, tmp_path / "a.gguf"))
    first = resolve(str(path)).directory
    assert resolve(str(path)).directory == first
    as_gguf(mlx, path, change=lambda metadata, tensors: metadata.update({"llama.context_length": 77}))
    second = resolve(str(path)).directory
    assert json.loads((second / "config.json").read_text())["max_position_embeddings"] == 77
    assert not first.exists()
    (second / "config.json").unlink()
    assert (resolve(str(path)).directory / "config.json").is_file(), "what is not whole is made again"
    path.unlink()
    assert resolve(str(gguf)).directory.exists()
    assert not second.exists()


def test_the_fingerprint_is_that_of_the_weights(gguf: Path, mlx: Path, tmp_path: Path) -> None:
    copy = shutil.copy(gguf, tmp_path / "other name.gguf")
    other = as_gguf(
        mlx, tmp_path / "b.gguf", change=lambda _, tensors: tensors.update({"output_norm.weight": plain([1.5] * 64)})
    )
    digests = [fingerprint(resolve(str(path)).directory) for path in (gguf, copy, other)]
    assert digests[0] == digests[1] != digests[2]


def test_a_model_in_parts_is_loaded_whole(mlx: Path, tmp_path: Path) -> None:
    """The first part has the metadata, and each part a share of the tensors."""
    names = [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    for number, name in enumerate(names):

        def keep(metadata: dict[str, object], tensors: dict[str, object], number: int = number) -> None:
            for place, tensor in enumerate(list(tensors)):
                if place % 3 != number:
                    del tensors[tensor]
            if number:
                metadata.clear()

        as_gguf(mlx, tmp_path / name, change=keep)  # type: ignore[arg-type]
    own = load_model(str(tmp_path / names[0]))
    assert mx.allclose(own.model(PROMPT), load_model(str(mlx)).model(PROMPT), rtol=1e-5, atol=1e-5)
    assert resolve(str(tmp_path)).directory == own.path
    (tmp_path / names[1]).unlink()
    with pytest.raises(UnsupportedModelError, match=r"tiny-00002-of-00003\.gguf is missing"):
        load_model(str(tmp_path / names[0]))


@pytest.mark.parametrize("stem", ["m", "model"])
def test_a_directory_with_several_quantizations_has_the_largest_that_fits(
    stem: str, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = gguf.stat().st_size
    more = {"Q4_K_M": 0, "Q8_0": 1000, "F32": size, "mmproj-F32": 10, "mmproj-Q5_0": 10}
    for kind, added in more.items():
        (tmp_path / f"{stem}-{kind}.gguf").write_bytes(gguf.read_bytes() + bytes(added))
        (tmp_path / f"._{stem}-{kind}.gguf").write_bytes(b"Mac OS X")

    def link(name: str) -> str:
        return (resolve(name).directory / "model.gguf").readlink().name

    assert link(str(tmp_path)) == f"{stem}-F32.gguf"
    assert Catalog((tmp_path.parent,)).find(tmp_path.name) == Found(
        tmp_path.name, tmp_path / f"{stem}-F32.gguf", 2 * size
    )
    assert link(f"{tmp_path}:q4_k_m") == f"{stem}-Q4_K_M.gguf"
    monkeypatch.setattr(local, "free_device_memory", lambda: 2 * size)
    assert link(str(tmp_path)) == f"{stem}-Q8_0.gguf"
    with pytest.raises(UnsupportedModelError, match=rf"no GGUF file Q5_0, but {stem}-F32\.gguf, {stem}-Q4_K_M\.gguf"):
        resolve(f"{tmp_path}:Q5_0")


def test_a_file_may_have_any_name(gguf: Path, tmp_path: Path) -> None:
    for name in (b"we ird 'n\xc3\xa4me'\n$(x).gguf", b"\xff.gguf"):
        path = shutil.copy(gguf, tmp_path / os.fsdecode(name))
        assert (resolve(str(path)).directory / "model.gguf").samefile(path)


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + "/y", "/" + "x" * 300, "lmstudio:a/" + "x" * 300])
def test_a_name_that_is_too_long_for_a_file_is_no_model(name: str, tmp_path: Path) -> None:
    (tmp_path / "home" / ".lmstudio" / "models" / "a").mkdir(parents=True)
    with pytest.raises(ModelNotFoundError):
        resolve(name)
    assert Catalog((tmp_path,)).find(name) is None


def test_a_cache_that_cannot_be_written_is_named(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(directory, "cache_directory", lambda: tmp_path / "file" / "gguf")
    with pytest.raises(
        UnsupportedModelError, match=r"tiny-F32\.gguf cannot be loaded: .*cannot be written to .*/file/"
    ):
        resolve(str(gguf))


def test_of_a_hub_repository_only_the_chosen_file_is_downloaded(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in ("m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-BF16.gguf"):
        shutil.copy(gguf, repository / name)
    sizes = {"m-Q4_K_M.gguf": 1, "m-Q8_0.gguf": 2, "m-BF16.gguf": 10**18}
    with hub("someone/model", repository, sizes) as (address, requests):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        chosen = {
            name: (resolve(name).directory / "model.gguf").readlink().name
            for name in ("someone/model", "someone/model:Q4_K_M", "someone/model/m-Q4_K_M.gguf")
        }
        assert chosen == {
            "someone/model": "m-Q8_0.gguf",
            "someone/model:Q4_K_M": "m-Q4_K_M.gguf",
            "someone/model/m-Q4_K_M.gguf": "m-Q4_K_M.gguf",
        }
        assert not any("BF16" in request for request in requests)
        with pytest.raises(UnsupportedModelError, match=r"someone/model:BF16 cannot be loaded: its weights take .* GB"):
            resolve("someone/model:BF16")
        assert not any("BF16" in request for request in requests)
        monkeypatch.setattr(local, "free_device_memory", lambda: 10**20)
        assert (
            resolve("someone/model").directory.name == resolve("someone/model:Q8_0").directory.name
        )  # as it is downloaded
        assert not any("BF16" in request for request in requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve("someone/model:Q8_0").directory.name == resolve("someone/model").directory.name


def test_a_quantization_is_taken_although_there_are_safetensors(mlx: Path, gguf: Path, tmp_path: Path) -> None:
    both = Path(shutil.copytree(mlx, tmp_path / "both"))
    shutil.copy(gguf, both / "m-Q4_K_M.gguf")
    assert resolve(str(both)).directory == both
    assert (resolve(f"{both}:Q4_K_M").directory / "model.gguf").readlink() == both / "m-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("", ["big/m-Q8_0-00001-of-00002.gguf", "big/m-Q8_0-00002-of-00002.gguf"]),
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q4_k", []),
        ("IQ3_XXS", ["m-UD-IQ3_XXS.gguf"]),
        ("UD-Q4_K_XL", ["m-UD-Q4_K_XL.gguf"]),
        ("big/m-Q8_0-00002-of-00002.gguf", ["big/m-Q8_0-00001-of-00002.gguf", "big/m-Q8_0-00002-of-00002.gguf"]),
    ],
)
def test_what_is_chosen(wanted: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxpaged.models.sources.gguf.choice.has_code_books", lambda: False)
    parts = [f"big/m-Q8_0-0000{number}-of-00002.gguf" for number in (2, 1)]
    sizes = {
        "m-Q4_K_M.gguf": 4 * GB,
        "m-UD-Q4_K_XL.gguf": 5 * GB,
        **dict.fromkeys(parts, 4 * GB),
        "imatrix.gguf": 20 * GB,
        "m-UD-IQ3_XXS.gguf": 9 * GB,  # code books
        "m-TQ2_0.gguf": 9 * GB,
    }
    if expected:
        assert choose(sizes, wanted, 20 * GB) == expected
    else:
        with pytest.raises(UnsupportedModelError, match="no GGUF file q4_k"):
            choose(sizes, wanted, 20 * GB)


def test_files_with_few_bits_grow_and_code_books_need_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict.fromkeys(["m-TQ1_0.gguf", "m-IQ2_M.gguf", "m-Q2_K.gguf", "m-Q8_0.gguf"], 0)
    sizes = {name: (2 + index) * GB for index, name in enumerate(sizes)}
    assert memory_of(sizes) == pytest.approx((2 * 1.12 + 3 * 2 + 4 * 1.65 + 5 * 1.12) * GB)
    place = "mlxpaged.models.sources.gguf.choice.has_code_books"
    for has_books, memory, expected in ((True, 6.5, "IQ2_M"), (False, 6.5, "Q2_K"), (True, 7, "Q2_K")):
        monkeypatch.setattr(place, lambda has_books=has_books: has_books)
        assert choose(sizes | {"m-Q8_0.gguf": 9 * GB}, "", int(memory * GB / 0.7)) == [f"m-{expected}.gguf"]


def quantized(name: str, array: Any) -> Stored:
    return random_tensor("Q4_0", array.shape) if array.ndim > 1 else plain(array)


def test_a_model_of_which_a_part_is_downloaded_has_all_its_parts() -> None:
    parts = [f"m-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    sizes = dict.fromkeys([*parts, "m-Q4_K_M.gguf", "mmproj.gguf"], GB)
    assert list(models_with(sizes, [parts[1], "mmproj.gguf", "config.json"])) == parts


def test_the_memory_is_checked_with_the_size_that_the_weights_will_have(
    mlx: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = as_gguf(
        mlx,
        tmp_path / "m.gguf",
        lambda _, array: random_tensor("Q4_0", array.shape) if array.ndim > 1 else plain(array),
    )
    config = json.loads((resolve(str(path)).directory / "config.json").read_text())
    served = load_model(str(path))
    assert served.weight_bytes <= config["gguf_bytes"] <= 1.12 * path.stat().st_size
    monkeypatch.setattr(local, "free_device_memory", lambda: config["gguf_bytes"] - 1)
    with pytest.raises(UnsupportedModelError, match=r"its weights take 0\.0 GB, but only 0\.0 GB"):
        load_model(str(path))


def test_the_tokenizer_alone_can_be_read(gguf: Path) -> None:
    assert read_tokenizer(str(gguf)).encode("hello", add_special_tokens=False)
