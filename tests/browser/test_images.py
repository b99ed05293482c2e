"""Images that go with a message, in Chromium: to a model that takes text only, and to one that sees."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import FilePayload, Request, Route, expect

from demo_model.vision.pictures import BUILT_IN, picture
from mlxpaged.engine_config import EngineConfig
from tests.browser.conftest import PHONE, Visit
from tests.browser.test_chat import button
from tests.browser.test_files import attach, chips, drop, file, problem
from tests.support import RunningServer, running_server

pytestmark = pytest.mark.browser

Start = Callable[..., Visit]

PASTE = """([name, type, content, text]) => {
    const clipboardData = new DataTransfer();
    const bytes = Uint8Array.from(atob(content), (each) => each.charCodeAt(0));
    clipboardData.items.add(new File([bytes], name, { type }));
    if (text) clipboardData.setData("text/plain", text);
    const event = new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true });
    document.querySelector(".composer textarea").dispatchEvent(event);
    return event.defaultPrevented;
}"""
SAID = """data: {"choices": [{"delta": {"content": "Red."}, "finish_reason": "stop"}]}

data: [DONE]

"""
QUESTION = "What number is in the picture?"


@pytest.fixture(scope="module")
def seeing() -> Iterator[RunningServer]:
    config = EngineConfig(model="demo-vision", kv_cache_bytes=64_000_000, default_temperature=0.0)
    with running_server(config) as running:
        yield running


def image(name: str, made: Image.Image | None = None) -> FilePayload:
    """made: None for one red pixel."""
    stored = io.BytesIO()
    (made or Image.new("RGB", (1, 1), "red")).save(stored, "PNG")
    return {"name": name, "mimeType": "image/png", "buffer": stored.getvalue()}


def number(value: int) -> FilePayload:
    return image(f"{value}.png", number_in(value))


def number_in(value: int) -> Image.Image:
    return picture(random.Random(value), value, 320, 200, [BUILT_IN], 2.5)


def part(sent: FilePayload) -> dict[str, Any]:
    data = base64.b64encode(sent["buffer"]).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def pasted(tab: Visit, content: FilePayload, text: str = "") -> bool:
    """Whether the page takes the file. Otherwise the browser pastes the text."""
    data = base64.b64encode(content["buffer"]).decode()
    return bool(tab.page.evaluate(PASTE, [content["name"], content["mimeType"], data, text]))


def paste(tab: Visit, content: FilePayload) -> None:
    assert pasted(tab, content)


def test_pasted_cells_are_their_text_and_a_copied_file_is_the_file(visit: Start, seeing: RunningServer) -> None:
    """A spreadsheet puts an image of the cells beside their text."""
    tab = visit(seeing)
    tab.open()
    expect(tab.page.get_by_label("Message")).to_be_visible()
    assert not pasted(tab, image("image.png"), "Rome\t25\nOslo\t11")
    assert pasted(tab, image("red.png"), "red.png")
    expect(chips(tab)).to_have_count(1)
    expect(chips(tab)).to_contain_text("red.png")


def test_an_image_that_only_the_browser_decodes_is_sent_as_a_jpeg(visit: Start, seeing: RunningServer) -> None:
    """Chromium decodes BMP as Safari does HEIC."""
    tab = visit(seeing)
    tab.open()
    stored = io.BytesIO()
    number_in(407).save(stored, "BMP")
    broken: FilePayload = {"name": "IMG_1.HEIC", "mimeType": "", "buffer": b"\0\0\0\x18ftypheic"}
    attach(tab, broken, {"name": "407.bmp", "mimeType": "image/bmp", "buffer": stored.getvalue()})
    expect(problem(tab)).to_have_text(
        "IMG_1.HEIC cannot be read: this browser has no decoder for it. Safari reads HEIC."
    )
    expect(chips(tab)).to_have_count(1)
    with tab.page.expect_request("**/v1/chat/completions") as request:
        tab.say(QUESTION)
    assert messages(request.value)[-1]["content"][0]["image_url"]["url"].startswith("data:image/jpeg;base64,")
    expect(tab.answered().locator(".answer")).to_have_text("407")


def messages(request: Request) -> Any:
    return json.loads(request.post_data or "")["messages"]


def served(**sees: bool | None) -> Callable[[Route], None]:
    """Answers with a list of models. sees: whether each takes images; None if it is not loaded, and is of that kind."""

    def entry(name: str, vision: bool | None) -> dict[str, Any]:
        kind = {"kind": "text" if vision is False else "vision", "state": "available" if vision is None else "loaded"}
        known = {} if vision is None else {"capabilities": {"chat": True, "vision": vision}}
        return {"id": name, "object": "model"} | kind | known

    models = [entry(*each) for each in sees.items()]
    return lambda route: route.fulfill(json={"object": "list", "data": models})


def test_images_are_chosen_or_pasted_and_go_before_the_message(visit: Start, seeing: RunningServer) -> None:
    tab = visit(seeing)
    tab.open()
    chosen, other = image("chosen.png"), image("pasted.png", Image.new("L", (2, 1)))
    attach(tab, chosen, file("a.txt", b"text"))
    paste(tab, other)
    expect(chips(tab)).to_have_count(3)
    with tab.page.expect_request("**/v1/chat/completions") as request:
        tab.say("What is this?")
    text = {"type": "text", "text": "a.txt:\n```txt\ntext\n```\n\nWhat is this?"}
    assert messages(request.value)[-1]["content"] == [part(chosen), part(other), text]
    shown = tab.page.locator(".message.user img")
    expect(shown).to_have_count(2)
    expect(shown.first).to_have_attribute("alt", "chosen.png")
    tab.answered()


def test_an_image_is_refused_if_the_model_takes_none(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    picker = tab.page.get_by_label("Model", exact=True)
    expect(picker).to_have_value("scripted")
    attach(tab, image("red.png"), file("a.txt", b"text"))
    expect(problem(tab)).to_have_text(
        "red.png is not attached: scripted takes no images. Nor does another model of this server."
    )
    expect(chips(tab)).to_have_text(["a.txt 4 B\u00d7"])
    button(tab.page, "Remove a.txt").click()
    tab.say("Right question")
    expect(tab.answered()).to_contain_text("A right answer.")
    expect(problem(tab)).to_be_hidden()


def test_the_models_that_take_an_image_are_named_before_it_is_sent_to_another_one(
    visit: Start, scripted: RunningServer
) -> None:
    tab = visit(scripted)
    tab.page.route("**/v1/models", served(blind=False, eyes=True, asleep=None))
    tab.page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=SAID))
    tab.open()
    picker = tab.page.get_by_label("Model", exact=True)
    expect(picker).to_have_value("blind")
    paste(tab, image("red.png"))
    refused = "blind takes no images. Choose a model that does: eyes, asleep."
    expect(problem(tab)).to_have_text(f"red.png is not attached: {refused}")
    picker.select_option("asleep")
    paste(tab, image("red.png"))
    expect(chips(tab)).to_have_count(1)
    expect(problem(tab)).to_be_hidden()
    picker.select_option("blind")
    tab.say("What is this?")
    expect(problem(tab)).to_have_text(f"There are images in this chat. {refused}")
    expect(tab.page.locator(".message")).to_have_count(0)
    picker.select_option("eyes")
    tab.say("What is this?")
    tab.answered()
    picker.select_option("blind")
    tab.say("And now?")
    expect(problem(tab)).to_have_text(f"There are images in this chat. {refused}")
    expect(tab.page.get_by_label("Message")).to_have_value("And now?")


def test_a_first_message_that_the_server_refuses_goes_back_to_the_form(visit: Start, scripted: RunningServer) -> None:
    """The list of models says that the server's model sees. It does not."""
    tab = visit(scripted)
    tab.allowed = {400}
    tab.page.route("**/v1/models", served(scripted=True))
    tab.open()
    expect(tab.page.get_by_label("Model", exact=True)).to_have_value("scripted")
    attach(tab, image("red.png"))
    tab.say("Right question")
    expect(problem(tab)).to_contain_text("image")
    field = tab.page.get_by_label("Message")
    expect(field).to_have_value("Right question")
    expect(field).to_be_focused()
    expect(chips(tab)).to_have_count(1)
    expect(tab.page.locator(".message")).to_have_count(0)
    chats = tab.page.get_by_role("navigation", name="Conversations").get_by_role("link")
    expect(chats).to_have_count(0)
    assert tab.page.evaluate("location.hash") == "#/chat"
    button(tab.page, "Remove red.png").click()
    field.press("Enter")
    expect(tab.answered()).to_contain_text("A right answer.")
    expect(problem(tab)).to_be_hidden()
    tab.page.reload()
    expect(chats).to_have_text(["Right question"])
    expect(tab.page.locator(".message")).to_have_count(2)


@pytest.mark.parametrize("way", ["pasted", "dropped"])
def test_the_number_in_an_image_is_read_and_the_image_stays(visit: Start, seeing: RunningServer, way: str) -> None:
    tab = visit(seeing)
    tab.open()
    expect(tab.page.get_by_label("Message")).to_be_visible()
    first, second = number(407), number(53)
    if way == "pasted":
        paste(tab, first)
    else:
        drop(tab, ".messages", first)
    expect(chips(tab)).to_have_text(["407.png \u00d7"])
    expect(chips(tab).locator("img")).to_have_attribute("src", part(first)["image_url"]["url"])
    tab.check_accessible()
    with tab.page.expect_request("**/v1/chat/completions") as request:
        tab.say(QUESTION)
    asked = messages(request.value)
    assert asked[-1]["content"] == [part(first), {"type": "text", "text": QUESTION}]
    expect(tab.answered().locator(".answer")).to_have_text("407")
    expect(chips(tab)).to_have_count(0)

    tab.page.reload()  # the image is stored with the conversation
    expect(tab.page.locator(".message.user img")).to_have_attribute("src", part(first)["image_url"]["url"])
    drop(tab, ".messages", second)
    tab.say("And in this picture?")
    expect(tab.page.locator(".message.assistant")).to_have_count(2)
    expect(tab.answered().locator(".answer")).to_have_text("53")
    with tab.page.expect_request("**/v1/chat/completions") as request:
        tab.say("What number is in the first picture?")
    sent = messages(request.value)
    assert sent[: len(asked)] == asked
    assert [each["content"] for each in sent if each["role"] == "assistant"] == ["407", "53"]
    expect(tab.page.locator(".message.assistant")).to_have_count(3)
    expect(tab.answered().locator(".answer")).to_have_text("407")
    expect(tab.page.locator(".message.user img")).to_have_count(2)
    tab.check_accessible()


def test_an_image_is_dropped_on_a_phone_and_removed(visit: Start, seeing: RunningServer) -> None:
    tab = visit(seeing, PHONE)
    tab.open()
    expect(tab.page.get_by_label("Message")).to_be_visible()
    drop(tab, ".composer", number(407))
    drop(tab, ".messages", number(53))
    expect(chips(tab)).to_have_count(2)
    button(tab.page, "Remove 407.png").click()
    expect(chips(tab)).to_have_text(["53.png \u00d7"])
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    tab.say(QUESTION)
    expect(tab.answered().locator(".answer")).to_have_text("53")
    expect(tab.page.locator(".message.user img")).to_have_count(1)
