"""The server view in Chromium, against a real server."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from mlxpaged.api.config import HttpConfig
from mlxpaged.engine_config import EngineConfig
from mlxpaged.registry.model import Model
from mlxpaged.registry.registry import Registry
from tests.api.helpers import Background, bearer, random_tokens, raw, run_on, start, write_keys
from tests.browser.conftest import PHONE, Visit
from tests.support import RunningServer, make_tiny_model, running_server, wait_until

pytestmark = pytest.mark.browser

Start = Callable[..., Visit]
Picture = Callable[[Page, str], None]


@contextlib.contextmanager
def load(server: RunningServer, count: int) -> Iterator[list[Background]]:
    """Long requests, of which each three share a prompt of 20 blocks. They end with the block."""
    prompts = [[*random_tokens(640, i // 3), 20 + i] for i in range(count)]
    tiers = ["flex" if i % 4 == 3 else "auto" for i in range(count)]
    pending = [
        start(server, run_on(prompt, 2500, service_tier=tier), f"load-{i}")
        for i, (prompt, tier) in enumerate(zip(prompts, tiers, strict=True))
    ]
    try:
        yield pending
    finally:
        with raw(server) as client:
            client.delete("/v1/requests")
        assert {request.result().status_code for request in pending} == {499}
        server.wait_idle()


def drawn(page: Page) -> str:
    """The picture in the canvas."""
    found: str = page.locator("canvas").evaluate("each => each.toDataURL()")
    return found


def test_the_map_the_charts_and_the_requests_follow_the_load(
    visit: Start, demo: RunningServer, picture: Picture
) -> None:
    tab = visit(demo, (1100, 1330))
    tab.open("/#/server")
    blocks = tab.page.locator(".map")
    expect(blocks).to_contain_text("0 used")
    idle = drawn(tab.page)
    with raw(demo) as client:
        assert client.post("/v1/completions", json={"prompt": "x", "model": "nothing"}).status_code == 404
    rows = tab.page.locator(".requests > li")
    with load(demo, 9):
        expect(rows).to_have_count(9)
        expect(rows.filter(has_text=re.compile("^(?!.*(decode|prefill))"))).to_have_count(3)
        expect(rows.filter(has_text="decode").first).to_contain_text("20 shared")
        expect(blocks).not_to_contain_text(" 0 used")
        expect(blocks).to_contain_text("cells shared")
        assert drawn(tab.page) != idle
        expect(rows.first.locator(".timeline .decode")).to_be_visible()
        expect(tab.page.get_by_role("region", name="Last refusals")).to_contain_text("model_not_found")
        tab.page.wait_for_timeout(6000)  # a chart with some history
        tokens = tab.page.locator(".chart").first
        assert float(tokens.locator("dd").inner_text().replace(",", "")) > 0
        assert tokens.locator("path.area").get_attribute("d")
        expect(tab.page.locator(".chart").nth(1).locator("dd").first).to_contain_text("s")
        tab.check_accessible()
        tab.page.emulate_media(color_scheme="dark")
        tab.page.wait_for_timeout(600)
        picture(tab.page, "server-dark")
        tab.check_accessible()
    expect(rows.filter(has=tab.page.get_by_role("button"))).to_have_count(0)
    expect(blocks).to_contain_text(" 0 used")
    tab.page.get_by_text("Ended just now").click()
    expect(tab.page.locator("details .timeline").first).to_be_visible()


def test_bytes_written_to_the_disk_and_tokens_of_keys_are_shown(visit: Start, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys.json", anna={}, root={"admin": True})
    config = EngineConfig(kv_cache_bytes=16_000_000, prefix_cache_dir=tmp_path / "prefixes")
    http = HttpConfig(api_keys=tmp_path / "keys.json")
    with running_server(config, http=http, data_dir=tmp_path) as server:
        body = {"prompt": random_tokens(640, 1), "max_tokens": 2, "ignore_eos": True}
        with raw(server) as client:
            assert client.post("/v1/completions", json=body, headers=bearer(keys["anna"])).status_code == 200
        tab = visit(server)
        tab.page.add_init_script(f"sessionStorage.setItem('mlxpaged-key', '{keys['root']}')")
        tab.open("/#/server")
        used = tab.page.get_by_role("region", name="API keys")
        anna = used.get_by_role("row").filter(has=tab.page.get_by_role("cell", name="anna"))
        expect(anna.get_by_role("cell")).to_have_text(["anna", "1", "640", "0", "2", "642"])
        written = tab.page.get_by_role("region", name="Written to the disk")
        expect(written.get_by_role("cell").first).to_have_text(f"Prefixes in {tmp_path / 'prefixes'}")
        expect(written.get_by_role("cell").last).to_have_text(re.compile(r"^\d[\d.]* [kM]?B$"))
        expect(tab.page.locator(".models")).to_contain_text("of memory")
        tab.check_accessible()


def test_a_request_is_cancelled(visit: Start, demo: RunningServer) -> None:
    tab = visit(demo)
    tab.open("/#/server")
    with load(demo, 2) as pending:
        cancel = tab.page.get_by_role("button", name="Cancel load-0")
        cancel.focus()
        tab.page.keyboard.press("Enter")
        assert pending[0].result().status_code == 499
        expect(cancel).to_have_count(0)
        expect(tab.page.get_by_role("button", name="Cancel load-1")).to_be_focused()


def test_the_server_computes_nothing_without_a_watcher(visit: Start, demo: RunningServer) -> None:
    tab = visit(demo)
    stream = demo.app.state.status_stream
    tab.open("/#/server")
    expect(tab.page.locator(".chart")).not_to_have_count(0)
    expect(tab.page.locator(".map")).to_be_visible()
    assert stream.task is not None
    tab.page.get_by_role("link", name="Chat").click()
    expect(tab.page.get_by_label("Message")).to_be_visible()
    wait_until(lambda: stream.task is None)
    tab.page.get_by_role("link", name="Server").click()
    expect(tab.page.locator(".map")).to_be_visible()


def test_the_view_fits_a_phone(visit: Start, demo: RunningServer) -> None:
    tab = visit(demo, PHONE, is_mobile=True, has_touch=True)
    tab.open("/#/server")
    with load(demo, 2):
        expect(tab.page.locator(".requests > li")).to_have_count(2)
        assert tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
        tab.check_accessible()


def test_what_a_load_answers_is_shown(visit: Start, demo: RunningServer) -> None:
    facts = {"kind": "text", "source": "mlx-vlm", "size_bytes": 2_000_000_000}
    small = {"id": "small", "object": "model", "pinned": False, **facts}
    states = {"small": "available", "org/broken": "failed"}
    asked: list[str] = []

    def entry(name: str) -> dict[str, Any]:
        loaded = states[name] == "loaded"
        failure = {"error": "config.json is not there"} if states[name] == "failed" else {}
        memory = {"memory_bytes": 2_500_000_000 if loaded else None}
        return small | {"id": name, "state": states[name]} | memory | failure

    def listed(route: Route) -> None:
        route.fulfill(json={"object": "list", "data": [entry(name) for name in states]})

    def change(route: Route) -> None:
        path = route.request.url.removeprefix(demo.url)
        asked.append(f"{route.request.method} {path}")
        if "broken" in path:
            error = {"message": "config.json is not there", "code": "load_failed"}
            return route.fulfill(status=500, json={"error": error})
        states["small"] = "loaded" if path.endswith("/load") else "available"
        return route.fulfill(json=entry("small"))

    tab = visit(demo)
    tab.allowed = {500}
    tab.page.route("**/v1/models", listed)
    tab.page.route("**/v1/models/**", change)
    tab.open("/#/server")
    models = tab.page.locator(".models")
    expect(models).to_contain_text("text · type from mlx-vlm · 2.0 GB of weights")
    tab.page.get_by_role("button", name="Load small").click()
    expect(models).to_contain_text("2.5 GB of memory")
    tab.page.get_by_role("button", name="Unload small").click()
    expect(tab.page.get_by_role("button", name="Load small")).to_be_visible()
    tab.page.get_by_role("button", name="Load org/broken").click()
    expect(tab.page.get_by_role("alert").filter(has_text="config.json is not there")).to_be_visible()
    assert asked == [f"POST /v1/models/{path}" for path in ("small/load", "small/unload", "org/broken/load")]


def test_a_model_is_loaded_and_unloaded_and_loaded_by_a_chat(visit: Start, tmp_path: Path) -> None:
    small = EngineConfig(model=str(make_tiny_model(tmp_path / "small", "llama")), kv_cache_bytes=8_000_000)
    demo = EngineConfig(kv_cache_bytes=16_000_000)
    with running_server(Registry({"demo": Model("demo", demo), "small": Model("small", small)}, demo)) as server:
        tab = visit(server)
        tab.open("/#/server")
        tab.page.get_by_role("button", name="Load small").click()
        unload = tab.page.get_by_role("button", name="Unload small")
        expect(unload).to_be_visible()
        maps = tab.page.get_by_label("Model of the map")
        expect(maps.get_by_role("option")).to_have_text(["demo", "small"])
        assert server.registry.models["small"].is_loaded
        unload.click()
        expect(tab.page.get_by_role("button", name="Load small")).to_be_visible()
        expect(maps).to_be_hidden()
        assert not server.registry.models["small"].is_loaded
        tab.page.get_by_role("link", name="Chat").click()
        tab.page.get_by_label("Model", exact=True).select_option("small (loads on first use)")
        tab.say("Hello")
        expect(tab.answered().locator(".stats")).to_contain_text("tokens")
        assert server.registry.models["small"].is_loaded


def test_the_view_says_when_the_stream_is_gone_and_comes_back(visit: Start, demo: RunningServer) -> None:
    tab = visit(demo)
    tab.allowed = {503}
    error = json.dumps({"error": {"message": "the server is answering 3 requests", "code": "too_many_connections"}})
    tab.page.route("**/v1/status/stream", lambda route: route.fulfill(status=503, body=error))
    tab.open("/#/server")
    alert = tab.page.get_by_role("alert").filter(has_text="is answering 3 requests")
    expect(alert).to_be_visible()
    tab.page.unroute("**/v1/status/stream")
    expect(tab.page.locator(".map")).to_be_visible()
    expect(alert).to_be_hidden()


def test_the_api_document_is_readable_and_can_be_tried(visit: Start, demo: RunningServer) -> None:
    tab = visit(demo)
    tab.open("/docs")
    expect(tab.page.get_by_role("heading", name="mlxpaged")).to_be_visible()
    health = tab.page.locator("#get_health")
    health.locator("summary").click()
    health.get_by_role("button", name="Send").click()
    expect(health.locator("pre")).to_contain_text('"running": 0')
    tokenize = tab.page.locator("#post_tokenize")
    tokenize.locator("summary").click()
    expect(tokenize.locator("table").last).to_contain_text("return_token_strs")
    tokenize.get_by_label("Body").fill("{")
    tokenize.get_by_role("button", name="Send").click()
    expect(tokenize.locator("pre")).to_contain_text("JSON")
    tokenize.get_by_label("Body").fill('{"prompt": "Once"}')
    tokenize.get_by_role("button", name="Send").click()
    expect(tokenize.locator("pre")).to_contain_text('"count":')
    model = tab.page.locator("#get_v1_models_model_")
    model.locator("summary").click()
    model.get_by_label("model", exact=True).fill("demo")
    model.get_by_label("model", exact=True).press("Enter")
    expect(model.locator("pre")).to_contain_text('"id": "demo"')
    tab.check_accessible()
    tab.page.get_by_role("link", name="Server").click()
    expect(tab.page.locator(".map")).to_be_visible()
