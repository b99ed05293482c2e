"""The tokenizer of a GGUF file gives the tokens of the one that it was made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import load_model
from mlxpaged.models.sources.gguf.tokenizer import SPLITS, tokenizer_files
from mlxpaged.models.text.tokenizer_limits import check_tokenizer_file
from tests.models.gguf_files import tokenizer_metadata
from tests.models.gguf_models import as_gguf
from tests.support import DEMO_PATH, make_tiny_model

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


def made(directory: Path, **metadata: Any) -> Tokenizer:
    """The tokenizer of metadata, whose names lack tokenizer.ggml."""
    files = tokenizer_files({f"tokenizer.ggml.{name}": value for name, value in metadata.items()})
    (directory / "tokenizer.json").write_text(json.dumps(files["tokenizer.json"]))
    check_tokenizer_file(directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def of_bytes(**changes: Any) -> dict[str, Any]:
    found = tokenizer_metadata(json.loads((DEMO_PATH / "tokenizer.json").read_text()))
    return {name.removeprefix("tokenizer.ggml."): value for name, value in found.items()} | {
        "token_type": np.array(found["tokenizer.ggml.token_type"]),
        **changes,
    }


PIECES = ["<unk>", "<s>", "</s>", "<0x0A>", "<0xC3>", "<0xA9>", "▁", "a", "b", "c", "▁a", "bc", "▁abc", "ab", "  "]
KINDS = [2, 3, 3, 6, 6, 6, 1, 1, 1, 1, 1, 1, 1, 1, 4]
SCORES = [0.0] * 6 + [-9.0, -10.0, -11.0, -12.0, -1.0, -2.0, -3.0, -0.5, 0.0]


def of_pieces(**changes: Any) -> dict[str, Any]:
    """A vocabulary of SentencePiece, whose best pair is "ab"."""
    scores, kinds = np.array(SCORES, np.float32), np.array(KINDS)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {"model": "llama", "tokens": PIECES, "scores": scores, "token_type": kinds, **ids, **changes}


@pytest.mark.parametrize(
    "text", ["What is 17 + 25?", "  two  spaces\n\n\tand more", "naïve 日本語 🙂", "<|im_start|>user"]
)
def test_a_tokenizer_of_bytes_has_the_tokens_of_the_original(text: str, tmp_path: Path) -> None:
    """The demo model's vocabulary, whose own rule splits into single marks: the texts have no two in a row."""
    original = Tokenizer.from_file(str(DEMO_PATH / "tokenizer.json"))
    found = made(tmp_path, **of_bytes())
    assert found.decode(found.encode(text).ids, skip_special_tokens=False) == text
    if "spaces" not in text:
        assert found.encode(text).ids == original.encode(text).ids


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "don't 1234 x", ["don", "'t", "Ġ1234", "Ġx"]),
        ("llama-bpe", "don't 1234 x", ["don", "'t", "Ġ", "123", "4", "Ġx"]),
        ("qwen2", "DON'T 12\n\n x", ["DON", "'T", "Ġ", "1", "2", "ĊĊ", "Ġx"]),
        ("qwen2", "e\u0301", ["Ã©"]),
        ("smollm", "a 12", ["a", "Ġ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", "Ġ", "123", "4"]),
        ("tekken", "HelloWorld's 12", ["Hello", "World", "'s", "Ġ", "1", "2"]),
        ("deepseek-v3", "x=12345 日本", ["x", "=", "123", "45", "Ġ", "æĹ¥æľ¬"]),
    ],
)
def test_texts_are_split_as_the_kind_of_tokenizer_says(name: str, text: str, pieces: list[str], tmp_path: Path) -> None:
    found = made(tmp_path, **of_bytes(pre=name))
    normalized = found.normalizer.normalize_str(text) if found.normalizer else text
    assert [piece for piece, _ in found.pre_tokenizer.pre_tokenize_str(normalized)] == pieces


@pytest.mark.parametrize("name", SPLITS)
def test_every_kind_can_be_loaded_and_loses_no_text(name: str, tmp_path: Path) -> None:
    found = made(tmp_path, **of_bytes(pre=name))
    text = "It's 1234567 naïve  日本語\r\n\tżółw, x_y(z)!!  "
    assert found.decode(found.encode(text).ids) == text


def test_a_tokenizer_of_pieces_merges_by_scores_and_falls_back_to_bytes(tmp_path: Path) -> None:
    found = made(tmp_path, **of_pieces())
    assert found.encode("abc").tokens == ["<s>", "▁", "ab", "c"]
    assert found.encode("c\né", add_special_tokens=False).tokens == ["▁", "c", "<0x0A>", "<0xC3>", "<0xA9>"]
    assert found.decode(found.encode("a bc\né").ids) == "a bc\né"


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"add_space_prefix": False}, ["<s>", "ab"]),
        ({"add_space_prefix": False, "add_bos_token": False}, ["ab"]),
        ({"add_space_prefix": False, "add_eos_token": True}, ["<s>", "ab", "</s>"]),
    ],
)
def test_what_is_put_around_a_text(changes: dict[str, Any], tokens: list[str], tmp_path: Path) -> None:
    assert made(tmp_path, **of_pieces(**changes)).encode("ab").tokens == tokens


def test_the_tokenizer_of_gemma_4_has_pieces_and_its_own_merges(tmp_path: Path) -> None:
    found = made(tmp_path, **of_pieces(model="gemma4", merges=["b c", "▁ a", "a b"]))
    assert found.encode("abc a").tokens == ["<s>", "a", "bc", "▁a"]
    assert found.decode(found.encode("abc a").ids) == "abc a"


def test_end_tokens_are_those_of_the_metadata_and_those_that_are_known(tmp_path: Path) -> None:
    tokens = ["a", "</s>", "<|im_end|>", "<|end|>", "<|return|>", "<|eot_id|>"]
    kinds = np.array([1, 3, 3, 3, 3, 1])
    fields = {"model": "gpt2", "pre": "gpt-4o", "tokens": tokens, "token_type": kinds, "merges": [], "eos_token_id": 1}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    assert tokenizer_files(metadata)["generation_config.json"]["eos_token_id"] == [1, 2, 4]
    sampled = tokenizer_files(metadata | {"general.sampling.temp": 0.5, "general.sampling.top_k": 20})
    assert sampled["generation_config.json"] | {"eos_token_id": []} == {
        "eos_token_id": [],
        "temperature": 0.5,
        "top_k": 20.0,
    }


def test_the_chat_template_of_the_file_is_rendered(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "llama")
    template = {"tokenizer.chat_template": TEMPLATE}
    gguf = as_gguf(path, tmp_path / "m.gguf", change=lambda metadata, _: metadata.update(template))
    tokenizer = load_model(str(gguf)).tokenizer
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    assert tokenizer.text_with_specials(tokens) == "<|im_start|>hello<|im_end|>"


WITH_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + TEMPLATE
TOOLS = [{"type": "function", "function": {"name": "find", "description": "", "parameters": {}}}]


@pytest.mark.parametrize(
    ("templates", "without_tools", "with_tools"),
    [
        ({"": TEMPLATE, ".tool_use": WITH_TOOLS}, "hello", "findhello"),
        ({"": TEMPLATE, ".tool_use": WITH_TOOLS, ".rag": "documents"}, "hello", "findhello"),
        ({"": WITH_TOOLS, ".rag": "documents"}, "hello", "findhello"),
        ({"": TEMPLATE, ".tool_use": 7}, "hello", "hello"),
        ({".tool_use": WITH_TOOLS}, "hello", "findhello"),
    ],
)
def test_a_template_for_tools_is_rendered_if_there_are_tools(
    templates: dict[str, Any], without_tools: str, with_tools: str, tmp_path: Path
) -> None:
    path = make_tiny_model(tmp_path / "m", "llama")
    named = {f"tokenizer.chat_template{name}": template for name, template in templates.items()}

    def change(metadata: dict[str, Any], _: Any) -> None:
        metadata.pop("tokenizer.chat_template", None)
        metadata.update(named)

    tokenizer = load_model(str(as_gguf(path, tmp_path / "m.gguf", change=change))).tokenizer
    found = []
    for options in ({}, {"tools": TOOLS}):
        tokens = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], **options)
        found.append(tokenizer.text_with_specials(tokens).replace("<|im_start|>", "").replace("<|im_end|>", ""))
    assert found == [without_tools, with_tools]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "bert"}, "of the kind 'bert'"),
        ({"pre": "unheard"}, "'unheard'"),
        ({"merges": None}, "no merges"),
        ({"tokens": []}, "no tokenizer"),
        ({"token_type": np.array([1])}, "token_type"),
    ],
)
def test_a_tokenizer_that_is_not_known_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        made(tmp_path, **of_bytes(**changes))
