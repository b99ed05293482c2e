"""Each add-on has a job in CI, which runs if its folder has changed."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.addons.jobs import ROOT, matching, paths_of, table, touched

ADDONS = table()


def test_the_add_ons_are_these() -> None:
    assert set(ADDONS) == {"gguf", "encoders", "cluster", "batches", "ollama", "tools", "chat", "cpu", "outside"}


@pytest.mark.parametrize("addon", ADDONS)
def test_each_pattern_of_an_add_on_has_files(addon: str) -> None:
    paths = [
        path.relative_to(ROOT).as_posix() for room in ("mlxpaged", "tests") for path in ROOT.glob(f"{room}/**/*.py")
    ]
    for pattern in (*ADDONS[addon].files, *ADDONS[addon].tests):
        assert matching(paths, [pattern]), pattern
    assert paths_of(addon)


def test_a_change_touches_the_add_ons_of_its_files_and_tests() -> None:
    assert touched(["mlxpaged/models/sources/gguf/blocks.py", "README.md"]) == ["gguf"]
    assert touched(["tests/formats/test_reading.py", "mlxpaged/cluster/ring.py"]) == ["cluster", "tools"]
    assert touched(["mlxpaged/core/engine/core.py", "tests/engine/test_overlap.py"]) == []


def test_ci_asks_for_the_add_ons_of_a_change_and_make_for_the_paths_of_one() -> None:
    ask = [sys.executable, "-m", "tests.addons.jobs"]
    said = subprocess.run(ask, input="mlxpaged/cpu/blas.py\n", capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(said.stdout) == ["cpu"]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.search(r"python3 -m tests\.addons\.jobs\)", workflow)
    assert "make test-addon ADDON=${{ matrix.addon }}" in workflow
    named = subprocess.run([*ask, "cpu"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert "tests/cpu/test_blas.py" in named
    assert subprocess.run([*ask, "absent"], capture_output=True, check=False, cwd=ROOT).returncode != 0
