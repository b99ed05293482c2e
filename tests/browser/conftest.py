"""Fixtures of the browser tests: Chromium, and a visit to a server's page that must be clean in every respect."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Response, expect, sync_playwright

from mlxpaged.engine_config import EngineConfig
from tests.browser.script import SCRIPT
from tests.scripted import scripted_server
from tests.support import RunningServer, running_server

ROOT = Path(__file__).parents[2]
AXE = ROOT / ".venv" / "browser" / "node_modules" / "axe-core" / "axe.min.js"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAX_IMAGE_BYTES = 150_000
DESK, PHONE = (1200, 800), (390, 844)

WIDE = """() => [document.documentElement, ...document.querySelectorAll("main, main > *, .messages, .sidebar, dialog")]
    .filter((each) => each.scrollWidth > each.clientWidth)
    .map((each) => `${each.tagName}.${each.className} ${each.scrollWidth} > ${each.clientWidth}`)"""

expect.set_options(timeout=15_000)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        found = next(filter(None, map(shutil.which, NAMES)), str(own) if own.exists() else None)
        if found is None:
            pytest.exit("There is no Chromium: install the system's package, or `playwright install chromium`", 1)
        # A container's root has no sandbox. The tests open only the servers that they start.
        with playwright.chromium.launch(executable_path=found, args=["--no-sandbox"]) as launched:
            yield launched


@pytest.fixture(scope="session")
def demo() -> Iterator[RunningServer]:
    with running_server(EngineConfig(kv_cache_bytes=64_000_000, max_num_seqs=6)) as server:
        yield server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with scripted_server(tmp_path_factory.mktemp("model"), "json_tools", SCRIPT) as server:
        yield server


@dataclass
class Visit:
    """One tab. allowed: statuses of errors that the test provokes; Chromium writes each to the console."""

    page: Page
    url: str
    problems: list[str] = field(default_factory=list)
    allowed: set[int] = field(default_factory=set)

    def listen(self) -> None:
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"error: {error}"))
        self.page.on("request", self._on_request)
        self.page.on("response", self._on_response)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.problems.append(f"console: {message.text}")  # a violation of the policy is one too

    def _on_request(self, request: Request) -> None:
        if not request.url.startswith((self.url, "blob:", "data:")):
            self.problems.append(f"another host: {request.url}")

    def _on_response(self, response: Response) -> None:
        if response.status >= 400 and response.status not in self.allowed:
            self.problems.append(f"{response.status}: {response.url}")

    def open(self, path: str = "/") -> None:
        self.page.goto(self.url + path)

    def say(self, text: str) -> None:
        message = self.page.get_by_label("Message")
        message.fill(text)
        message.press("Enter")

    def answered(self) -> Any:
        """The last answer, when it is complete."""
        answer = self.page.locator(".message.assistant").last
        expect(answer).to_have_attribute("aria-busy", "false")
        return answer

    def delete(self, chat: str) -> None:
        self.page.get_by_label(f"Actions of {chat}").click()
        self.page.get_by_role("button", name="Delete", exact=True).click()
        self.page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()

    def check_fits(self) -> None:
        """Nothing makes the page or a view wider than it is: it would have to be scrolled to the side."""
        wide = self.page.evaluate(WIDE)
        assert not wide, wide

    def check_accessible(self) -> None:
        """axe-core finds nothing serious or critical, such as too little contrast, and all fits."""
        self.check_fits()
        if not AXE.exists():
            pytest.skip("axe-core is not installed: make test-page installs it with npm")
        self.page.evaluate(AXE.read_text())
        found = self.page.evaluate("() => axe.run()")["violations"]
        bad = [
            f"{each['id']}: {[node['target'] for node in each['nodes']]}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        assert not bad, bad


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Visit]]:
    """Opens tabs with a storage of their own, and checks at the end that nothing went wrong in them."""
    visits: list[Visit] = []
    contexts = []

    def start(server: RunningServer, size: tuple[int, int] = DESK, **options: Any) -> Visit:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        contexts.append(context)
        made = Visit(context.new_page(), server.url)
        made.listen()
        visits.append(made)
        return made

    yield start
    for context in contexts:
        context.close()
    assert [problem for each in visits for problem in each.problems] == []


@pytest.fixture
def picture(tmp_path: Path) -> Callable[[Page, str], None]:
    """Takes the pictures of the documentation, into the folder MLXPAGED_SCREENSHOTS if it is set."""
    folder = Path(os.environ.get("MLXPAGED_SCREENSHOTS", tmp_path))

    def take(page: Page, name: str) -> None:
        path = folder / f"{name}.png"
        page.screenshot(path=path, animations="disabled", caret="hide")
        assert path.stat().st_size < MAX_IMAGE_BYTES

    return take
