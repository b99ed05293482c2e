"""Limits on the time and size of rendering a chat template, which is a program that comes with the model.

Jinja's sandbox keeps a template from files and from Python's own objects. It does not keep it from looping 10^15 times
or from making 10^9 characters. So transformers compiles templates in a `LimitedEnvironment`, whose code spends of a
`Budget`: for each block of the template that runs, each filter, and each value that a call or an operator makes. What
is made by one call of Python, which cannot be interrupted, is estimated before.

This must not slow down ordinary templates. So a step is counted without a call, texts and numbers are not looked into,
and lists only once.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import GeneratorType
from typing import Any

from jinja2.runtime import str_join
from jinja2.utils import Namespace

SECONDS = 5.0
"""Processor time of one rendering. One with 120 messages and 200,000 characters takes 10 ms."""
MAX_VALUE = 2**26
"""Characters and items in one value. A conversation of a million tokens has 5 million characters."""
MAX_MADE = 2**28
"""Characters and items of all values that a rendering makes. A template that appends each of 100 messages to one text
makes 50 times the conversation."""
MAX_WIDTH = 10_000
"""To which a text is padded or indented."""
MAX_BITS = 2**15
"""Of a whole number. Python divides such numbers in less than a millisecond."""
MAX_FORM = 4096
"""Characters of a format: searching widths in it is not linear."""
MAX_COMPARED = 2**32
"""Characters times characters that methods compare whose time is not linear."""
PLAIN_SECONDS, WORK_SECONDS, REST_SECONDS = 0.05, 0.001, 0.0005
"""After the first, a rendering rests after each of the second, for the third: Python gives its lock to another thread
only every 5 ms, and a step takes it many times."""
STEPS = 64
"""Steps between two looks at the clock."""
VIEWS: tuple[Any, ...] = (type({}.items()), type({}.values()), type({}.keys()))
ITEM, REFERENCE = 64, 8
"""Bytes of an item of a list, and of one that is in another list too. They count like characters."""
CONVERSION = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|\d*)(?:\.(\*|\d*))?")
FIELD = re.compile(r"\{[^{}:]*:[^{}]*(?:\{|\d{5})")
"""Widths in formats: those of `%`, and a computed or large one of `str.format`."""


class TemplateLimitError(Exception):
    """A template exceeds a limit of this module. The message is the end of a sentence about the template."""


def too_large() -> TemplateLimitError:
    return TemplateLimitError(f"it makes a text or list of more than {MAX_VALUE:,} characters")


class Budget:
    """What one rendering may still spend."""

    __slots__ = ("_deadline", "_left", "_rest_at", "_weights", "steps")

    def __init__(self) -> None:
        now = time.thread_time()
        self._deadline, self._rest_at = now + SECONDS, now + PLAIN_SECONDS
        self._left = MAX_MADE
        self.steps = STEPS  # until the next look at the clock
        # The weights of lists by id, and the lists, so that no other list gets this id. The sandbox changes no list.
        self._weights: dict[int, tuple[Any, int]] = {}

    def spend(self, amount: int) -> None:
        """amount: characters or items. Raises TemplateLimitError."""
        self._left -= amount
        if self._left < 0:
            raise TemplateLimitError(f"it makes texts and lists of more than {MAX_MADE:,} characters")
        self.steps -= 1 + (amount >> 12)
        if self.steps < 0:
            self.look()

    def look(self) -> None:
        """Look at the clock. Raises TemplateLimitError."""
        self.steps = STEPS
        now = time.thread_time()
        if now > self._deadline:
            raise TemplateLimitError(f"it takes more than {SECONDS:g} seconds")
        if now > self._rest_at:
            time.sleep(REST_SECONDS)
            self._rest_at = now + WORK_SECONDS

    def weigh(self, value: Any) -> int:
        """Characters and items in a value: what it takes to write it as text, or to compare it. A list that is in
        another twice counts twice."""
        kind = type(value)
        if kind is dict or kind is list or kind is tuple:
            known = self._weights.get(id(value))
            return known[1] if known else self._weigh_items(value)
        if isinstance(value, (str, bytes)):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 3 + 1
        if isinstance(value, (*VIEWS, list, tuple, dict)):
            items: Any = value
            return sum(self.weigh(item) for item in items)
        if isinstance(value, Namespace):  # it can change, so its weight would be none
            raise TemplateLimitError("it puts a namespace into a list or text")
        return 1

    def _weigh_items(self, value: Any) -> int:
        weight = 1
        if type(value) is dict:
            for name, item in value.items():
                weight += 2 + self.weigh(name) + (len(item) if type(item) is str else self.weigh(item))
        else:
            for item in value:
                weight += 1 + (len(item) if type(item) is str else self.weigh(item))
        return self.note(value, weight)

    def note(self, value: Any, weight: int) -> int:
        """Keep the weight of a list."""
        self.check(weight)
        self._weights[id(value)] = (value, weight)
        return weight

    def check(self, weight: int) -> None:
        """Raises TemplateLimitError if no value may have this weight."""
        if weight > MAX_VALUE:
            raise too_large()

    def text(self, value: Any) -> str:
        """A value as text, in place of `str`."""
        if type(value) is str:
            return value
        self.weigh(value)
        return str(value)

    def made(self, value: Any) -> Any:
        """Spend for a value that was made, and return it."""
        if isinstance(value, str):
            size = len(value)
            if size > MAX_VALUE:
                raise too_large()
            self._left -= size
            self.steps -= size >> 12
            if self._left < 0:
                self.spend(0)
        elif isinstance(value, GeneratorType):
            return self._count(value)
        elif isinstance(value, int):
            self.check_bits(value.bit_length())
        elif isinstance(value, (list, tuple, dict, bytes)):
            self.check(self.weigh(value))
            self.spend(ITEM * len(value))
        return value

    def join(self, values: tuple[Any, ...]) -> str:
        """The operator `~`."""
        self.check(sum(map(self.weigh, values)))
        text = str_join(values)
        self.spend(len(text))
        return text

    def check_bits(self, bits: int) -> None:
        if bits > MAX_BITS:
            raise TemplateLimitError(f"it computes a number of more than {MAX_BITS:,} bits")

    def _count(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(REFERENCE)
            yield item


# -- estimates before a call -------------------------------------------------------------------------------------------


def check_percent(budget: Budget, form: str, given: Any) -> None:
    """Before `form % given`."""
    check_form(form)
    widths = [width for pair in CONVERSION.findall(form) for width in pair if width]
    if any(width == "*" or len(width) > 6 or int(width) > MAX_WIDTH for width in widths):
        raise too_large()
    budget.check(len(form) + form.count("%") * (budget.weigh(given) + MAX_WIDTH * bool(widths)))


def check_form(form: str) -> None:
    if len(form) > MAX_FORM:
        raise TemplateLimitError(f"it uses a text of more than {MAX_FORM:,} characters as a format")


def check_format(budget: Budget, form: str, given: Any) -> None:
    """Before `form.format(given)`."""
    check_form(form)
    if FIELD.search(form):
        raise too_large()
    budget.check(len(form) + form.count("{") * (budget.weigh(given) + MAX_WIDTH))


def check_width(given: tuple[Any, ...]) -> None:
    if any(isinstance(each, int) and each > MAX_WIDTH for each in given):
        raise TemplateLimitError(f"it asks for a width or number above {MAX_WIDTH:,}")


def before_width(budget: Budget, value: Any, given: tuple[Any, ...]) -> None:
    check_width(given)
    if isinstance(value, (str, bytes)):  # expandtabs
        tabs = value.count(b"\t") if isinstance(value, bytes) else value.count("\t")
        budget.check(tabs * MAX_WIDTH)


def before_strip(budget: Budget, value: Any, given: tuple[Any, ...]) -> None:
    if given and len(value) * max(map(budget.weigh, given)) > MAX_COMPARED:
        raise too_large()


def before_split(budget: Budget, value: Any, given: tuple[Any, ...]) -> None:
    separated = bool(given and given[0]) and type(given[0]) is str is type(value)
    pieces = value.count(given[0]) if separated else len(value)
    budget.check(pieces * ITEM)
    budget.spend(len(value))


def before_reverse_split(budget: Budget, value: Any, given: tuple[Any, ...]) -> None:
    before_strip(budget, value, given)
    before_split(budget, value, given)


def before_list(budget: Budget, value: Any, given: tuple[Any, ...]) -> None:
    if isinstance(value, str):
        budget.check(len(value) * ITEM)
        budget.spend(len(value))
    check_width(given)


def before_sum(budget: Budget, value: Any, given: tuple[Any, ...]) -> None:
    if any(isinstance(each, (list, tuple)) for each in given):
        raise TemplateLimitError("it adds lists by a filter, which is not supported")


def before_replace(budget: Budget, value: Any, given: tuple[Any, ...]) -> None:
    texts = [each for each in given if isinstance(each, (str, bytes))]
    if len(texts) == 2 and isinstance(value, type(texts[0])):
        old, new = texts
        if len(new) > len(old):
            budget.check(len(value) + value.count(old) * (len(new) - len(old)))  # type: ignore[arg-type]
    elif not isinstance(value, (str, bytes)):  # the filter takes any value as text
        raise TemplateLimitError("it replaces in a value that is no text")


def before_indent(budget: Budget, value: Any, given: tuple[Any, ...]) -> None:
    check_width(given)
    width = max((budget.weigh(each) if isinstance(each, str) else int(each) for each in given), default=4)
    budget.check(budget.weigh(value) + (str(value).count("\n") + 1) * width)


def before_json(budget: Budget, value: Any, given: tuple[Any, ...]) -> None:
    check_width(given)
    columns = 0
    for each in given:  # the indentation, and the separators
        columns = max(columns, budget.weigh(each) if isinstance(each, (str, tuple, list)) else int(each or 0))
    if columns > 1:
        budget.check(budget.weigh(value) * columns * nesting(budget, value))


def unsupported(budget: Budget, value: Any, given: tuple[Any, ...]) -> None:
    raise TemplateLimitError("it uses pprint, urlize, wordwrap, striptags or translate, which are not supported")


Estimate = Callable[[Budget, Any, tuple[Any, ...]], None]

METHODS: dict[str, Estimate] = {
    **dict.fromkeys(("format", "format_map"), check_format),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "to_bytes", "expandtabs"), before_width),
    **dict.fromkeys(("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition"), before_strip),
    **dict.fromkeys(("split", "splitlines"), before_split),
    **dict.fromkeys(("striptags", "translate"), unsupported),
    "rsplit": before_reverse_split,
    "replace": before_replace,
}
"""What is checked before a method of a text or number is called. `join` is there in `LimitedEnvironment.call`."""

FILTERS: dict[str, Estimate] = {
    **dict.fromkeys(("center", "round"), before_width),
    **dict.fromkeys(("list", "sort", "unique", "slice", "batch", "random", "min", "max", "groupby"), before_list),
    **dict.fromkeys(("pprint", "urlize", "wordwrap", "striptags"), unsupported),
    "trim": before_strip,
    "sum": before_sum,
    "replace": before_replace,
    "indent": before_indent,
    "tojson": before_json,
}
"""As `METHODS`, for filters. `join` and `format` are in `limited_filter`."""


def nesting(budget: Budget, value: Any) -> int:
    """How deep the lists in a value are."""
    budget.check(budget.weigh(value) * 8)
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return 1 + max((nesting(budget, item) for item in items), default=0)


def check_join(budget: Budget, items: Iterable[Any], separator: Any) -> list[Any]:
    """The items as a list, before they are joined."""
    if isinstance(items, str):
        budget.check(len(items) * ITEM)
    found = list(items)
    budget.check(budget.weigh(found) + len(found) * budget.weigh(separator))
    return found
