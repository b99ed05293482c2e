"""Saved results as Markdown: a table per load, and the ratios to the best peer that the project holds itself to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .environments import BEFORE
from .metrics import Figures, count_by, middle

OURS = "mlxpaged"
BLOCK_SIZE = 32

METHOD = """\
Client and server share the machine. A request's time to first token (TTFT) is that of the first event with text, an
inter-token time (ITL) that between two such events of one answer, as a reader of the stream waits for it: nothing is
divided by the tokens of an event. Tokens are the servers' own counts (`usage`). In C, ITL is that of the streams, and
TTFT and the whole are those of the long prompts. A wait that was not over when time was up counts as long as it had
lasted. Input tokens count whether computed or cached. p99 of 32 or 40 requests is nearly the slowest. Memory is the
highest resident one of the server's processes. CPU: the client's share of a core."""

COLUMNS = (
    "server",
    "out tok/s",
    "in tok/s",
    "TTFT p50 / p99",
    "ITL p50 / p99",
    "end to end p50 / p99",
    "memory",
    "in: cached",
    "answered",
    "load avg, CPU",
)


@dataclass(frozen=True)
class Row:
    """A server's repetitions of a load. problem: why it has none, or did not survive one."""

    server: str
    runs: list[dict[str, Any]]
    problem: str | None

    def value(self, name: str) -> float | None:
        return middle(run[name] for run in self.runs)

    def values(self, name: str) -> list[float]:
        return [run[name] for run in self.runs if run[name] is not None]


def rows_of(results: dict[str, Any], load: str) -> list[Row]:
    """A row per server that was to run the load, in their order."""
    rows = []
    for server, about in results["servers"].items():
        runs = [run for run in results["runs"] if run["server"] == server and run["load"] == load]
        problems = [run["problem"] for run in runs if run["problem"]]
        figures = [run["figures"] for run in runs if run["figures"]]
        rows.append(Row(server, figures, about["problem"] or (problems[0] if problems else None)))
    return rows


def loads_of(results: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(run["load"] for run in results["runs"]))


def markdown(results: dict[str, Any]) -> str:
    lines = header(results, METHOD)
    if found := ratios(results):
        lines += ["", *found]
    for load in loads_of(results):
        lines += [
            "",
            f"### {title(load, results)}",
            "",
            *table(COLUMNS, [cells(row) for row in rows_of(results, load)]),
        ]
    return "\n".join(lines) + "\n"


def header(results: dict[str, Any], method: str) -> list[str]:
    """method: what the figures mean."""
    machine, servers = results["machine"], results["servers"]
    quick = ", **quick: too small to mean anything**" if results["quick"] else ""
    repeat = f"medians of {results['repeat']} runs (least to most)" if results["repeat"] > 1 else "one run"
    before = f", before: {results['commit_before']}" if results.get("commit_before") else ""
    rows = [
        [
            name,
            ", ".join(f"{package} {version}" for package, version in about["versions"].items()) or "-",
            f"{about['gflops']:.0f}" if about["gflops"] else "-",
            {True: about.get("routines") or "OpenBLAS", False: "not OpenBLAS", None: "-"}[about["openblas"]],
            f"`{about['command']}`",
            about["problem"] or "",
        ]
        for name, about in servers.items()
    ]
    return [
        f"{results['date']}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"{machine['system']}, Python {machine['python']}, load average {machine['load_average']:.2f} at the start; "
        f"commit {results['commit'] or 'unknown'}{before}; model: {results['model']}; "
        f"{repeat}, {results['minutes']:.0f} minutes{quick}.",
        "",
        method,
        "",
        *table(("server", "versions", "GFLOP/s", "BLAS in its process", "command", "problem"), rows),
    ]


def title(load: str, results: dict[str, Any]) -> str:
    sizes = results["sizes"]
    letter = load[0]
    if letter == "A":
        what = f"{sizes['a_requests']} distinct prompts of {sizes['a_prompt']} tokens, {sizes['a_output']} out"
    elif letter == "B":
        what = (
            f"{sizes['b_requests']} requests, one prefix of {sizes['b_prefix']} tokens, {sizes['b_own']} of their own, "
            f"{sizes['b_output']} out, {sizes['b_concurrent']} at a time"
        )
    elif letter == "C":
        what = (
            f"{sizes['c_streams']} streams decode, {sizes['c_long']} prompts of {sizes['c_long_prompt']} tokens "
            f"arrive, one every {sizes['c_every_seconds']:g} s"
        )
    elif letter == "D":
        what = (
            f"{sizes['d_users']} users, {sizes['d_turns']} turns, {sizes['d_prompt']} tokens each, "
            f"{sizes['d_output']} out"
        )
    elif load.startswith("E at"):
        what = (
            f"{sizes['e_requests']} requests arrive at random, mixed lengths, of {results['capacity']:.2f} per second"
        )
    else:
        what = f"the requests of E, {sizes['e_concurrent']} at a time"
    return f"{load}: {what}"


def cells(row: Row) -> list[str]:
    if not row.runs:
        return [row.server, f"**{row.problem or 'not run'}**", *[""] * (len(COLUMNS) - 2)]
    rates = row.values("output_tokens_per_second")
    spread = f" ({min(rates):.1f} to {max(rates):.1f})" if len(rates) > 1 else ""
    cached = row.value("cached_tokens")
    told = f"{cached:.0f}" if cached is not None else "not told" if any(row.values("answered")) else "-"
    return [
        row.server,
        f"{number(row.value('output_tokens_per_second'))}{spread}",
        number(row.value("input_tokens_per_second")),
        pair(row, "ttft"),
        pair(row, "itl") + events_note(row),
        pair(row, "e2e"),
        f"{row.value('peak_memory_mb'):.0f} MB",
        f"{row.value('input_tokens'):.0f}: {told}",
        outcome(row),
        f"{max(row.values('load_average')):.1f}, {100 * max(row.values('client_cpu_share')):.1f} %",
    ]


def pair(row: Row, name: str) -> str:
    return f"{seconds(row.value(f'{name}_p50'))} / {seconds(row.value(f'{name}_p99'))}"


def events_note(row: Row) -> str:
    tokens = row.value("tokens_per_event")
    return f" ({tokens:.1f} tokens an event)" if tokens is not None and tokens > 1.05 else ""


def outcome(row: Row) -> str:
    requests, answered = (sum(run[name] for run in row.runs) for name in ("requests", "answered"))
    errors = count_by(error for run in row.runs for error, count in run["errors"].items() for _ in range(count))
    short = sum(run["short"] for run in row.runs)
    notes = [f"{count} x {error[:100]}" for error, count in errors.items()]
    retries = sum(run["retries"] for run in row.runs)
    notes += [f"{retries} tried again after a reset"] if retries else []
    notes += [f"{short} ended early"] if short else []
    notes += [f"the server {row.problem}"] if row.problem else []
    return f"{answered} of {requests}" + (f": {'; '.join(notes)}" if notes else "")


def ratios(results: dict[str, Any]) -> list[str]:
    """What the project holds itself to, against the best peer of each load."""
    if OURS not in results["servers"]:
        return []
    rows = []
    for load, least in (("A at 1", 1.0), ("A at 4", 1.4), ("A at 16", 1.3), ("B", 3.0)):
        if (ratio := to_best(results, load, "output_tokens_per_second", max)) is not None:
            rows.append([load, "output tok/s", f"{ratio:.2f}", f"at least {least}"])
    if (ratio := to_best(results, "C", "itl_p99", min)) is not None:
        rows.append(["C", "inter-token p99", f"{ratio:.3f}", "at most 0.1"])
    if (ratio := to_best(results, "C", "total", max)) is not None:
        rows.append(["C", "tok/s, in and out", f"{ratio:.2f}", "at least 0.9"])
    ours = {load: row for load in ("B", "D") for row in rows_of(results, load) if row.server == OURS}
    if "B" in ours and (computed := ours["B"].value("computed_tokens")) is not None:
        once = most_computed_once(ours["B"], results["sizes"])
        rows.append(["B", "prompt tokens computed", f"{computed:.0f}", f"prefix once: at most {once:.0f}"])
    if "D" in ours and (again := ours["D"].value("recomputed_beyond_new")) is not None:
        rows.append(["D", "old tokens computed again in a turn", f"{again:.0f}", f"at most {BLOCK_SIZE}"])
    return table(("load", f"{OURS} to the best peer, or its own", "is", "to be"), rows) if rows else []


def to_best(results: dict[str, Any], load: str, name: str, best: Callable[[list[float]], float]) -> float | None:
    """Ours / the best peer's. name: a figure, or "total": input and output tokens per second."""

    def value(row: Row) -> float | None:
        if name == "total":
            return middle(run["input_tokens_per_second"] + run["output_tokens_per_second"] for run in row.runs)
        return row.value(name)

    rows = rows_of(results, load)
    ours = [value(row) for row in rows if row.server == OURS]
    peers = [found for row in rows if row.server not in (OURS, BEFORE) and (found := value(row))]
    if not peers or not ours or ours[0] is None:
        return None
    return ours[0] / best(peers)


def most_computed_once(row: Row, sizes: dict[str, Any]) -> float:
    """Of load B's prompt tokens, if only whole blocks are shared and each of the prefix is computed once."""
    shared: int = (sizes["b_requests"] - 1) * (sizes["b_prefix"] // BLOCK_SIZE * BLOCK_SIZE)
    return (row.value("input_tokens") or 0.0) - shared


def describe(figures: Figures | None, problem: str | None) -> str:
    """One line of progress."""
    if figures is None:
        return problem or "not run"
    line = (
        f"{figures.output_tokens_per_second:.1f} tok/s out, {figures.input_tokens_per_second:.1f} in, "
        f"TTFT p50 {seconds(figures.ttft_p50)}, ITL p50 / p99 {seconds(figures.itl_p50)} / {seconds(figures.itl_p99)}, "
        f"{figures.answered} of {figures.requests} in {figures.seconds:.1f} s"
    )
    for error, count in figures.errors.items():
        line += f"; {count} x {error}"
    return line + (f"; the server {problem}" if problem else "")


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def seconds(value: float | None) -> str:
    """Three figures, in s."""
    return "-" if value is None else f"{value:.3g} s"


def table(head: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    def line(values: Any) -> str:
        return "| " + " | ".join(value.replace("|", "/").replace("\n", " ") for value in values) + " |"

    return [line(head), "|" + "---|" * len(head), *[line(row) for row in rows]]
