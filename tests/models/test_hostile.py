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
from tokenizers import Tokenizer as FastTokenizer

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files import files
from mlxpaged.models.files.files import check_files
from mlxpaged.models.loader import load_model
from mlxpaged.models.text import tokenizer
from mlxpaged.models.text.tokenizer import TextTooLongError
from mlxpaged.models.text.tokenizer_files import tokenizer_in
from mlxpaged.models.text.tokenizer_limits import check_tokenizer_file
from tests.support import make_tiny_model

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Of an added token."""
SECONDS = 2.0
"""In which a directory is refused."""
MANY_ENDS = f'{{"eos_token_id": [{"1, " * 999_999}1]}}'


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


def many_settings(directory: Path) -> None:
    decoder = {str(i): {"content": "x"} for i in range(200_000)}
    change("tokenizer_config.json", added_tokens_decoder=decoder)(directory)


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


def change_header(file: str = "model.safetensors", /, **fields: Any) -> Callable[[Path], None]:
    """fields: of the first tensor in the header of the weights."""

    def damage(directory: Path) -> None:
        data = (directory / file).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        next(each for name, each in header.items() if name != "__metadata__").update(fields)
        text = json.dumps(header).encode()
        (directory / file).write_bytes(len(text).to_bytes(8, "little") + text + data[end:])

    return damage


def write_bytes(file: str, data: bytes) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        (directory / file).write_bytes(data)

    return damage


def empty_vocabulary(directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"] |= {"vocab": {}, "merges": []}
    (directory / "tokenizer.json").write_text(json.dumps(content | {"added_tokens": []}))


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(name: str, rule: dict[str, Any], count: int = 30) -> dict[str, Any]:
    return {"type": "Sequence", name: [rule] * count}


DOUBLE = replace({"String": "a"}, "aa")
GROWS = sequence("normalizers", DOUBLE)


def many_tokens(directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"]["vocab"] = {str(i): i for i in range(MILLION)}
    (directory / "tokenizer.json").write_text(json.dumps(content))


MILLION, ALL = 10**6, 10**15

DIRECTORIES = {
    "a million layers": (
        change("config.json", num_hidden_layers=MILLION),
        r"asks for 1,000,000 layers \(num_hidden_layers\), but its weights have \d+ tensors",
    ),
    "layers in a part": (change("config.json", text_config={"n_layer": MILLION}), r"1,000,000 layers \(n_layer\)"),
    "layers in a list": (change("config.json", layer_types=["full_attention"] * 50_000), r"layers \(layer_types\)"),
    "layers in a text": (change("config.json", hybrid_override_pattern="M" * MILLION), r"1,000,000 layers"),
    "loops": (change("config.json", num_loops=ALL), r"layers \(num_loops\)"),
    "experts in layers": (
        change("config.json", num_local_experts=MILLION),
        r"1,000,000 experts in 2 layers, but its weights have \d+ tensors",
    ),
    "hidden size": (
        change("config.json", hidden_size=ALL),
        r"hidden_size 1,0+(,000)*, but the largest dimension .* 768",
    ),
    "vocabulary": (change("config.json", vocab_size=ALL), "vocab_size"),
    "heads": (change("config.json", num_attention_heads=ALL), "num_attention_heads"),
    "head size": (change("config.json", head_dim=ALL), "head_dim"),
    "inner size": (change("config.json", intermediate_size=ALL), "intermediate_size"),
    "another hidden size": (change("config.json", hidden_size=2**19), "cannot be loaded: "),
    "no heads": (change("config.json", num_attention_heads=0), "cannot be loaded: "),
    "layers that are no number": (change("config.json", num_hidden_layers="many"), "cannot be loaded: "),
    "shape without bytes": (change_header(shape=[ALL, ALL]), r"the bytes of \S+ do not fit its shape"),
    "negative shape": (change_header(shape=[-1, -1]), r"\S+ has a bad shape"),
    "bytes after the end": (change_header(shape=[ALL], dtype="U8", data_offsets=[0, ALL]), r"\S+ is cut short"),
    "no fields": (change_header(shape=None), r"its model\.safetensors is not usable: its header is damaged"),
    "endless header": (write_bytes("model.safetensors", b"\xff" * 64), r"is not a safetensors file, or is cut short"),
    "empty weights": (write_bytes("model.safetensors", b""), r"is not a safetensors file, or is cut short"),
    "deep header": (
        write_bytes("model.safetensors", (100_000).to_bytes(8, "little") + b"[" * 100_000),
        r"its header is damaged",
    ),
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
    "a growing normalizer": (change("tokenizer.json", normalizer=GROWS), r"normalizer .* can make 4,294,967,296 "),
    "a growing decoder": (
        change("tokenizer.json", decoder=sequence("decoders", DOUBLE)),
        r"the decoder of its tokenizer",
    ),
    "growing in two places": (
        change(
            "tokenizer.json",
            normalizer=sequence("normalizers", DOUBLE, 4),
            pre_tokenizer={"type": "Sequence", "pretokenizers": [sequence("pretokenizers", DOUBLE, 4)]},
        ),
        r"can make 256 characters of one; the limit is 100",
    ),
    "growing by a pattern": (
        change("tokenizer.json", normalizer=replace({"Regex": "x*"}, "y" * 200)),
        r"can make 804 characters of one",
    ),
    "growing by a replacement": (
        change("tokenizer.json", normalizer=replace({"String": "a"}, "a" * 17)),
        r"replacements of its tokenizer\.json can make 17 characters of one; the limit is 16",
    ),
    "a long prefix": (
        change("tokenizer.json", normalizer={"type": "Prepend", "prepend": "x" * 2000}),
        "adds more than",
    ),
    "a million tokens": (many_tokens, r"its tokenizer\.json has 1,000,\d+ entries"),
    "many added tokens": (
        change("tokenizer_config.json", added_tokens_decoder={str(i): {"content": f"<{i}>"} for i in range(40_001)}),
        r"its tokenizer_config\.json adds 40,00\d tokens; the limit is 40,000",
    ),
    "many settings": (
        many_settings,
        r"its tokenizer_config\.json has 400,0\d\d values; the limit is 320,000",
    ),
    "many settings in a list": (
        change("tokenizer_config.json", settings=[1] * 320_001),
        r"its tokenizer_config\.json has 320,0\d\d values; the limit is 320,000",
    ),
    "many special tokens": (
        change("tokenizer_config.json", extra_special_tokens=[f"<{i}>" for i in range(40_001)]),
        r"its tokenizer_config\.json adds 40,00\d tokens",
    ),
    "a file of added tokens": (
        write("added_tokens.json", json.dumps({f"<{i}>": i for i in range(40_001)})),
        r"its added_tokens\.json adds 40,001 tokens",
    ),
    "a tokenizer that is a list": (write("tokenizer.json", "[]"), r"its tokenizer\.json is not an object"),
    "deep tokenizer": (write("tokenizer.json", "[" * 100_000), "cannot be loaded: "),
    "a million ends": (
        write("generation_config.json", MANY_ENDS),
        r"its generation_config\.json has 3\.0 MB; such a file has at most 1\.0 MB",
    ),
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


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPACES = replace({"String": " "}, "\u2581")
BEFORE = {"type": "Prepend", "prepend": "\u2581"}
META = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
FORMS = {"type": "Precompiled", "precompiled_charsmap": ""}
FALLBACK = [replace({"String": "\u2581"}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


def in_order(name: str, *rules: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(rules)}


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
CL100K = WORDS + r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA2 = {
    "normalizer": in_order("normalizers", BEFORE, SPACES),
    "decoder": in_order("decoders", *FALLBACK, {"type": "Strip", "content": " ", "start": 1, "stop": 0}),
}
TIKTOKEN = {"pre_tokenizer": in_order("pretokenizers", split(CL100K), BYTES), "decoder": BYTES}

KNOWN: dict[str, dict[str, Any]] = {
    "GPT-2, Phi-2, Falcon": {"pre_tokenizer": BYTES | {"use_regex": True}, "decoder": BYTES},
    "Llama 3, Phi-4, GLM-4, gpt-oss, Mistral's tekken": TIKTOKEN,
    "Qwen 2 to 3.5, OLMo": TIKTOKEN | {"normalizer": {"type": "NFC"}},
    "StarCoder 2, SmolLM, Granite": TIKTOKEN
    | {"pre_tokenizer": in_order("pretokenizers", {"type": "Digits", "individual_digits": True}, BYTES)},
    "Command R": {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": in_order("pretokenizers", {"type": "Digits", "individual_digits": True}, BYTES),
        "decoder": BYTES,
    },
    "DeepSeek V3": {
        "normalizer": in_order("normalizers"),
        "pre_tokenizer": in_order(
            "pretokenizers", split(r"\p{N}{1,3}"), split("[\u4e00-\u9fa5\u3040-\u309f]+"), split(CL100K), BYTES
        ),
        "decoder": BYTES,
    },
    "Llama 2, Mistral, Phi-3": LLAMA2,
    "Llama 2 without legacy": {"normalizer": None, "pre_tokenizer": META | {"split": False}},
    "Gemma 2 to 3": {
        "normalizer": SPACES,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "decoder": in_order("decoders", *FALLBACK),
    },
    "BERT": {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    },
    "T5, XLM-R": {
        "normalizer": in_order(
            "normalizers",
            FORMS,
            {"type": "Strip", "strip_left": False, "strip_right": True},
            replace({"Regex": " {2,}"}, "\u2581"),
        ),
        "pre_tokenizer": in_order("pretokenizers", {"type": "WhitespaceSplit"}, META),
        "decoder": META,
    },
    "compatibility forms before bytes": {"normalizer": {"type": "NFKC"}, "pre_tokenizer": BYTES},
    "30,000 sounds or images": {
        "added_tokens": [{"id": i, "content": f"<{i}>"} | dict.fromkeys(FLAGS, False) for i in range(30_000)]
    },
}
"""Rules that tokenizers of these models have, as they were published. Those of Claude, DeepSeek V3, Gemma 3, GPT-4o,
gpt-oss, Llama 2, Llama 3.1 and Qwen3 were checked as whole files too."""


@pytest.mark.parametrize("name", KNOWN)
def test_rules_of_known_tokenizers_are_loaded(model: Path, name: str) -> None:
    change("tokenizer.json", **KNOWN[name])(model)
    assert check_tokenizer_file(model) <= 2
    if FORMS not in (KNOWN[name].get("normalizer") or {}).get("normalizers", ()):  # its table is missing here
        FastTokenizer.from_file(str(model / "tokenizer.json"))


def test_a_directory_without_a_tokenizer_file_is_checked_elsewhere(model: Path) -> None:
    without("tokenizer.json")(model)
    assert check_tokenizer_file(model) == 1
    change("tokenizer_config.json", additional_special_tokens=["a"] * 40_001)(model)
    with pytest.raises(UnsupportedModelError, match=r"its tokenizer_config\.json adds 40,001 tokens"):
        check_tokenizer_file(model)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"special_tokens": [{"rank": i, "token_str": str(i)} for i in range(40_001)]}, "adds 40,001 tokens"),
        ({"config": {"pattern": 1}}, "its pattern is no text"),
        ({"config": {}}, "'pattern'"),
    ],
)
def test_a_tekken_file_that_adds_too_much_or_splits_no_text_is_refused(
    changes: dict[str, Any], reason: str, model: Path
) -> None:
    without("tokenizer.json")(model)
    content = {"config": {"pattern": "a"}, "vocab": [{"rank": 0, "token_bytes": "YQ=="}], "special_tokens": []}
    write("tekken.json", json.dumps(content | changes))(model)
    with pytest.raises(UnsupportedModelError, match=rf"its tekken\.json .*{reason}"):
        tokenizer_in(model, None, ())


def test_a_text_that_replacements_make_long_is_not_encoded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template that a request renders counts too."""
    monkeypatch.setattr(tokenizer, "MAX_WRITTEN", 1600)
    change("tokenizer.json", normalizer=replace({"String": "a"}, "a" * 16))(model)
    write("chat_template.jinja", "{{ messages[0].content * 2 }}")(model)
    found = tokenizer_in(model, None, ())
    assert len(found.encode("a" * 100)) > 100
    assert found.apply_chat_template([{"role": "user", "content": "a" * 50}])
    for encode in (
        lambda: found.encode("a" * 101),
        lambda: found.encode("a" * 101, split_special_tokens=True),
        lambda: found.apply_chat_template([{"role": "user", "content": "a" * 51}]),
    ):
        with pytest.raises(TextTooLongError, match=r"a text of 10\d bytes in UTF-8 is too long .* at most 100"):
            encode()
    change("tokenizer.json", normalizer=replace({"String": "a"}, "\U0001f600"))(model)
    found = tokenizer_in(model, None, ())
    assert found.encode("a" * 400)
    for text in ("a" * 401, "\u4e2d" * 134):
        with pytest.raises(TextTooLongError, match=r"a text of 40\d bytes in UTF-8 is too long .* at most 400"):
            found.encode(text)


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
