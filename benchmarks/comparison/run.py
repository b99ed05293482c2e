"""The order of a comparison: prepare, then load by load, server by server; at the end the results as files."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import servers
from .chart import draw
from .client import Client
from .environments import (
    BEFORE,
    LINUX,
    LLAMA_CPP,
    MLX,
    MLX_LM,
    ROOT,
    SERVER_PACKAGES,
    Probe,
    SetupError,
    check_system,
    make_environment,
    probe,
)
from .loads import CAPACITY, QUICK, Load, Sizes, capped, make_loads, warm_up
from .metrics import Figures, measure
from .model import Texts, benchmark_model
from .options import Options
from .report import describe, markdown
from .servers import MemoryWatch, Server, ServerError

WARM_UP_SECONDS = 300

Start = Callable[[str, Path], AbstractContextManager[Server]]
"""(a server's name, a file for its log) -> the server, running. Raises ServerError."""

Results = dict[str, Any]
"""What comparison.json has: JSON's own types only."""


@dataclass
class Budget:
    """The time that all loads together may take."""

    seconds: float
    start: float

    @property
    def left(self) -> float:
        return self.seconds - (time.perf_counter() - self.start)


def compare(options: Options) -> None:
    """Raises SetupError if nothing can be measured, or kept; a server that fails is a row that says so."""
    check_writable(options.out)
    check_system()
    model = find_model(options)
    texts = read_texts(model)
    sizes = QUICK if options.quick else Sizes()
    results = new_results(options, model, sizes)
    packages = SERVER_PACKAGES | {BEFORE: ("-e", str(options.before), MLX, MLX_LM)}
    pythons = make_environments(options, packages, results["servers"])

    def start(name: str, log: Path) -> AbstractContextManager[Server]:
        return servers.running(name, pythons[name], model, log)

    try:
        measure_all(options, sizes, texts, list(pythons), start, results)
    finally:  # what an interrupt leaves is kept
        save(results, options.out)
    if not any(run["figures"] for run in results["runs"]):
        raise SetupError("nothing was measured")


def make_environments(
    options: Options, packages: dict[str, tuple[str, ...]], entries: dict[str, dict[str, Any]]
) -> dict[str, Path]:
    """The Python of each server that can be installed. entries: what is known of each; it gets what was found."""
    pythons: dict[str, Path] = {}
    for name in options.servers:
        try:
            python = make_environment(name, packages[name], options.cache)
            found = Probe({}, 0.0, "") if name == LLAMA_CPP else probe(python)  # that one is not made of MLX
        except SetupError as error:
            print(f"{name}: {error}", flush=True)
            entries[name]["problem"] = str(error)
            continue
        pythons[name] = python
        entries[name] |= asdict(found)
        version = found.versions.get(name.removesuffix("-before"))
        print(f"{name}: {version}, mlx {found.versions.get('mlx')}, {found.gflops:.0f} GFLOP/s")
    return pythons


def check_writable(out: Path) -> None:
    """Before hours of measuring. Raises SetupError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise SetupError(f"--out {out}: {error.strerror}") from None


def find_model(options: Options) -> Path:
    """Raises SetupError."""
    if options.model is None:
        try:
            return benchmark_model(options.cache)
        except OSError as error:
            raise SetupError(f"--cache {options.cache}: {error.strerror}") from None
    if Path(options.model).is_dir():
        return Path(options.model).resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(options.model))
    except Exception as error:  # it has many kinds, and all mean that there is no model
        raise SetupError(f"--model {options.model}: {error}") from None


def read_texts(model: Path) -> Texts:
    """Raises SetupError."""
    try:
        return Texts(model)
    except Exception as error:  # the tokenizer's library knows no other kind
        raise SetupError(f"{model}/tokenizer.json: {error}") from None


def measure_all(options: Options, sizes: Sizes, texts: Texts, names: list[str], start: Start, results: Results) -> None:
    """Every load on every server, `repeat` times; E last, since its rates depend on what was measured.

    All servers have one load before any has the next: what else the machine does changes within minutes, and a ratio is
    of figures that were measured close to each other.
    """
    budget = Budget(options.budget_seconds, time.perf_counter())
    measured_capacity = "E" in options.loads and options.capacity is None

    def run_all(letters: tuple[str, ...], capacity: float | None) -> None:
        for repetition in range(options.repeat):
            failed: dict[str, str] = {}
            for load in make_loads(letters, capacity, sizes, texts, repetition):
                for name in names:
                    figures, problem = None, failed.get(name)
                    log = options.out / "logs" / f"{name}-{repetition}-{load.name}.log".replace(" ", "-")
                    if problem is None:
                        try:
                            figures, problem = one_load(
                                options, load, texts, start(name, log), results["servers"][name], budget
                            )
                        except ServerError as error:
                            failed[name] = problem = str(error)
                    record(name, load, repetition, figures, problem)

    def record(name: str, load: Load, repetition: int, figures: Figures | None, problem: str | None) -> None:
        run = {"server": name, "load": load.name, "repetition": repetition, "problem": problem}
        results["runs"].append(run | {"figures": asdict(figures) if figures else None})
        results["minutes"] = (time.perf_counter() - budget.start) / 60
        print(f"{name}, {load.name}: {describe(figures, problem)}", flush=True)

    count = len(make_loads(options.loads, options.capacity, sizes, texts, 0))
    count += len(sizes.e_shares) if measured_capacity else 0
    count *= len(names) * options.repeat
    worst = min(budget.seconds, count * options.load_seconds)
    print(f"{count} loads, each at most {options.load_seconds:.0f} s; at most {worst / 60:.0f} minutes of them\n")
    run_all(options.loads, options.capacity)
    if not measured_capacity:
        return
    results["capacity"] = best_capacity(results)
    if results["capacity"] is None:
        print("E is left out: no server answered all requests when its capacity was measured")
        return
    print(f"E: rates are shares of {results['capacity']:.2f} requests per second")
    run_all(("E",), results["capacity"])


def one_load(
    options: Options,
    load: Load,
    texts: Texts,
    server: AbstractContextManager[Server],
    entry: dict[str, Any],
    budget: Budget,
) -> tuple[Figures, str | None]:
    """Its figures, and how the server died of it, if it did. Raises ServerError for a server that does not get as far,
    and for one that had no time left."""
    if budget.left <= 0:
        raise ServerError(f"not run: {options.budget_seconds / 60:.0f} minutes were over")
    with server as running:
        entry["openblas"] = running.uses_openblas()
        client = Client(running.port, running.model, 0.0, options.request_seconds)
        for answer in warm_up(capped(client, WARM_UP_SECONDS), texts):
            if answer.error:
                raise ServerError(running.died() or f"the warm-up failed: {answer.error}")
        load_average, cpu = os.getloadavg()[0], time.process_time()
        with MemoryWatch(running) as memory:
            run = load.run(capped(client, min(options.load_seconds, budget.left)))
        return measure(run, memory.peak, load_average, time.process_time() - cpu), running.died()


def best_capacity(results: Results) -> float | None:
    """Requests per second of the fastest server with CAPACITY; None if none answered everything."""
    figures = [run["figures"] for run in results["runs"] if run["load"] == CAPACITY and run["figures"]]
    return max(
        (one["answered"] / one["seconds"] for one in figures if one["answered"] == one["requests"]), default=None
    )


def new_results(options: Options, model: Path, sizes: Any) -> Results:
    """sizes: a dataclass with the numbers of the loads."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "quick": options.quick,
        "repeat": options.repeat,
        "model": options.model or "made from a seed: Llama, float32, 12 layers of 768, 81 million parameters",
        "machine": machine(),
        "commit": commit(ROOT),
        "commit_before": commit(options.before) if options.before else None,
        "sizes": asdict(sizes),
        "request_seconds": options.request_seconds,
        "load_seconds": options.load_seconds,
        "capacity": options.capacity,
        "minutes": 0.0,
        "servers": {
            name: {
                "command": shlex.join(part.format(model="MODEL", port="PORT") for part in servers.COMMANDS[name]),
                "versions": {},
                "gflops": None,
                "routines": "",
                "openblas": None,
                "problem": None,
            }
            for name in options.servers
        },
        "runs": [],
    }


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    if LINUX:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    elif platform.system() == "Darwin":
        cpu = output_of("sysctl", "-n", "machdep.cpu.brand_string") or cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def commit(checkout: Path) -> str:
    """Of a checkout, with a + if files differ from it."""
    name = output_of("git", "-C", str(checkout), "rev-parse", "--short", "HEAD")
    changed = output_of("git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no")
    return name + ("+" if changed else "")


def output_of(*command: str) -> str:
    """Empty if the command fails or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def save(results: Results, out: Path) -> None:
    """Print the results and write them to files. Raises SetupError if that fails."""
    text = markdown(results)
    print(f"\n{text}")
    try:
        (out / "comparison.json").write_text(json.dumps(results, indent=1) + "\n")
        (out / "comparison.md").write_text(text)
        draw(results, out / "comparison.png")
    except OSError as error:
        raise SetupError(f"--out {out}: {error.strerror}; the results are above") from None
    print(f"{out}/comparison.json, .md, .png; the servers' logs in {out}/logs")


def print_saved(path: Path) -> None:
    """Raises SetupError."""
    try:
        print(markdown(json.loads(path.read_text())))
    except (OSError, ValueError) as error:
        raise SetupError(f"--markdown {path}: {error}") from None
    except (LookupError, TypeError, AttributeError) as error:
        raise SetupError(f"--markdown {path}: not the results of a comparison ({error!r})") from None
