"""Names and origins that belong to this machine or its own network, so that no page of the internet can have them.

A name is accepted by its form, never because it resolves to this machine. In DNS rebinding, the attacker's own name
resolves to 127.0.0.1, so that is no proof of anything. The zones below do not exist in the public DNS, so no name can
be registered in them. `.local` belongs to mDNS: only a machine in the same network can answer for such a name. A page
from there can read with GET, for which browsers send no Origin; all else is stopped by its Origin (see `Origins`).
"""

from __future__ import annotations

import re
import socket

CONTAINER_HOSTS = frozenset(
    {
        "host.docker.internal",
        "gateway.docker.internal",
        "host.containers.internal",  # Podman
        "host.lima.internal",
        "host.orb.internal",
    }
)
"""Names by which containers and virtual machines on this machine reach it."""
HOME_ZONES = ("lan", "home")
"""Routers give names in these zones to the machines of their network."""

LOCAL_ORIGIN = re.compile(
    r"https?://(localhost|127\.0\.0\.1|\[::1\]|tauri\.localhost)(:\d{1,5})?"
    r"|(app|tauri|vscode-webview)://[^/?#\s]*"
    r"|capacitor://localhost"
)
"""Origins of pages that this machine served itself, and of desktop apps. `null`, the origin of files, is not one: every
page can give that origin to a frame."""


def is_loopback_name(name: str) -> bool:
    """Whether browsers and resolvers take the name for this machine without asking a DNS server (RFC 6761)."""
    return name == "localhost" or name.endswith(".localhost")


def is_local_name(name: str) -> bool:
    """Whether the name, in lower case, has a form that only this machine or its own network can give."""
    return name in CONTAINER_HOSTS or name.endswith(".local") or name in machine_names()


def machine_names() -> set[str]:
    """Returns this machine's own name, alone and in the zones of home networks. The rest of a longer name is left out:
    the network may have chosen it."""
    label = socket.gethostname().partition(".")[0].lower()
    return {label, *(f"{label}.{zone}" for zone in HOME_ZONES)} if label else set()
