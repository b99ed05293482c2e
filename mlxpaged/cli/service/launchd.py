"""A launch agent of the user: launchd.plist(5), launchctl(1)."""

from __future__ import annotations

import os
import plistlib
import re
import time
from pathlib import Path

from mlxpaged.cli.service.manager import Job, Manager, call

LABEL = "mlxpaged.server"
THROTTLE_SECONDS = 30
"""Seconds between two starts of a server that fails, which may have read many gigabytes before."""

IN_PROGRESS, NO_PROCESS = 36, 3
"""Exit statuses of `launchctl bootout`: the server finishes its requests; it has just ended (EINPROGRESS and ESRCH of
macOS, for which Homebrew's `services` waits too)."""
POLL_SECONDS = 0.2


class Launchd(Manager):
    def __init__(self) -> None:
        home = Path.home()
        self.path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        self._log = home / "Library" / "Logs" / "mlxpaged" / "server.log"
        self._domain = f"gui/{os.getuid()}"

    def content(self, job: Job) -> bytes:
        return plistlib.dumps(
            {
                "Label": LABEL,
                "ProgramArguments": list(job.command),
                "WorkingDirectory": str(job.directory),
                "EnvironmentVariables": job.variables,
                "RunAtLoad": True,
                "KeepAlive": {"SuccessfulExit": False},  # `mlxpaged stop` ends it with status 0
                "ThrottleInterval": THROTTLE_SECONDS,
                "ExitTimeOut": job.stop_seconds,
                "ProcessType": "Interactive",  # launchd slows down the others
                "StandardOutPath": str(self._log),
                "StandardErrorPath": str(self._log),
            }
        )

    def start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self.stop()
        call("launchctl", "bootstrap", self._domain, str(self.path))

    def stop(self) -> None:
        """Returns when the server has ended: until then, launchd starts no other one."""
        while self._described() is not None:
            call("launchctl", "bootout", f"{self._domain}/{LABEL}", statuses=(0, IN_PROGRESS, NO_PROCESS))
            time.sleep(POLL_SECONDS)

    def pid(self) -> int | None:
        found = re.search(r"^\s*pid = (\d+)$", self._described() or "", flags=re.MULTILINE)
        return None if found is None else int(found[1])

    def logs(self) -> str:
        return str(self._log)

    def _described(self) -> str | None:
        """Returns None if launchd does not know the service."""
        done = call("launchctl", "print", f"{self._domain}/{LABEL}", statuses=None)
        return done.stdout if done.returncode == 0 else None
