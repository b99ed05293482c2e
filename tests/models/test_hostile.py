"""Model directories that are hostile or damaged: each is refused in one line and in time, and the process lives."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.models import files
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files import check_files
from mlxpaged.models.loader import load_model
from tests.support import make_tiny_model

SECONDS = 2.0
"""In which a directory is refused."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("hostile") / "plain", "llama")


@pytest.fixture
def model(plain: Path, tmp_path: Path) -> Path:
    """A directory that loads, to be damaged."""
    return Path(shutil.copytree(plain, tmp_path / "model"))


def change(file: str, **fields: Any) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        content = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps(content | fields))

    return damage


def write(file: str, text: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).write_text(text)

    return damage


def fifo(file: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / file).parent.mkdir(exist_ok=True)
        (directory / file).unlink(missing_ok=True)
        os.mkfifo(directory / file)

    return damage


def link(file: str, target: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / file).unlink(missing_ok=True)
        (directory / file).symlink_to(target)

    return damage


def without(*names: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        for name in names:
            (directory / name).unlink()

    return damage


def sparse(file: str, size: int) -> Callable[[Path], None]:
    """A file of that many bytes, which takes no room on the disk."""

    def damage(directory: Path) -> None:
        with (directory / file).open("r+b" if (directory / file).exists() else "wb") as opened:
            opened.truncate(size)

    return damage


def empty_vocabulary(directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    (directory / "tokenizer.json").write_text(json.dumps(content | {"added_tokens": []}))


DIRECTORIES = {
    "weights are a FIFO": (fifo("model.safetensors"), r"its model\.safetensors is a FIFO instead of a regular file"),
    "more weights are a FIFO": (fifo("model-2.safetensors"), r"its model-2\.safetensors is a FIFO"),
    "config is a FIFO": (fifo("config.json"), r"its config\.json is a FIFO"),
    "tokenizer is a FIFO": (fifo("tokenizer.json"), r"its tokenizer\.json is a FIFO"),
    "a template is a FIFO": (fifo("additional_chat_templates/a.jinja"), r"its a\.jinja is a FIFO"),
    "weights are a device": (link("model.safetensors", "/dev/zero"), r"its model\.safetensors is a device"),
    "config is a device": (link("config.json", "/dev/zero"), r"its config\.json is a device"),
    "no tokenizer": (without("tokenizer.json"), r"it has no tokenizer, .*tokenizer\.json"),
    "no vocabulary": (empty_vocabulary, "its tokenizer has no tokens for text"),
    "large config": (sparse("config.json", 2**40), r"its config\.json has 1,099,511\.6 MB; .* at most 16\.8 MB"),
    "large tokenizer": (sparse("tokenizer.json", 2**40), r"its tokenizer\.json has 1,099,511\.6 MB"),
    "large defaults": (sparse("generation_config.json", 2**40), r"its generation_config\.json has"),
    "large settings": (sparse("tokenizer_config.json", 2**40), r"its tokenizer_config\.json has"),
    "large template": (sparse("chat_template.jinja", 2**21), r"its chat_template\.jinja has 2\.1 MB"),
    "deep config": (write("config.json", '{"a":' * 100_000), r"its config\.json .* cannot be read: maximum recursion"),
    "deep settings": (write("tokenizer_config.json", "[" * 100_000), r"its tokenizer_config\.json .* cannot be read"),
    "deep tokenizer": (write("tokenizer.json", "[" * 100_000), "cannot be loaded: "),
    "deep defaults": (write("generation_config.json", "[" * 100_000), "cannot be loaded: "),
}


def refused(directory: Path) -> str:
    """The message. Time of the process is measured, because the machine may be busy."""
    begin = time.process_time()
    with pytest.raises(UnsupportedModelError) as error:
        load_model(str(directory))
    assert time.process_time() - begin < SECONDS
    message = str(error.value)
    assert message.startswith(f"{directory} cannot be loaded: ")
    assert "\n" not in message
    return message.removeprefix(f"{directory} ")


@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_hostile_directory_is_refused_with_the_reason_in_one_line(model: Path, name: str) -> None:
    damage, reason = DIRECTORIES[name]
    damage(model)
    assert re.search(reason, refused(model))


def test_a_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has at most 108 characters
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("config.json")
        with pytest.raises(UnsupportedModelError, match=r"its config\.json is a socket"):
            check_files(tmp_path)


def test_a_directory_of_too_many_files_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 4)
    assert "its directory has more than 4 files" in refused(model)


def test_links_to_regular_files_are_loaded(plain: Path, tmp_path: Path) -> None:
    """As the cache of the hub has them. A link to nothing is no file."""
    for file in plain.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "README.md").symlink_to("nowhere")
    assert load_model(str(tmp_path)).vocab_size
