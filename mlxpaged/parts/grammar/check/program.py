"""Compiles grammars: the program of a child process, which imports llguidance and nothing of this package.

Its arguments are the processor time of a request, in whole seconds, after which the system ends it, and the bytes of
the stack on which it works. It first writes an empty line. Then each line of its input is a request, and the next line
of its output the reply, both in JSON.

A request has `grammars`, texts in llguidance's notation, and `limits`, those of its parser. The reply says nothing: who
asks wants to know whether this process survives. What is wrong with a grammar is found again, with the model's
tokenizer. This process has one of bytes, which takes no time to make. Or a request has `gbnf`, a grammar in that
notation; then the reply has the same in `lark`'s, or an `error`. Or it has `part`, a grammar in `lark`'s notation; then
the reply says whether it `is_empty`. With `texts`, it says which of them it `matches`.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

NICENESS = 5
"""The steps of running requests go first."""
MAX_MESSAGE = 1_000
"""Characters of an error message, which has a part of the grammar."""


def compile_all(grammars: list[str], limits: dict[str, Any]) -> None:
    parser_limits, tokenizer = LLParserLimits(**limits), LLTokenizer("byte")
    for grammar in grammars:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits)
        if matcher.is_error():  # it may only name a token that a tokenizer of bytes does not have
            LLMatcher.validate_grammar(grammar, None, limits=parser_limits)
        else:
            matcher.compute_bitmask()


def is_empty(grammar: str) -> bool:
    """Whether no text fits a grammar in Lark's notation. What else is wrong with it is found later."""
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    if matcher.is_error():
        return "Unsatisfiable schema" in matcher.get_error()
    return not any(matcher.compute_bitmask()[: 256 // 8])


def matches(grammar: str, texts: list[str]) -> list[bool]:
    """Whether each text fits a grammar in Lark's notation."""
    matcher, found = LLMatcher(LLTokenizer("byte"), grammar, log_level=0), []
    for text in texts:
        tokens, fresh = list(text.encode()), matcher.deep_copy()
        found.append(fresh.validate_tokens(tokens) == len(tokens) and fresh.consume_tokens(tokens))
        found[-1] = found[-1] and fresh.is_accepting()
    return found


def answer(request: dict[str, Any]) -> dict[str, Any]:
    if "texts" in request:
        return {"matches": matches(request["part"], request["texts"])}
    if "part" in request:
        return {"is_empty": is_empty(request["part"])}
    if "gbnf" not in request:
        compile_all(**request)
        return {}
    try:
        return {"lark": gbnf_to_lark(request["gbnf"])}
    except Exception as error:  # its parser raises any type
        return {"error": str(error)[:MAX_MESSAGE]}


def limit_time(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + seconds, hard))


def serve(seconds: int) -> None:
    output = sys.stdout.buffer
    output.write(b"\n")
    output.flush()
    for line in sys.stdin.buffer:
        limit_time(seconds)
        output.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        output.flush()


def main() -> None:
    seconds, stack_bytes = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its death is a refusal, and needs no file of its memory
    os.nice(NICENESS)
    threading.stack_size(stack_bytes)
    thread = threading.Thread(target=serve, args=(seconds,))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
