"""A real model in one table: a GGUF file and a float32 directory of it, on this server and on its peers.

Each server is started once for each form of the model that it can read. It answers one request alone, a long answer
alone, then load A one at a time and 16 at a time. A load has `--load-timeout` seconds: of a server that needs more,
what came until then counts, and the table says how many requests were answered.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .client import Client
from .environments import (
    BEFORE,
    LINUX,
    LLAMA_CPP,
    MLX,
    MLX_LM,
    ROOT,
    SERVER_PACKAGES,
    SetupError,
    check_system,
    make_environment,
    probe,
    server_variables,
    telling_line,
)
from .loads import DistinctPrompts, Sizes, TextsOf, capped, user
from .metrics import Figures, measure
from .model import Texts
from .options import Options
from .report import number, seconds, table
from .servers import MemoryWatch, Server, ServerError, running

CONVERTER_PACKAGES = ("numpy>=1.26", "safetensors>=0.4", "gguf==0.19.0")
LLAMA_CPP_PACKAGES = ("xllamacpp==2026.10.11549",)
CONVERT_SECONDS = 600

LONG_ANSWER, QUICK_ANSWER = 128, 16
"""Tokens of the answer that is timed alone."""

SIZES = Sizes(a_concurrent=(1, 16))
QUICK_SIZES = Sizes(a_requests=4, a_output=8, a_concurrent=(1, 4))

COLUMNS = (
    *("server", "model", "ready", "first answer", "decode tok/s, alone"),
    *("A at", "out tok/s", "answered", "TTFT p50 / max", "ITL p50 / p99", "CPU s a token", "peak memory"),
)

NOTES = """\
Ready: seconds from the start until `/health` answers 200; first answer: until the first token of the first request.
Decode: one request, tokens after the first one by the time that they took. A: {requests} distinct prompts of {prompt}
tokens, {output} out, greedy, so many at a time, at most {limit:.0f} s: what came until then counts, and TTFT then has
the waits that were not over. Requests that were given up may keep a server busy into the next load. CPU: user and
system time of the server's processes during the load, by the output tokens. Memory: the highest resident one since the
start (VmHWM). Each server has its default flags. OpenBLAS has the same routines in all of them ({routines}); llama.cpp
has kernels of its own."""


@dataclass(frozen=True)
class Subject:
    """A row of the table. server: its name in servers.COMMANDS."""

    server: str
    form: str
    python: Path
    model: Path


@dataclass
class Row:
    """problem: why figures are missing."""

    server: str
    form: str
    ready: float | None = None
    first: float | None = None
    decode: float | None = None
    loads: dict[str, dict[str, Any]] | None = None
    problem: str = ""


def compare_real(options: Options) -> None:
    """Raises SetupError if nothing can be measured, or kept."""
    assert options.gguf is not None
    check_system()
    options.out.mkdir(parents=True, exist_ok=True)
    directory = float32_directory(options.gguf, options.cache)
    texts = Texts(directory)
    routines = choose_routines(options.cache)
    rows = []
    for subject in subjects(options, directory):
        row = subject if isinstance(subject, Row) else measured(subject, options, texts)
        rows.append(row)
        print("\n".join(table(COLUMNS, cells(row))), flush=True)
    text = markdown(options, rows, routines)
    print(f"\n{text}")
    try:
        (options.out / "real.md").write_text(text)
        (options.out / "real.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    except OSError as error:
        raise SetupError(f"--out {options.out}: {error.strerror}; the results are above") from None
    print(f"{options.out}/real.json, .md; the servers' logs in {options.out}/logs")


def run(python: Path, *arguments: str) -> None:
    """Raises SetupError."""
    command, variables = [str(python), *arguments], server_variables()
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=CONVERT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise SetupError(f"{arguments[0]} did not end within {CONVERT_SECONDS} s") from None
    if done.returncode:
        raise SetupError(f"{arguments[0]}: {telling_line(done.stderr or done.stdout)}")


def float32_directory(gguf: Path, cache: Path) -> Path:
    """The file's values, made by the package gguf. Raises SetupError."""
    directory = cache / "models" / f"{gguf.stem}-float32"
    if not directory.exists():
        python = make_environment("gguf", CONVERTER_PACKAGES, cache)
        run(python, str(Path(__file__).with_name("checkpoint.py")), str(gguf), str(directory))
    return directory


def four_bit_directory(directory: Path, python: Path) -> Path:
    """mlx-lm's own conversion, with scales in bfloat16, as published ones have. Raises SetupError."""
    made = directory.with_name(f"{directory.name.removesuffix('-float32')}-4bit")
    if not made.exists():
        flags = ("-q", "--q-bits", "4", "--dtype", "bfloat16")
        run(python, "-m", "mlx_lm", "convert", "--hf-path", str(directory), "--mlx-path", str(made), *flags)
    return made


def choose_routines(cache: Path) -> str:
    """Those of OpenBLAS for all servers, by OPENBLAS_CORETYPE: the variable's own value, or what this server takes."""
    python = make_environment("mlxpaged", SERVER_PACKAGES["mlxpaged"], cache)
    if not LINUX:
        return "Apple's"
    code = "import ctypes; from mlxpaged.cpu import openblas; print(openblas.load(False).split(',')[0].split(';')[0])"
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, env=server_variables("mlxpaged"), check=False
    )
    name = done.stdout.strip()
    if done.returncode or not name:
        raise SetupError(f"OpenBLAS: {telling_line(done.stderr)}")
    os.environ.setdefault("OPENBLAS_CORETYPE", name)  # servers inherit it
    found = probe(python)
    return f"{found.routines}, {found.gflops:.0f} GFLOP/s"


def subjects(options: Options, directory: Path) -> list[Subject | Row]:
    """In the order of the table; a Row for what cannot be set up."""
    gguf = options.gguf
    assert gguf is not None
    before = ("-e", str(options.before), MLX, MLX_LM)
    wanted: list[tuple[str, str, tuple[str, ...], Callable[[Path], Path]]] = [
        ("mlxpaged", "GGUF", SERVER_PACKAGES["mlxpaged"], lambda _: gguf),
        ("mlxpaged", "float32", SERVER_PACKAGES["mlxpaged"], lambda _: directory),
        ("mlx-lm", "float32", SERVER_PACKAGES["mlx-lm"], lambda _: directory),
        ("mlx-lm", "4 bits", SERVER_PACKAGES["mlx-lm"], lambda python: four_bit_directory(directory, python)),
        (LLAMA_CPP, "GGUF", LLAMA_CPP_PACKAGES, lambda _: gguf),
        (BEFORE, "float32", before, lambda _: directory),
        (BEFORE, "GGUF", before, lambda _: gguf),
    ]
    names = (*options.servers, LLAMA_CPP)
    found: list[Subject | Row] = []
    for name, form, packages, model in wanted:
        if name not in names:
            continue
        try:
            python = make_environment(name, packages, options.cache)
            found.append(Subject(name, form, python, model(python)))
        except SetupError as error:
            found.append(Row(name, form, problem=str(error)))
    return found


def measured(subject: Subject, options: Options, texts: Texts) -> Row:
    row = Row(subject.server, subject.form, loads={})
    log = options.out / "logs" / f"{subject.server}-{subject.form}.log".replace(" ", "-")
    began = time.perf_counter()
    try:
        with running(subject.server, subject.python, subject.model, log, options.ready_seconds) as server:
            row.ready = time.perf_counter() - began
            measure_server(server, row, began, options, texts)
    except ServerError as error:
        row.problem = str(error)
    return row


def measure_server(server: Server, row: Row, began: float, options: Options, texts: Texts) -> None:
    """Raises ServerError."""
    assert row.loads is not None
    sizes, words = QUICK_SIZES if options.quick else SIZES, TextsOf(texts, "real")
    client = Client(server.port, server.model, 0.0, options.load_seconds)
    first = capped(client, options.load_seconds).ask(user("Hello."), 8)
    if not first.chunk_times:
        raise ServerError(server.died() or f"no first answer: {first.error}")
    row.first = first.chunk_times[0] - began
    longest = QUICK_ANSWER if options.quick else LONG_ANSWER
    alone = capped(client, options.load_seconds).ask(user("Write a long story about a river."), longest)
    if len(alone.chunk_times) > 1:
        row.decode = (alone.output_tokens - 1) / (alone.chunk_times[-1] - alone.chunk_times[0])
    for count in sizes.a_concurrent:
        load, cpu, own = os.getloadavg()[0], server.cpu_seconds(), time.process_time()
        with MemoryWatch(server) as memory:
            run = DistinctPrompts(sizes, words, count)(capped(client, options.load_seconds))
        figures = measure(run, server.peak_bytes() or memory.peak, load, time.process_time() - own)
        used = server.cpu_seconds()
        ttfts = [answer.ttft for answer in run.answers if answer.ttft is not None]
        row.loads[str(count)] = asdict(figures) | {
            "ttft_max": max(ttfts, default=None),
            "cpu_per_token": (used - cpu) / figures.output_tokens
            if used is not None and cpu is not None and figures.output_tokens
            else None,
        }
        print(f"{row.server}, {row.form}, A at {count}: {figures.output_tokens_per_second:.2f} tok/s", flush=True)
        if reason := server.died():
            raise ServerError(reason)


def cells(row: Row) -> list[list[str]]:
    """A line for each load, or one that says why there is none."""
    about = [seconds(row.ready), seconds(row.first), number(row.decode)]
    lines = []
    for count, load in (row.loads or {}).items():
        figures = Figures(**{name: load[name] for name in Figures.__dataclass_fields__})
        rate = figures.output_tokens_per_second
        notes = [f"{figures.short} ended early"] if figures.short else []
        notes += [f"{times} x {error}" for error, times in figures.errors.items()]
        cpu = load["cpu_per_token"]
        lines.append(
            [
                *(row.server, row.form, *about, count),
                f"{rate:.2f}" if rate else f"less than 1 token in {figures.seconds:.0f} s",
                "; ".join([f"{figures.answered} of {figures.requests}", *notes]),
                f"{seconds(figures.ttft_p50)} / {seconds(load['ttft_max'])}",
                f"{seconds(figures.itl_p50)} / {seconds(figures.itl_p99)}",
                "-" if cpu is None else f"{cpu:.4f}",
                f"{figures.peak_memory_mb:.0f} MB",
            ]
        )
    if row.problem or not lines:
        lines.append([row.server, row.form, *about, f"**{row.problem or 'not run'}**", *[""] * 6])
    return lines


def markdown(options: Options, rows: list[Row], routines: str) -> str:
    from .run import commit, machine

    sizes, host = QUICK_SIZES if options.quick else SIZES, machine()
    notes = NOTES.format(
        requests=sizes.a_requests,
        prompt=sizes.a_prompt,
        output=sizes.a_output,
        limit=options.load_seconds,
        routines=routines,
    )
    before = f", before: {commit(options.before)}" if options.before else ""
    quick = "; **quick: too small to mean anything**" if options.quick else ""
    gguf = options.gguf.name if options.gguf else ""
    versions = ", ".join((MLX, MLX_LM, *LLAMA_CPP_PACKAGES))
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M')}, {host['cpu']}, {host['cores']} cores, {host['memory_gb']} GB, "
        f"{host['system']}, Python {sys.version.split()[0]}, load average {host['load_average']:.2f} at the end; "
        f"commit {commit(ROOT)}{before}; {gguf}; {versions}{quick}.",
        *("", notes, ""),
        *table(COLUMNS, [line for row in rows for line in cells(row)]),
    ]
    return "\n".join(lines) + "\n"
