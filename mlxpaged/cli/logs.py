"""Sets up the log. Its lines have the id of their request, and no API key."""

from __future__ import annotations

import logging
import re
from typing import Any

from mlxpaged.api.access.redaction import redacted
from mlxpaged.log_writer import LogHandler, Writer

NOISY = ("httpx", "httpcore", "huggingface_hub", "filelock", "asyncio", "uvicorn.error", "uvicorn.access")


CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
CONTROL_IN_LINES = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")


class LineFormatter(logging.Formatter):
    """Removes API keys that a client has put into a path or that are in a traceback. A line is one line: control
    characters in names and paths are escaped, and the lines of a traceback are indented."""

    def format(self, record: logging.LogRecord) -> str:
        from mlxpaged.api.request_id import current  # imports starlette, which `serve --help` does not need

        request_id = current()
        record.request = f"{request_id} " if request_id is not None else ""
        return redacted(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        lines = CONTROL_IN_LINES.sub(lambda found: f"\\x{ord(found[0]):02x}", super().formatException(ei))
        return "  " + lines.replace("\n", "\n  ")


def set_up(level: str) -> None:
    """level: debug, info, warning or error. The log goes to standard error, and never waits for its reader."""
    handler = LogHandler(Writer(2))
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(request)s%(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
