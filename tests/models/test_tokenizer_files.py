"""The rules of a tokenizer.json are those by which texts are tokenized, whatever class its directory names."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from mlxpaged.models.encoders.embedding import Pooling
from mlxpaged.models.encoders.encoder_model import EncoderModel, pool
from mlxpaged.models.loader import load_embedding_model
from mlxpaged.models.sources.gguf.directory import gguf_directory
from mlxpaged.models.text import tokenizer_files
from mlxpaged.models.text.tokenizer import InfillError, Tokenizer
from mlxpaged.models.text.tokenizer_files import TELLING, tokenizer_in
from tests.models.encoders import VOCABULARY, make_encoder
from tests.models.gguf_models import as_gguf
from tests.support import DEMO_PATH, make_tiny_model

TEXT = "hello\n 1  12"
BEGIN, END = "<s>", "</s>"
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
WORDS = ["h", "e", "l", "o", "he", "ll", "hell", "hello", "1", "2", "12", "\u0120", "\u0120\u0120", "\u010a"]
WORDS += ["\u010a\u0120", "\u01201"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("1", "2"), ("\u0120", "\u0120"), ("\u010a", "\u0120")]
MERGES += [("\u0120", "1")]
PLAIN: Mapping[str, Any] = {"bos_token": BEGIN, "eos_token": END}


def of_bytes(rules: pre_tokenizers.PreTokenizer) -> FastTokenizer:
    """Byte-level BPE with a few merges. Its only begin and end tokens are BEGIN and END."""
    alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet(), *WORDS})
    made = FastTokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, MERGES))
    made.pre_tokenizer, made.decoder = rules, decoders.ByteLevel()
    made.add_special_tokens([BEGIN, END])
    return made


def directory_of(path: Path, made: FastTokenizer, settings: Mapping[str, Any], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps(config))
    return path


def found_in(path: Path, *others: Any) -> Tokenizer:
    return tokenizer_in(path, None, (), *others)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.text_alone(token) for token in tokenizer.encode(text, add_special_tokens=False)]


def begin_and_end(made: FastTokenizer, single: str) -> processors.TemplateProcessing:
    ids = [(token, made.token_to_id(token)) for token in (BEGIN, END)]
    return processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=ids)


def test_digits_of_a_file_are_split_though_its_class_keeps_them(tmp_path: Path) -> None:
    """SmolLM and SmolLM2 have this class, type and rules."""
    path = directory_of(tmp_path, of_bytes(DIGITS), {**PLAIN, "tokenizer_class": "GPT2Tokenizer"}, model_type="llama")
    found = found_in(path)
    assert pieces(found, TEXT) == ["hello", "\n ", "1", "  ", "1", "2"]
    assert pieces(Tokenizer(load_tokenizer(path)), TEXT) != pieces(found, TEXT), "transformers heeds the file now"


RULES = {
    "digits": (DIGITS, normalizers.NFKC()),
    "gpt-2": (pre_tokenizers.ByteLevel(False), normalizers.Lowercase()),
    "prefix": (pre_tokenizers.ByteLevel(True), None),
    "threes": (
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        ),
        None,
    ),
    "white space": (
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False)]),
        normalizers.NFD(),
    ),
    "metaspace": (pre_tokenizers.Metaspace(), None),
}
CLASSES = [
    ("GPT2Tokenizer", "llama"),
    ("GPT2TokenizerFast", "gpt2"),
    ("LlamaTokenizer", "llama"),
    ("LlamaTokenizerFast", "mistral"),
    ("GPTNeoXTokenizerFast", "gpt_neox"),
    ("Qwen2Tokenizer", "qwen2"),
    ("GemmaTokenizer", "gemma"),
    ("CodeLlamaTokenizer", "llama"),
    ("CohereTokenizer", "cohere"),
    ("PreTrainedTokenizerFast", "llama"),
    ("TokenizersBackend", "llama"),
    ("OwnTokenizer", "llama"),  # code of the repository, which is not run
    (None, "qwen2"),
    (None, "bert"),
    (None, "gpt_neox"),
    (None, "unknown"),
]


@pytest.mark.parametrize(("name", "kind"), CLASSES)
@pytest.mark.parametrize("rules", RULES)
def test_a_file_counts_whatever_its_class_is(
    rules: str, name: str | None, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = of_bytes(RULES[rules][0])
    if (normalizer := RULES[rules][1]) is not None:
        made.normalizer = normalizer
    settings = PLAIN if name is None else {**PLAIN, "tokenizer_class": name}
    with caplog.at_level(logging.INFO):
        found = found_in(directory_of(tmp_path, made, settings, model_type=kind))
    assert not caplog.records
    texts = [*TELLING, TEXT, f"{TEXT}{END} {BEGIN}x"]
    assert [found.encode(text, False) for text in texts] == [bare_ids(made, text) for text in texts]
    added: list[Any] = [made.token_to_id(BEGIN)] * (name == "CodeLlamaTokenizer")  # its class adds it
    assert [found.encode(text) for text in texts] == [added + bare_ids(made, text) for text in texts]
    assert found.encode_pair(TEXT, TEXT)[1] == len(found.encode(TEXT))
    assert found.is_thread_safe
    tokens = found.encode(TEXT, False)
    detokenizer = found.detokenizer()
    assert "".join(map(detokenizer.add, tokens)) + detokenizer.finish() == found.decode(tokens) == made.decode(tokens)


def bare_ids(made: FastTokenizer, text: str) -> list[int]:
    return list(made.encode(text, add_special_tokens=False).ids)


def test_a_class_that_changes_texts_does_so_before_the_rules_of_the_file(tmp_path: Path) -> None:
    """mlx-lm has one that writes line feeds as <n>."""
    made = of_bytes(DIGITS)
    made.add_tokens(["<n>"])
    found = found_in(directory_of(tmp_path, made, {**PLAIN, "tokenizer_class": "NewlineTokenizer"}))
    assert pieces(found, TEXT) == ["hello", "\n", " ", "1", "  ", "1", "2"]
    assert found.decode(found.encode(TEXT)) == TEXT


def test_pieces_with_scores_are_read_for_a_type_whose_class_has_word_pieces(tmp_path: Path) -> None:
    path = make_encoder(tmp_path / "m", "bert")
    words = [*VOCABULARY[:5], "\u2581", *"12ab"]
    made = FastTokenizer(models.Unigram([(word, -float(i > 4)) for i, word in enumerate(words)], unk_id=1))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.add_special_tokens(VOCABULARY[:5])
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    model = load_embedding_model(str(path), None, 128)
    assert isinstance(model, EncoderModel)
    texts = [model.tokenizer.encode(text) for text in ("12", "21")]
    assert [[words[i] for i in text] for text in texts] == [["\u2581", "1", "2"], ["\u2581", "2", "1"]]
    one, other = np.array(pool(model.encoder(model.encoder.texts(texts)), [3, 6], Pooling.MEAN))
    assert abs(one - other).max() > 0.01


@pytest.mark.parametrize("lower", [False, True])
def test_case_is_what_the_file_says_and_not_the_class(lower: bool, tmp_path: Path) -> None:
    path = make_encoder(tmp_path / "m", "bert")
    edit(path / "tokenizer.json", normalizer={"type": "BertNormalizer", **BERT_FLAGS, "lowercase": lower})
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    model = load_embedding_model(str(path), None, 128)
    assert (model.tokenizer.encode("Blue") == model.tokenizer.encode("blue")) is lower
    assert model.tokenizer.reader.cls_token == "[CLS]"  # no file names it


BERT_FLAGS = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None}


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("name", ["BertTokenizer", "RobertaTokenizer", None])
def test_a_pair_has_the_types_of_the_file(name: str | None, tmp_path: Path) -> None:
    path = make_encoder(tmp_path / "m", "bert", pairs=True)
    (path / "tokenizer_config.json").write_text(json.dumps({} if name is None else {"tokenizer_class": name}))
    tokens, second = found_in(path).encode_pair("blue", "red red")
    assert [VOCABULARY[i] for i in tokens].count("[SEP]") == 2
    assert second == 3


@pytest.mark.parametrize("single", ["$A", f"{BEGIN} $A", f"$A {END}", f"{BEGIN} $A {END}"])
@pytest.mark.parametrize("asked", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
@pytest.mark.parametrize(
    "name", ["LlamaTokenizerFast", "GPTNeoXTokenizer", "PreTrainedTokenizerFast", "Qwen2Tokenizer"]
)
def test_a_prompt_has_its_begin_token_once(
    name: str, asked: dict[str, bool], single: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """DeepSeek V3 is published with a file that adds no begin token, and Llama's class and setting, which do."""
    made = of_bytes(DIGITS)
    made.post_processor = begin_and_end(made, single)
    path = directory_of(tmp_path, made, {**PLAIN, "tokenizer_class": name, **asked})
    with caplog.at_level(logging.INFO):
        tokens = found_in(path).encode("hello")
    by_file = {"add_bos_token": BEGIN in single, "add_eos_token": END in single}
    heeded = name in ("LlamaTokenizerFast", "GPTNeoXTokenizer")
    wanted = by_file | (asked if heeded else {})
    before, after = (
        [made.token_to_id(BEGIN)] * wanted["add_bos_token"],
        [made.token_to_id(END)] * wanted["add_eos_token"],
    )
    assert tokens == [*before, made.token_to_id("hello"), *after]
    assert bool(caplog.messages) is (by_file != by_file | asked)


def test_a_rule_that_a_setting_contradicts_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {**PLAIN, "tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True}
    found = found_in(directory_of(tmp_path, of_bytes(pre_tokenizers.ByteLevel(False)), settings))
    assert pieces(found, "hello") == ["hello"]
    assert caplog.messages == [
        "the rules of its tokenizer.json count, not add_prefix_space in its tokenizer_config.json"
    ]


def test_other_tokens_than_those_of_the_file_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Changed(tokenizer_files.PreTrainedTokenizerFast):  # type: ignore[misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)

    monkeypatch.setattr(tokenizer_files, "PreTrainedTokenizerFast", Changed)
    found_in(directory_of(tmp_path, of_bytes(DIGITS), PLAIN))
    assert caplog.messages == [f"the model's tokenizer makes other tokens of {TEXT!r} than its tokenizer.json"]


def test_tokens_that_only_the_configuration_has_are_added(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = of_bytes(DIGITS)
    size = made.get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    listed = {size: {"content": "<|new|>", **flags}}
    path = directory_of(tmp_path / "m", made, {**PLAIN, "added_tokens_decoder": listed})
    found = found_in(path)
    assert found.encode("hello<|new|>hello") == [made.token_to_id("hello"), size, made.token_to_id("hello")]
    assert found.decode([size]) == ""
    assert not caplog.messages
    edit(path / "tokenizer_config.json", added_tokens_decoder={size + 5: {"content": "<|new|>", **flags}})
    found_in(path)
    assert caplog.messages == [
        f"its token '<|new|>' has the number {size}, not {size + 5} as in its tokenizer_config.json"
    ]


@pytest.mark.parametrize("listed", [False, True])
def test_the_map_of_special_tokens_is_above_the_names_of_the_class(listed: bool, tmp_path: Path) -> None:
    made = of_bytes(DIGITS)
    made.add_special_tokens(["<|endoftext|>"])  # GPT-2's end token
    settings: dict[str, Any] = {"tokenizer_class": "GPT2Tokenizer"}
    path = directory_of(tmp_path, made, settings | ({"added_tokens_decoder": {}} if listed else {}))
    assert found_in(path).reader.eos_token == "<|endoftext|>"
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": END}}))
    assert found_in(path).reader.eos_token == END
    assert found_in(path).eos_token_ids == {made.token_to_id(END)}
    edit(path / "tokenizer_config.json", eos_token=BEGIN)
    assert found_in(path).reader.eos_token == (BEGIN if listed else END)  # as transformers reads the two


def test_a_file_neither_cuts_nor_fills_texts(tmp_path: Path) -> None:
    made = of_bytes(DIGITS)
    made.enable_truncation(2)
    made.enable_padding(length=40, pad_token=END)
    found = found_in(directory_of(tmp_path, made, {**PLAIN, "tokenizer_class": "LlamaTokenizer"}))
    assert pieces(found, TEXT) == ["hello", "\n ", "1", "  ", "1", "2"]
    assert found.encode_pair(TEXT, TEXT)[0] == 2 * found.encode(TEXT)


def test_code_llama_fills_the_middle_by_the_rules_of_its_file(tmp_path: Path) -> None:
    marks = ["\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>", "<FILL_ME>"]
    made = FastTokenizer(models.BPE({c: i for i, c in enumerate(["<unk>", *"ab12\u2581"])}, [], unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    made.add_special_tokens([BEGIN, END, *marks])
    made.post_processor = begin_and_end(made, f"{BEGIN} $A")
    path = directory_of(tmp_path, made, {**PLAIN, "unk_token": "<unk>", "tokenizer_class": "CodeLlamaTokenizer"})
    found, id_of = found_in(path), made.token_to_id
    plain = [id_of(each) for each in (BEGIN, "\u2581", "a", "\u2581", "1", "2")]
    assert found.encode("a 12") == plain
    filled = found.encode("a<FILL_ME>b")
    assert [i for i in filled if i in map(id_of, marks)] == [id_of(each) for each in marks[:3]]
    assert found.encode("a 12") == plain


def test_infilling_leaves_the_rules_of_the_file(tmp_path: Path) -> None:
    """transformers puts Llama 2's rules into the tokenizer after each text that it fills in."""
    marks = ["\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>", "<FILL_ME>"]
    settings = {**PLAIN, "tokenizer_class": "CodeLlamaTokenizer"}
    (made := of_bytes(DIGITS)).add_special_tokens(marks)
    found = found_in(directory_of(tmp_path, made, settings))
    before, filled = found.encode(TEXT), found.encode("hello<FILL_ME>")
    assert len(before) > 1
    assert found.encode("12<FILL_ME>12") == found.encode("12<FILL_ME>12") != filled
    assert found.encode(TEXT) == before
    with pytest.raises(InfillError, match="a text with <FILL_ME> cannot be filled in: too many values"):
        found.encode("1<FILL_ME>2<FILL_ME>1")


@pytest.mark.parametrize(
    ("pre", "text", "wanted"),
    [
        ("gpt-2", "DON'T 1234\n\n", ["DON", "'", "T", " 1234", "\n\n"]),
        ("llama-bpe", "a1234", ["a", "123", "4"]),
        ("qwen2", "a1234", ["a", "1", "2", "3", "4"]),
    ],
)
def test_a_gguf_file_is_split_as_its_pre_says_whatever_its_architecture(
    pre: str, text: str, wanted: list[str], tmp_path: Path
) -> None:
    def change(metadata: dict[str, Any], _: Any) -> None:
        metadata["tokenizer.ggml.pre"] = pre

    path = gguf_directory(as_gguf(make_tiny_model(tmp_path / "m", "qwen2"), tmp_path / "model.gguf", change=change))
    found = found_in(path)
    made = FastTokenizer.from_file(str(path / "tokenizer.json"))
    normalized = text if made.normalizer is None else made.normalizer.normalize_str(text)
    parts = [
        piece.replace("\u0120", " ").replace("\u010a", "\n")
        for piece, _ in made.pre_tokenizer.pre_tokenize_str(normalized)
    ]
    assert parts == wanted
    assert [found.encode(each, False) for each in TELLING] == [bare_ids(made, each) for each in TELLING]


def test_the_demo_model_keeps_its_template(tmp_path: Path) -> None:
    found = found_in(DEMO_PATH)
    expected = Tokenizer(load_tokenizer(DEMO_PATH))
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    assert found.apply_chat_template(messages) == expected.apply_chat_template(messages)
    assert found.eos_token_ids == expected.eos_token_ids
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    assert found.decode(found_in(DEMO_PATH, tmp_path / "own.jinja").apply_chat_template(messages)) == "What is 17 + 25?"


def test_transformers_raises_no_alarm_of_mistrals_expression(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does for more than 100,000 tokens."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    made = FastTokenizer(models.WordLevel({f"{i}": i for i in range(100_001)}, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = {"model_type": "mistral", "transformers_version": "4.50.0"}
    path = directory_of(tmp_path, made, {"tokenizer_class": "LlamaTokenizer", "unk_token": "0"}, **config)
    assert found_in(path).encode("12 345") == [12, 345]
    assert not caplog.messages
    tokenizer_files.PreTrainedTokenizerFast.from_pretrained(path)
    assert "incorrect regex pattern" in caplog.text
