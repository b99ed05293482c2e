"""Text as it appears token by token, and the bytes that tokens stand for."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.chat_templates import deepseek_v32
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import BPE, WordPiece
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import DEMO_PATH
from mlxpaged.models.text.templates import renderer
from mlxpaged.models.text.tokenizer import ChatTemplateError, Tokenizer, decode_of
from tests.support import demo_vocab_size

TOKENIZER = Tokenizer(load_tokenizer(DEMO_PATH))
EMOJI = "👩‍👩‍👧‍👦🇩🇪é漢字 ñ \N{COMBINING ACUTE ACCENT}\U0001f642"


def pieces(token_ids: list[int]) -> list[str]:
    detokenizer = TOKENIZER.detokenizer()
    return [*(detokenizer.add(token) for token in token_ids), detokenizer.finish()]


def pieces_after(token_ids: list[int]) -> list[str]:
    """The pieces of an answer that goes on after the first of these tokens."""
    detokenizer = TOKENIZER.detokenizer(after=token_ids[0])
    return [*(detokenizer.add(token) for token in token_ids[1:]), detokenizer.finish()]


TEXTS = st.text(max_size=40) | st.text("a 🙂é\n漢\ufffd", max_size=20) | st.text("ab 1\t", max_size=40)


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_pieces_of_a_text_join_to_the_text(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert "".join(pieces(tokens)) == TOKENIZER.decode(tokens)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, demo_vocab_size() - 1), max_size=40))
def test_pieces_of_any_tokens_join_to_what_all_of_them_decode_to(tokens: list[int]) -> None:
    assert "".join(pieces(tokens)) == TOKENIZER.decode(tokens)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, demo_vocab_size() - 1), min_size=1, max_size=20))
def test_the_token_before_an_answer_changes_no_piece_of_it(tokens: list[int]) -> None:
    assert pieces_after(tokens) == pieces(tokens[1:])


def test_pieces_of_random_bytes_join_to_what_all_of_them_decode_to() -> None:
    rng = random.Random(0)
    vocabulary = {token: TOKENIZER.token_bytes(token) for token in range(demo_vocab_size())}
    partial = [token for token, data in vocabulary.items() if len(data) == 1 and data[0] >= 0x80]
    assert len(partial) > 64
    for _ in range(300):
        tokens = [rng.choice(partial) if rng.random() < 0.8 else rng.randrange(len(vocabulary)) for _ in range(12)]
        assert "".join(pieces(tokens)) == TOKENIZER.decode(tokens)


def test_bytes_that_are_no_characters_are_sent_and_join_to_what_all_of_them_decode_to() -> None:
    rng = random.Random(0)
    vocabulary = {token: TOKENIZER.token_bytes(token) for token in range(demo_vocab_size())}
    partial = [token for token, data in vocabulary.items() if len(data) == 1 and data[0] >= 0x80]
    whole = TOKENIZER.encode("€🙂é", add_special_tokens=False)
    for _ in range(20):
        ends = [rng.choice([*whole, partial[0]]) for _ in range(rng.randrange(8))]
        tokens = [*ends, *rng.choices([*partial, *whole], k=150), *[partial[0]] * 200, *whole]
        found = pieces(tokens)
        assert "".join(found) == TOKENIZER.decode(tokens)
        assert sum(map(len, found[: len(ends) + 340])) > 200


def test_a_character_is_held_back_until_its_last_byte() -> None:
    for character in ("🙂", "漢", "é"):
        tokens = TOKENIZER.encode(character)
        assert len(tokens) > 1
        assert pieces(tokens) == [*([""] * (len(tokens) - 1)), character, ""]


def test_an_answer_keeps_its_space_after_a_prompt_that_ends_with_a_character_of_several_tokens() -> None:
    """Llama 2 and Mistral write characters that they have no tokens for as bytes, and strip a text's first space."""
    vocabulary = {piece: i for i, piece in enumerate(["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "a", "▁", "▁is"])}
    fast = FastTokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>")))
    for prompt in ("a", "🙂"):
        detokenizer = tokenizer.detokenizer(after=tokenizer.encode(prompt)[-1])
        assert detokenizer.add(vocabulary["▁is"]) == " is"


def test_no_piece_of_a_text_with_emoji_shows_a_replacement_character() -> None:
    for piece in pieces(TOKENIZER.encode(EMOJI)):
        assert "\ufffd" not in piece


def test_a_character_that_never_becomes_complete_comes_at_the_end() -> None:
    first = TOKENIZER.encode("🙂")[0]
    a = TOKENIZER.encode("a")
    assert pieces([*a, first]) == ["a", "", "\ufffd"]


def test_threads_encode_decode_and_find_tags_at_once() -> None:
    """By one tokenizer, which would raise an error if one of them set an option meanwhile."""
    texts = [EMOJI * 300, "What is 17 + 25? " * 2000, "a\n\n  b" * 3000]
    expected = [TOKENIZER.encode(text) for text in texts]
    short = TOKENIZER.encode("What is 17 + 25?")

    def decode(_: int) -> bool:
        TOKENIZER.detokenizer(think_tags=True, tool_tags=True)
        return TOKENIZER.decode(short) == "What is 17 + 25?" and TOKENIZER.reader.truncation_side == "right"

    with ThreadPoolExecutor(4) as threads:
        encoding = [threads.submit(TOKENIZER.encode, text) for text in texts * 3]
        assert all(map(decode, range(500)))
        assert [each.result() for each in encoding] == expected * 3


def test_special_tokens_leave_no_text() -> None:
    (eos, *_) = TOKENIZER.eos_token_ids
    a = TOKENIZER.encode("a")
    assert "".join(pieces([*a, eos, *a, eos])) == "aa"


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_token_bytes_join_to_the_utf8_of_the_text(text: str) -> None:
    data = bytes(byte for token in TOKENIZER.encode(text) for byte in TOKENIZER.token_bytes(token))
    assert data.decode() == TOKENIZER.decode(TOKENIZER.encode(text))


def test_every_token_has_bytes_in_range_and_one_outside_the_vocabulary_has_none() -> None:
    for token in range(demo_vocab_size()):
        data = TOKENIZER.token_bytes(token)
        assert data
        assert all(0 <= byte <= 255 for byte in data)
    assert TOKENIZER.token_bytes(demo_vocab_size() + 1000) == []


def test_the_end_of_sequence_is_shown_by_its_name() -> None:
    (eos, *_) = TOKENIZER.eos_token_ids
    assert TOKENIZER.token_text(eos).startswith("<")


def test_a_conversation_ends_where_the_assistant_answers() -> None:
    tokens = TOKENIZER.apply_chat_template([{"role": "user", "content": "Who are you?"}])
    shown = "".join(TOKENIZER.token_text(token) for token in tokens)
    assert shown.index("Who are you?") < shown.rindex("assistant")


def test_a_model_without_chat_template_says_what_to_use_instead() -> None:
    wrapped = load_tokenizer(DEMO_PATH)
    tokenizer = Tokenizer(wrapped)
    tokenizer.has_chat_template = False
    with pytest.raises(
        ChatTemplateError, match="no chat template; give it one with --chat-template, or use /v1/completions"
    ):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_what_a_template_refuses_is_reported_in_its_own_words() -> None:
    wrapped = load_tokenizer(DEMO_PATH)
    wrapped.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ChatTemplateError, match="refuses these messages: roles must alternate"):
        Tokenizer(wrapped).apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_template_that_is_code_shows_tools_and_calls() -> None:
    """mlx-lm's for DeepSeek V3.2: nothing is known of what it reads."""
    plain = AutoTokenizer.from_pretrained(DEMO_PATH)
    plain.chat_template = None
    found = Tokenizer(TokenizerWrapper(plain, chat_template=deepseek_v32.apply_chat_template), "deepseek_v32")
    assert (found.shows_tools, found.shows_calls, found.tags.tools.name) == (True, True, "deepseek_v32")
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "21 degrees"}
    shown = found.text_with_specials(found.apply_chat_template([{"role": "user", "content": "Hi"}, said, result]))
    assert '"city" string="true">Rome</｜DSML｜parameter>' in shown
    assert "21 degrees" in shown


def test_a_template_that_shows_tools_in_system_messages_is_given_one() -> None:
    plain = AutoTokenizer.from_pretrained(DEMO_PATH)
    plain.chat_template = None
    found = Tokenizer(TokenizerWrapper(plain, chat_template=deepseek_v32.apply_chat_template), "deepseek_v32")
    tools = [{"type": "function", "function": {"name": "weather"}}]
    user, system = {"role": "user", "content": "Rome?"}, {"role": "system", "content": "Be brief."}
    shown = [
        found.text_with_specials(found.apply_chat_template(messages, tools=tools))
        for messages in ([user], [system, user])
    ]
    assert ['{"name": "weather"}' in each for each in shown] == [True, True]
    assert ["Be brief." in each for each in shown] == [False, True]


def test_a_template_that_loops_at_an_effort_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "SECONDS", 0.05)
    wrapped = load_tokenizer(DEMO_PATH)
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    wrapped.chat_template = f"{{{{ messages }}}}{{% if reasoning_effort == 'high' %}}{loops}{{% endif %}}"
    with pytest.raises(UnsupportedModelError, match="takes more than"):
        Tokenizer(wrapped)


class Reversing(PreTrainedTokenizerFast):  # type: ignore[no-untyped-call,misc]
    def decode(self, token_ids: Any, *args: Any, **options: Any) -> str:
        return str(super().decode(token_ids, *args, **options))[::-1]


@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, Reversing])
@pytest.mark.parametrize("cleans", [False, True])
def test_texts_are_those_that_transformers_makes(kind: Any, cleans: bool) -> None:
    """It may clean them up, as for tokens of words and punctuation, and a kind may have a way of its own."""
    words = {"[UNK]": 0, "hello": 1, ",": 2, "is": 3, "n't": 4, "[END]": 5}
    inner = FastTokenizer(WordPiece(words, unk_token="[UNK]"))
    inner.decoder = WordPieceDecoder(cleanup=False)
    tokenizer = kind(tokenizer_object=inner, clean_up_tokenization_spaces=cleans, eos_token="[END]")
    ids, text_of = [1, 2, 3, 4, 5], decode_of(tokenizer)
    for skips in (False, True):
        assert text_of(ids, skips) == tokenizer.decode(ids, skip_special_tokens=skips)
    assert ("hello," in text_of(ids, True)) == (cleans and kind is not Reversing)
