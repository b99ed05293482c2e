"""Makes the tokenizer's files of a GGUF file: tokenizer.json, tokenizer_config.json and generation_config.json.

The kinds of tokenizers, what splits a text before its tokens are merged, and the defaults are those of llama.cpp
(llama-vocab.cpp); the expressions are those of the models' own tokenizer.json, which it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.files import TEMPLATES

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens (llama_token_type in llama.h)."""

SPACE = "\u2581"
MAX_PIECE = 64
"""Characters of a token that is merged of two others. SentencePiece has at most 16."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDINGS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{ENDINGS}"
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{ENDINGS}"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
WORD = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = rf"{WORD}{UPPER}*{LOWER}+|{WORD}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{ENDINGS}"
GPT4O = (
    rf"{WORD}{UPPER}*{LOWER}+{CONTRACTIONS}?|{WORD}{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{ENDINGS}"
)
ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
DEEPSEEK3 = (
    rf"{ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{ENDINGS}"
)


class Splits(NamedTuple):
    """expressions: each splits what the ones before have left. whole: whether a word that is a token is not merged.
    bos: whether texts begin with the begin token if the file does not say. nfc: whether characters are composed."""

    expressions: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    nfc: bool = False


OF_LLAMA3 = Splits((LLAMA3,), whole=True, bos=True)
OF_GPT2 = Splits((GPT2,))
DIGITS = Splits((r"\p{N}", GPT2))

SPLITS: Mapping[str, Splits] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), OF_LLAMA3
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "mellum", "exaone4", "granite-docling", "olmo", "trillion"), OF_GPT2
    ),
    **dict.fromkeys(("refact", "smollm", "starcoder", "command-r", "exaone", "codeshell", "minerva-7b"), DIGITS),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Splits((LLAMA3,))),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), Splits((GPT4O,))),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "hunyuan", "stablelm2"), Splits((QWEN2,))),
    "qwen2": Splits((QWEN2,), nfc=True),
    "qwen35": Splits((QWEN35,), nfc=True),
    "tekken": Splits((TEKKEN,), whole=True, bos=True),
    "deepseek-v3": Splits((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+", DEEPSEEK3)),
    "deepseek-coder": Splits(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
    ),
}
"""Rules by the value of tokenizer.ggml.pre."""

END_TEXTS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<turn|>",
}
"""Control tokens that end an answer, whatever the metadata says (llama-vocab.cpp, special_eog_ids)."""
MESSAGE_END = "<|end|>"
"""Ends a message, not the answer, in gpt-oss, which has <|return|>."""

SAMPLING = {"temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}
"""Names in general.sampling, and those of generation_config.json."""

ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


class Vocabulary:
    """The tokens of a file. Raises UnsupportedModelError if it has none of use."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
            raise UnsupportedModelError("it has no tokenizer (tokenizer.ggml.tokens)")
        self.tokens: list[str] = tokens
        self.kinds = self._numbers("token_type", np.full(len(tokens), NORMAL)).tolist()
        self.ids: dict[str, int] = {}
        for i, token in enumerate(tokens):
            self.ids.setdefault(token, i)

    def _numbers(self, name: str, default: Any) -> Any:
        found = self.metadata.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(found, np.ndarray) or len(found) != len(self.tokens):
            raise UnsupportedModelError(f"its tokenizer.ggml.{name} does not have a number for each token")
        return found

    def scores(self) -> list[float]:
        found: list[float] = self._numbers("scores", None).tolist()
        return found

    def of(self, kind: int) -> list[str]:
        return [self.tokens[i] for i, each in enumerate(self.kinds) if each == kind]

    def named(self, name: str) -> str | None:
        """The token of an id of the metadata, such as "bos"."""
        found = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return self.tokens[found] if type(found) is int and 0 <= found < len(self.tokens) else None

    def listed(self, name: str) -> set[str | None]:
        """The tokens of a list of ids, which Ollama's files have."""
        found = self.metadata.get(f"tokenizer.ggml.{name}_token_ids")
        ids = found.tolist() if isinstance(found, np.ndarray) and found.dtype.kind in "iu" else []
        return {self.tokens[i] for i in ids if 0 <= i < len(self.tokens)}

    def flag(self, name: str, default: bool) -> bool:
        found = self.metadata.get(f"tokenizer.ggml.{name}")
        return found if isinstance(found, bool) else default

    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens that a text is searched for before it is split."""
        found = ((i, token, self.kinds[i]) for token, i in self.ids.items())
        return [
            {"id": i, "content": token, "special": kind != USER_DEFINED, **ADDED}
            for i, token, kind in found
            if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
        ]

    def merges(self) -> list[tuple[str, str]]:
        """The pairs of tokens that the file merges, in order."""
        found = self.metadata.get("tokenizer.ggml.merges")
        if not isinstance(found, list):
            raise UnsupportedModelError("its tokenizer has no merges (tokenizer.ggml.merges)")
        pairs = []
        for merge in found:
            at = str(merge).find(" ", 1)  # the first character may be a space
            left, right = merge[:at], merge[at + 1 :]
            if left in self.ids and right in self.ids and left + right in self.ids:
                pairs.append((left, right))
        return pairs

    def merges_by_score(self) -> Iterator[tuple[str, str]]:
        """The pairs that give a token, those of the highest score first, as SentencePiece merges."""
        scores = self.scores()
        normal = {token for token, i in self.ids.items() if self.kinds[i] == NORMAL and len(token) <= MAX_PIECE}
        for token in sorted(normal, key=lambda token: (-scores[self.ids[token]], self.ids[token])):
            for at in range(1, len(token)):
                if token[:at] in normal and token[at:] in normal:
                    yield token[:at], token[at:]


def bpe(words: Vocabulary) -> dict[str, Any]:
    """A tokenizer of bytes, as GPT-2's."""
    name = words.metadata.get("tokenizer.ggml.pre")
    splits = SPLITS.get(name) if isinstance(name, str) else None
    if splits is None:
        raise UnsupportedModelError(f"its tokenizer splits texts in a way that is not known ({name!r:.40})")
    split = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in splits.expressions
    ]
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "normalizer": {"type": "NFC"} if splits.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, by_bytes]},
        "post_processor": begin_and_end(words, splits.bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model(words, words.merges(), ignore_merges=splits.whole),
    }


def spm(words: Vocabulary) -> dict[str, Any]:
    """A tokenizer of characters that merges by scores, and writes a space as SPACE."""
    prefix = words.flag("add_space_prefix", True)
    return by_characters(words, list(words.merges_by_score()), prefix)


def gemma4(words: Vocabulary) -> dict[str, Any]:
    """Like `spm`, with its own order of merges."""
    return by_characters(words, words.merges(), words.flag("add_space_prefix", False))


def by_characters(words: Vocabulary, merges: list[tuple[str, str]], prefix: bool) -> dict[str, Any]:
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    before = [{"type": "Prepend", "prepend": SPACE}] * prefix
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * prefix
    unknown = words.named("unknown") or next(iter(words.of(UNKNOWN)), None)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, replaced]},
        "pre_tokenizer": None,
        "post_processor": begin_and_end(words, True),
        "decoder": {"type": "Sequence", "decoders": decoders + strip},
        "model": model(words, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def model(words: Vocabulary, merges: list[tuple[str, str]], **settings: Any) -> dict[str, Any]:
    defaults = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    switches = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **defaults, **switches, **settings, "vocab": words.ids, "merges": merges}


def begin_and_end(words: Vocabulary, begins: bool) -> dict[str, Any] | None:
    """What is put around a text. begins: whether it is the begin token if the file does not say."""
    bos = words.named("bos") if words.flag("add_bos_token", begins) else None
    eos = words.named("eos") if words.flag("add_eos_token", False) else None
    text: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    before = [{"SpecialToken": {"id": bos, "type_id": 0}}] * (bos is not None)
    after = [{"SpecialToken": {"id": eos, "type_id": 0}}] * (eos is not None)
    if not before and not after:
        return None
    special = {
        each: {"id": each, "ids": [words.ids[each]], "tokens": [each]} for each in (bos, eos) if each is not None
    }
    second = [{"Sequence": {"id": "B", "type_id": 1}}]
    single = [*before, *text, *after]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *before, *second, *after],
        "special_tokens": special,
    }


KINDS = {"gpt2": bpe, "llama": spm, "gemma4": gemma4}
"""Makers by the value of tokenizer.ggml.model."""


def tokenizer_files(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of the files by their paths; those of chat templates are texts. Raises UnsupportedModelError."""
    kind = metadata.get("tokenizer.ggml.model")
    words = Vocabulary(metadata)
    if not isinstance(kind, str) or kind not in KINDS:
        raise UnsupportedModelError(f"its tokenizer is of the kind {kind!r:.40}; {', '.join(KINDS)} are supported")
    fields = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": words.added_tokens()}
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    files: dict[str, Any] = {
        "tokenizer.json": fields | KINDS[kind](words),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{field: words.named(name) for field, name in names.items()},
        },
        "generation_config.json": {"eos_token_id": end_tokens(words), **sampling(metadata)},
    }
    return files | templates(metadata)


def templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates by the names of their files, as transformers reads them: `tool_use` is for requests with tools
    if there is another one. Templates of other names are used by no request."""
    own, for_tools = (metadata.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use"))
    found = [each for each in (own, for_tools) if isinstance(each, str) and each]
    return dict(zip(("chat_template.jinja", f"{TEMPLATES}/tool_use.jinja"), found, strict=False))


def end_tokens(words: Vocabulary) -> list[int]:
    """The tokens that end an answer."""
    texts = {words.named(name) for name in ("eos", "eot", "eom")} | words.listed("eos")
    control = {token for token in words.of(CONTROL) if token in END_TEXTS}
    if "<|return|>" in control:
        control.discard(MESSAGE_END)
        texts.discard(MESSAGE_END)
    return sorted(words.ids[each] for each in (texts | control) if each is not None)


def sampling(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Recommended values of sampling parameters."""
    found: dict[str, Any] = {name: metadata.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    return {name: float(value) for name, value in found.items() if type(value) in (int, float)}
