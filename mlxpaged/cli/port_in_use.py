"""Says what listens on a port that `mlxpaged serve` wants, and what to do. It imports no engine."""

from __future__ import annotations

import http.client
from typing import Any
from urllib.parse import urlsplit

from mlxpaged.cli.client import parsed
from mlxpaged.cli.visible import visible

PROBE_SECONDS = 2.0
"""Time for an answer. What takes longer is not known."""
MOST_BYTES = 2**20


def occupant(url: str, flag: str) -> str:
    """Returns the end of a message: what runs at the address, and how to go on. flag: that of the port."""
    other = f"choose another port with {flag}"
    health = parsed(answer(url, "/health") or b"")
    if isinstance(health, dict) and {"status", "model"} <= health.keys():
        models = ", ".join(loaded_models(url)) or health["model"]
        serves = f" with {models}" if models else ""
        ends = f"end it with `mlxpaged stop --url {url}`"
        return visible(f"mlxpaged runs there already{serves}; use it (`mlxpaged ps --url {url}`), {ends}, or {other}")
    if (answer(url, "/") or b"").startswith(b"Ollama is running"):
        return f"Ollama runs there; quit it, or {other}"
    return f"another program uses it, which `lsof -nP -i :{urlsplit(url).port}` names; end that, or {other}"


def loaded_models(url: str) -> list[str]:
    """Returns the names of the loaded models, as far as the server tells them without a key."""
    found: Any = parsed(answer(url, "/v1/models") or b"")
    entries = found.get("data") if isinstance(found, dict) else None
    return [str(each["id"]) for each in entries or () if isinstance(each, dict) and each.get("state") == "loaded"]


def answer(url: str, path: str) -> bytes | None:
    """Returns the body, None if there is no answer of HTTP."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=PROBE_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().read(MOST_BYTES)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
