"""The marks around the middle of a text: which vocabularies have them, and the tokens of a prompt."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from mlxpaged.models.text.infill import FAMILIES, Family, infill_of


def vocabulary(*tokens: str) -> dict[str, int]:
    return {token: 100 + i for i, token in enumerate(tokens)}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.prefix))
def test_a_family_is_found_by_its_marks(family: Family) -> None:
    found = infill_of(vocabulary(family.prefix, family.suffix, family.middle, *family.ends, "x"))
    assert found is not None
    assert (found.prefix, found.suffix, found.middle) == (100, 101, 102 if family.middle else None)
    assert found.ends == set(range(103, 103 + len(family.ends)))
    assert found.marks == {100, 101, *([102] if family.middle else [])}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: str(family.prefix))
def test_a_vocabulary_without_one_of_the_marks_has_none(family: Family) -> None:
    marks = [mark for mark in (family.prefix, family.suffix, family.middle) if mark]
    for missing in marks:
        assert infill_of(vocabulary(*(mark for mark in marks if mark != missing), *family.ends)) is None


def test_ends_that_the_vocabulary_lacks_are_none() -> None:
    found = infill_of(vocabulary("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"))
    assert found is not None
    assert found.ends == {103}


MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "[PREFIX]", "[SUFFIX]", "<s>"]


def of_bytes(begins: bool = False) -> Tokenizer:
    """A token for each byte. begins: a prompt begins with <s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return with_marks(made, begins)


def of_words(begins: bool = False) -> Tokenizer:
    """A token for each character, and a space before each text, as SentencePiece has it."""
    made = Tokenizer(models.BPE({char: i for i, char in enumerate("▁abc☺")}, []))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    return with_marks(made, begins)


def with_marks(made: Tokenizer, begins: bool) -> Tokenizer:
    made.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    if begins:
        made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    return made


def prompt(made: Tokenizer, prefix: str | list[int], suffix: str, *marks: str) -> list[str]:
    """The prompt in tokens. marks: those that the vocabulary has."""
    ids_of: dict[str, Any] = {mark: made.token_to_id(mark) for mark in marks or MARKS[:3]}
    infill = infill_of(ids_of)
    assert infill is not None
    ids = infill.prompt(lambda text, special: list(made.encode(text, add_special_tokens=special).ids), prefix, suffix)
    return [str(made.id_to_token(each)) for each in ids]


def test_the_prefix_comes_before_the_suffix_and_the_answer_after_both() -> None:
    assert prompt(of_bytes(), "ab", "c") == ["<|fim_prefix|>", "a", "b", "<|fim_suffix|>", "c", "<|fim_middle|>"]
    assert prompt(of_bytes(), "", "c") == ["<|fim_prefix|>", "<|fim_suffix|>", "c", "<|fim_middle|>"]


def test_a_prompt_begins_with_the_models_first_token() -> None:
    assert prompt(of_bytes(True), "a", "b")[:3] == ["<s>", "<|fim_prefix|>", "a"]
    assert prompt(of_bytes(True), "a", "b").count("<s>") == 1


def test_codestral_has_the_suffix_first() -> None:
    assert prompt(of_bytes(True), "a", "b", "[PREFIX]", "[SUFFIX]") == ["<s>", "[SUFFIX]", "b", "[PREFIX]", "a"]


def test_no_space_comes_before_a_suffix() -> None:
    """SentencePiece puts one before each text. Before the prefix it belongs to the beginning of a text."""
    assert prompt(of_words(True), "a b", "c a") == [
        *("<s>", "<|fim_prefix|>", "▁", "a", "▁", "b"),
        *("<|fim_suffix|>", "c", "▁", "a", "<|fim_middle|>"),
    ]


def test_tokens_may_stand_for_the_prefix() -> None:
    made = of_bytes()
    ids = list(made.encode("ab").ids)
    assert prompt(made, ids, "c") == prompt(made, "ab", "c")


def test_marks_in_the_texts_stay_what_the_encoder_makes_of_them() -> None:
    """Whether control tokens in a text count as text is for the encoder to say."""
    assert prompt(of_bytes(), "a<|fim_suffix|>", "b").count("<|fim_suffix|>") == 2
