"""The audit of pinned packages: what it says if pip-audit finds something, finds nothing, or reaches no service."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "audit.py"
PINS = """starlette==1.7.0 ; python_full_version < '3.11' \\
    --hash=sha256:00
starlette==1.10.0 ; python_full_version >= '3.11' \\
    --hash=sha256:01
mlx-metal==0.32.4 ; sys_platform == 'darwin' \\
    --hash=sha256:02
"""
STAND_IN = """
import json, pathlib, sys
options = dict(zip(sys.argv, sys.argv[1:]))
named = pathlib.Path(options["--requirement"]).read_text().split()
known = json.loads(pathlib.Path(__file__).with_name("known.json").read_text())
if isinstance(known, str):
    sys.exit(known)
answers = [{"name": name, "version": version, **known.get(version, {"vulns": []})}
           for name, version in (each.split("==") for each in named)]
pathlib.Path(options["--output"]).write_text(json.dumps({"dependencies": answers}))
sys.exit(any(each.get("vulns") for each in answers))
"""
"""In place of pip-audit: it answers what `known.json` has about a version."""


def audit(folder: Path, known: object) -> subprocess.CompletedProcess[str]:
    (folder / "pip_audit.py").write_text(STAND_IN)
    (folder / "known.json").write_text(json.dumps(known))
    (folder / "pins.txt").write_text(PINS)
    command = [sys.executable, str(SCRIPT), str(folder / "pins.txt")]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(folder)})


def test_a_vulnerability_of_any_pinned_version_fails(tmp_path: Path) -> None:
    done = audit(tmp_path, {"1.7.0": {"vulns": [{"id": "CVE-1", "fix_versions": ["1.8.0"]}]}})
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "starlette 1.7.0: CVE-1, fixed in 1.8.0",
        "3 versions audited, 1 known vulnerabilities",
    ]


def test_versions_for_other_systems_are_audited_and_unknown_ones_are_named(tmp_path: Path) -> None:
    done = audit(tmp_path, {"0.32.4": {"skip_reason": "not found"}})
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "The service does not know these versions: mlx-metal",
        "2 versions audited, 0 known vulnerabilities",
    ]


NONE_KNOWN = {version: {"skip_reason": "not found"} for version in ("1.7.0", "1.10.0", "0.32.4")}


@pytest.mark.parametrize("known", ["requests.exceptions.ConnectionError: refused", NONE_KNOWN])
def test_it_says_so_if_nothing_was_audited(tmp_path: Path, known: object) -> None:
    done = audit(tmp_path, known)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("NOT AUDITED: the advisory service ")


def test_another_failure_of_pip_audit_fails(tmp_path: Path) -> None:
    done = audit(tmp_path, "no such option")
    assert (done.returncode, done.stderr) == (1, "pip-audit failed:\nno such option\n\n")
