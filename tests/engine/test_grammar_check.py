"""Grammars are compiled in a child process first, and then on a thread whose stack has a known size."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxpaged.core.engine.constraint import Constraint, GrammarError
from mlxpaged.daemon_thread import in_daemon_thread
from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.parts.grammar import grammar
from mlxpaged.parts.grammar.check import checker
from mlxpaged.parts.grammar.grammar import Grammars, grammar_text
from mlxpaged.parts.grammar.grammar_limits import MAX_OPENINGS, check_size
from mlxpaged.parts.grammar.schema_limits import MAX_DEPTH, MAX_NESTING
from tests.engine.constraints import RULES, WRAPPED, chain, doubling, nested, rules
from tests.support import make_tiny_model

GREETING = Constraint("grammar", 'start: "hi"')
LARGE = Constraint("json_schema", json.dumps({"properties": {f"p{i}": {"enum": [i]} for i in range(900)}}))
MARGIN = 4
"""The child has so many times the stack that a constraint at a limit takes."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_model(str(make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", eos_token_id=2)))


@pytest.fixture
def grammars(served: ServedModel) -> Iterator[Grammars]:
    yield Grammars(served.tokenizer, served.vocab_size)
    checker.end_children()


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if str(checker.PROGRAM) in each.cmdline()]


def at_the_limits() -> dict[str, Constraint]:
    """A constraint as deep as its limit allows, of each kind."""
    # Those of oneOf may all be null, so they do not exclude each other: that is refused before.
    wrapped = [name for name in WRAPPED if name != "oneOf"]
    found = {name: Constraint("json_schema", json.dumps(chain(name, MAX_DEPTH))) for name in wrapped}
    found |= {name: Constraint("grammar", rules(name, count)) for name, (_, count) in RULES.items()}
    found["objects"] = Constraint("json_schema", json.dumps(nested(MAX_NESTING)))
    found["copies"] = Constraint("json_schema", json.dumps(doubling(10)))
    found["groups"] = Constraint("regex", "(" * 200 + "a" + ")" * 200)
    return found


@pytest.mark.parametrize("name", at_the_limits())
def test_the_deepest_constraints_take_a_part_of_the_childs_stack(name: str) -> None:
    constraint = at_the_limits()[name]
    check_size(constraint)
    request = {"grammars": [grammar_text(constraint)], "limits": grammar.LIMITS}
    command = [sys.executable, str(checker.PROGRAM), "60", str(checker.STACK_BYTES // MARGIN)]
    ended = subprocess.run(command, input=json.dumps(request).encode(), capture_output=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, b"\n{}\n"), ended.stderr


def test_this_process_has_more_stack_than_the_child() -> None:
    assert grammar.STACK_BYTES >= 2 * checker.STACK_BYTES


def test_a_compiling_thread_has_its_stack_and_the_others_have_theirs(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: dict[str, int] = {}
    start = threading.Thread.start

    def noting(thread: threading.Thread) -> None:
        sizes[thread.name] = threading.stack_size()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noting)
    grammars.compile(GREETING)
    assert in_daemon_thread(threading.get_ident, "another").result() != threading.get_ident()
    assert sizes == {"mlxpaged-grammar": grammar.STACK_BYTES, "another": 0}
    assert threading.stack_size() == 0


def test_a_thread_that_cannot_start_leaves_the_size_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError):
        in_daemon_thread(threading.get_ident, "none", 2**25)
    assert threading.stack_size() == 0


def test_one_process_checks_many_grammars(grammars: Grammars) -> None:
    for i in range(5):
        grammars.compile(Constraint("regex", f"a{i}"))
    assert len(children()) == 1


def test_a_grammar_that_takes_too_long_or_too_much_memory_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "SECONDS", 1e-3)
    with pytest.raises(GrammarError, match=r"^cannot be compiled: it takes more than 0\.001 seconds$"):
        grammars.compile(LARGE)
    monkeypatch.undo()
    monkeypatch.setattr(checker, "MAX_MEMORY", 2**20)
    with pytest.raises(GrammarError, match=r"^cannot be compiled: it takes more than 1 MB of memory$"):
        grammars.compile(LARGE)
    monkeypatch.undo()
    assert children() == []
    grammars.compile(LARGE)


def test_the_death_of_the_process_refuses_the_grammar_that_it_compiled(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(process: psutil.Process) -> Any:
        os.kill(process.pid, signal.SIGKILL)
        raise psutil.NoSuchProcess(process.pid)

    with monkeypatch.context() as patch:
        patch.setattr(psutil.Process, "cpu_times", kill)
        with pytest.raises(GrammarError, match="the process that checks it ended with status -9"):
            grammars.compile(LARGE)
    grammars.compile(LARGE)


def test_a_process_that_was_killed_meanwhile_is_replaced(grammars: Grammars) -> None:
    grammars.compile(GREETING)
    (child,) = children()
    child.kill()
    child.wait()
    grammars.compile(Constraint("regex", "ab"))


def test_without_a_process_nothing_is_compiled(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    checker.end_children()
    monkeypatch.setattr(checker, "PROGRAM", Path("/nowhere"))
    with pytest.raises(ChildProcessError, match="did not start"):
        grammars.compile(GREETING)


def test_what_was_compiled_before_needs_no_process_when_it_was_forgotten(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker, "PROGRAM", Path("/nowhere"))
    checker.end_children()
    assert grammars.start(GREETING, ignore_eos=False).forced()


def test_a_process_that_is_not_watched_any_more_ends() -> None:
    """As when the server is killed: its input ends."""
    command = [sys.executable, str(checker.PROGRAM), "1", str(checker.STACK_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n"
        child.stdin.close()
        assert child.wait(60) == 0


def test_a_token_that_only_the_model_has_is_no_error(grammars: Grammars) -> None:
    """The child has a tokenizer of bytes."""
    assert grammars.compile(Constraint("grammar", 'start: <[1]> "a" <[250]>')).compute_ff_tokens()[:1] == [1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("start: " + "(" * (MAX_OPENINGS + 1), f"rules and groups; the limit is {MAX_OPENINGS}"),
        (f"start: %json {json.dumps(chain('items', MAX_DEPTH + 5))}", "a schema in the grammar has more than 1000"),
        (f"start: %json\n{json.dumps(doubling(60))}\n", "with what its references copy"),
        ('start: %json {"multipleOf": 10007}', "multipleOf is above 10000"),
    ],
)
def test_a_grammar_beyond_a_limit_is_refused_before_it_is_compiled(text: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        check_size(Constraint("grammar", text))


def test_a_schema_in_a_grammar_is_enforced(grammars: Grammars) -> None:
    grammars.compile(Constraint("grammar", 'start: "<" %json {"enum": [1, "%json {"]} ">"'))
    with pytest.raises(GrammarError):
        grammars.compile(Constraint("grammar", "start: %json [["))


@pytest.mark.parametrize("text", ['{}start: "a"', 'root ::= "a"{}', '{}root ::= "a"', '\t{}  start : "a"'])
def test_line_feeds_in_a_grammar_take_no_time(grammars: Grammars, text: str) -> None:
    """Not the minutes that an expression of quadratic time takes, while no other thread of Python runs."""
    grammars.compile(Constraint("grammar", text.format("\n" * 30_000)))


def test_a_grammar_in_the_notation_of_gbnf_is_written_in_larks_by_the_child(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher = grammars.compile(Constraint("grammar", 'root ::= "x" sub\nsub ::= [0-9]'))
    assert not matcher.is_error()
    with pytest.raises(GrammarError, match="GBNF's notation cannot be read: "):
        grammars.compile(Constraint("grammar", 'root ::= "a" missing'))
    monkeypatch.setattr(checker, "SECONDS", 1e-3)
    many = "".join(f'\nr{i} ::= "a" r{i + 1}' for i in range(400))
    with pytest.raises(GrammarError, match=r"more than 0\.001 seconds"):
        grammars.compile(Constraint("grammar", f'root ::= r0{many}\nr400 ::= "b"'))


def test_a_panic_of_the_tokenizer_is_an_error_of_structured_output(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicException(BaseException):
        """As PyO3 raises it."""

    def panic(*_: Any) -> None:
        raise PanicException("a token is too long")

    monkeypatch.setattr(grammar, "from_tokenizer", panic)
    with pytest.raises(GrammarError, match=r"does not work with this tokenizer: .*: a token is too long"):
        grammars.compile(GREETING)
