"""Keeps the text of requests from becoming control tokens: only the chat template writes those.

A template trims, splits and joins the texts that it is given. So nothing can be said afterwards of where a text came
from, unless it was marked before. `mark` puts a marker into each control token that a request contains: the template
sees no such token, but all other text as it is. After the rendering, the control tokens that are whole are the
template's own. They get the names that `renamed_tokenizer` knows them by, and the markers are removed. This tokenizer
does not know the usual names, so it encodes them as it encodes any text, merges with the text around them included.

Most requests contain no control token. For them, this module is one search by a regular expression.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from mlxpaged.models.errors import UnsupportedModelError

MAX_CONTROL_TOKENS = 65_536
"""Models with a token for each sound or image have some 30,000. Their expression takes seconds to compile."""
MARKERS = [chr(code) for code in range(0xA000, 0xA48D)]
"""Syllables of Yi. They are letters without case, so a template that writes values as JSON, as Python does, in
capitals or without white space leaves them as they are. One that no text of the request has is the marker."""
NAME_CHARACTERS = [chr(code) for code in range(0x13000, 0x1342F)]
"""Egyptian hieroglyphs: as the above, and no normalizer of a tokenizer changes them."""
NAME_LENGTH = 16
"""A name is random, so that no request contains it: 160 bits."""
HARMLESS_NORMALIZERS = {"Prepend", "Replace"}
"""They change white space only, as far as models use them."""


class ControlTokenError(ValueError):
    """A text has control tokens that cannot be encoded as text."""


class ControlTokens:
    """The control tokens of a tokenizer, by their texts."""

    def __init__(self, ids: Mapping[str, int], written_by_model: Iterable[str], is_normalized: bool) -> None:
        """written_by_model: those that stay control tokens in messages of the assistant. is_normalized: whether other
        texts can become control tokens, because the tokenizer normalizes them. Raises UnsupportedModelError."""
        if len(ids) > MAX_CONTROL_TOKENS:
            raise UnsupportedModelError(f"its tokenizer has more than {MAX_CONTROL_TOKENS:,} control tokens")
        self._ids = {text: token_id for text, token_id in ids.items() if len(text) > 1}  # one character has no inside
        self._texts = Texts(self._ids)
        self._written_by_model = frozenset(written_by_model)
        self._is_normalized = is_normalized
        self._names: dict[str, str] = {}
        self._renamed: FastTokenizer | None = None
        self._lock = threading.Lock()

    def mark(self, template: str, messages: Sequence[Mapping[str, Any]], *others: Any) -> tuple[Any, ...]:
        """Returns the marker, the messages and the others. All strings in them that contain a control token, or end
        with the beginning of one, have the marker there. The marker is empty if no text needs one; then everything is
        returned as it is. template: its source. others: what else of the request the template is given.

        In messages of the assistant, the tags of thinking and calls stay as they are. A model writes them, so clients
        that do not parse answers send them back, and templates look for them there. Raises ControlTokenError."""
        if not (self._is_normalized or any(map(self._texts.is_in, strings_of([messages, others])))):
            return "", messages, *others
        given = "\n".join([template, *strings_of([messages, others])])
        unused = (each for each in MARKERS if each not in given and escaped(each) not in given)
        marker = next(unused, "")
        if not marker:
            raise ControlTokenError("a control token in them cannot be marked, because they have all letters of Yi")

        def mark_all(value: Any) -> Any:
            return mapped(value, lambda text: self._texts.marked(text, marker))

        def mark_message(message: Mapping[str, Any]) -> dict[str, Any]:
            marked = {name: mark_all(value) for name, value in message.items()}
            if message.get("role") == "assistant" and isinstance(content := message.get("content"), str):
                marked["content"] = self._texts.marked(content, marker, self._written_by_model)
            return marked

        try:
            return marker, list(map(mark_message, messages)), *map(mark_all, others)
        except RecursionError:
            raise ControlTokenError("they are nested too deep") from None

    def encode(self, fast: Any, text: str, marker: str) -> list[int]:
        """Tokens of a rendered text. fast: as for `renamed_tokenizer`. Raises ControlTokenError."""
        tokenizer = self.renamed_tokenizer(fast)
        renamed = self._texts.pattern.sub(lambda match: self._names[match[0]], text)
        return encoded(tokenizer, unmarked(renamed, marker), add_special_tokens=False)

    def renamed_tokenizer(self, fast: Any) -> FastTokenizer:
        """The same tokenizer with other names for the control tokens, which no request knows. It is made when it is
        first needed, which takes about a second for a large vocabulary. fast: the tokenizer, of the library tokenizers.
        Raises ControlTokenError."""
        with self._lock:
            return self._made_renamed(fast)

    def _made_renamed(self, fast: Any) -> FastTokenizer:
        """Makes it, on one thread at a time."""
        if self._renamed is None:
            if not isinstance(fast, FastTokenizer):
                raise ControlTokenError("the model's tokenizer cannot encode control tokens as text")
            self._names = {text: random_name() for text in self._ids}
            renamed = FastTokenizer.from_str(json.dumps(renamed_settings(json.loads(fast.to_str()), self._names)))
            if any(renamed.token_to_id(self._names[text]) != token_id for text, token_id in self._ids.items()):
                raise ControlTokenError("the model's tokenizer cannot encode control tokens as text")
            self._renamed = renamed
        return self._renamed


def encoded(tokenizer: FastTokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Returns the tokens of a text. A batch of one text releases the interpreter lock, and a text alone does not: other
    threads would wait 1.4 s for a megabyte. A fast batch keeps neither the texts of the tokens nor their places. This
    halves the time, and nothing is left to be freed with the lock, which would take up to 0.1 s."""
    [found] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(found.ids)


class Texts:
    """Finds any of some texts, the longest at each place."""

    def __init__(self, texts: Iterable[str]) -> None:
        known = sorted(texts)
        self._expression = alternatives(known) if known else "(?!)"
        self.pattern = re.compile(self._expression)
        self._beginnings = {text[:length] for text in known for length in range(1, len(text))}
        self._longest = max(map(len, known), default=0)
        self._first = frozenset(text[0] for text in known)

    @functools.cached_property
    def _starts(self) -> re.Pattern[str]:
        """The first character of each one, those within another one too."""
        return re.compile(f"(?=({self._expression}))(.)", re.DOTALL)

    def is_in(self, text: str) -> bool:
        """Whether a text contains one of these, or ends with the beginning of one."""
        return self.pattern.search(text) is not None or self._open_end(text) > 0

    def marked(self, text: str, marker: str, left: frozenset[str] = frozenset()) -> str:
        """The text with a marker after the first character of each of these, but of those to be left. If it ends with
        the beginning of one, which the text that a template puts after it may complete, there is a marker too."""
        if end := self._open_end(text):
            text = text[:end] + marker + text[end:]
        if not left:
            return self._starts.sub(rf"\2{marker}", text)
        return self._starts.sub(lambda match: match[2] if match[1] in left else match[2] + marker, text)

    def _open_end(self, text: str) -> int:
        """Where the beginning of one of these ends that the text ends with, white space aside; 0 if there is none."""
        stripped = text.rstrip()
        tail = stripped[-self._longest :]
        if self._first.isdisjoint(tail):
            return 0
        return len(stripped) if any(tail[start:] in self._beginnings for start in range(len(tail))) else 0


def alternatives(texts: Sequence[str]) -> str:
    """A regular expression for any of these sorted texts, the longest first. It is a tree of their beginnings, so that
    its time does not depend on their number."""
    prefix = common_prefix(texts[0], texts[-1])
    rests = [text[len(prefix) :] for text in texts]
    branches = [alternatives(list(group)) for _, group in itertools.groupby(filter(None, rests), lambda rest: rest[0])]
    if not branches:
        return re.escape(prefix)
    return f"{re.escape(prefix)}(?:{'|'.join(branches)}){'' if rests[0] else '?'}"


def common_prefix(one: str, other: str) -> str:
    pairs = zip(one, other, strict=False)
    return one[: sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))]


def escaped(marker: str) -> str:
    """The marker in JSON that is ASCII only."""
    return json.dumps(marker)[1:-1]


def unmarked(text: str, marker: str) -> str:
    """The text without its markers. marker: may be empty."""
    return text.replace(marker, "").replace(escaped(marker), "") if marker else text


def strings_of(value: Any) -> Iterator[str]:
    """All strings in a value of JSON, names of fields included."""
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, Mapping):
            rest.extend(each)
            rest.extend(each.values())
        elif isinstance(each, (list, tuple)):
            rest.extend(each)


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON with its strings changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {mapped(name, change): mapped(each, change) for name, each in value.items()}
    return [mapped(each, change) for each in value] if isinstance(value, (list, tuple)) else value


def random_name() -> str:
    return "".join(secrets.choice(NAME_CHARACTERS) for _ in range(NAME_LENGTH))


def can_normalize_into(fast: Any, texts: Iterable[str]) -> bool:
    """Whether the tokenizer's normalizer can make one of these control tokens of another text: if it looks for them
    after it, or if its model finds them as pieces. fast: as for `renamed_tokenizer`."""
    if not isinstance(fast, FastTokenizer) or fast.normalizer is None:
        return False
    added = {token.content: token for token in fast.get_added_tokens_decoder().values()}
    if type(fast.model).__name__ == "BPE" and not any(added[text].normalized for text in texts if text in added):
        return False
    return not HARMLESS_NORMALIZERS.issuperset(kinds_of(json.loads(fast.normalizer.__getstate__())))


def kinds_of(settings: Mapping[str, Any]) -> Iterator[str]:
    """The kinds of a normalizer and its parts."""
    if settings["type"] != "Sequence":
        yield settings["type"]
    for part in settings.get("normalizers", ()):
        yield from kinds_of(part)


def renamed_settings(settings: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer.json with other names for some tokens. Models of most kinds have them in their vocabulary too, from
    where they would match text: a unigram model finds all pieces, and one with merges those that it can merge."""
    for token in settings["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = settings["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    return settings | {"truncation": None, "padding": None}
