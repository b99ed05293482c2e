"""The page's files: who gets them, with which headers, and that a browser needs nothing else."""

from __future__ import annotations

import asyncio
import hashlib
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxpaged.api.app import create_app
from mlxpaged.api.config import HttpConfig
from tests.api.helpers import bearer, write_keys

STATIC = Path(__file__).parents[2] / "mlxpaged" / "api" / "web" / "static"
VENDOR = STATIC / "vendor"
SERVED = {".css", ".js", ".mjs", ".svg"}
STRICT = {
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


def ask(app: Any, *requests: tuple[str, str], **headers: str) -> list[httpx.Response]:
    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8080", headers=headers) as client:
            return [await client.request(method, path) for method, path in requests]

    return asyncio.run(send())


def policy(response: httpx.Response) -> dict[str, str]:
    parts = [part.strip().partition(" ") for part in response.headers["content-security-policy"].split(";")]
    return {name: value for name, _, value in parts}


def served_files() -> list[str]:
    return [path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.suffix in SERVED]


def own_files() -> list[Path]:
    return [path for path in STATIC.rglob("*") if path.is_file() and VENDOR not in path.parents]


@pytest.fixture(scope="module")
def app() -> Any:
    return create_app(None)


def test_the_page_runs_only_what_this_server_sends(app: Any) -> None:
    page, docs, script = ask(app, ("GET", "/"), ("GET", "/docs"), ("GET", "/web/app.js"))
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    for response in (page, docs, script):
        assert policy(response) == STRICT
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cross-origin-resource-policy"] == "same-origin"


def test_a_file_that_the_browser_has_is_not_sent_again(app: Any) -> None:
    for path in ("/", "/docs", "/web/app.js"):
        [first] = ask(app, ("GET", path))
        assert first.headers["cache-control"] == "no-cache"
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
            [again] = ask(app, ("GET", path), **{"If-None-Match": known})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        [other] = ask(app, ("GET", path), **{"If-None-Match": '"other"'})
        assert (other.status_code, other.content) == (200, first.content)
        [head] = ask(app, ("HEAD", path))
        assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", tag)


def test_only_the_files_of_the_page_are_there(app: Any) -> None:
    paths = ("/web/", "/web/index.html", "/web/vendor/README.md", "/web/nothing.js", "/web/..%2ffiles.py", "/web/../x")
    assert [each.status_code for each in ask(app, *(("GET", path) for path in paths))] == [404] * len(paths)
    assert [each.status_code for each in ask(app, ("POST", "/"), ("POST", "/web/app.js"))] == [405, 405]
    [foreign] = ask(app, ("GET", "/web/app.js"), Host="evil.example")
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "host_not_allowed")


def test_the_files_need_no_key_and_everything_else_does(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", anna={})
    app = create_app(None, http=HttpConfig(api_keys=tmp_path / "keys.json"))
    open_paths = ("/", "/docs", *(f"/web/{name}" for name in served_files()))
    assert {each.status_code for each in ask(app, *(("GET", path) for path in open_paths))} == {200}
    closed = ("/openapi.json", "/v1/models", "/v1/status/stream", "/status/stream", "/web", "/web/x", "/docs/")
    assert {each.status_code for each in ask(app, *(("GET", path) for path in closed))} == {401}
    [refused] = ask(app, ("GET", "/v1/status/stream"), **bearer(keys["anna"]))
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_key_required")


LOADED_LATER = re.compile(r'\bimport\("(\..+?)"\)|new URL\("(\..+?)", import\.meta\.url\)')


def references(text: str) -> list[str]:
    """Paths of other files that a script names, relative to it."""
    later = [one or other for one, other in LOADED_LATER.findall(text)]
    return re.findall(r' from "(\..+?)";$', text, re.MULTILINE) + later


def test_every_file_is_used_and_every_reference_leads_to_a_file() -> None:
    used, todo = set[str](), ["index.html", "docs.html"]
    while todo:
        name = todo.pop()
        if name.startswith("vendor/"):
            continue
        text = (STATIC / name).read_text()
        if name.endswith(".html"):
            found = [each.removeprefix("web/") for each in re.findall(r'(?:src|href)="(web/[^"]+)"', text)]
        else:
            paths = [((STATIC / name).parent / each).resolve() for each in references(text)]
            found = [path.relative_to(STATIC.resolve()).as_posix() for path in paths]
        for each in found:
            assert (STATIC / each).is_file(), f"{name} refers to {each}"
        todo += [each for each in found if each not in used]
        used.update(found)
    assert used == set(served_files())


def test_no_file_of_the_page_names_another_host() -> None:
    """The vendored ones do, in comments and licences. The policy keeps a browser from asking these hosts."""
    for path in own_files():
        urls = set(re.findall(r"https?://[^\s\"'`)]+", path.read_text()))
        assert urls <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}, f"{path.name}: {urls}"


def test_no_file_of_the_page_has_code_that_the_policy_forbids() -> None:
    for path in own_files():
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
        if path.suffix == ".html":
            assert not re.search(r"<script(?![^>]+src=)|<style|\sstyle=|\son\w+=", text), path


def test_vendored_files_are_those_of_their_packages() -> None:
    listed = dict(re.findall(r"^\| `([^`]+)` \| `(\w{64})` \|$", (VENDOR / "README.md").read_text(), re.MULTILINE))
    files = {path.relative_to(VENDOR).as_posix(): path for path in VENDOR.glob("*/*")}
    assert listed == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    for package in {name.split("/")[0] for name in files}:
        assert (VENDOR / package / "LICENSE").is_file()
    assert sum(path.stat().st_size for path in files.values()) < 800_000


def test_the_wheel_has_all_files() -> None:
    """It has what is in the package's directory, except files that git ignores. `make wheel` looks into the wheel."""
    found = subprocess.run(
        ["git", "check-ignore", "--no-index", *(str(path) for path in STATIC.rglob("*"))],
        cwd=STATIC,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout) in {(1, ""), (128, "")}  # 128: this is not a checkout
