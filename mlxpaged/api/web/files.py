"""Serves the files of the page. They need no key: they are the same on every server. All data comes from the API."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

STATIC = Path(__file__).parent / "static"
PREFIX = "/web/"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Other files in static/ are for readers of the source, and are not served."""

FILES = {
    f"{PREFIX}{path.relative_to(STATIC).as_posix()}": path
    for path in sorted(STATIC.rglob("*"))
    if path.suffix in TYPES and path.suffix != ".html"
}
PATHS = frozenset(FILES)
"""Exactly these paths are served. None is looked up on the disk."""

POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "dompurify",
}
"""Only files of this server run, and only DOMPurify may make HTML of text."""

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",  # a browser may keep a file, and asks each time whether it has changed
}


@dataclass(frozen=True)
class File:
    content: bytes
    etag: str
    headers: dict[str, str]


@functools.cache
def read(path: Path) -> File:
    content = path.read_bytes()
    headers = {
        "Content-Type": TYPES[path.suffix],
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
        "ETag": f'"{hashlib.blake2b(content, digest_size=16).hexdigest()}"',
    }
    return File(content, headers["ETag"], HEADERS | headers)


def answer(request: Request, path: Path) -> Response:
    """304 if the browser has the file already."""
    file = read(path)
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)


async def index(request: Request) -> Response:
    return answer(request, STATIC / "index.html")


async def docs(request: Request) -> Response:
    return answer(request, STATIC / "docs.html")


async def static(request: Request) -> Response:
    return answer(request, FILES[request.url.path])


def routes() -> list[Route]:
    return [Route(path, static, methods=["GET"]) for path in PATHS]
