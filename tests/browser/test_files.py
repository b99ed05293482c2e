"""Text files that go with a message, in Chromium."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import FilePayload, expect

from tests.browser.conftest import PHONE, Visit
from tests.browser.test_chat import button
from tests.support import RunningServer

pytestmark = pytest.mark.browser

Start = Callable[..., Visit]

WITH_FILES = """async ([content, files]) => {
    const { withFiles } = await import("/web/chat/files.js");
    return withFiles(content, files);
}"""
DROP = """([target, name, type, content]) => {
    const data = new DataTransfer();
    data.items.add(new File([Uint8Array.from(atob(content), (each) => each.charCodeAt(0))], name, { type }));
    const send = (type) => {
        const event = new DragEvent(type, { dataTransfer: data, bubbles: true, cancelable: true });
        document.querySelector(target).dispatchEvent(event);
        return event.defaultPrevented;
    };
    return [send("dragover"), document.querySelector(".dropping") !== null, send("drop")];
}"""


def file(name: str, content: bytes) -> FilePayload:
    return {"name": name, "mimeType": "application/octet-stream", "buffer": content}


def attach(tab: Visit, *files: FilePayload) -> None:
    with tab.page.expect_file_chooser() as chooser:
        button(tab.page, "Attach files").click()
    chooser.value.set_files(list(files))


def drop(tab: Visit, target: str, dropped: FilePayload) -> None:
    """Drags a file over an element and drops it there. The page says that it takes the file."""
    content = base64.b64encode(dropped["buffer"]).decode()
    taken = tab.page.evaluate(DROP, [target, dropped["name"], dropped["mimeType"], content])
    assert taken == [True, True, True]
    expect(tab.page.locator(".dropping")).to_have_count(0)


def chips(tab: Visit) -> Any:
    return tab.page.locator(".composer .chips li")


def problem(tab: Visit) -> Any:
    return tab.page.locator(".composer").get_by_role("alert")


def test_files_are_blocks_of_code_before_the_message(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()

    def joined(content: str, *files: dict[str, str]) -> Any:
        return tab.page.evaluate(WITH_FILES, [content, files])

    assert joined("Hello") == "Hello"
    assert joined("Why?", {"name": "a.py", "text": "x = 1\n"}) == "a.py:\n```py\nx = 1\n```\n\nWhy?"
    two = ({"name": "Makefile", "text": "a"}, {"name": "b.md", "text": "````\ncode\n````\n"})
    assert joined("", *two) == "Makefile:\n```\na\n```\n\nb.md:\n`````md\n````\ncode\n````\n`````"


def test_a_text_file_is_a_chip_then_sent_and_folded_in_the_message(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    attach(tab, file("notes.txt", "Grüße\n".encode()), file("other.py", b"x = 1"))
    expect(chips(tab)).to_have_text(["notes.txt 8 B\u00d7", "other.py 5 B\u00d7"])
    expect(tab.page.get_by_label("Message")).to_be_focused()
    tab.check_accessible()
    button(tab.page, "Remove other.py").click()
    expect(chips(tab)).to_have_count(1)
    expect(tab.page.get_by_label("Message")).to_be_focused()
    with tab.page.expect_request("**/v1/chat/completions") as request:
        tab.say("Right question")
    sent = "notes.txt:\n```txt\nGrüße\n```\n\nRight question"
    assert json.loads(request.value.post_data or "")["messages"][0]["content"] == sent
    expect(chips(tab)).to_have_count(0)
    expect(tab.answered()).to_contain_text("A right answer.")
    tab.page.reload()
    message = tab.page.locator(".message.user")
    expect(message.locator(".plain")).to_have_text("Right question")
    expect(message.locator("pre")).to_be_hidden()
    message.locator("summary").click()
    expect(message.locator("pre")).to_have_text("Grüße\n")
    tab.check_accessible()


def test_an_edited_message_keeps_its_files_or_loses_them(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    attach(tab, file("Right question", b"What is right?"))
    button(tab.page, "Send").click()  # a file is enough of a message
    expect(tab.answered()).to_contain_text("A right answer.")
    expect(tab.page.get_by_role("heading", level=1)).to_have_text("Right question")
    button(tab.page.locator(".message.user"), "Edit").click()
    field = tab.page.get_by_label("Edit your message")
    field.fill("Second chat")
    field.press("Enter")
    expect(tab.answered()).to_contain_text("Here too.")
    expect(tab.page.locator(".message.user summary")).to_have_text("Right question 14 B")
    button(tab.page.locator(".message.user"), "Edit").click()
    button(tab.page.locator(".editing"), "Remove Right question").click()
    with tab.page.expect_request("**/v1/chat/completions") as request:
        field.press("Enter")
    assert json.loads(request.value.post_data or "")["messages"][-1]["content"] == "Second chat"
    tab.answered()


NEITHER = " is neither a text in UTF-8 nor a PNG, JPEG, WEBP or GIF image."


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        (
            "photo.png",
            b"\x89PNG\r\n\x1a\n\0\0",
            "photo.png" + NEITHER,
        ),
        ("nul.txt", b"a\0b", "nul.txt" + NEITHER),
        (
            "latin.txt",
            "Grüße".encode("latin-1"),
            "latin.txt" + NEITHER,
        ),
        ("big.txt", b"a" * 500_001, "big.txt is too large. A file may have up to 500 kB."),
        ("empty.txt", b"", "empty.txt is empty."),
    ],
)
def test_a_file_that_cannot_be_taken_is_refused_with_the_reason(
    visit: Start, scripted: RunningServer, name: str, content: bytes, text: str
) -> None:
    tab = visit(scripted)
    tab.open()
    attach(tab, file(name, content), file("good.txt", b"good"))
    expect(problem(tab)).to_have_text(text)
    expect(chips(tab)).to_have_text(["good.txt 4 B\u00d7"])
    attach(tab, file("better.txt", b"better"))
    expect(chips(tab)).to_have_count(2)
    expect(problem(tab)).to_be_hidden()


def test_files_are_dropped_anywhere_on_the_chat(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted, PHONE)
    tab.open()
    expect(tab.page.get_by_label("Message")).to_be_visible()
    drop(tab, ".messages", file("dropped.txt", b"text"))
    expect(chips(tab)).to_have_text(["dropped.txt 4 B\u00d7"])
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
