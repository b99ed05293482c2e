"""The list of conversations in Chromium: search, files, and the keyboard."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import FilePayload, expect

from tests.browser.conftest import PHONE, Visit
from tests.browser.test_chat import button
from tests.support import RunningServer

pytestmark = pytest.mark.browser

Start = Callable[..., Visit]

SAID = {"role": "user", "content": "Hello"}
CHAT = {"title": "Taken", "messages": [SAID, {"role": "assistant", "content": "**Hi**"}]}
STORED = """() => new Promise((resolve) => {
    indexedDB.open("mlxpaged", 1).onsuccess = ({ target }) => {
        target.result.transaction("conversations").objectStore("conversations").getAll().onsuccess = ({ target }) =>
            resolve(target.result);
    };
})"""


def chats(tab: Visit) -> Any:
    return tab.page.get_by_role("navigation", name="Conversations").get_by_role("link")


def give(tab: Visit, content: bytes) -> None:
    file: FilePayload = {"name": "chats.json", "mimeType": "application/json", "buffer": content}
    with tab.page.expect_file_chooser() as chooser:
        button(tab.page, "Import").click()
    chooser.value.set_files([file])


def two_chats(tab: Visit) -> None:
    tab.open()
    tab.say("Right question")
    tab.answered()
    button(tab.page, "New chat").click()
    tab.say("Second chat")
    tab.answered()


def test_chats_are_found_by_words_of_their_messages(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    two_chats(tab)
    search = tab.page.get_by_label("Search chats")
    search.fill("ANSWER right")
    expect(chats(tab)).to_have_text(["Right question"])
    search.fill("nothing of it")
    expect(chats(tab)).to_have_count(0)
    expect(tab.page.get_by_text("No chat has these words.")).to_be_visible()
    tab.check_accessible()
    search.fill("")
    expect(chats(tab)).to_have_text(["Second chat", "Right question"])


def test_all_chats_are_exported_and_taken_in_another_browser(visit: Start, scripted: RunningServer) -> None:
    tab, other = visit(scripted), visit(scripted)
    two_chats(tab)
    with tab.page.expect_download() as download:
        button(tab.page, "Export all").click()
    assert download.value.suggested_filename == "chats.json"
    content = Path(download.value.path()).read_bytes()
    other.open()
    expect(other.page.get_by_label("Search chats")).to_be_hidden()
    give(other, content)
    expect(chats(other)).to_have_text(["Second chat", "Right question"])
    expect(other.page.locator("#announcer")).to_have_text("2 chats imported")
    assert other.page.evaluate(STORED) == tab.page.evaluate(STORED)
    chats(other).last.click()
    expect(other.answered()).to_contain_text("A right answer.")
    other.say("Second chat")
    expect(other.answered()).to_contain_text("Here too.")
    give(other, content)
    expect(other.page.locator("#announcer")).to_have_text("0 chats imported, 2 here already")
    expect(other.page.locator(".message")).to_have_count(4)


@pytest.mark.parametrize(
    "wrong",
    [
        "{",
        "3",
        "[null]",
        json.dumps({"title": "x", "messages": []}),
        json.dumps(CHAT | {"title": 3}),
        json.dumps(CHAT | {"messages": [SAID | {"role": "system"}]}),
        json.dumps(CHAT | {"messages": [SAID | {"content": ["Hello"]}]}),
        json.dumps(CHAT | {"messages": [SAID | {"files": [{"name": "x", "image": "https://example.com/x.png"}]}]}),
        json.dumps(CHAT | {"messages": [SAID | {"versions": {"shown": 5, "tails": [None]}}]}),
        json.dumps(CHAT | {"settings": {"tools": "["}}),
    ],
)
def test_a_file_that_is_no_export_changes_nothing(visit: Start, scripted: RunningServer, wrong: str) -> None:
    tab = visit(scripted)
    tab.open()
    give(tab, wrong.encode())
    dialog = tab.page.get_by_role("dialog", name="Nothing is imported")
    expect(dialog).to_contain_text("chats.json is not")
    button(dialog, "Close").click()
    assert tab.page.evaluate(STORED) == []


def test_a_chat_of_a_file_has_only_what_the_page_knows(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    hostile = {"role": "assistant", "content": "<img src=x onerror=window.hacked=1>", "running": True, "x": 1}
    given = CHAT | {"id": "../../x", "more": 1, "messages": [SAID | {"toolCalls": 7}, hostile]}
    give(tab, json.dumps(given).encode())
    chats(tab).click()
    expect(tab.answered()).to_contain_text("<img src=x")
    [stored] = tab.page.evaluate(STORED)
    assert stored.keys() == {"id", "title", "created", "updated", "model", "settings", "messages"}
    assert stored["id"] != given["id"]
    assert [each.keys() for each in stored["messages"]] == [
        {"role", "content"},
        {"role", "content", "id", "reasoning", "toolCalls", "model"},
    ]
    assert tab.page.evaluate("window.hacked") is None


def test_shortcuts_begin_search_and_are_listed(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("Right question")
    tab.answered()
    keyboard = tab.page.keyboard
    keyboard.press("Control+k")
    expect(tab.page.get_by_label("Search chats")).to_be_focused()
    keyboard.press("Shift+Escape")
    expect(tab.page.get_by_label("Message")).to_be_focused()
    keyboard.press("Control+/")
    dialog = tab.page.get_by_role("dialog", name="Keyboard shortcuts")
    expect(dialog).to_contain_text("searches the chats")
    tab.check_accessible()
    keyboard.press("Control+Shift+O")
    expect(tab.page.get_by_role("heading", level=1)).to_have_text("Right question")
    keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    keyboard.press("Control+Shift+O")
    expect(tab.page.get_by_role("heading", level=1)).to_have_text("New chat")
    expect(tab.page.get_by_label("Message")).to_be_focused()
    button(tab.page, "Shortcuts").click()
    expect(dialog).to_be_visible()


def test_the_list_fits_a_phone(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted, PHONE, is_mobile=True, has_touch=True)
    tab.open()
    tab.say("Right question")
    tab.answered()
    button(tab.page, "Chats").tap()
    expect(tab.page.get_by_label("Search chats")).to_be_visible()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    tab.check_accessible()
