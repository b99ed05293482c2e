"""A shell in a real terminal, which tmux keeps: keys go in, the screen comes out."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

PROMPT = re.compile(r"\[(\d+)\]\$ *\Z")
"""Of the shell: the exit status of the last command."""
SECONDS = 60.0
POLL_SECONDS = 0.02
SIZE = ("-x", "100", "-y", "30")


class Terminal:
    """`mlxpaged` is the command of this checkout. home: the user's, with nothing in it."""

    def __init__(self, home: Path, variables: Mapping[str, str]) -> None:
        self.home = home
        self._socket = str(home / "tmux")
        home.mkdir(parents=True, exist_ok=True)
        (home / "bashrc").write_text(
            f'PS1="[\\$?]\\$ "\nmlxpaged() {{ {shlex.quote(sys.executable)} -m mlxpaged "$@"; }}\n'
        )
        shell = ["env", *(f"{name}={value}" for name, value in variables.items()), "bash", "--rcfile", "bashrc"]
        self._tmux("-f", "/dev/null", "new-session", "-d", *SIZE, "-c", str(home), shlex.join(shell))
        self._tmux("set-option", "-g", "history-limit", "100000")
        self._tmux("respawn-pane", "-k", "-c", str(home), shlex.join(shell))  # with that limit
        self.wait_prompt()

    def close(self) -> None:
        self._tmux("kill-server")

    def _tmux(self, *args: str) -> str:
        return subprocess.run(["tmux", "-S", self._socket, *args], stdout=-1, text=True, check=True).stdout

    def text(self) -> str:
        """The scrollback and the screen, without empty lines at the end."""
        return self._tmux("capture-pane", "-p", "-J", "-S", "-").rstrip("\n ")

    def type(self, text: str, end: str = "Enter") -> None:
        """Type a line. end: the key after it; "" for none."""
        self._tmux("send-keys", "-l", text)
        if end:
            self.key(end)

    def key(self, *names: str) -> None:
        """Press keys by tmux's names: C-c, C-d, Enter."""
        self._tmux("send-keys", *names)

    def wait_for(self, pattern: str, seconds: float = SECONDS, since: int = 0) -> str:
        """Until the text from `since` on has the pattern. Returns that text."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, text := self.text()[since:]):
            assert time.monotonic() < deadline, f"{pattern!r} did not come:\n{text}"
            time.sleep(POLL_SECONDS)
        return text

    def wait_prompt(self, since: int = 0) -> int:
        """Until the shell waits for a command. Returns the exit status of the last one."""
        text = self.wait_for(PROMPT.pattern, since=since)
        match = PROMPT.search(text)
        assert match is not None
        return int(match[1])

    def start(self, command: str) -> int:
        """Start a command. Returns where its output begins in the text."""
        before = len(self.text())
        self.type(command)
        self.wait_for(re.escape(command), since=before)
        return before + len(command) + 1

    def run(self, command: str) -> tuple[int, str]:
        """The exit status of a command, and what it shows."""
        before = self.start(command)
        status = self.wait_prompt(before)
        return status, PROMPT.sub("", self.text()[before:]).strip("\n ")
