"""requirements/ci.txt and tools.txt fit pyproject.toml and tools.in, for every system and version of Python."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FORGOTTEN = "run `make lock`"
PROJECT: dict[str, Any] = tomli.loads((ROOT / "pyproject.toml").read_text())
ENVIRONMENTS = [
    {
        "sys_platform": system,
        "platform_machine": machine,
        "python_version": python,
        "python_full_version": f"{python}.9",
        "platform_python_implementation": "CPython",
        "implementation_name": "cpython",
        "os_name": "posix",
    }
    for system, machine in (("darwin", "arm64"), ("linux", "x86_64"), ("linux", "aarch64"))
    for python in ("3.10", "3.11", "3.12", "3.13")
]


def entries(lock: str) -> list[str]:
    """Each package with its marker and its hashes, in one line."""
    text = (ROOT / "requirements" / lock).read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if not line.startswith("#")]


def required(lock: str) -> list[Requirement]:
    if lock == "tools.txt":
        lines = (ROOT / "requirements" / "tools.in").read_text().splitlines()
        return [Requirement(line) for line in lines if not line.startswith("#")]
    project = PROJECT["project"]
    return [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"]["dev"]]


@pytest.mark.parametrize("lock", ["ci.txt", "tools.txt"])
def test_every_dependency_is_pinned_once_in_every_environment(lock: str) -> None:
    pins = [Requirement(line.partition("--hash")[0]) for line in entries(lock)]
    for environment in ENVIRONMENTS:
        here = [pin for pin in pins if pin.marker is None or pin.marker.evaluate(environment)]
        pinned = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in here}
        assert len(pinned) == len(here), environment
        for need in required(lock):
            if need.marker is None or need.marker.evaluate(environment):
                version = pinned.get(canonicalize_name(need.name))
                assert version is not None, f"{lock} lacks {need}: {FORGOTTEN}"
                assert need.specifier.contains(version), f"{lock} has {version} of {need}: {FORGOTTEN}"


@pytest.mark.parametrize("lock", ["ci.txt", "tools.txt"])
def test_every_line_is_a_version_with_hashes(lock: str) -> None:
    form = r"[a-z0-9-]+==[\w.]+( ; [\w\s.'<>=!*()]+?)?(\s+--hash=sha256:[0-9a-f]{64})+"
    assert [line for line in entries(lock) if not re.fullmatch(form, line)] == []


def test_the_package_is_built_with_pinned_packages() -> None:
    for lock in ("ci.txt", "tools.txt"):
        pinned = {line.partition("==")[0] for line in entries(lock)}
        assert {Requirement(each).name for each in PROJECT["build-system"]["requires"]} <= pinned
    assert set(PROJECT["build-system"]["requires"]) <= set(PROJECT["project"]["optional-dependencies"]["dev"])
