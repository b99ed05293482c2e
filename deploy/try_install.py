"""Runs `make serve` and `make test` in copies of this checkout, each with another installer. Prints a table.

The packages come from a local index in which every locked package also has a newer version.

python deploy/try_install.py [--python PATH ...] [--pip VERSION ...] [--no-uv] [--whole]

Each copy has an empty home and an empty environment. The index passes on the files of PyPI (or --upstream). A newer
version that is installed is an error: its wheel has no code. By default, `make test` runs few tests; --whole runs all.
The exit status is 1 if a command fails.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PIPS = ("23.0.1", "23.2.1", "24.0", "newest")
NEWER = "9999.0"
JSON = "application/vnd.pypi.simple.v1+json"
"""PEP 691's form of an index. pip knows it from 22.2 on."""
SECONDS = 900.0
"""For an installation and a first answer."""


class TryError(Exception):
    """A command did not do what the README says."""


def pinned(lock: str) -> dict[str, set[str]]:
    """Versions by package. A package has several if they depend on the system or on Python's version."""
    versions: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([a-z0-9-]+)==([\w.]+)", (ROOT / "requirements" / lock).read_text(), re.M):
        versions.setdefault(name, set()).add(version)
    return versions


def file_name(package: str) -> str:
    return f"{package.replace('-', '_')}-{NEWER}-py3-none-any.whl"


def empty_wheel(package: str) -> bytes:
    """A version without code, which wants a package that does not exist."""
    folder = f"{package.replace('-', '_')}-{NEWER}.dist-info"
    name = f"Name: {package}\nVersion: {NEWER}\n"
    files = {
        "METADATA": f"Metadata-Version: 2.1\n{name}Requires-Dist: there-is-no-such-package\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: try_install\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{folder}/{name},,\n" for name in (*files, "RECORD"))
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as wheel:
        for name, text in {**files, "RECORD": record}.items():
            wheel.writestr(f"{folder}/{name}", text)
    return data.getvalue()


@contextmanager
def local_index(upstream: str) -> Iterator[str]:
    """Yields its address."""
    locked = pinned("ci.txt") | pinned("serve.txt")

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, name = self.path.strip("/").split("/")
            try:
                page = empty_wheel(name.partition("-")[0].replace("_", "-")) if kind == "newer" else self.listing(name)
            except urllib.error.HTTPError as error:
                self.send_error(error.code)
                return
            self.send_response(200)
            self.send_header("content-type", JSON if kind == "simple" else "application/octet-stream")
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def listing(self, name: str) -> bytes:
            address = urllib.parse.urljoin(upstream, f"{name}/")
            asked = urllib.request.Request(address, headers={"accept": JSON})
            with urllib.request.urlopen(asked, timeout=60) as answer:
                found: dict[str, Any] = json.load(answer)
            for each in found["files"]:
                each["url"] = urllib.parse.urljoin(address, each["url"])
                for key in ("core-metadata", "dist-info-metadata"):  # beside the file upstream, not here
                    each.pop(key, None)
            if name in locked:
                found["files"].append({"filename": file_name(name), "url": f"/newer/{file_name(name)}", "hashes": {}})
            return json.dumps(found).encode()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/simple/"
        server.shutdown()


@dataclass(frozen=True)
class Installer:
    """What sets up a copy. pip: None for the one that Python brings with it."""

    python: str
    pip: str | None = None
    is_uv: bool = False

    @property
    def name(self) -> str:
        return "uv" if self.is_uv else f"pip {self.pip or bundled_pip(self.python)}"


def version_of(python: str) -> str:
    code = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def bundled_pip(python: str) -> str:
    code = "import ensurepip; print(ensurepip.version())"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "?"


def programs(installer: Installer, folder: Path, upstream: str) -> Path:
    """A folder for PATH with a python3, which gives new environments the wanted version of pip, or with uv."""
    folder.mkdir()
    python = folder / "python3"
    lines = ["#!/bin/sh", f'"{installer.python}" "$@" || exit']
    if installer.pip is not None:
        wanted = "pip" if installer.pip == "newest" else f"pip=={installer.pip}"
        command = f'"$last/bin/python" -m pip install --quiet --upgrade --index-url {upstream} {wanted}'
        lines.append(f'if [ "$1 $2" = "-m venv" ]; then for last; do :; done; {command}; fi')
    python.write_text("\n".join(lines) + "\n")
    python.chmod(0o755)
    if installer.is_uv:
        venv = folder / "uv-venv"
        subprocess.run([installer.python, "-m", "venv", venv], check=True)
        subprocess.run([venv / "bin/python", "-m", "pip", "install", "--quiet", "uv"], check=True)
        (folder / "uv").symlink_to(venv / "bin/uv")
    return folder


def copy_checkout(target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def environment(installer: Installer, folder: Path, index: str, upstream: str) -> dict[str, str]:
    home = folder / "home"
    home.mkdir()
    without_uv = [each for each in os.environ["PATH"].split(os.pathsep) if not Path(each, "uv").exists()]
    path = os.pathsep.join([str(programs(installer, folder / "bin", upstream)), *without_uv])
    indexes = {"PIP_INDEX_URL": index, "PIP_CONFIG_FILE": os.devnull, "UV_DEFAULT_INDEX": index, "UV_NO_CONFIG": "1"}
    certificates = {name: value for name, value in os.environ.items() if name in ("PIP_CERT", "SSL_CERT_FILE")}
    return {"PATH": path, "HOME": str(home), **indexes, **certificates}


def seconds_to_first_answer(copy: Path, env: dict[str, str]) -> float:
    """Of `make serve`, from nothing."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    body = {"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    log = copy / "serve.log"
    started = time.monotonic()
    with log.open("w") as written:
        command = ["make", "serve", f"ARGS=--port {port}"]
        serving = subprocess.Popen(command, cwd=copy, env=env, stdout=written, stderr=written, start_new_session=True)
    try:
        while time.monotonic() - started < SECONDS and serving.poll() is None:
            try:
                with urllib.request.urlopen(asked, timeout=60) as answer:
                    text = json.load(answer)["choices"][0]["message"]["content"]
            except OSError:
                time.sleep(0.05)
                continue
            if text != "42":
                raise TryError(f"`make serve` answered {text!r}")
            return time.monotonic() - started
    finally:
        if serving.poll() is None:
            os.killpg(serving.pid, signal.SIGTERM)
            serving.wait()
    raise TryError(f"`make serve` gave no answer:\n{log.read_text()[-2000:]}")


def check_versions(copy: Path, lock: str) -> None:
    """Every package that is installed has a version of the lock."""
    code = "import importlib.metadata as m, json; print(json.dumps([[d.name, d.version] for d in m.distributions()]))"
    python = copy / ".venv/bin/python"
    found = json.loads(subprocess.run([python, "-c", code], check=True, capture_output=True, cwd=copy).stdout)
    versions = pinned(lock)
    for package, version in found:
        name = re.sub(r"[-_.]+", "-", package).lower()
        if name not in ("mlxpaged", "pip", "setuptools") and version not in versions.get(name, ()):
            raise TryError(f"{name} {version} is installed, which is not in requirements/{lock}")
    if len(found) < len(versions) / 2:
        raise TryError(f"only {len(found)} packages of requirements/{lock} are installed")


def run_tests(copy: Path, env: dict[str, str], whole: bool) -> str:
    """pytest's summary."""
    few = {} if whole else {"PYTEST_ADDOPTS": "-k test_lock"}
    done = subprocess.run(["make", "test"], cwd=copy, env=env | few, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise TryError(f"`make test` failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout.splitlines()[-1].strip("= ")


def show_what_the_index_has(installer: Installer, index: str, folder: Path) -> None:
    """Without a lock, the newer version is taken."""
    venv = folder / "control"
    subprocess.run([installer.python, "-m", "venv", venv], check=True)
    env = {"PATH": os.environ["PATH"], "PIP_INDEX_URL": index, "PIP_CONFIG_FILE": os.devnull}
    download = f"{venv}/bin/python -m pip -q --disable-pip-version-check download --no-deps --dest {folder} coverage"
    subprocess.run(download.split(), check=True, env=env)
    if not (folder / file_name("coverage")).exists():
        raise TryError("the index does not offer a newer version")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--python", action="append", help="a Python to try; the first one with all installers")
    parser.add_argument("--pip", action="append", help=f"a version of pip, or newest (default: {', '.join(PIPS)})")
    parser.add_argument("--no-uv", action="store_true", help="do not try uv")
    parser.add_argument("--whole", action="store_true", help="run all tests")
    parser.add_argument("--upstream", default="https://pypi.org/simple/", help="where the files come from")
    options = parser.parse_args()
    pythons = [shutil.which(each) or each for each in options.python or [sys.executable]]
    installers = [Installer(each) for each in pythons]
    installers += [Installer(pythons[0], each) for each in options.pip or PIPS]
    installers += [] if options.no_uv else [Installer(pythons[0], is_uv=True)]
    failed = False
    with tempfile.TemporaryDirectory() as name, local_index(options.upstream) as index:
        show_what_the_index_has(installers[0], index, Path(name))
        print("| Python | installer | make serve: seconds to the first answer | make test |\n|---|---|---|---|")
        for i, installer in enumerate(installers):
            folder = Path(name, str(i))
            copy_checkout(folder / "copy")
            cells = [version_of(installer.python), installer.name]
            error = ""
            try:
                env = environment(installer, folder, index, options.upstream)
                cells.append(f"{seconds_to_first_answer(folder / 'copy', env):.0f}")
                check_versions(folder / "copy", "serve.txt")
                cells.append(run_tests(folder / "copy", env, options.whole))
                check_versions(folder / "copy", "ci.txt")
            except TryError as failure:
                failed, error = True, str(failure)
                cells.append("failed")
            print(f"| {' | '.join(cells)} |", error, sep="\n" if error else "", flush=True)
            shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
