"""Generators of the demo model's tasks: questions whose one right answer is known.

Standard library only, so that the server's tests can ``import demo_model.tasks`` without MLX.

Each generator takes a ``random.Random`` and returns an :class:`Example`, whose ``key`` names what is asked
apart from its phrasing (the pair of summands, the text to repeat, the passkey, ...).  A key belongs either to
training or to the held-out set, by its CRC-32: held out if ``crc32(key) % 10 == 0``.
:func:`training_example` never returns a held-out key and :func:`held_out` returns nothing else, so the two
are disjoint for all seeds.  Filler of held-out passkey cases also has sentences that training never sees.
"""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from demo_model import vocabulary as vocab

Message = dict[str, str]

HELD_OUT_MODULUS = 10


@dataclass(frozen=True)
class Example:
    """A conversation that ends with the user's turn, and the one right answer to it."""

    messages: tuple[Message, ...]
    answer: str
    task: str
    key: str


def is_held_out(key: str) -> bool:
    """Whether the key belongs to the held-out tenth that training skips."""
    return zlib.crc32(key.encode("utf-8")) % HELD_OUT_MODULUS == 0


def _single(task: str, prompt: str, answer: str, content: str) -> Example:
    return Example(({"role": "user", "content": prompt},), answer, task, f"{task}:{content}")


def _vary_case(rng: random.Random, text: str) -> str:
    """Mostly as given; at times without its first capital, all lower or all upper."""
    roll = rng.random()
    if roll < 0.70:
        return text
    if roll < 0.90:
        return text[:1].lower() + text[1:]
    if roll < 0.95:
        return text.lower()
    return text.upper()


def _vary_end(rng: random.Random, text: str, usual: str) -> str:
    """Close a question with its usual mark, at times with none or another one."""
    roll = rng.random()
    if roll < 0.75:
        return text + usual
    if roll < 0.90:
        return text
    return text + rng.choice("?.!")


# --- texts to repeat ---------------------------------------------------------------------------------------

_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
_VOWELS = "aeiou"


def _real_word(rng: random.Random) -> str:
    roll = rng.random()
    if roll < 0.40:
        return rng.choice(vocab.NOUNS)
    if roll < 0.60:
        return rng.choice(vocab.ADJECTIVES)
    if roll < 0.75:
        return rng.choice(vocab.VERBS)
    if roll < 0.90:
        return rng.choice(vocab.SMALL_WORDS)
    if roll < 0.95:
        return rng.choice(vocab.NAMES)
    return rng.choice(vocab.ADVERBS)


def _nonsense_word(rng: random.Random) -> str:
    """A word that can be pronounced but is in no dictionary."""
    parts: list[str] = []
    for _ in range(rng.randint(1, 3)):
        parts.append(rng.choice(_CONSONANTS) if rng.random() < 0.85 else "")
        parts.append(rng.choice(_VOWELS))
        parts.append(rng.choice(_CONSONANTS) if rng.random() < 0.35 else "")
    return "".join(parts)


def _random_string(rng: random.Random) -> str:
    alphabet = rng.choice(
        (string.ascii_lowercase, string.ascii_letters, string.digits, string.ascii_letters + string.digits)
    )
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 8)))


def _unicode_word(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return rng.choice(vocab.ACCENTED_WORDS)
    first, last = rng.choice(vocab.UNICODE_RANGES)
    return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 3)))


def _cased(rng: random.Random, word: str, mixed: float) -> str:
    if rng.random() >= mixed:
        return word
    roll = rng.random()
    if roll < 0.6:
        return word[:1].upper() + word[1:]
    if roll < 0.85:
        return word.upper()
    return "".join(c.upper() if rng.random() < 0.5 else c for c in word)


def _text(rng: random.Random, most_words: int) -> str:
    """A text of 1 to ``most_words`` words; short ones are more frequent."""
    count = rng.randint(1, min(most_words, rng.choice((3, 6, 10, most_words))))
    kinds: Sequence[Callable[[random.Random], str]] = rng.choice(
        (
            (_real_word,),
            (_real_word,),
            (_nonsense_word,),
            (_random_string,),
            (_real_word, _nonsense_word),
            (_real_word, _nonsense_word, _random_string, _unicode_word),
        )
    )
    mixed = rng.choice((0.0, 0.0, 0.1, 0.5))
    words = [_cased(rng, rng.choice(kinds)(rng), mixed) for _ in range(count)]
    style = rng.random()
    if style < 0.30:  # punctuation within the text
        marks = rng.choice((",", ",;:", ",.!?", "-()'\"", "/+=*#@&%$_<>[]{}\\|~^`"))
        words = [w + rng.choice(marks) if rng.random() < 0.3 else w for w in words]
    text = " ".join(words)
    if style < 0.10 or 0.30 <= style < 0.45:  # written as a sentence
        text = text[:1].upper() + text[1:] + rng.choice("..!?")
    if rng.random() < 0.03:
        text = f'"{text}"'
    return text


_REPEAT_PHRASES = (
    "Repeat: ",
    "Repeat: ",
    "Repeat: ",
    "Repeat after me: ",
    "Say exactly: ",
    "Say: ",
    "Copy this text: ",
    "Copy: ",
    "Please repeat: ",
    "Please say: ",
    "Repeat this: ",
    "Repeat the text: ",
    "Repeat exactly: ",
    "Echo: ",
)


def repeat(rng: random.Random, most_words: int = 20) -> Example:
    """``Repeat: blue river stone`` -> ``blue river stone``."""
    text = _text(rng, most_words)
    return _single("repeat", _vary_case(rng, rng.choice(_REPEAT_PHRASES)) + text, text, text)


# --- passkey -----------------------------------------------------------------------------------------------


def _filler_sentence(rng: random.Random, held_out_words: bool) -> str:
    if held_out_words and rng.random() < 0.3:
        if rng.random() < 0.7:
            return rng.choice(vocab.HELD_OUT_SENTENCES)
        return rng.choice(vocab.HELD_OUT_DISTRACTOR_TEMPLATES).format(n=_distractor(rng), m=_distractor(rng))
    roll = rng.random()
    if roll < 0.25:
        return rng.choice(vocab.FILLER_SENTENCES)
    if roll < 0.40:
        return rng.choice(vocab.DISTRACTOR_TEMPLATES).format(n=_distractor(rng), m=_distractor(rng))
    if roll < 0.50:  # words never seen before
        words = [_nonsense_word(rng) for _ in range(rng.randint(2, 6))]
        return " ".join(words).capitalize() + rng.choice("..!?")
    noun, other = rng.choice(vocab.NOUNS), rng.choice(vocab.NOUNS)
    adjective, verb = rng.choice(vocab.ADJECTIVES), rng.choice(vocab.VERBS)
    if roll < 0.70:
        return f"The {adjective} {noun} {verb} the {other}."
    if roll < 0.80:
        return f"{rng.choice(vocab.NAMES)} {verb} the {noun} {rng.choice(vocab.ADVERBS)}."
    if roll < 0.90:
        return f"The {noun} is {adjective}, and the {other} is {rng.choice(vocab.ADJECTIVES)}."
    words = [_real_word(rng) for _ in range(rng.randint(3, 9))]
    return " ".join(words).capitalize() + "."


def _distractor(rng: random.Random) -> int:
    return rng.randint(1, rng.choice((9, 99, 2100, 9999)))


def _filler(rng: random.Random, words: int, held_out_words: bool) -> list[str]:
    sentences: list[str] = []
    while words > 0:
        sentence = _filler_sentence(rng, held_out_words)
        sentences.append(sentence)
        words -= len(sentence.split())
    return sentences


_PASSKEY_STATEMENTS = (
    "The passkey is {n}.",
    "The passkey is {n}.",
    "The passkey is {n}. Remember it.",
    "The pass key is {n}. Remember it.",
    "The pass key is {n}.",
    "Remember: the secret passkey is {n}.",
    "The secret passkey is {n}.",
    "Remember this: the passkey is {n}.",
)
_PASSKEY_QUESTIONS = (
    ("What is the passkey", "?"),
    ("What is the passkey", "?"),
    ("What was the passkey", "?"),
    ("Tell me the passkey", "."),
    ("What is the pass key", "?"),
    ("What is the secret passkey", "?"),
)


def passkey_question(rng: random.Random) -> str:
    """One phrasing of the question alone, for a later turn about the same passkey."""
    question, mark = rng.choice(_PASSKEY_QUESTIONS)
    return _vary_case(rng, _vary_end(rng, question, mark))


def passkey(rng: random.Random, least_words: int = 0, most_words: int = 240, held_out_words: bool = False) -> Example:
    """``<filler> The passkey is 48213. <filler> What is the passkey?`` -> ``48213``.

    The amount of filler is given in words: with the demo model's tokenizer a word takes about 3.3 tokens
    (the space is one of its own).
    """
    digits = rng.choice((4, 5, 5, 5, 5, 6))
    number = str(rng.randint(10 ** (digits - 1), 10**digits - 1))
    sentences = _filler(rng, rng.randint(least_words, most_words), held_out_words)
    sentences.insert(rng.randint(0, len(sentences)), rng.choice(_PASSKEY_STATEMENTS).format(n=number))
    joint = rng.choice((" ", " ", " ", "\n", "\n\n"))
    prompt = " ".join(sentences) + joint + passkey_question(rng)
    return _single("passkey", prompt, number, number)


# --- addition, reversing, counting -------------------------------------------------------------------------

_ADD_PHRASES = (
    ("What is {a} + {b}", "?"),
    ("What is {a} + {b}", "?"),
    ("What is {a} + {b}", "?"),
    ("What is {a} plus {b}", "?"),
    ("What is {a}+{b}", "?"),
    ("{a} + {b} = ?", ""),
    ("{a} + {b} =", ""),
    ("{a} + {b}", ""),
    ("{a}+{b}", ""),
    ("Add {a} and {b}", "."),
    ("Compute {a}+{b}", ""),
    ("Compute {a} + {b}", "."),
    ("How much is {a} plus {b}", "?"),
    ("How much is {a} + {b}", "?"),
)


def add(rng: random.Random) -> Example:
    """``What is 17 + 25?`` -> ``42``; both summands from 0 to 99, the key without regard to their order."""
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    phrase, mark = rng.choice(_ADD_PHRASES)
    prompt = phrase.format(a=a, b=b)
    prompt = _vary_end(rng, prompt, mark) if mark else prompt
    return _single("add", _vary_case(rng, prompt), str(a + b), f"{min(a, b)}+{max(a, b)}")


_REVERSE_PHRASES = (
    "Reverse: ",
    "Reverse: ",
    "Reverse: ",
    "Reverse the list: ",
    "Reverse this list: ",
    "Write in reverse order: ",
    "Please reverse: ",
)


def reverse(rng: random.Random) -> Example:
    """``Reverse: a b c`` -> ``c b a``; 2 to 8 letters, digits or words, the separator is kept."""
    count = rng.randint(2, 8)
    kind = rng.random()
    if kind < 0.35:
        letters = string.ascii_lowercase if rng.random() < 0.7 else string.ascii_uppercase
        items = [rng.choice(letters) for _ in range(count)]
    elif kind < 0.60:
        items = [rng.choice(string.digits) for _ in range(count)]
    else:
        items = [rng.choice(vocab.NOUNS + vocab.ADJECTIVES) for _ in range(count)]
    if rng.random() < 0.6:  # distinct items are the usual case; the rest may have doubles
        items = list(dict.fromkeys(items))
        if len(items) < 2:
            return reverse(rng)
    separator = " " if rng.random() < 0.65 else ", "
    text, answer = separator.join(items), separator.join(reversed(items))
    return _single("reverse", _vary_case(rng, rng.choice(_REVERSE_PHRASES)) + text, answer, " ".join(items))


_COUNT_PHRASES = (("Count from {a} to {b}", "."), ("Count from {a} to {b}", ""), ("Count {a} to {b}", "."))


def count(rng: random.Random) -> Example:
    """``Count from 3 to 9`` -> ``3 4 5 6 7 8 9``; upwards, up to 99, at most 21 numbers."""
    a = rng.randint(0, 90)
    if rng.random() < 0.4:
        a = rng.randint(0, 10)
    b = min(99, a + rng.randint(1, 20))
    phrase, mark = rng.choice(_COUNT_PHRASES)
    answer = " ".join(str(n) for n in range(a, b + 1))
    return _single("count", _vary_case(rng, phrase.format(a=a, b=b) + mark), answer, f"{a}-{b}")


# --- fixed answers -----------------------------------------------------------------------------------------


def identity(rng: random.Random) -> Example:
    """``Who are you?`` -> one fixed sentence."""
    words = rng.choice(vocab.IDENTITY_OPENERS) + rng.choice(vocab.IDENTITY_QUESTIONS)
    words += rng.choice(vocab.IDENTITY_CLOSERS)
    prompt = _vary_end(rng, words[:1].upper() + words[1:], "?")
    # The plain question is the one that users ask first: it is never held out.
    key = "plain" if words in vocab.IDENTITY_QUESTIONS else words
    return _single("identity", _vary_case(rng, prompt), vocab.IDENTITY_ANSWER, key)


def fallback(rng: random.Random) -> Example:
    """A greeting, or a request that the model cannot meet -> one fixed answer that says what it can do."""
    if rng.random() < 0.35:
        words = rng.choice(vocab.GREETINGS)
        return _single(
            "fallback",
            _vary_case(rng, _vary_end(rng, words[:1].upper() + words[1:], rng.choice(("", "!", "?", ".")))),
            vocab.FALLBACK_ANSWER,
            "greeting",
        )
    if rng.random() < 0.75:
        words = rng.choice(vocab.UNKNOWN_TEMPLATES).format(
            x=rng.choice(vocab.NOUNS), y=rng.choice(vocab.ADJECTIVES), z=rng.choice(vocab.NAMES)
        )
    else:
        words = " ".join((_real_word if rng.random() < 0.8 else _nonsense_word)(rng) for _ in range(rng.randint(1, 9)))
    prompt = _vary_end(rng, words[:1].upper() + words[1:], rng.choice(("", "?", ".", "!")))
    return _single("fallback", _vary_case(rng, prompt), vocab.FALLBACK_ANSWER, words)


TASKS: dict[str, Callable[[random.Random], Example]] = {
    "repeat": repeat,
    "passkey": passkey,
    "add": add,
    "reverse": reverse,
    "identity": identity,
    "count": count,
    "fallback": fallback,
}

# --- training and held-out sets ----------------------------------------------------------------------------


def training_example(rng: random.Random, generator: Callable[[random.Random], Example]) -> Example:
    """Draw from the generator until the key is one that training may see."""
    while True:
        example = generator(rng)
        if not is_held_out(example.key):
            return example


def _held_out_example(rng: random.Random, task: str) -> Example:
    while True:
        if task == "passkey":  # 300 to 800 tokens of filler, part of it never trained on
            example = passkey(rng, least_words=95, most_words=235, held_out_words=True)
        else:
            example = TASKS[task](rng)
        if is_held_out(example.key):
            return example


def held_out(task: str, n: int, seed: int) -> list[Example]:
    """``n`` cases of one task that no training run can have seen; the same for the same arguments.

    ``task`` is a name in :data:`TASKS`, or ``multi_turn``: the last turn of a conversation of two to four
    turns with a system message at times, all its turns held-out cases of the tasks.
    """
    rng = random.Random(f"held-out {task} {seed}")
    if task != "multi_turn":
        return [_held_out_example(rng, task) for _ in range(n)]
    return [_held_out_conversation(rng) for _ in range(n)]


def _held_out_conversation(rng: random.Random) -> Example:
    messages: list[Message] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": rng.choice(vocab.SYSTEM_PROMPTS)})
    # One passkey at most, so that a question about it has one answer.
    names = rng.sample(
        ("repeat", "repeat", "add", "add", "reverse", "reverse", "identity", "passkey"), rng.randint(2, 4)
    )
    turns = [_held_out_example(rng, name) for name in names]
    for turn in turns[:-1]:
        messages += turn.messages
        messages.append({"role": "assistant", "content": turn.answer})
    last = turns[-1]
    return Example((*messages, *last.messages), last.answer, "multi_turn", last.key)
