"""The files of requirements/ fit pyproject.toml and tools.in, for every system and version of Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCKS = {"ci.txt": "dev", "serve.txt": "editable", "tools.txt": None}
"""The extra of each. tools.txt has the packages of tools.in."""
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
    extra = LOCKS[lock]
    if extra is None:
        lines = (ROOT / "requirements" / "tools.in").read_text().splitlines()
        return [Requirement(line) for line in lines if not line.startswith("#")]
    return [*map(Requirement, PROJECT["project"]["dependencies"]), *of_extra(extra)]


def of_extra(extra: str) -> Iterator[Requirement]:
    for need in map(Requirement, PROJECT["project"]["optional-dependencies"][extra]):
        if need.name == PROJECT["project"]["name"]:
            for other in need.extras:
                yield from of_extra(other)
        else:
            yield need


@pytest.mark.parametrize("lock", LOCKS)
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


def test_a_server_has_the_versions_that_the_tests_ran_with() -> None:
    tested, served = ({line.split()[0] for line in entries(lock)} for lock in ("ci.txt", "serve.txt"))
    assert served < tested
    assert not {"pytest", "mypy", "ruff", "ziglang", "openai"} & {pin.partition("==")[0] for pin in served}


@pytest.mark.parametrize("lock", LOCKS)
def test_every_line_is_a_version_with_hashes(lock: str) -> None:
    form = r"[a-z0-9-]+==[\w.]+( ; [\w\s.'<>=!*()]+?)?(\s+--hash=sha256:[0-9a-f]{64})+"
    assert [line for line in entries(lock) if not re.fullmatch(form, line)] == []


def test_the_package_is_built_with_pinned_packages() -> None:
    for lock in LOCKS:
        pinned = {line.partition("==")[0] for line in entries(lock)}
        assert {Requirement(each).name for each in PROJECT["build-system"]["requires"]} <= pinned
    assert set(PROJECT["build-system"]["requires"]) <= {str(need) for need in of_extra("editable")}
