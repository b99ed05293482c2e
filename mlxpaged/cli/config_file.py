"""The configuration file: where it is, and what it says about each flag.

Its keys are the names of flags without the leading dashes. A key is for every command that has the flag.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlxpaged.cli.guesses import meant_key

VARIABLE = "MLXPAGED_CONFIG"
NAME = Path("mlxpaged", "config.toml")


class ConfigFileError(ValueError):
    """The file cannot be used. The message names the file, and the line if it is known."""


class Given(str):
    """The text of a value that a variable or the file gives. origin: which of them, for messages."""

    origin: str

    def __new__(cls, text: str, origin: str) -> Given:
        given = super().__new__(cls, text)
        given.origin = origin
        return given


def candidates() -> list[Path]:
    """The files that may be the configuration file. The first one that exists is."""
    base = os.environ.get("XDG_CONFIG_HOME")
    if base:
        return [Path(base, NAME)]
    found = [Path.home() / ".config" / NAME]
    if sys.platform == "darwin":
        found.append(Path.home() / "Library" / "Application Support" / NAME)
    return found


class ConfigFile:
    """What the file says. path: None if there is no file."""

    def __init__(self, path: Path | None = None, values: Mapping[str, Any] | None = None, text: str = "") -> None:
        self.path = path
        self._values = values or {}
        self._lines = text.splitlines()

    @classmethod
    def read(cls, named: str | None = None) -> ConfigFile:
        """named: the file that the user names, which must exist; None for the first of `candidates`, if one exists.
        Raises ConfigFileError."""
        named = named or os.environ.get(VARIABLE)
        try:
            path = Path(named).expanduser() if named else next(filter(os.path.exists, candidates()), None)
        except RuntimeError:
            raise ConfigFileError(f"there is no such home directory: {named!r}") from None
        if path is None:
            return cls()
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigFileError(f"{path} cannot be read: {reason}") from None
        from mlxpaged import toml

        try:
            return cls(path, toml.loads(text), text)
        except toml.TOMLDecodeError as error:
            raise ConfigFileError(f"{path} is not TOML: {error}") from None

    @property
    def keys(self) -> set[str]:
        return set(self._values)

    def check_keys(self, known: Iterable[str]) -> None:
        """Raises ConfigFileError for the first key that no command has as a flag."""
        names = sorted(known)
        for key in self._values:
            if key not in names:
                raise ConfigFileError(f"{self.place(key)}: unknown key {key!r}{meant_key(key, names)}")

    def place(self, key: str) -> str:
        """The file and the line of a key, for messages."""
        pattern = re.compile(rf"\s*\[*\s*[\"']?{re.escape(key)}\b")
        line = next((number for number, line in enumerate(self._lines, 1) if pattern.match(line)), None)
        return f"{self.path}" if line is None else f"{self.path}, line {line}"

    def value(self, key: str) -> Given | None:
        """The text of a value, as it would stand on the command line. Raises ConfigFileError if it is a list, a table
        or true."""
        found = self._values.get(key)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, (str, int, float)):
            raise ConfigFileError(f"{self.place(key)}: {key} must be a text or a number")
        return Given(str(found), self.place(key))

    def values(self, key: str) -> list[Given] | None:
        """The texts of a flag that can be repeated: of a list, or of one value."""
        found = self._values.get(key)
        if not isinstance(found, list):
            given = self.value(key)
            return None if given is None else [given]
        if not all(isinstance(text, str) for text in found):
            raise ConfigFileError(f"{self.place(key)}: {key} must be a list of texts")
        return [Given(text, self.place(key)) for text in found]

    def switch(self, key: str) -> Given | None:
        """ "1" or "0", as its variable has."""
        found = self._values.get(key)
        if found is None:
            return None
        if not isinstance(found, bool):
            raise ConfigFileError(f"{self.place(key)}: {key} must be true or false")
        return Given(str(int(found)), self.place(key))
