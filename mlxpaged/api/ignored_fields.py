"""Tells the client, and the log once, which fields of its requests were ignored. `Reading` finds them, and
`Server.ignore` adds those that the model cannot honour."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

from starlette.requests import Request

from mlxpaged.api.access.caller import caller_of

logger = logging.getLogger(__name__)

HEADER = "X-Mlxpaged-Ignored"
PRODUCT = re.compile(r"[A-Za-z0-9_.-]{1,40}")

MAX_LOGGED = 1000
"""The log names at most so many pairs of a client and a field."""


class IgnoredFields:
    """Remembers which fields of which client the log has named."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def note(self, client: str, names: Sequence[str]) -> None:
        new = [name for name in names if (client, name) not in self._logged]
        if new and len(self._logged) < MAX_LOGGED:
            self._logged.update((client, name) for name in new)
            logger.info("fields of %s are ignored: %s", client, ", ".join(new))


def client_of(request: Request) -> str:
    """Returns the name of the caller's key, or of the program: the first product in `User-Agent`."""
    caller = caller_of(request)
    if caller is not None:
        return caller.name
    product = PRODUCT.match(request.headers.get("user-agent", ""))
    return product[0] if product else "an unknown client"


def header(request: Request) -> dict[str, str]:
    """Returns the header of the response to a request whose body was read."""
    names: list[str] = request.state.ignored
    return {HEADER: ", ".join(names)} if names else {}
