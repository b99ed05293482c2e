"""Sets up the log. Its lines have the id of their request, and no API key."""

from __future__ import annotations

import logging

from mlxpaged.api.access.redaction import redacted
from mlxpaged.log_writer import LogHandler, Writer

NOISY = ("httpx", "httpcore", "huggingface_hub", "filelock", "asyncio", "uvicorn.error", "uvicorn.access")


class LineFormatter(logging.Formatter):
    """Removes API keys that a client has put into a path or that are in a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        from mlxpaged.api.request_id import current  # imports starlette, which `serve --help` does not need

        request_id = current()
        record.request = f"{request_id} " if request_id is not None else ""
        return redacted(super().format(record))


def set_up(level: str) -> None:
    """level: debug, info, warning or error. The log goes to standard error, whoever reads that."""
    handler = LogHandler(Writer(2))
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(name)s: %(request)s%(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
