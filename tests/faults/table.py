"""What became of each fault, and the table that is printed at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from tests.faults.wire import Answer, Reply, answer_of, reason_of


class Outcome(str, Enum):
    """Of one answer."""

    RIGHT = "right"
    REFUSED = "refused"  # with a status of the API, or an event, that gives the reason
    CUT = "cut"  # the process ended, and with it the connection
    HUNG = "hung"
    LOST = "lost"  # a wrong answer, one without an end, or an error without a reason


class LostError(Exception):
    """An answer is not what it must be. The message says how."""


@dataclass
class Row:
    """One line of the table. streams: what the 16 streams got meanwhile. problems: of the answers that hung or are
    lost, the first ones."""

    name: str
    faulted: Counter[Outcome] = field(default_factory=Counter)
    streams: Counter[Outcome] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def note(self, counts: Counter[Outcome], outcome: Outcome, problem: str = "") -> None:
        counts[outcome] += 1
        if outcome in (Outcome.HUNG, Outcome.LOST) and len(self.problems) < 10:
            self.problems.append(problem)


def judge(path: str, reply: Reply, expected: Answer | None, statuses: Collection[int] = (200,)) -> Outcome:
    """What became of a request. expected: the known answer; None if any whole answer of 200 is right. statuses: that
    the reply may have. Raises LostError."""
    if reply.status == 0 and not reply.body:
        raise LostError("the connection ended without an answer")
    if reply.status not in statuses:
        raise LostError(f"must be one of {sorted(statuses)}: {reply}")
    if not reply.whole:
        raise LostError(f"ended in the middle: {reply}")
    if reply.status != 200:
        return judge_error(path, reply)
    if expected is None:
        return Outcome.RIGHT
    answer = answer_of(path, reply)
    if answer.error is not None:
        if not answer.error:
            raise LostError(f"an error without a reason: {reply}")
        return Outcome.REFUSED
    if answer != expected:
        raise LostError(f"wrong answer: {answer}, not {expected}")
    return Outcome.RIGHT


def judge_error(path: str, reply: Reply) -> Outcome:
    """Raises LostError unless the error has the form of its API, and a reason."""
    try:
        body = json.loads(reply.body)
    except ValueError:
        raise LostError(f"not an error of the API: {reply}") from None
    if not reason_of(body):
        raise LostError(f"an error without a reason: {reply}")
    is_unread = "open connections" in reason_of(body)  # such a refusal may come before the request
    if path == "/v1/messages" and body.get("type") != "error" and not is_unread:
        raise LostError(f"not an error of Anthropic's API: {reply}")
    may_retry = "the engine is dead" not in reason_of(body)  # only OpenAI's format has a code for that
    if reply.status in (429, 503) and may_retry and "retry-after" not in reply.headers:
        raise LostError(f"no Retry-After: {reply}")
    return Outcome.REFUSED


NAMES = 42
"""Width of the column of names."""
HEAD = (
    f"{'':{NAMES}}  {'clients with the fault':^31}  {'the 16 streams meanwhile':^36}\n"
    f"{'fault':{NAMES}} {'times':>6} {'right':>6} {'refused':>8} {'hung':>5} {'lost':>5} "
    f"{'right':>8} {'refused':>8} {'cut':>5} {'hung':>5} {'lost':>5} {'s':>5}"
)


def line(row: Row) -> str:
    """Of the table. A connection that the end of the process has cut counts as a refusal of the client."""
    faulted, streams = row.faulted, row.streams
    refused = faulted[Outcome.REFUSED] + faulted[Outcome.CUT]
    return (
        f"{row.name:{NAMES}} {sum(faulted.values()):6} {faulted[Outcome.RIGHT]:6} {refused:8} "
        f"{faulted[Outcome.HUNG]:5} {faulted[Outcome.LOST]:5} {streams[Outcome.RIGHT]:8} {streams[Outcome.REFUSED]:8} "
        f"{streams[Outcome.CUT]:5} {streams[Outcome.HUNG]:5} {streams[Outcome.LOST]:5} {row.seconds:5.0f}"
    )


def total(rows: list[Row]) -> Row:
    every = Row("all")
    for row in rows:
        every.faulted += row.faulted
        every.streams += row.streams
        every.seconds += row.seconds
    return every
