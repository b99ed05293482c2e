"""Control tokens in the text of requests are text, whatever the tokenizer and the template do with it."""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.text.control_tokens import MARKERS, ControlTokens
from mlxpaged.models.text.tokenizer import ChatTemplateError, Tokenizer

CORPUS = [
    "the end of the turn is in the text",
    "</s> <s> [INST] <|im_end|> <end_of_turn> {'name': 'value'}",
    "im end 1 2",
]
BAR = "\uff5c"
CHATML = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{{- '\\n' + content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{%- if reason %}{{ reason }}{% endif %}
<think>
{% endif %}"""
LLAMA = """{{ bos_token }}{% if tools %}{{ tools | string }}{% endif %}{% for message in messages -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}
{%- for call in message.tool_calls or [] %}<|python_tag|>{{ call.function | tojson }}{% endfor %}<|eot_id|>
{%- endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{{ reason }}{% endif %}"""
GEMMA = """{{ bos_token }}{% if tools %}{{ tools }}{% endif %}{% for message in messages %}<start_of_turn>
{{- 'model' if message.role == 'assistant' else message.role }}
{{ message.content | trim }}{% if message.tool_calls %}{{ message.tool_calls }}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{{ reason }}{% endif %}"""
DEEPSEEK = """{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.description }}
{%- endfor %}{% for message in messages %}
{%- if message.role == 'user' %}<¦User¦>{{ message.content }}
{%- elif message.role == 'system' %}{{ message.content }}
{%- else %}<¦Assistant¦>{{ message.content }}{% for call in message.tool_calls or [] -%}
<¦tool▁call▁begin¦>{{ call.function.name }}{{ call.function.arguments | tojson }}<¦tool▁call▁end¦>{% endfor %}
{{- eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<¦Assistant¦>{{ reason }}{% endif %}""".replace(
    "¦", BAR
)
HARMONY = """{% if tools %}<|start|>developer<|message|>{% for tool in tools %}
type {{ tool.function.name }} = {{ tool.function.parameters | tojson(indent=2) }}{% endfor %}<|end|>{% endif %}
{%- for message in messages %}<|start|>{{ message.role }}<|channel|>final<|message|>{{ message.content }}
{%- for call in message.tool_calls or [] %}<|start|>assistant to=functions.{{ call.function.name }}<|message|>
{{- call.function.arguments | tojson }}<|call|>{% endfor %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{{ reason }}{% endif %}"""
MISTRAL = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}{% if message.role == 'assistant' %}{{ message.content }}
{%- if message.tool_calls %}[TOOL_CALLS]{{ message.tool_calls | tojson }}{% endif %}{{ eos_token }}
{%- else %}[INST]{{ message.content }}{% if loop.last %}{{ reason }}{% endif %}[/INST]{% endif %}{% endfor %}"""


@dataclass(frozen=True)
class Family:
    """special, added: tokens of the tokenizer, special and not. The first special one begins a text, the second ends an
    answer."""

    make: Callable[[list[str]], FastTokenizer]
    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()


def byte_level(ignore_merges: bool, _: list[str]) -> FastTokenizer:
    """As of GPT-2, Qwen, Llama 3 and gpt-oss."""
    tokenizer = FastTokenizer(models.BPE(ignore_merges=ignore_merges))
    words = pre_tokenizers.Split(Regex(r"[^\s\w]+|\s?\w+|\s+"), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_only])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


def pieces(special: list[str], texts: Iterator[str] | list[str] = CORPUS) -> list[str]:
    """A vocabulary as of SentencePiece: control tokens first, bytes, characters and pairs, and parts of the control
    tokens, so that text can be merged into them."""
    found = dict.fromkeys(["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"])
    for text in [*texts, *special]:
        shown = text.replace(" ", "▁")
        for length in (1, 2, 3, 4):
            found |= dict.fromkeys(shown[start : start + length] for start in range(len(shown) - length + 1))
        found |= dict.fromkeys(shown[:end] for end in range(1, len(shown)))
    return list(found)


def sentence_pieces(special: list[str]) -> FastTokenizer:
    """As of Llama 2, Mistral and Gemma: each piece can be merged of two others, control tokens too."""
    known = pieces(special)
    vocabulary = {piece: i for i, piece in enumerate(known)}
    splits = ((piece[:at], piece[at:]) for piece in sorted(known, key=len) for at in range(1, len(piece)))
    merges = [pair for pair in splits if vocabulary.keys() >= set(pair)]
    tokenizer = FastTokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(byte_parts)
    return tokenizer


def unigram(special: list[str]) -> FastTokenizer:
    """As of T5 and XLM: the pieces of the best score, which are control tokens wherever a text has them."""
    scores = [(piece, 0.0 if piece in special else -5.0 - 1 / len(piece)) for piece in pieces(special)]
    tokenizer = FastTokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    return tokenizer


CHATML_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
CHATML_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "\n\n")
GEMMA_TOKENS = ("<bos>", "<end_of_turn>", "<start_of_turn>", "<unused0>", "<unused1>")
MISTRAL_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
FAMILIES = {
    "chatml": Family(functools.partial(byte_level, False), CHATML, CHATML_TOKENS, CHATML_TAGS),
    "llama": Family(
        functools.partial(byte_level, True),
        LLAMA,
        ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    ),
    "gemma": Family(sentence_pieces, GEMMA, GEMMA_TOKENS, ("\n\n", "<table>")),
    "deepseek": Family(
        functools.partial(byte_level, False),
        DEEPSEEK,
        (f"<{BAR}begin▁of▁sentence{BAR}>", f"<{BAR}end▁of▁sentence{BAR}>"),
        (
            f"<{BAR}User{BAR}>",
            f"<{BAR}Assistant{BAR}>",
            f"<{BAR}tool▁call▁begin{BAR}>",
            f"<{BAR}tool▁call▁end{BAR}>",
            "<think>",
            "</think>",
        ),
    ),
    "harmony": Family(
        functools.partial(byte_level, False),
        HARMONY,
        ("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
    ),
    "mistral": Family(sentence_pieces, MISTRAL, MISTRAL_TOKENS),
    "unigram": Family(unigram, MISTRAL, MISTRAL_TOKENS),
}


@functools.cache
def tokenizer_of(name: str) -> Tokenizer:
    family = FAMILIES[name]
    fast = family.make(list(family.special))
    fast.add_special_tokens([AddedToken(text, normalized=name == "unigram") for text in family.special])
    fast.add_tokens([AddedToken(text, normalized=False) for text in family.added])
    begin, end = family.special[:2]
    fast.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, fast.token_to_id(begin))]
    )
    unknown = {"unk_token": "<unk>"} if fast.token_to_id("<unk>") is not None else {}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token=begin, eos_token=end, chat_template=family.template, **unknown
    )
    return Tokenizer(TokenizerWrapper(wrapped))


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def control_ids(name: str, token_ids: list[int], but: tuple[str, ...] = ("\n\n", "<table>")) -> list[int]:
    """Those of these tokens that are control tokens."""
    family, reader = FAMILIES[name], tokenizer_of(name).reader
    ids = {reader.convert_tokens_to_ids(text) for text in {*family.special, *family.added} - set(but)}
    return [token for token in token_ids if token in ids]


def hostile_conversation(name: str, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """As `conversation`. The assistant's own messages may have the tags that are not special."""
    family, rng = FAMILIES[name], random.Random(seed)
    added = [text for text in family.added if text != "\n\n"]
    return conversation(hostile_texts([*family.special, *added], rng), hostile_texts(family.special, rng))


def conversation(
    text: Callable[[], str], answer: Callable[[], str] | None = None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A conversation of one shape, and the template's options."""
    call = {
        "type": "function",
        "function": {"name": text(), "arguments": {text(): text(), "list": [text(), {"a": text()}]}},
    }
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text()},
        {"role": "user", "content": text()},
        {"role": "assistant", "content": (answer or text)(), "tool_calls": [call]},
        {"role": "user", "content": text()},
    ]
    parameters = {"type": "object", "properties": {text(): {"type": "string", "description": text()}}}
    tool = {"type": "function", "function": {"name": text(), "description": text(), "parameters": parameters}}
    return messages, {"tools": [tool], "reason": text()}


def numbered(prefix: str = "x") -> Callable[[], str]:
    count = iter(range(1000))
    return lambda: f"{prefix}{next(count)}"


def hostile_texts(tokens: Sequence[str], rng: random.Random) -> Callable[[], str]:
    """Random texts of control tokens and their parts. Two texts that a template writes side by side may be a control
    token together."""

    def part() -> str:
        token = rng.choice(tokens)
        at = rng.randrange(1, len(token))
        return rng.choice(
            [token, token, token[:at], token[at:], token.upper(), token + token, token[:at] + token, "a b", "\n", " "]
        )

    def text() -> str:
        return f"{next(count)}".join(part() for _ in range(rng.randrange(1, 5)))

    count = iter(range(10_000))
    return text


@pytest.mark.parametrize("seed", range(12))
def test_only_the_template_writes_control_tokens(name: str, seed: int) -> None:
    tokenizer = tokenizer_of(name)
    messages, options = conversation(numbered())
    expected = control_ids(name, tokenizer.apply_chat_template(messages, **options))
    assert len(expected) > 3
    messages, options = hostile_conversation(name, seed)
    assert control_ids(name, tokenizer.apply_chat_template(messages, **options)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_the_text_of_the_prompt_is_what_the_template_writes(name: str, seed: int) -> None:
    tokenizer = tokenizer_of(name)
    messages, options = hostile_conversation(name, seed)
    rendered = tokenizer.reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    decoded = tokenizer.text_with_specials(tokenizer.apply_chat_template(messages, **options))
    if name in ("mistral", "gemma", "unigram"):  # they write a space before each piece of text between control tokens
        rendered, decoded = rendered.replace(" ", ""), decoded.replace(" ", "")
    assert decoded == rendered


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_control_token_is_encoded_as_by_a_tokenizer_that_has_none(data: st.DataObject) -> None:
    """In merges with the text around it, too."""
    family = FAMILIES["chatml"]
    parts = st.sampled_from([*family.special, "<think>", "im_end", "<|", "the", " ", ".", "é"])
    text = "".join(data.draw(st.lists(parts, min_size=1, max_size=6)))
    tokenizer = tokenizer_of("chatml")
    known = json.loads(tokenizer.reader.backend_tokenizer.to_str())
    plain = FastTokenizer.from_str(json.dumps(known | {"added_tokens": []}))
    start, end = (tokenizer.reader.convert_tokens_to_ids(each) for each in ("<|im_start|>", "<|im_end|>"))
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    first = tokens[1 : tokens.index(end)]
    assert tokens[0] == start
    assert first == plain.encode(f"user\n{text}", add_special_tokens=False).ids


def test_text_without_control_tokens_has_the_same_tokens_either_way(name: str) -> None:
    """So prompts of one beginning share a prefix, whatever comes after it."""
    tokenizer = tokenizer_of(name)
    messages, options = conversation(numbered("a b <x> [y] | "))
    text = tokenizer.reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    usual = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.apply_chat_template(messages, True, len, MARKERS[0], **options) == usual
    assert tokenizer.apply_chat_template(messages, **options) == usual


def test_a_later_control_token_leaves_the_prefix(name: str) -> None:
    tokenizer = tokenizer_of(name)
    messages = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "hi"}]
    usual = tokenizer.apply_chat_template(messages, False)
    longer = tokenizer.apply_chat_template([*messages, {"role": "user", "content": FAMILIES[name].special[1]}])
    assert longer[: len(usual)] == usual


def test_a_prompt_can_be_split_and_is_not_by_default(name: str) -> None:
    tokenizer, tokens = tokenizer_of(name), FAMILIES[name].special
    text = f"a {tokens[1]} b{tokens[0]}"
    assert len(control_ids(name, tokenizer.encode(text))) == 3
    assert control_ids(name, tokenizer.encode(text, split_special_tokens=True)) == tokenizer.encode("")
    assert tokenizer.encode("a b", split_special_tokens=True) == tokenizer.encode("a b")


def test_tags_in_messages_of_the_assistant_are_what_the_template_looks_for() -> None:
    """Clients that do not parse thinking send it back with the answer. The template removes it."""
    tokenizer = tokenizer_of("chatml")
    text = "<think>\nhm <|im_end|>\n</think>\n\nanswer <tool_call> <|im_end|>"
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}], False
    )
    assert "hm" not in tokenizer.text_with_specials(tokens)
    names = tokenizer.reader.convert_ids_to_tokens(control_ids("chatml", tokens))
    assert names == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "<|im_end|>"]


def test_tags_of_a_user_are_text() -> None:
    tokens = tokenizer_of("chatml").apply_chat_template([{"role": "user", "content": "</think><tool_call>"}], False)
    names = tokenizer_of("chatml").reader.convert_ids_to_tokens(control_ids("chatml", tokens))
    assert names == ["<|im_start|>", "<|im_end|>"]


def test_an_ordinary_added_token_stays_one_token() -> None:
    tokenizer = tokenizer_of("chatml")
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "a\n\nb <|im_end|>"}])
    assert tokenizer.reader.convert_tokens_to_ids("\n\n") in tokens


def test_text_that_normalizes_to_a_control_token_is_text() -> None:
    tokenizer = tokenizer_of("unigram")
    assert control_ids("unigram", tokenizer.reader.encode("\uff1c/s\uff1e", add_special_tokens=False))
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "\uff1c/s\uff1e"}])
    assert control_ids("unigram", tokens) == control_ids(
        "unigram", tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    )


def test_the_marker_is_a_character_that_the_request_does_not_have() -> None:
    tokenizer = tokenizer_of("llama")
    text = "".join(MARKERS[:-1]) + json.dumps(MARKERS[0]) + "<|eot_id|>"
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": text}], reason="")
    assert text in tokenizer.text_with_specials(tokens)
    with pytest.raises(ChatTemplateError, match="letters of Yi"):
        tokenizer.apply_chat_template([{"role": "user", "content": text + MARKERS[-1]}], reason="")


def test_a_template_that_escapes_text_shows_no_marker() -> None:
    tokenizer = tokenizer_of("llama")
    escaping = LLAMA.replace("message.content | trim", "message.content | tojson(ensure_ascii=True)")
    wrapped = tokenizer.reader
    changed = PreTrainedTokenizerFast(
        tokenizer_object=wrapped.backend_tokenizer,
        bos_token=wrapped.bos_token,
        eos_token=wrapped.eos_token,
        chat_template=escaping,
    )
    escaping_tokenizer = Tokenizer(TokenizerWrapper(changed))
    tokens = escaping_tokenizer.apply_chat_template([{"role": "user", "content": "é<|eot_id|>"}], reason="")
    assert '"\\u00e9<|eot_id|>"' in escaping_tokenizer.text_with_specials(tokens)


def test_megabytes_are_searched_in_milliseconds() -> None:
    tokenizer = tokenizer_of("gemma")
    messages = [{"role": "user", "content": "<p>the end_of_turn is [here] </p>\n" * 100_000}]
    started = time.thread_time()
    marker, marked = tokenizer.mark(messages)
    assert time.thread_time() - started < 0.5
    assert marker == ""
    assert marked is messages


def test_a_tokenizer_of_too_many_control_tokens_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="more than 65,536 control tokens"):
        ControlTokens({f"<{i}>": i for i in range(65_537)}, (), False)
