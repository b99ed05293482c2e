"""The makers' chat templates, from the source distributions of packages that ship them.

    python -m tests.formats.makers DIRECTORY        downloads them (120 MB) unless they are there

llama-cpp-python (MIT) has those of llama.cpp, as the makers publish them. vLLM (Apache 2.0) has some that it offers
instead of the makers'. They are no part of this repository: some models' licences say what may be done with them.
"""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

TIMEOUT = 60


@dataclass(frozen=True)
class Package:
    """path: on files.pythonhosted.org. folder: the end of the path of the templates' folder."""

    path: str
    sha256: str
    folder: str


PACKAGES = (
    Package(
        "ec/e9/e7de2b0463ea3ffbf0ede6cb21b58c1258a8f6521aae45ca773a59fe7cf3/llama_cpp_python-0.3.36.tar.gz",
        "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
        "llama.cpp/models/templates",
    ),
    Package(
        "f7/25/aa5684e9c59d6fc75f78926b7f15e8d9adc7de2d9e6e7575b80776ad8169/vllm-0.33.0.tar.gz",
        "f4c33c2503d52bb411146afa9618a4f48bed68912f617e6803ac8d76e4c74112",
        "vllm-0.33.0/examples",
    ),
)


def templates(package: Package) -> dict[str, bytes]:
    """By file name. Raises ValueError if the package is another one."""
    with urllib.request.urlopen(f"https://files.pythonhosted.org/packages/{package.path}", timeout=TIMEOUT) as answer:
        data = answer.read()
    if hashlib.sha256(data).hexdigest() != package.sha256:
        raise ValueError(f"{package.path} is not the package whose hash is known")
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        for member in archive:
            path = PurePosixPath(member.name)
            file = archive.extractfile(member) if path.suffix == ".jinja" else None
            if file is not None and str(path.parent).endswith(package.folder):
                found[path.name] = file.read()
    return found


def fetch(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        done = directory / f"{package.sha256}.done"
        if not done.exists():
            print(f"downloading {PurePosixPath(package.path).name}", file=sys.stderr)
            for name, text in templates(package).items():
                (directory / name).write_bytes(text)
            done.touch()


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
