"""Renders chat templates: the program of a child process, which imports Jinja and nothing of this package.

Its argument is the processor time of a request, in whole seconds, after which the system ends it: the process that
watches it may have ended. It first writes an empty line. Then each line of its input is a request, and the next line of
its output the reply, both in JSON. `source` is a template. With `variables`, the reply has the rendered `text`;
without, the `names` that the template looks up and does not set itself. An `error` has the message of whatever the
template or Jinja raised, and a `limit` says which one the template exceeds.

The environment is that in which transformers renders chat templates: Jinja's sandbox, without the lines that hold tags
alone, with `tojson`, `raise_exception`, `strftime_now`, loop controls, and tags around answers that change no text.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_TEXT = 2**26
"""Characters of a rendered text. A conversation of a million tokens has 5 million."""
MAX_MESSAGE = 10_000
"""Characters of an error message, which a template can write."""


class Generation(Extension):
    """The tags `generation` and `endgeneration` mark answers for training."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class PlainNamespace(Namespace):
    """A namespace whose names do not begin with an underscore: the sandbox does not look at those that are set."""

    def __init__(*args: Any, **named: Any) -> None:  # a template may give `self` a value
        self, *given = args
        Namespace.__init__(self)
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"the name {name!r} of a namespace begins with an underscore")
        super().__setitem__(name, value)


class DictMaker:
    """The function `dict` of a template, in place of Python's class."""

    fromkeys: Callable[..., dict[Any, Any]] = staticmethod(dict.fromkeys)

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as a model reads it. Jinja's own filter escapes characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: Any) -> None:
    raise TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


ENVIRONMENT = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
ENVIRONMENT.filters["tojson"] = to_json
ENVIRONMENT.globals.update(
    raise_exception=raise_exception, strftime_now=strftime_now, dict=DictMaker(), namespace=PlainNamespace
)


@functools.lru_cache(maxsize=16)
def compiled(source: str) -> Template:
    return ENVIRONMENT.from_string(source)


def answer(source: str, variables: dict[str, Any] | None = None) -> dict[str, Any]:
    """The reply to a request."""
    try:
        if variables is None:
            return {"names": sorted(meta.find_undeclared_variables(ENVIRONMENT.parse(source)))}
        text = compiled(source).render(variables)
    except MemoryError:
        return {"limit": "it asks for more memory than there is"}
    except Exception as error:  # templates raise any type
        return {"error": str(error)[:MAX_MESSAGE]}
    return (
        {"text": text} if len(text) <= MAX_TEXT else {"limit": f"it makes a text of more than {MAX_TEXT:,} characters"}
    )


def limit_time(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + seconds, hard))


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # it ends without a word after the process that reads it
    output = sys.stdout.buffer
    output.write(b"\n")
    output.flush()
    for line in sys.stdin.buffer:
        limit_time(int(sys.argv[1]))
        reply = json.dumps(answer(**json.loads(line)), ensure_ascii=False)
        output.write(reply.encode("utf-8", "surrogatepass") + b"\n")
        output.flush()


if __name__ == "__main__":
    main()
