"""Check that a wheel has every file of the package that git knows: modules, demo model, Metal kernels, page.

python deploy/check_wheel.py dist/mlxpaged-0.1.0-py3-none-any.whl
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parent.parent
FOLDERS = {"mlxpaged/": "mlxpaged/", "metal_kernels/": "mlxpaged/metal_kernels/"}
"""Folders of the repository, and where the wheel has them."""


def missing_files(wheel: Path) -> list[str]:
    """The names, in the wheel, of the files that it lacks."""
    listed = subprocess.run(["git", "ls-files", "-z", *FOLDERS], cwd=ROOT, check=True, capture_output=True, text=True)
    expected = {
        target + name.removeprefix(source)
        for source, target in FOLDERS.items()
        for name in listed.stdout.split("\0")
        if name.startswith(source)
    }
    assert any(name.endswith(".metal") for name in expected)
    with ZipFile(wheel) as files:
        return sorted(expected - set(files.namelist()))


if __name__ == "__main__":
    missing = missing_files(Path(sys.argv[1]))
    sys.exit("the wheel lacks:\n" + "\n".join(missing) if missing else 0)
