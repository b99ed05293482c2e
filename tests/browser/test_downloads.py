"""The list of models that can be downloaded, in Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants
from playwright.sync_api import Page, expect

from mlxpaged.api.config import HttpConfig
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models import device_memory
from mlxpaged.models.loader import DEMO_PATH
from tests.browser.conftest import PHONE, Visit
from tests.cli.helpers import hub
from tests.models.test_preflight import point_to, sizes_of
from tests.support import RunningServer, running_server

pytestmark = pytest.mark.browser

Start = Callable[..., Visit]
Picture = Callable[[Page, str], None]
NAME = "mlx-community/Qwen3-0.6B-4bit"


def test_a_model_is_downloaded_by_a_button_and_by_its_name(
    visit: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(device_memory, "system_free_memory", lambda: 16 * 10**9)
    allowed = HttpConfig(allow_downloads=True)
    with (
        hub(NAME, DEMO_PATH, sizes_of(DEMO_PATH)) as (address, _),
        running_server(EngineConfig(kv_cache_bytes=16_000_000), http=allowed) as server,
    ):
        point_to(address, monkeypatch)
        tab = visit(server)
        tab.allowed = {404}
        tab.open("/#/models")
        tab.page.get_by_role("button", name="Download qwen3:0.6b").click()
        row = tab.page.locator("li", has_text="qwen3:0.6b").last
        expect(row).to_contain_text("downloaded")
        expect(tab.page.locator("li", has_text="all-minilm:22m")).to_contain_text("embedding · type from mlxpaged")
        field = tab.page.get_by_label("Repository")
        field.fill("someone/absent")
        field.press("Enter")
        expect(tab.page.get_by_text("someone/absent is neither a local directory nor a repository")).to_be_visible()
        field.fill("nothing")
        field.press("Enter")
        expect(tab.page.get_by_text("there is no model named 'nothing'")).to_be_visible()
        tab.check_accessible()


def test_without_the_flag_the_list_says_what_fits_and_how_to_get_it(
    visit: Start, demo: RunningServer, monkeypatch: pytest.MonkeyPatch, picture: Picture
) -> None:
    monkeypatch.setattr(device_memory, "system_free_memory", lambda: 16 * 10**9)
    tab = visit(demo)
    tab.open("/#/models")
    rows = tab.page.locator(".downloads > li")
    small = rows.filter(has_text="qwen3:4b-instruct")
    expect(small).to_contain_text("chat and tools, without thinking · 4.0 billion parameters · 2.3 GB")
    expect(rows.filter(has_text="qwen3:235b")).to_have_count(0)
    expect(tab.page.get_by_text("mlxpaged pull NAME")).to_be_visible()
    expect(tab.page.get_by_role("button", name="Download")).to_have_count(0)
    picture(tab.page, "models")
    tab.check_accessible()
    tab.page.get_by_label("only those whose weights fit").uncheck()
    expect(rows.filter(has_text="qwen3:235b")).to_contain_text("larger than the memory")
    tab.page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    tab.check_accessible()
