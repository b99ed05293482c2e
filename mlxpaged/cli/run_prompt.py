"""`mlxpaged run MODEL PROMPT` prints one answer as plain text."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any, TextIO

from mlxpaged.cli import flags
from mlxpaged.cli.answer import Answer, pieces
from mlxpaged.cli.arguments import put_flags_first
from mlxpaged.cli.client import ServerError
from mlxpaged.cli.connection import Connection, add_server_flags, connected
from mlxpaged.cli.image_file import content, data_url
from mlxpaged.cli.os_errors import sentence
from mlxpaged.cli.status_line import StatusLine
from mlxpaged.cli.visible import visible

CUT = 3
"""The exit status if the answer has reached the most tokens it may have. A schema may not hold for it then."""

temperature = flags.fitting(float, "a number from 0 to 2", lambda value: 0 <= value <= 2)
top_p = flags.fitting(float, "a number above 0 and at most 1", lambda value: 0 < value <= 1)
seed = flags.fitting(int, "a whole number from 0 to 2**64 - 1", lambda value: 0 <= value < 2**64)


def schema(text: str) -> Any:
    """Parses a JSON schema, or reads the file that has it."""
    try:
        found = json.loads(text if text.lstrip().startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = sentence(error)
        raise argparse.ArgumentTypeError(f"neither a JSON schema nor a file with one: {reason}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return found


@flags.checked
def image(text: str) -> str:
    return data_url(flags.path(text))


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        usage="%(prog)s MODEL [PROMPT] [flags]",
        description="Print the answer to one prompt. Text on standard input is added to the prompt.",
        epilog="Exit status: 0 the answer is complete; 1 there is none; "
        f"{CUT} it is cut, because it has reached the most tokens it may have; 130 interrupted.",
    )
    parser.add_argument(
        "model", type=flags.model_name, metavar="MODEL", help="name of a served model, or what `mlxpaged serve` takes"
    )
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="without it, standard input is the prompt")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--max-tokens", type=flags.positive_int, metavar="N", help="most tokens of the answer")
    parser.add_argument("--temperature", type=temperature, metavar="T", help="0 to 2 (default: the model's)")
    parser.add_argument("--top-p", type=top_p, metavar="P", help="above 0, at most 1 (default: the model's)")
    parser.add_argument("--seed", type=seed, metavar="N", help="the same seed repeats an answer")
    shown = "PNG, JPEG, WEBP or GIF that the model is shown before the prompt; can be repeated"
    parser.add_argument("--image", type=image, action="append", default=[], metavar="FILE", help=shown, dest="images")
    enforced = "the answer fits this JSON schema: the schema itself, or a file with it"
    parser.add_argument("--json-schema", type=schema, metavar="SCHEMA", help=enforced)
    parser.add_argument("--think", action="store_true", help="print the model's thinking on standard error")
    add_server_flags(parser, starts=True)
    parser.set_defaults(run=run, parser=parser)
    put_flags_first(parser)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        prompt = whole_prompt(args)
        with connected(args, args.model, shows_images=bool(args.images)) as connection:
            return print_answer(connection, request(args, prompt), args.think)
    except ServerError as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
    except UnicodeError:
        print("mlxpaged: the prompt is not text in UTF-8", file=sys.stderr)
    return 1


def whole_prompt(args: argparse.Namespace) -> str:
    """Returns the words of the command line, then the text on standard input. Raises UnicodeError if a byte of them is
    no UTF-8: some locales decode it to half of a surrogate pair."""
    typed = " ".join(args.prompt)
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    prompt = "\n\n".join(part for part in (typed, piped.strip("\n")) if part.strip())
    if not prompt:
        args.parser.error("there is no prompt: name one, or pipe it in. For a conversation, use `mlxpaged chat`")
    f"{args.system}{prompt}".encode()
    return prompt


def request(args: argparse.Namespace, prompt: str) -> dict[str, Any]:
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    body: dict[str, Any] = {"messages": [*system, {"role": "user", "content": content(prompt, args.images)}]}
    for name in ("max_tokens", "temperature", "top_p", "seed"):
        if getattr(args, name) is not None:
            body[name] = getattr(args, name)
    if args.json_schema is not None:
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": args.json_schema},
        }
    return body


def shown_on(stream: TextIO, text: str) -> str:
    """A pipe or a file gets the text as it is."""
    return visible(text) if stream.isatty() else text


def print_answer(connection: Connection, body: dict[str, Any], shows_thinking: bool) -> int:
    answer, line = Answer(), StatusLine(sys.stderr)
    stream = pieces(connection.client, {"model": connection.model, **body}, answer)
    thinks = False
    try:
        with contextlib.closing(stream):
            for piece in stream:
                if piece.kind == "progress":
                    line.show(piece.text)
                    continue
                line.clear()
                if piece.kind == "thinking":
                    if shows_thinking:
                        thinks = True
                        print(shown_on(sys.stderr, piece.text), end="", file=sys.stderr, flush=True)
                    else:
                        line.show("thinking")
                    continue
                if thinks:
                    thinks = False
                    print(file=sys.stderr)
                print(shown_on(sys.stdout, piece.text), end="", flush=True)
    finally:
        line.clear()
        if answer.text and not answer.text.endswith("\n"):
            print(flush=True)
    if answer.finish_reason == "length":
        print("mlxpaged: the answer is cut: it has reached the most tokens it may have", file=sys.stderr)
        return CUT
    return 0
