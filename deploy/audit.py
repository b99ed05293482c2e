"""Ask pip-audit for known vulnerabilities of the versions that are pinned in files of requirements.

python deploy/audit.py requirements/ci.txt requirements/tools.txt

The exit status is 1 if there are any. It is 0 if the advisory service cannot be reached: then nothing is known.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

UNREACHABLE = ("requests.exceptions.", "your network may be blocking")
"""What pip-audit's errors contain if the service does not answer, or answers with a status of 500 and above."""


def pinned_versions(requirements: str) -> list[tuple[str, str]]:
    """Name and version of each pin, those for other systems and other versions of Python included."""
    return re.findall(r"^([\w.-]+)==(\S+)", requirements, flags=re.MULTILINE)


def without_duplicates(pins: list[tuple[str, str]]) -> list[list[str]]:
    """Lists of requirements in which no package appears twice: pip-audit refuses two versions in one list.

    The requirements have no markers, because pip-audit leaves out what is not for the Python that runs it.
    """
    versions: dict[str, list[str]] = defaultdict(list)
    for name, version in sorted(set(pins)):
        versions[name].append(version)
    most = max(map(len, versions.values()))
    return [[f"{name}=={each[n]}" for name, each in versions.items() if n < len(each)] for n in range(most)]


def audit(requirements: list[str]) -> list[dict[str, Any]] | None:
    """What pip-audit says about each package, or None if the service cannot be reached."""
    with tempfile.TemporaryDirectory() as folder:
        listed, report = Path(folder, "requirements.txt"), Path(folder, "report.json")
        listed.write_text("\n".join(requirements))
        command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner=off"]
        command += ["--requirement", str(listed), "--format", "json", "--output", str(report)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if report.exists():
            packages: list[dict[str, Any]] = json.loads(report.read_text())["dependencies"]
            return packages
    if any(sign in done.stderr for sign in UNREACHABLE):
        return None
    sys.exit(f"pip-audit failed:\n{done.stderr}")


def main(paths: list[str]) -> int:
    pins = [pin for path in paths for pin in pinned_versions(Path(path).read_text())]
    packages: list[dict[str, Any]] = []
    for requirements in without_duplicates(pins):
        audited = audit(requirements)
        if audited is None:
            print("NOT AUDITED: the advisory service cannot be reached")
            return 0
        packages += audited
    unknown = [each["name"] for each in packages if "skip_reason" in each]
    if len(unknown) == len(packages):
        print(f"NOT AUDITED: the advisory service knows none of the {len(packages)} versions. Is it the right one?")
        return 0
    found = [(each, vulnerability) for each in packages for vulnerability in each.get("vulns", [])]
    for each, vulnerability in found:
        fixed = ", ".join(vulnerability["fix_versions"]) or "no version yet"
        print(f"{each['name']} {each['version']}: {vulnerability['id']}, fixed in {fixed}")
    if unknown:
        print(f"The service does not know these versions: {', '.join(unknown)}")
    print(f"{len(packages) - len(unknown)} versions audited, {len(found)} known vulnerabilities")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
