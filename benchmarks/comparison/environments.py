"""A virtual environment per server, and the BLAS that it computes with. Standard library only.

Environments are kept in the cache directory, by the versions that they hold; one that was made is not touched again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "mlxpaged" / "bench"

LINUX = sys.platform == "linux"
MLX = "mlx[cpu]==0.32.4" if LINUX else "mlx==0.32.4"
"""The same for all servers."""
# mlx-lm 0.31.3 is the last that runs on Python 3.10.
MLX_LM = "mlx-lm==0.32.2" if sys.version_info >= (3, 11) else "mlx-lm==0.31.3"
SERVER_PACKAGES = {
    "mlxpaged": ("-e", str(ROOT), MLX, MLX_LM),
    "mlx-lm": (MLX, MLX_LM),
    "vllm-mlx": (MLX, "vllm-mlx==0.6.0"),
    "rapid-mlx": (MLX, "rapid-mlx==0.16.10"),
}
BEFORE = "mlxpaged-before"
"""Another checkout of mlxpaged, beside this one (`--before`)."""

LLAMA_CPP = "llama.cpp"
"""Only in the table of a GGUF file (`--gguf`)."""

DRIVER_PACKAGES = ("numpy>=1.26", "safetensors>=0.4", "tokenizers>=0.21", "huggingface-hub>=0.27", "matplotlib>=3.9")
REPORTED_PACKAGES = ("mlxpaged", "mlx", "mlx-lm", "vllm-mlx", "rapid-mlx", "transformers", "torch")

OPENBLAS = "libopenblas.so.0"
INSTALL_SECONDS = 1800
PROBE_SECONDS = 300

PROBE = """
import ctypes, importlib.metadata, json, sys, time
import mlx.core as mx
a, b = mx.random.normal((1024, 1024)), mx.random.normal((1024, 1024))
mx.eval(a, b)
best = float("inf")
for _ in range(10):
    start = time.perf_counter()
    mx.eval(a @ b)
    best = min(best, time.perf_counter() - start)
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
routines = ""
if sys.platform == "linux":
    core_name = getattr(ctypes.CDLL("libopenblas.so.0"), "openblas_get_corename", None)
    if core_name is not None:
        core_name.restype = ctypes.c_char_p
        routines = f"OpenBLAS ({core_name().decode()})"
print(json.dumps({"gflops": 2 * 1024**3 / best / 1e9, "versions": versions, "routines": routines}))
"""


class SetupError(Exception):
    """A server's environment cannot be made or does not work; the message says why."""


@dataclass(frozen=True)
class Probe:
    """What is in an environment. gflops: of a product of two 1024 x 1024 float32 matrices, the best of ten. routines:
    OpenBLAS's, by the processor that they are made for; empty on a Mac."""

    versions: dict[str, str]
    gflops: float
    routines: str


def make_environment(name: str, packages: tuple[str, ...], cache: Path) -> Path:
    """The environment's Python, installed now if it was not before. Raises SetupError."""
    key = [sys.version, *packages]
    if "-e" in packages:
        key.append((Path(packages[1]) / "pyproject.toml").read_text())
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:10]
    directory = cache / "environments" / f"{name}-{digest}"
    python, stamp = directory / "bin" / "python", directory / ".installed"
    if stamp.exists():
        return python
    print(f"{name}: installing {' '.join(packages)} ...", flush=True)
    shutil.rmtree(directory, ignore_errors=True)  # of an installation that failed
    uv = shutil.which("uv")
    if uv:
        create = [uv, "venv", "--quiet", "--python", sys.executable, str(directory)]
        install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    else:
        create = [sys.executable, "-m", "venv", str(directory)]
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (create, [*install, *packages]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise SetupError(f"not installed within {INSTALL_SECONDS} s") from None
        if done.returncode:
            raise SetupError(f"not installed: {telling_line(done.stderr or done.stdout)}")
    stamp.touch()
    return python


def server_variables(name: str | None = None) -> dict[str, str]:
    """Environment variables of a server: the same BLAS for all, with its own number of threads, and nothing from the
    network or to it. mlxpaged loads OpenBLAS by itself, in its own way, and heeds no variable with a number of threads;
    that it has it is looked up in the process, as it is for the others."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MLXPAGED_")
        and not name.endswith(("_NUM_THREADS", "_MAXIMUM_THREADS"))
        and name not in ("PYTHONPATH", "VIRTUAL_ENV", "LD_PRELOAD")
    }
    variables = inherited | {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    if LINUX and name not in ("mlxpaged", BEFORE):
        variables["LD_PRELOAD"] = OPENBLAS
    return variables


def check_system() -> None:
    """Raises SetupError if memory could not be measured, or it would be a comparison of reference BLAS routines."""
    if shutil.which("ps") is None:
        raise SetupError("ps is not installed (Debian, Ubuntu: apt install procps)")
    if not LINUX:
        return
    code = f"import ctypes; ctypes.CDLL({OPENBLAS!r})"
    if subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode:
        raise SetupError(f"{OPENBLAS} is not installed (Debian, Ubuntu: apt install libopenblas0)")


def probe(python: Path) -> Probe:
    """Versions and speed of the environment as servers run in it. Raises SetupError."""
    command = [str(python), "-c", PROBE, *REPORTED_PACKAGES]
    try:
        done = subprocess.run(
            command, env=server_variables(), capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise SetupError(f"a product of matrices did not end within {PROBE_SECONDS} s") from None
    if done.returncode:
        raise SetupError(f"mlx does not work: {telling_line(done.stderr)}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Probe(found["versions"], found["gflops"], found["routines"])


def telling_line(text: str) -> str:
    """Of a program's output: the last line with an error in it, or with what to install, else the last line."""
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.strip()]
    errors, hints = (
        [line for line in lines if re.search(words, line, re.IGNORECASE)] for words in ("error|critical", "apt install")
    )
    return (errors or hints or lines or ["no output"])[-1][:300]
