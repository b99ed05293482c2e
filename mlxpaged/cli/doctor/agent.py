"""`mlxpaged doctor --agent MODEL`: whether a model works for agents. It is asked over HTTP, as agents do."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxpaged.cli.client import ServerError
from mlxpaged.cli.connection import Connection, Entry, connected
from mlxpaged.cli.doctor.agent_answer import AgentAnswer, ask, problems, raw_text, shortened, thought_tags
from mlxpaged.cli.doctor.agent_tasks import SYSTEM, TASKS, TOOLS, Task, Turn
from mlxpaged.cli.status_line import StatusLine
from mlxpaged.cli.visible import visible
from mlxpaged.formats import FORMATS

MOST_TOKENS = 4096
"""Tokens of an answer with its thoughts."""
MOST_SHOWN = 600
"""Characters of a model's text that the report shows."""

Outcome = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Returns exit status 1 if a task has failed or the model cannot be asked, else 0."""
    try:
        with connected(args, args.model) as connection:
            report = Doctor(connection, quiet=args.json).report()
    except ServerError as error:
        print(f"mlxpaged: {error}", file=sys.stderr)
        return 1
    text = json.dumps(report, indent=1, ensure_ascii=False)
    if args.json:
        print(text)
    if args.report not in (None, "-"):
        Path(args.report).write_text(text + "\n", encoding="utf-8")
        print(f"the report is in {args.report}", file=sys.stderr)
    return int(report["right"] < report["tried"])


class Doctor:
    """Asks one model. quiet: nothing is printed on standard output."""

    def __init__(self, connection: Connection, quiet: bool) -> None:
        self._client, self._model, self._quiet = connection.client, connection.model, quiet
        entries = self._client.get("/v1/models")["data"]
        self._entry: Entry = next((entry for entry in entries if entry["id"] == self._model), {})
        if "tool_calls" not in self._entry:
            raise ServerError(f"{self._model} is not loaded, or the server is older than this command")
        self._calls = self._entry["tool_calls"]
        if self._calls["shown_by"] is None:
            raise ServerError(f"{self._model} does not chat: it has no chat template")
        self._thinks = self._entry["capabilities"]["thinking"]
        self._tags = tuple(dict.fromkeys((*FORMATS[self._calls["parser"]].tags, *thought_tags())))
        self._line = StatusLine(sys.stderr)

    def report(self) -> dict[str, Any]:
        """Raises ServerError if the server cannot be reached."""
        name = Path(self._model).name if Path(self._model).exists() else self._model
        shown_by = f"the {self._calls['shown_by'].replace('_', ' ')} shows the tools"
        self._print(f"model     {name}")
        self._print(f"calls     read in the format {self._calls['parser']}; {shown_by}")
        self._print(f"thinking  {'yes' if self._thinks else 'no'}")
        outcomes = []
        for outcome in self._outcomes():
            outcomes.append(outcome)
            self._show(outcome)
        tried = [each for each in outcomes if "skipped" not in each]
        right = sum("problems" not in each for each in tried)
        self._print(f"{right} of {len(tried)} tasks came back right, {len(outcomes) - len(tried)} skipped")
        about = {"model": name, "tool_calls": self._calls, "thinking": self._thinks}
        return about | {"right": right, "tried": len(tried), "tasks": outcomes}

    def _outcomes(self) -> Iterator[Outcome]:
        for task in TASKS:
            if task.turn.thinks is not None and not self._thinks:
                yield {"task": task.name, "skipped": "the model does not think"}
                continue
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.prompt}]
            outcome, answer = self._try(task.name, task, task.turn, messages)
            yield outcome
            if task.then is None:
                continue
            if "problems" in outcome or answer is None:
                yield {"task": task.name_then, "skipped": "without right calls there are no results"}
                continue
            yield self._try(task.name_then, task, task.then, [*messages, *with_results(answer, task.turn)])[0]

    def _try(
        self, name: str, task: Task, turn: Turn, messages: list[dict[str, Any]]
    ) -> tuple[Outcome, AgentAnswer | None]:
        most = min(MOST_TOKENS, self._entry["max_model_len"] // 2)
        body = {"model": self._model, "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": most}
        body |= task.fields
        self._line.show(f"asking: {name}")
        start = time.monotonic()
        try:
            answer = ask(self._client, body)
            seconds = round(time.monotonic() - start, 1)
            found = problems(answer, turn, self._tags)
            wrote = raw_text(self._client, body) if found else ""
        except ServerError as error:
            if error.status is None:
                raise
            if turn.thinks is False and error.status == 400:
                return {"task": name, "skipped": str(error)}, None
            return {"task": name, "problems": [f"the server refuses it: {error}"]}, None
        finally:
            self._line.clear()
        wrong = {"problems": found, "wrote": wrote} if found else {}
        return {"task": name, "seconds": seconds} | wrong, answer

    def _show(self, outcome: Outcome) -> None:
        skipped, found = outcome.get("skipped"), outcome.get("problems")
        said = f"skipped: {skipped}" if skipped else "; ".join(found) if found else f"ok, {outcome['seconds']} s"
        self._print(f"  {outcome['task']:18} {said}")
        if wrote := outcome.get("wrote"):
            self._print("    the model wrote:")
            for line in shortened(wrote, MOST_SHOWN).split("\n"):
                self._print(f"    | {line}")

    def _print(self, line: str) -> None:
        if not self._quiet:
            print(visible(line), flush=True)


def with_results(answer: AgentAnswer, turn: Turn) -> list[dict[str, Any]]:
    """Returns the answer and the results of its calls, for the next turn. They have the ids that came."""
    by_call = {json.dumps(call[1], sort_keys=True): text for call, text in zip(turn.calls, turn.results, strict=True)}
    results = []
    for call in answer.calls:
        arguments = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True)
        results.append({"role": "tool", "tool_call_id": call["id"], "content": by_call[arguments]})
    return [answer.message(), *results]
