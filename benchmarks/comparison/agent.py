"""Two sessions of an agent at once, and the same sessions after a restart of the server.

Both begin with the same system text. A turn sends all that was said before, and the result of a tool. What the
assistant said before is scripted, so every server reads the same messages, whatever it answers. The second session
begins when the first one has its first answer. Beside each first turn, a title is asked for, as agents do.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import tempfile
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .client import Answer, Client, Message
from .environments import BEFORE, LLAMA_CPP, MLX, MLX_LM, SERVER_PACKAGES, SetupError, check_system
from .loads import Run, TextsOf, Threads, capped, user, warm_up
from .metrics import measure, percentile
from .model import Texts
from .options import Options
from .real import LLAMA_CPP_PACKAGES, choose_routines
from .report import OURS, Row, header, loads_of, number, outcome, rows_of, seconds, table
from .run import WARM_UP_SECONDS, Results, check_writable, find_model, make_environments, new_results, read_texts
from .servers import COMMANDS, MemoryWatch, Server, ServerError, running

PHASES = ("Two sessions at once", "After a restart")

SHARE = 0.75
"""Of the model's context, for the longest prompt and its answer."""

METHOD = """\
Each session: a system text of {system} tokens, a task, then results of tools of {shortest} to {longest} tokens, each
after a scripted text of the assistant; {turns} turns, and after the restart {after} more; {total} tokens in all.
Results have the role `{role}`{why}. Answers are greedy and have {output} tokens, titles {title}. The second session
begins when the first one has its first answer, after the restart too. Each start is followed by five short requests
that are not measured. Out tok/s: tokens of all answers, titles too, by the time until the last one is whole. First
tokens are those of turns; then, those of each session's first turn. CPU: user and system time of the server's
processes. Memory: the highest resident one since the start (VmHWM). mlxpaged runs with `--prefix-cache-dir`, the others
with their defaults. OpenBLAS has the same routines in all of them ({routines})."""

COLUMNS = (
    *("server", "out tok/s", "seconds", "first token p50 / max", "of session 1 / 2", "prompt tokens: cached"),
    *("CPU s", "memory", "answered"),
)


@dataclass(frozen=True)
class AgentSizes:
    """Lengths are in tokens."""

    system: int = 6400
    task: int = 150
    said: int = 60
    result: tuple[int, int] = (200, 2000)
    """Shortest and longest; the logarithm of a length is uniform between them."""
    title: int = 90
    turns: int = 12
    turns_after: int = 4
    output: int = 48
    title_output: int = 12

    def results(self, session: int) -> list[int]:
        """Lengths of the results of a session, the same in every run."""
        rng = random.Random(f"agent, session {session}")
        low, high = map(math.log, self.result)
        return [round(math.exp(rng.uniform(low, high))) for _ in range(self.turns + self.turns_after - 1)]

    @property
    def total(self) -> int:
        """Of the longer session, with its last answer. What the chat template adds is left out."""
        results = max(sum(self.results(session)) for session in SESSIONS)
        said = (self.turns + self.turns_after - 1) * self.said
        return self.system + self.task + said + results + self.output

    def scaled(self, context: int) -> AgentSizes:
        """With prompts that are as much shorter as the context needs."""
        share = min(1.0, (SHARE * context - self.output) / (self.total - self.output))
        shorter = {name: round(share * getattr(self, name)) for name in ("system", "task", "said", "title")}
        return replace(self, **shorter, result=(round(share * self.result[0]), round(share * self.result[1])))


SESSIONS = (0, 1)
QUICK = AgentSizes(
    system=300, task=20, said=8, result=(20, 60), title=10, turns=3, turns_after=1, output=8, title_output=4
)


def context_of(model: Path) -> int:
    """The model's own limit, in tokens."""
    config = json.loads((model / "config.json").read_text())
    return int((config.get("text_config") or config)["max_position_embeddings"])


def result_role(model: Path) -> tuple[str, str]:
    """(role, why it is not tool): a template takes results if it names tools, or shows whatever role a message has."""
    file = model / "chat_template.jinja"
    template = file.read_text() if file.exists() else (model / "tokenizer_config.json").read_text()
    if re.search(r"tool|message(\['role'\]|\.role) *(\+|\}\})", template):
        return "tool", ""
    return "user", ", because the chat template has no place for those of tools"


@dataclass(frozen=True)
class Scenario:
    sizes: AgentSizes
    words: TextsOf
    role: str
    """That of results."""

    def prompts(self, session: int) -> list[list[Message]]:
        """The messages of each turn."""
        name = f"session {session}"
        system: Message = {"role": "system", "content": self.words.of("system", self.sizes.system)}
        messages = [system, *user(self.words.of(f"{name}, task", self.sizes.task))]
        found = [messages]
        for turn, length in enumerate(self.sizes.results(session)):
            said: Message = {"role": "assistant", "content": self.words.of(f"{name}, said {turn}", self.sizes.said)}
            result: Message = {"role": self.role, "content": self.words.of(f"{name}, result {turn}", length)}
            if self.role == "tool":
                call = f"call{session:02}{turn:03}"  # some templates take nine letters or digits only
                function = {"name": "read", "arguments": json.dumps({"part": turn})}
                said["tool_calls"] = [{"id": call, "type": "function", "function": function}]
                result["tool_call_id"] = call
            messages = [*messages, said, result]
            found.append(messages)
        return found

    def title(self, session: int) -> list[Message]:
        system: Message = {"role": "system", "content": self.words.of("title", self.sizes.title)}
        return [system, *user(self.words.of(f"session {session}, task", self.sizes.task))]

    def run(self, client: Client, phase: str) -> Run:
        """phase: one of PHASES. The turns after a restart are those that follow."""
        sizes, begun = self.sizes, threading.Event()
        first = phase == PHASES[0]
        turns = slice(None, sizes.turns) if first else slice(sizes.turns, None)
        prompts = [self.prompts(session)[turns] for session in SESSIONS]

        def converse(session: int) -> list[Answer]:
            if session:
                begun.wait()
            answers = []
            title = pool.submit(client.ask, self.title(session), sizes.title_output, "title") if first else None
            try:
                for messages in prompts[session]:
                    answers.append(client.ask(messages, sizes.output, f"session {session}"))
                    begun.set()
            finally:
                begun.set()
            return answers + ([title.result()] if title else [])

        with Threads(2 * len(SESSIONS)) as pool:
            start = time.perf_counter()
            answers = [answer for found in pool.map(converse, SESSIONS) for answer in found]
            end = time.perf_counter()
        return Run(phase, answers, end - start, (start, end))


def figures_of(
    run: Run, server: Server, peak: int, load_average: float, own: float, cpu: float | None
) -> dict[str, Any]:
    """own, cpu: CPU seconds of the client, and of the server."""
    turns = [answer for answer in run.answers if answer.role != "title"]
    waits = [answer.ttft for answer in turns if answer.ttft is not None]
    firsts = [next(answer.ttft for answer in turns if answer.role == f"session {session}") for session in SESSIONS]
    return asdict(measure(run, server.peak_bytes() or peak, load_average, own)) | {
        "first_token_p50": percentile(waits, 50),
        "first_token_max": max(waits, default=None),
        "first_of_session_1": firsts[0],
        "first_of_session_2": firsts[1],
        "server_cpu_seconds": cpu,
    }


def measure_phase(scenario: Scenario, phase: str, server: Server, options: Options, texts: Texts) -> dict[str, Any]:
    """Raises ServerError."""
    client = Client(server.port, server.model, 0.0, options.request_seconds)
    for answer in warm_up(capped(client, WARM_UP_SECONDS), texts):
        if answer.error:
            raise ServerError(server.died() or f"the warm-up failed: {answer.error}")
    load, own, before = os.getloadavg()[0], time.process_time(), server.cpu_seconds()
    with MemoryWatch(server) as memory:
        run = scenario.run(capped(client, options.load_seconds), phase)
    own, after = time.process_time() - own, server.cpu_seconds()
    used = None if before is None or after is None else after - before
    if reason := server.died():
        raise ServerError(reason)
    return figures_of(run, server, memory.peak, load, own, used)


def command_of(name: str, prefixes: str) -> tuple[str, ...]:
    """The server's own command, but that prefixes may outlive it. prefixes: mlxpaged's directory of them."""
    parts = tuple(part for part in COMMANDS[name] if part != "--disable-disk-caches")
    return (*parts, "--prefix-cache-dir", prefixes) if name in (OURS, BEFORE) else parts


def compare_agent(options: Options) -> None:
    """Raises SetupError if nothing can be measured, or kept."""
    check_writable(options.out)
    check_system()
    model = find_model(options)
    routines = choose_routines(options.cache)
    role, why = result_role(model)
    sizes = QUICK if options.quick else AgentSizes().scaled(context_of(model))
    options = replace(options, servers=options.servers + (LLAMA_CPP,) * (options.gguf is not None))
    results = new_results(options, model, sizes)
    results |= {"results_role": role, "results_why": why, "total": sizes.total, "routines": routines}
    for name in options.servers:
        shown = (part.format(model="MODEL", port="PORT") for part in command_of(name, "DIR"))
        results["servers"][name]["command"] = " ".join(shown)
    before = ("-e", str(options.before), MLX, MLX_LM)
    pythons = make_environments(
        options, SERVER_PACKAGES | {BEFORE: before, LLAMA_CPP: LLAMA_CPP_PACKAGES}, results["servers"]
    )
    texts, began = read_texts(model), time.perf_counter()
    try:
        for repetition in range(options.repeat):
            scenario = Scenario(sizes, TextsOf(texts, f"agent, repetition {repetition}"), role)
            for name, python in pythons.items():
                path = options.gguf if name == LLAMA_CPP and options.gguf else model
                measure_server(scenario, name, python, path, repetition, options, texts, results)
                results["minutes"] = (time.perf_counter() - began) / 60
    finally:  # what an interrupt leaves is kept
        save(results, options.out)
    if not any(run["figures"] for run in results["runs"]):
        raise SetupError("nothing was measured")


def measure_server(
    scenario: Scenario,
    name: str,
    python: Path,
    model: Path,
    repetition: int,
    options: Options,
    texts: Texts,
    results: Results,
) -> None:
    """All phases of a repetition, each with a start of the server."""
    problem = None
    with tempfile.TemporaryDirectory(dir=options.out) as prefixes:
        for phase in PHASES:
            figures, log = None, options.out / "logs" / f"{name}-{repetition}-{PHASES.index(phase)}.log"
            if problem is None:
                try:
                    start: AbstractContextManager[Server] = running(
                        name, python, model, log, options.ready_seconds, command_of(name, prefixes)
                    )
                    with start as server:
                        results["servers"][name]["openblas"] = server.uses_openblas()
                        figures = measure_phase(scenario, phase, server, options, texts)
                except ServerError as error:
                    problem = str(error)
            run = {"server": name, "load": phase, "repetition": repetition, "problem": problem, "figures": figures}
            results["runs"].append(run)
            rate = f"{figures['output_tokens_per_second']:.2f} tok/s" if figures else problem
            print(f"{name}, {phase}: {rate}", flush=True)


def markdown(results: Results) -> str:
    sizes = results["sizes"]
    method = METHOD.format(
        **{name: sizes[name] for name in ("system", "turns", "output")},
        shortest=sizes["result"][0],
        longest=sizes["result"][1],
        after=sizes["turns_after"],
        title=sizes["title_output"],
        total=results["total"],
        role=results["results_role"],
        why=results["results_why"],
        routines=results["routines"],
    )
    lines = header(results, method)
    for phase in loads_of(results):
        lines += ["", f"### {phase}", "", *table(COLUMNS, [cells(row) for row in rows_of(results, phase)])]
    return "\n".join(lines) + "\n"


def cells(row: Row) -> list[str]:
    if not row.runs:
        return [row.server, f"**{row.problem or 'not run'}**", *[""] * (len(COLUMNS) - 2)]
    rates, cached = row.values("output_tokens_per_second"), row.value("cached_tokens")
    spread = f" ({min(rates):.1f} to {max(rates):.1f})" if len(rates) > 1 else ""
    return [
        row.server,
        f"{number(row.value('output_tokens_per_second'))}{spread}",
        number(row.value("seconds")),
        f"{seconds(row.value('first_token_p50'))} / {seconds(row.value('first_token_max'))}",
        f"{seconds(row.value('first_of_session_1'))} / {seconds(row.value('first_of_session_2'))}",
        f"{row.value('input_tokens'):.0f}: {'not told' if cached is None else f'{cached:.0f}'}",
        number(row.value("server_cpu_seconds")),
        f"{row.value('peak_memory_mb'):.0f} MB",
        outcome(row),
    ]


def save(results: Results, out: Path) -> None:
    """Print the results and write them to files. Raises SetupError if that fails."""
    text = markdown(results)
    print(f"\n{text}")
    try:
        (out / "agent.json").write_text(json.dumps(results, indent=1) + "\n")
        (out / "agent.md").write_text(text)
    except OSError as error:
        raise SetupError(f"--out {out}: {error.strerror}; the results are above") from None
    print(f"{out}/agent.json, .md; the servers' logs in {out}/logs")
