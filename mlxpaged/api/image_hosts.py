"""Fetches images of hosts that the operator names: `--allow-image-hosts`. Without it, no URL of a client is opened.

A client could make the server ask any machine that it reaches (server-side request forgery). So a name is resolved
once, all of its addresses must be public, and the connection goes to the first of them; an address that is allowed as
such may be private. Redirections are not followed. Of an answer, no more is read than an image may have, for at most
SECONDS.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import ipaddress
import socket
import ssl
import string
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

from mlxpaged import __version__
from mlxpaged.api.turns import Rules, Turns
from mlxpaged.vision.headers import ImageError
from mlxpaged.vision.reading import MAX_BYTES

SECONDS = 10.0
"""The longest that an image may take."""
FETCHES = Rules("images of other hosts", at_once=8, places=128, free_seconds=SECONDS, heavy_at_once=4)
"""Heavy clients hold a half of the threads at most: a host that does not answer takes SECONDS of each. How long an
image takes is not known before."""
PORTS = {"http": 80, "https": 443}
READ_BYTES = 2**16
EMBEDDED = {
    "::/96": 0,  # compatible (RFC 4291, 2.5.5.1)
    "::ffff:0:0/96": 0,  # mapped (2.5.5.2)
    "::ffff:0:0:0/96": 0,  # translated (RFC 2765, 2.1)
    "64:ff9b::/96": 0,  # of a NAT64 (RFC 6052)
    "2002::/16": 80,  # 6to4 (RFC 3056)
}
"""IPv6 networks whose addresses lead to the IPv4 address in them, and how many bits follow it. Teredo's have another
form, and Python takes none of them for public."""
ISATAP, ISATAP_BITS = 0x00005EFE, 0x02000000
"""What stands before the IPv4 address at the end (RFC 5214, 6.1), and the bit of it that may be set."""
LOCAL = ipaddress.IPv6Network("64:ff9b:1::/48")
"""NAT64 of the own network (RFC 8215). Older versions of Python take it for public."""
Addresses = Sequence[tuple[Any, ...]]


class ImageHosts:
    """allowed: names or addresses, each with or without a port; without one, the scheme's port is allowed. resolve,
    seconds: others are for tests."""

    def __init__(
        self,
        allowed: Sequence[str],
        resolve: Callable[..., Addresses] = socket.getaddrinfo,
        seconds: float = SECONDS,
    ) -> None:
        self._allowed = {split_host(each) for each in allowed}
        self._resolve = resolve
        self.seconds = seconds
        self.turns = Turns(FETCHES)
        self._threads = ThreadPoolExecutor(FETCHES.at_once, thread_name_prefix="mlxpaged-fetch")

    async def fetch(self, client: str, url: str) -> bytes:
        """client: that takes turns with others. Raises ImageError or TurnRefusedError."""
        try:
            parts = urlsplit(url)
            name, port = (parts.hostname or "").lower(), parts.port or PORTS[parts.scheme]
        except (ValueError, KeyError):
            raise ImageError("has a URL that is neither http nor https") from None
        if not {(name, port), (name, None if port == PORTS[parts.scheme] else port)} & self._allowed:
            raise ImageError("is on a host that this server does not fetch images from (--allow-image-hosts)")
        turn = await self.turns.enter(client)
        fetch = Fetch(parts, name, port, self._resolve, time.monotonic() + self.seconds)
        try:
            return await asyncio.wait_for(self.turns.on_thread(turn, self._threads, fetch.run), self.seconds)
        except (asyncio.TimeoutError, TimeoutError):  # of the wait, or of the socket
            raise ImageError(f"did not come from its host within {self.seconds:g} s") from None
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise ImageError(f"could not be fetched: {type(error).__name__}") from None
        finally:
            fetch.stop()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def split_host(allowed: str) -> tuple[str, int | None]:
    """Returns the name or address and the port of HOST, HOST:PORT or [ADDRESS]:PORT. Raises ValueError."""
    parts = urlsplit(f"//{allowed}")
    if not parts.hostname or parts.netloc != allowed or "@" in allowed or "*" in allowed:
        raise ValueError(f"not a host: {allowed!r}")
    return parts.hostname.lower(), parts.port


class Fetch:
    """One request, on a thread. `stop` ends it from any other one."""

    def __init__(
        self, parts: SplitResult, name: str, port: int, resolve: Callable[..., Addresses], deadline: float
    ) -> None:
        self.parts, self._name, self._port, self._resolve = parts, name, port, resolve
        self._deadline = deadline
        self._socket: socket.socket | None = None

    def run(self) -> bytes:
        """Raises ImageError, OSError or HTTPException."""
        family, address = self._address()
        with socket.socket(family, socket.SOCK_STREAM) as plain:
            self._socket = plain
            plain.settimeout(self._left())
            plain.connect(address)
            if self.parts.scheme == "http":
                return self._ask(http.client.HTTPConnection(self._name, self._port), plain)
            context = ssl.create_default_context()
            with context.wrap_socket(plain, server_hostname=self._name) as encrypted:
                self._socket = encrypted
                return self._ask(http.client.HTTPSConnection(self._name, self._port, context=context), encrypted)

    def _ask(self, connection: http.client.HTTPConnection, connected: socket.socket) -> bytes:
        """connection: of the URL's scheme, whose port its header Host leaves out."""
        connection.sock = connected
        path = (self.parts.path or "/") + (f"?{self.parts.query}" if self.parts.query else "")
        path = quote(path, safe=string.punctuation)  # as a browser does: people copy what it shows
        connection.request("GET", path, headers={"User-Agent": f"mlxpaged/{__version__}", "Accept": "image/*"})
        with connection.getresponse() as response:
            if response.status != http.client.OK:
                raise ImageError(f"could not be fetched: its host answers with {response.status}")
            data = bytearray()
            while piece := response.read1(READ_BYTES):
                data += piece
                if len(data) > MAX_BYTES:
                    raise ImageError(f"has more than {MAX_BYTES >> 20} MiB")
                connected.settimeout(self._left())
            return bytes(data)

    def stop(self) -> None:
        """Ends what the thread waits for. It closes the socket itself."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is closed, or not connected
                self._socket.shutdown(socket.SHUT_RDWR)

    def _left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _address(self) -> tuple[int, Any]:
        """The family and the address to connect to. Raises ImageError if one of the name's is not public."""
        found = self._resolve(self._name, self._port, type=socket.SOCK_STREAM)
        if not is_address(self._name):
            for _, _, _, _, address in found:
                if not is_public(ipaddress.ip_address(address[0].partition("%")[0])):
                    raise ImageError("is on a host whose address is not public")
        family, _, _, _, address = found[0]
        return family, address


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address belongs to the internet. An IPv6 address that leads to an IPv4 address is judged by that."""
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    number = int(address)
    for network, bits in EMBEDDED.items():
        if address in ipaddress.IPv6Network(network):
            return is_public(ipaddress.IPv4Address(number >> bits & 2**32 - 1))
    if number >> 32 & ~ISATAP_BITS & 2**32 - 1 == ISATAP and not is_public(ipaddress.IPv4Address(number & 2**32 - 1)):
        return False
    return address.is_global and not (address.is_multicast or address.is_site_local or address in LOCAL)


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
