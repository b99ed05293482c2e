"""One Markdown file with what a Mac does: `make mac-report`, at most 15 minutes after the installation.

    python benchmarks/mac_report.py [MODEL] [--out mac-report.md] [--quick]

The doctor checks the kernels, times them (tuner) and compares decoding with mlx-lm; then the loads A and C of the
comparison run over HTTP on this server and mlx-lm's, with the same model. A part that fails, or takes longer than its
time, is named in the file. Without a Mac the figures mean nothing, and the file says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IS_MAC = sys.platform == "darwin"
MODEL = "mlx-community/Qwen3-4B-4bit"
"""2.3 GB, for Macs from 8 GB on."""
DOCTOR_SECONDS = 360
LOADS_MINUTES = 8
"""Of the loads, after the servers are installed and the model is downloaded. Each load has a minute."""
INSTALL_SECONDS = 3600
NO_MAC = "**This is not a Mac: the figures below mean nothing for one. They show that the report can be made.**"
HOSTED = "apple paravirtual"
"""A part of the name of a virtual machine's GPU."""


@dataclass(frozen=True)
class Part:
    """What a program came to. found: the JSON that it wrote. problem: why there is none, or its exit status."""

    text: str
    found: dict[str, Any]
    problem: str


def run_part(name: str, command: Sequence[str], written: Path, seconds: float) -> Part:
    """Run a program, and show what it prints. written: the file with its JSON."""
    print(f"{name}: up to {seconds / 60:.0f} minutes", flush=True)
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
        text, problem = done.stdout, ""
        if done.returncode:
            problem = f"exit status {done.returncode}: {(done.stderr.strip() or 'no reason').splitlines()[-1]}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        problem = f"it was ended after {seconds:.0f} seconds"
    print(f"{text}{problem}", flush=True)
    found = json.loads(written.read_text(encoding="utf-8")) if written.exists() else {}
    return Part(text, found, problem)


def run_doctor(model: str, directory: Path) -> Part:
    report = directory / "doctor.json"
    command = [str(Path(sys.executable).parent / "mlxpaged"), "doctor", model, "--retune", "--report", str(report)]
    return run_part("the doctor", command, report, DOCTOR_SECONDS)


def run_loads(model: str, directory: Path, quick: bool) -> Part:
    """The comparison of A and C. Its Markdown is the text."""
    own_model = [] if model == "demo" else ["--model", model]  # the demo model's context is too short for C
    limits = ["--budget", str(LOADS_MINUTES), "--load-timeout", "60", *(["--quick"] if quick else [])]
    chosen = ["--loads", "A", "C", "--servers", "mlxpaged", "mlx-lm", *own_model, "--out", str(directory)]
    command = [sys.executable, "benchmarks/compare.py", *chosen, *limits]
    found = directory / "comparison.json"
    part = run_part("loads A and C, with the installation of the servers", command, found, INSTALL_SECONDS)
    tables = directory / "comparison.md"
    return Part(tables.read_text(encoding="utf-8") if tables.exists() else "", part.found, part.problem)


def value(content: Any, shown: str) -> str:
    """content: a section of the doctor's report, or None if it is missing."""
    if content is None:
        return "missing"
    if isinstance(content, dict) and "not_measured" in content:
        return f"not measured: {content['not_measured']}"
    return shown.format(content)


def questions(doctor: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What only a Mac can answer, and what this one says."""
    machine = doctor.get("machine", {})
    for name in ("device", "memory", "GPU limit", "system", "packages", "neural accelerators"):
        yield name, machine.get(name, "missing")
    checks = doctor.get("kernels")
    failed = [check["case"] for check in checks if check["problem"]] if isinstance(checks, list) else []
    right = f"{len(failed)} of {len(checks)} wrong {', '.join(failed)}".strip() if isinstance(checks, list) else ""
    yield "kernels compared with MLX's own operations", right or value(checks, "")
    yield "attention tuning, what it gains over the default", value(doctor.get("tuning"), "{0[summary]}")
    yield "milliseconds of a decoding step by rows", value(doctor.get("step_times"), "{}")
    for each in doctor.get("decoding", ()):
        ours, theirs = each["tokens_per_second"], each["mlx_lm_tokens_per_second"]
        is_known = isinstance(ours, float) and isinstance(theirs, float)
        ratio = f", {ours / theirs:.2f} times" if is_known else ""
        rates = f"{value(ours, '{:.1f}')} tokens/s, mlx-lm {value(theirs, '{:.1f}')}{ratio}"
        yield f"decoding, batch {each['batch']}", rates
    yield "steps by rows, a prompt beside one stream", value(doctor.get("prompt_steps"), "{0[steps_by_rows]}")
    for name, title in (("largest_prefill", "memory of a prompt"), ("long_prefill", "memory of a long prompt")):
        yield title, value(doctor.get(name), "{0[tokens]} tokens: {0[bytes]} bytes")


def markdown(model: str, doctor: Part, loads: Part | None) -> str:
    device = str(doctor.found.get("machine", {}).get("device", ""))
    lines = [f"# mlxpaged on a Mac: {model}", ""]
    if not IS_MAC:
        lines += [NO_MAC, ""]
    elif HOSTED in device.lower():
        lines += ["**The GPU is a virtual one: its speed says nothing about a Mac's.**", ""]
    for title, part in (("doctor", doctor), ("loads A and C", loads)):
        if part is not None and part.problem:
            lines += [f"**The {title} did not end well: {part.problem}.**", ""]
    lines += ["| Question | Answer |", "|---|---|"]
    lines += [f"| {question} | {str(answer).replace('|', '/')} |" for question, answer in questions(doctor.found)]
    lines += ["", "## Loads A and C beside mlx-lm's server", "", "not run" if loads is None else loads.text.rstrip()]
    return "\n".join([*lines, "", "## The doctor", "", "```", doctor.text.rstrip(), "```", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=MODEL if IS_MAC else "demo", help="default %(default)s")
    parser.add_argument("--out", type=Path, default=Path("mac-report.md"), help="default %(default)s")
    parser.add_argument("--quick", action="store_true", help="small loads: shows that all works, measures little")
    parser.add_argument("--no-loads", action="store_true", help="only the doctor, as on hosted machines")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        doctor = run_doctor(args.model, Path(directory))
        loads = None if args.no_loads else run_loads(args.model, Path(directory), args.quick or not IS_MAC)
    args.out.write_text(markdown(args.model, doctor, loads), encoding="utf-8")
    print(f"the report is in {args.out}")
    sys.exit(int(bool(doctor.problem or (loads is not None and loads.problem))))


if __name__ == "__main__":
    main()
