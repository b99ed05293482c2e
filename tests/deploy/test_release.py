"""What a release is made of."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]


def test_the_formula_is_of_this_version() -> None:
    formula = (ROOT / "deploy" / "homebrew" / "mlxpaged.rb").read_text()
    assert re.findall(r"/mlxpaged-(.+)\.tar\.gz", formula) == [version("mlxpaged")]


@pytest.mark.parametrize("workflow", ["ci.yml", "macos.yml", "release.yml"])
def test_workflows_run_pinned_actions_only(workflow: str) -> None:
    actions = re.findall(r"uses: (.+)", (ROOT / ".github" / "workflows" / workflow).read_text())
    assert actions
    assert [each for each in actions if not re.match(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)] == []


def test_a_wheel_that_lacks_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "deploy" / "check_wheel.py"), str(tmp_path / "mlxpaged.whl")]
    with ZipFile(command[-1], "w"):
        pass
    _, *names = subprocess.run(command, capture_output=True, text=True, check=False).stderr.splitlines()
    assert {"mlxpaged/py.typed", "mlxpaged/metal_kernels/paged_decode.metal"} <= set(names)
    with ZipFile(command[-1], "a") as wheel:
        for name in names[1:]:
            wheel.writestr(name, "")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"the wheel lacks:\n{names[0]}\n")
    with ZipFile(command[-1], "a") as wheel:
        wheel.writestr(names[0], "")
    assert subprocess.run(command, check=False).returncode == 0
