"""A tekken.json, Mistral's own format, makes a tokenizer, and a bad one is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.text import tekken
from mlxpaged.models.text.tokenizer_files import tokenizer_in

CONTROL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
NUM_SPECIAL = 8
MERGED = [b"he", b"ll", b"hell", b"hello", b"12"]
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def contents(**changes: Any) -> dict[str, Any]:
    """All bytes, and a few merged ones, as mistral-common writes them. The numbers of the control tokens come first."""
    tokens = [bytes([byte]) for byte in range(256)] + MERGED
    vocab = [{"rank": i, "token_bytes": base64.b64encode(token).decode()} for i, token in enumerate(tokens)]
    sizes = {"default_vocab_size": len(tokens) + NUM_SPECIAL, "default_num_special_tokens": NUM_SPECIAL}
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(CONTROL)]
    config = {"pattern": PATTERN, "num_vocab_tokens": len(tokens), "version": "v3", **sizes}
    return {"config": config, "vocab": vocab, "special_tokens": special} | changes


def id_of(token: bytes) -> int:
    return NUM_SPECIAL + (token[0] if len(token) == 1 else 256 + MERGED.index(token))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tekken, "PACKAGE", "no_such_package")  # mistral-common may be installed
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    (tmp_path / "tekken.json").write_text(json.dumps(contents()))
    return tmp_path


HELLO = [1, id_of(b"hello"), id_of(b" "), id_of(b"1"), id_of(b"2")]


@pytest.mark.parametrize("settings", [None, {}, {"tokenizer_class": "LlamaTokenizerFast", "eos_token": "</s>"}])
def test_texts_have_the_tokens_of_the_file_after_the_begin_token(settings: Any, model: Path) -> None:
    """Numbers are split before bytes are merged."""
    if settings is not None:
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
    found = tokenizer_in(model, None, ())
    assert found.encode("hello 12") == HELLO
    assert found.encode("[INST]hello", add_special_tokens=False) == [3, id_of(b"hello")]
    assert found.encode("[INST]", False, split_special_tokens=True) == [id_of(bytes([byte])) for byte in b"[INST]"]
    assert found.eos_token_ids == {2}
    assert found.decode(found.encode("na\u00efve \U0001f642\n\n")) == "na\u00efve \U0001f642\n\n"
    assert found.is_thread_safe
    assert not found.has_chat_template


def test_a_tokenizer_file_in_the_same_directory_is_read_in_its_place(model: Path) -> None:
    made = tokenizer_in(model, None, ()).reader.backend_tokenizer
    made.add_special_tokens(["<|only here|>"])
    made.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    found = tokenizer_in(model, None, ())
    assert found.encode("hello 12") == HELLO
    assert len(found.encode("<|only here|>", add_special_tokens=False)) == 1


def test_a_template_of_the_directory_is_read(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0].content }}[/INST]")
    found = tokenizer_in(model, None, ())
    assert found.apply_chat_template([{"role": "user", "content": "hello"}]) == [1, 3, id_of(b"hello"), 4]


@pytest.mark.parametrize("has_tokenizer_file", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_missing_template_is_made_by_mistral_common_if_it_is_installed(
    fails: bool,
    has_tokenizer_file: bool,
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stand-in of its module: the tests do without the package."""
    if has_tokenizer_file:
        tokenizer_in(model, None, ()).reader.backend_tokenizer.save(str(model / "tokenizer.json"))
        (model / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    package = f"mistral_stand_in_{fails}_{has_tokenizer_file}"
    place = tmp_path_factory.mktemp("packages") / package / "integrations" / "chat_templates"
    place.mkdir(parents=True)
    line = "raise ValueError('no v99')" if fails else "return '[INST]{{ messages[0].content }}'"
    (place / "chat_templates.py").write_text(f"def convert_tokenizer_to_chat_template(file):\n    {line}\n")
    monkeypatch.syspath_prepend(place.parents[2])
    monkeypatch.setattr(tekken, "PACKAGE", package)
    found = tokenizer_in(model, None, ())
    assert found.has_chat_template is not fails
    if fails:
        assert caplog.messages == ["mistral-common makes no chat template of its tekken.json: no v99"]
    else:
        assert found.apply_chat_template([{"role": "user", "content": "hello"}]) == [3, id_of(b"hello")]


def long_token(size: int) -> dict[str, Any]:
    found = contents()
    found["vocab"][-1]["token_bytes"] = base64.b64encode(b"a" * size).decode()
    return found


def many_special(count: int) -> dict[str, Any]:
    found = contents()
    found["config"] |= {"default_num_special_tokens": count, "default_vocab_size": count + len(found["vocab"])}
    return found


def without_special() -> dict[str, Any]:
    found = contents()
    del found["special_tokens"]
    return found


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (list, "is no vocabulary of Mistral's"),
    "no vocabulary": (lambda: {"config": {}}, "is no vocabulary of Mistral's"),
    "no base64": (lambda: contents(vocab=[{"token_bytes": "a"}]), "is no vocabulary of Mistral's"),
    "a long token": (lambda: long_token(tekken.MAX_BYTES + 1), "has a token of 257 bytes; the limit is 256"),
    "many": (lambda: many_special(40_001), "adds 40,001 tokens; the limit is 40,000"),
    "unnamed": (without_special, "does not name its control tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_file_is_refused(name: str, model: Path) -> None:
    make, message = REFUSED[name]
    (model / "tekken.json").write_text(json.dumps(make()))
    with pytest.raises(UnsupportedModelError, match=message):
        tokenizer_in(model, None, ())


def test_the_longest_token_is_read(model: Path) -> None:
    (model / "tekken.json").write_text(json.dumps(long_token(tekken.MAX_BYTES)))
    assert tokenizer_in(model, None, ()).encode("hello 12") == HELLO
