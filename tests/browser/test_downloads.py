"""The list of models that can be downloaded, in Chromium."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants
from playwright.sync_api import expect

from mlxpaged.api.config import HttpConfig
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import DEMO_PATH
from tests.browser.conftest import Visit
from tests.cli.helpers import hub
from tests.models.test_preflight import point_to, sizes_of
from tests.support import RunningServer, running_server

pytestmark = pytest.mark.browser

Start = Callable[..., Visit]
NAME = "mlx-community/Qwen3-0.6B-4bit"


def test_a_model_is_downloaded_by_a_button_and_by_its_name(
    visit: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    allowed = HttpConfig(allow_downloads=True)
    with (
        hub(NAME, DEMO_PATH, sizes_of(DEMO_PATH)) as (address, _),
        running_server(EngineConfig(kv_cache_bytes=16_000_000), http=allowed) as server,
    ):
        point_to(address, monkeypatch)
        tab = visit(server)
        tab.allowed = {404}
        tab.open("/#/server")
        tab.page.get_by_text("Models with a short name").click()
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


def test_without_the_flag_there_is_no_list(visit: Start, demo: RunningServer) -> None:
    tab = visit(demo)
    tab.open("/#/server")
    expect(tab.page.get_by_role("heading", name="Last refusals")).to_be_visible()
    expect(tab.page.get_by_role("heading", name="Download a model")).to_be_hidden()
