"""A case: its id, what defines it, the request, and the check of the reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .target import ENDPOINTS, Fields, NotOffered, Reply, Target, Wrong

Check = Callable[[Target, Reply], None]


@dataclass(frozen=True)
class Case:
    """id: the endpoint's name, a dot, and the case's. defined_by: what of the API's reference says so. fields: the
    request's own ones. check: raises Wrong; it may ask for more."""

    id: str
    defined_by: str
    fields: Fields
    check: Check

    @property
    def endpoint(self) -> str:
        return self.id.partition(".")[0]

    @property
    def api(self) -> str:
        return ENDPOINTS[self.endpoint].api


@dataclass(frozen=True)
class Outcome:
    """seen: what was wrong; None if nothing was. offered: whether the server has the endpoint."""

    case: Case
    seen: str | None = None
    offered: bool = True


CASES: list[Case] = []


def case(id: str, defined_by: str, **fields: Any) -> Callable[[Check], Check]:
    """Decorates the check of a case."""

    def add(check: Check) -> Check:
        CASES.append(Case(id, defined_by, fields, check))
        return check

    return add


def run(target: Target, cases: Iterable[Case]) -> Iterable[Outcome]:
    """One case at a time."""
    offered: dict[str, bool] = {}
    for each in cases:
        try:
            if each.endpoint not in offered:
                offered[each.endpoint] = target.offers(each.endpoint)
            if not offered[each.endpoint]:
                raise NotOffered
            each.check(target, target.ask(each.endpoint, **each.fields))
        except NotOffered:
            yield Outcome(each, offered=False)
        except Wrong as error:
            yield Outcome(each, str(error))
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            yield Outcome(each, f"an answer without its form: {type(error).__name__}: {error}")
        else:
            yield Outcome(each)


def expect(condition: object, seen: object) -> None:
    if not condition:
        raise Wrong(str(seen)[:300])


def same(what: str, seen: object, wanted: object) -> None:
    expect(seen == wanted, f"{what}: {seen!r}, not {wanted!r}")


def middle_word(text: str) -> str:
    """A stop string that an answer has inside."""
    words = text.split()
    expect(len(words) > 2, f"an answer of less than three words: {text!r}")
    return words[len(words) // 2]


def before(text: str, stop: str) -> str:
    """What is left of an answer. White space before the stop string may be left out, too."""
    return text[: text.index(stop)].rstrip()


SCHEMA: Fields = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green"]}, "ready": {"type": "boolean"}},
    "required": ["colour", "ready"],
    "additionalProperties": False,
}
"""Of answers and of arguments. The model can neither go on for ever nor get it wrong by what it does not know."""


def fits_schema(value: Any) -> None:
    valid = isinstance(value, dict) and value.keys() == {"colour", "ready"}
    expect(valid and value["colour"] in ("red", "green") and value["ready"] in (True, False), f"not valid: {value!r}")


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAEklEQVR4nGP4z8CAFWEXHbQSACj/P8Fu7N9hAAAAAElFTkSuQmCC"
"""8 x 8 pixels, red."""


def long_text(target: Target) -> str:
    """Slightly longer than the context: a token has at most a word of it."""
    return "blue river " * (target.context // 2 + 50)
