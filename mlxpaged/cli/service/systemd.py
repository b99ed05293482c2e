"""A systemd unit of the user: systemd.service(5), systemd.syntax(7)."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mlxpaged.cli.service.manager import Job, Manager, ServiceError, call

UNIT = "mlxpaged.service"
RESTART_SECONDS = 30
"""Seconds between two starts of a server that fails, which may have read many gigabytes before."""

CONTROL = re.compile(r"[\x00-\x1f\x7f]")

TEMPLATE = """[Unit]
Description=mlxpaged, a server for language models
After=network.target

[Service]
ExecStart={command}
WorkingDirectory={directory}
{variables}Restart=on-failure
RestartSec={restart}
TimeoutStopSec={stop}

[Install]
WantedBy=default.target
"""


class Systemd(Manager):
    def __init__(self) -> None:
        configuration = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
        self.path = Path(configuration) / "systemd" / "user" / UNIT

    def content(self, job: Job) -> bytes:
        variables = (f"Environment={quoted(f'{name}={value}')}\n" for name, value in job.variables.items())
        return TEMPLATE.format(
            command=" ".join(quoted(word).replace("$", "$$") for word in job.command),
            directory=as_path(job.directory),
            variables="".join(variables),
            restart=RESTART_SECONDS,
            stop=job.stop_seconds,
        ).encode()

    def start(self) -> None:
        self._call("daemon-reload")
        self._call("enable", UNIT)
        self._call("restart", UNIT)

    def stop(self) -> None:
        self._call("disable", "--now", UNIT)

    def pid(self) -> int | None:
        pid = int(self._call("show", "--property=MainPID", "--value", UNIT).strip() or 0)
        return pid or None

    def logs(self) -> str:
        return f"journalctl --user -u {UNIT}"

    def _call(self, *args: str) -> str:
        return call("systemctl", "--user", *args).stdout


def as_path(path: Path) -> str:
    """Returns a path as the value of a directive, which has no quotes. Raises ServiceError for one that would end the
    line, or join it with the next."""
    text = str(path)
    if CONTROL.search(text) or text.endswith("\\"):
        raise ServiceError(f"{text!r} cannot be the working directory of a service: rename it, or start elsewhere")
    return text.replace("%", "%%")


def quoted(word: str) -> str:
    """Quotes a word of a unit: backslashes, quotes, control characters, and % of its specifiers. A line feed as it is
    would begin another directive."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return '"' + CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", escaped) + '"'
