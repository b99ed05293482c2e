"""The signature of a thinking block, which clients send back with it."""

from __future__ import annotations

import base64
import hashlib

SEALED = "thinking:"


def signature(thinking: str) -> str:
    """A digest. It is not checked: only the client itself could have changed the text."""
    return hashlib.sha256(thinking.encode()).hexdigest()


def seal(thinking: str) -> str:
    """The signature of a block whose text is not shown. It brings the text back: the server does not keep it."""
    return SEALED + base64.b64encode(thinking.encode()).decode()


def unseal(signature: str) -> str:
    """The thinking that a signature holds; "" for signatures of other servers."""
    if not signature.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(signature[len(SEALED) :], validate=True).decode()
    except ValueError:
        return ""
