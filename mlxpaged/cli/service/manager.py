"""What a service manager must do, and how its programs are called."""

from __future__ import annotations

import subprocess
from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

SERVICE_VARIABLE = "MLXPAGED_SERVICE"
"""Set for a server that a service manager starts."""
SERVICE_DIRECTORY = Path("~/.mlxpaged/service")
"""What such a server remembers from start to start, if it has no --data-dir."""


class ServiceError(Exception):
    """The service manager refuses, or is not there."""


@dataclass(frozen=True)
class Job:
    """What the service runs. directory: relative paths in the command are relative to it. stop_seconds: from a SIGTERM
    until it is killed."""

    command: tuple[str, ...]
    directory: Path
    variables: dict[str, str]
    stop_seconds: int


class Manager(ABC):
    """path: of the file that describes the service."""

    path: Path

    @abstractmethod
    def content(self, job: Job) -> bytes:
        """Returns the content of the file. Raises ServiceError for a job that the file cannot describe."""

    @abstractmethod
    def start(self) -> None:
        """Start the service of the file, now and at each login. One that runs is restarted. Raises ServiceError."""

    @abstractmethod
    def stop(self) -> None:
        """End the service and do not start it again. Raises ServiceError."""

    @abstractmethod
    def pid(self) -> int | None:
        """Returns the process, or None if it does not run. Raises ServiceError."""

    @abstractmethod
    def logs(self) -> str:
        """Returns where the log is: a file or a command."""


def call(*command: str, statuses: Container[int] | None = (0,)) -> subprocess.CompletedProcess[str]:
    """statuses: exit statuses that are no failure; None: all. Raises ServiceError for another one, or if the program is
    missing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ServiceError(f"{command[0]} cannot be run: {error.strerror}") from None
    if statuses is not None and done.returncode not in statuses:
        said = (done.stderr or done.stdout).strip()
        raise ServiceError(f"`{' '.join(command)}` has failed: {said or f'status {done.returncode}'}")
    return done
