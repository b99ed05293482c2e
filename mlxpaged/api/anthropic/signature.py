"""Makes the signature of a thinking block. Clients send it back with the block."""

from __future__ import annotations

import base64
import hashlib

SEALED = "thinking:"


def signature(thinking: str) -> str:
    """Returns a digest. It is not checked: only the client itself could have changed the text."""
    return hashlib.sha256(thinking.encode()).hexdigest()


def seal(thinking: str) -> str:
    """Returns a signature that holds the text of a block that does not show it. The server does not keep the text."""
    return SEALED + base64.b64encode(thinking.encode()).decode()


def unseal(signature: str) -> str:
    """Returns the thinking that a signature holds, or "" for signatures of other servers."""
    if not signature.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(signature[len(SEALED) :], validate=True).decode()
    except ValueError:
        return ""
