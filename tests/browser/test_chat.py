"""The chat in Chromium, against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from mlxpaged.api.config import HttpConfig
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import write_keys
from tests.browser.conftest import PHONE, Visit
from tests.support import RunningServer, running_server

pytestmark = pytest.mark.browser

Start = Callable[..., Visit]
Picture = Callable[[Page, str], None]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
HIDE = """() => {
    Object.defineProperty(document, "hidden", { value: true });
    document.dispatchEvent(new Event("visibilitychange"));
}"""
FULL = """
    const { put } = IDBObjectStore.prototype;
    IDBTransaction.prototype.commit = () => {};
    IDBObjectStore.prototype.put = function (value) {
        const { transaction } = this;
        const request = put.call(this, value);
        const error = new DOMException("the disk is full", "QuotaExceededError");
        Object.defineProperty(transaction, "error", { value: error });
        request.addEventListener("success", () => transaction.abort());
        return request;
    };
"""
"""The browser takes what is stored, and refuses it at the end of the transaction, as Chromium does on a full disk."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def key(keys: Path) -> str:
    return write_keys(keys, anna={})["anna"]


@pytest.fixture(scope="module")
def closed(keys: Path, key: str) -> Iterator[RunningServer]:
    """A server with API keys."""
    with running_server(EngineConfig(kv_cache_bytes=16_000_000), http=HttpConfig(api_keys=keys)) as server:
        yield server


def button(where: Any, name: str) -> Any:
    return where.get_by_role("button", name=name, exact=True)


def test_a_chat_is_streamed_to_its_end(visit: Start, scripted: RunningServer, picture: Picture) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("How do priorities age?")
    expect(button(tab.page, "Stop")).to_be_visible()
    answer = tab.answered()
    expect(answer.locator("pre")).to_contain_text("def effective_priority")
    expect(answer.locator("pre .hljs-keyword").first).to_have_text("def")
    expect(answer.locator("td").first).to_have_text("low")
    expect(answer.locator("ol li")).to_have_count(2)
    expect(answer.locator(".stats")).to_contain_text("tokens/s")
    expect(answer.locator(".stats")).to_contain_text("first token after")
    expect(tab.page.get_by_label("Message")).to_be_focused()
    thinking = answer.locator("details.thinking")
    assert not thinking.evaluate("each => each.open")
    expect(thinking.locator("strong")).to_be_hidden()
    thinking.locator("summary").click()
    expect(thinking.locator("strong")).to_have_text("Markdown")
    thinking.locator("summary").click()
    expect(tab.page.locator("#announcer")).to_contain_text("The answer:")
    picture(tab.page, "chat")
    tab.check_accessible()
    tab.page.emulate_media(color_scheme="dark")
    picture(tab.page, "chat-dark")
    tab.check_accessible()


def test_a_new_chat_shows_its_model_and_what_to_ask(visit: Start, demo: RunningServer) -> None:
    models = {"demo": ("text", 7_615_616_512, 4_300_000_000), "other": ("vision", 4_000_000, 3_600_000)}
    entries = [
        {"id": name, "object": "model", "state": "loaded", "kind": kind, "parameters": parameters, "size_bytes": size}
        for name, (kind, parameters, size) in models.items()
    ]
    tab = visit(demo, PHONE)
    tab.page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": entries}))
    tab.open()
    empty = tab.page.locator(".empty")
    expect(empty).to_contain_text("7.6 billion parameters · 4.3 GB")
    expect(empty).to_contain_text(f"for {tab.url.removeprefix('http://')} only")
    tab.check_accessible()
    tab.page.get_by_label("Model", exact=True).select_option("other")
    expect(empty.get_by_role("heading")).to_have_text("other")
    expect(empty).to_contain_text("4.0 million parameters · 3.6 MB")
    tab.page.unroute("**/v1/models")
    button(tab.page, "What is 17 + 25?").click()
    field = tab.page.get_by_label("Message")
    expect(field).to_have_value("What is 17 + 25?")
    expect(field).to_be_focused()
    tab.page.get_by_label("Model", exact=True).select_option("demo")
    field.press("Enter")
    expect(tab.answered().locator(".answer")).to_have_text("42")
    expect(empty).to_have_count(0)


def test_code_is_copied(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted, permissions=["clipboard-read", "clipboard-write"])
    tab.open()
    tab.say("How do priorities age?")
    answer = tab.answered()
    button(answer.locator(".code-bar"), "Copy").click()
    expect(answer.locator(".code-bar button")).to_have_text("Copied")
    assert tab.page.evaluate("navigator.clipboard.readText()").startswith("def effective_priority")


def test_nothing_that_a_model_writes_runs_or_loads(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("Attack!")
    answer = tab.answered()
    text = answer.locator(".answer")
    expect(text).to_contain_text("<script>window.hacked = 1</script>")
    expect(text).to_contain_text("<b>code</b>")
    expect(text.locator("sub")).to_have_text("2")
    links = text.locator("a").evaluate_all(
        "all => all.map(each => [each.textContent, each.href, each.target, each.rel])"
    )
    outside = ["_blank", "noopener noreferrer"]
    assert [link for link in links if link[1]] == [
        ["good", "https://example.com/good", *outside],
        ["image", "https://example.com/picture.png", *outside],
    ]
    assert text.locator("img, script, style, iframe, form, [onclick], [onerror], [style], [id], .composer").count() == 0
    assert tab.page.evaluate("window.hacked") is None


def test_quotes_that_nest_without_end_are_shown_as_text(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    shown = """async () => {
        const { Markdown } = await import("/web/chat/markdown.js");
        const answer = new Markdown();
        const end = { complete: true };
        answer.show("**Before**", end);
        answer.show(">".repeat(50000), end);
        const all = answer.element.textContent.length;
        answer.show("> after", end);
        return [all, answer.element.innerHTML];
    }"""
    length, after = tab.page.evaluate(shown)
    assert length == 50000
    assert after.startswith('<div class="block"><blockquote>')


def test_an_answer_is_stopped_and_made_again(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("Count!")
    answer = tab.page.locator(".message.assistant")
    expect(answer).to_contain_text("word word")
    button(tab.page, "Stop").click()
    expect(answer.locator(".note")).to_have_text("Stopped.")
    length = len(answer.locator(".answer").inner_text())
    scripted.wait_idle()
    assert len(answer.locator(".answer").inner_text()) == length < 5000
    button(answer, "Regenerate").click()
    expect(answer).to_have_count(1)
    expect(answer).to_contain_text("word word")
    tab.page.keyboard.press("Escape")
    expect(answer.locator(".note")).to_have_text("Stopped.")
    scripted.wait_idle()


def test_an_answer_goes_on_after_a_limit(visit: Start, demo: RunningServer) -> None:
    tab = visit(demo)
    tab.open()
    button(tab.page, "Settings").click()
    dialog = tab.page.get_by_role("dialog")
    dialog.get_by_label("Temperature").fill("0")
    dialog.get_by_label("Max tokens").fill("1")
    button(dialog, "Save").click()
    tab.say("What is 17 + 25?")
    answer = tab.answered()
    expect(answer.locator(".note")).to_have_text("The answer reached its limit of tokens.")
    begun = answer.locator(".answer").inner_text()
    assert begun != "42"
    button(tab.page, "Settings").click()
    dialog.get_by_label("Max tokens").fill("")
    button(dialog, "Save").click()
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        button(answer, "Continue").click()
    body = json.loads(sent.value.post_data or "")
    assert body["messages"][-1] == {"role": "assistant", "content": begun}
    assert body["continue_final_message"] is True
    expect(tab.answered().locator(".answer")).to_have_text("42")
    expect(answer.locator(".note")).to_be_hidden()
    expect(button(answer, "Continue")).to_be_hidden()
    tab.page.reload()
    expect(tab.answered().locator(".answer")).to_have_text("42")
    expect(tab.page.locator(".message")).to_have_count(2)


def test_an_answer_goes_on_after_a_stop_with_its_thought(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("Ponder!")
    answer = tab.page.locator(".message.assistant")
    expect(answer.locator(".answer")).to_contain_text("word word")
    button(tab.page, "Stop").click()
    expect(answer.locator(".note")).to_have_text("Stopped.")
    scripted.wait_idle()
    begun = answer.locator(".answer").inner_text()
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        button(answer, "Continue").click()
    last = json.loads(sent.value.post_data or "")["messages"][-1]
    assert last["reasoning_content"].strip() == "Words."
    expect(button(tab.page, "Stop")).to_be_visible()
    button(tab.page, "Stop").click()
    expect(answer.locator(".note")).to_have_text("Stopped.")
    assert answer.locator(".answer").inner_text().startswith(begun)
    expect(tab.page.locator(".message")).to_have_count(2)
    scripted.wait_idle()


def test_calls_of_tools_are_shown_and_get_their_result(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    button(tab.page, "Settings").click()
    dialog = tab.page.get_by_role("dialog")
    tools = dialog.get_by_label("Tools")
    tools.fill("{")
    button(dialog, "Save").click()
    expect(dialog).to_be_visible()  # this is not JSON
    tools.fill(json.dumps(TOOLS))
    dialog.get_by_label("Temperature").fill("0.5")
    tab.check_accessible()
    button(dialog, "Save").click()
    expect(dialog).to_be_hidden()
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        tab.say("Weather in Rome?")
    assert json.loads(sent.value.post_data or "")["temperature"] == 0.5
    call = tab.answered().get_by_role("region", name="Call of get_weather")
    expect(call).to_contain_text('"city": "Rome"')
    call.get_by_label("Result").fill("Sunny, 25 degrees")
    button(call, "Give result").click()
    expect(tab.page.locator(".message.tool")).to_contain_text("Sunny, 25 degrees")
    expect(tab.answered()).to_contain_text("It is sunny in Rome.")


def test_the_settings_of_a_new_chat_outlive_a_reload_and_are_all_sent(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    button(tab.page, "Settings").click()
    dialog = tab.page.get_by_role("dialog")
    numbers = {"Min p": 0.05, "Repetition penalty": 1.1, "Presence penalty": -0.5, "Frequency penalty": 0.5, "Seed": 7}
    for name, value in numbers.items():
        dialog.get_by_label(name).fill(str(value))
    dialog.get_by_label("System prompt").fill("Be brief.")
    dialog.get_by_label("Stop").fill("END\n\\n\\n")
    properties = {"answer": {"type": "string", "maxLength": 9}}
    schema = {"type": "object", "properties": properties, "required": ["answer"], "additionalProperties": False}
    dialog.get_by_label("JSON schema").fill("[]")
    button(dialog, "Save").click()
    expect(dialog).to_be_visible()  # this is no schema
    dialog.get_by_label("JSON schema").fill(json.dumps(schema))
    button(dialog, "Save").click()
    expect(dialog).to_be_hidden()
    tab.page.reload()
    with tab.page.expect_request("**/v1/chat/completions") as sent:
        tab.say("Right question")
    body = json.loads(sent.value.post_data or "")
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: body[name.lower().replace(" ", "_")] for name in numbers} == numbers
    assert body["stop"] == ["END", "\n\n"]
    assert body["response_format"]["json_schema"]["schema"] == schema
    assert set(json.loads(tab.answered().locator(".answer").inner_text())) == {"answer"}


def test_the_prompt_of_an_answer_is_shown_as_the_template_makes_it(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    button(tab.page, "Settings").click()
    dialog = tab.page.get_by_role("dialog")
    dialog.get_by_label("System prompt").fill("Be <b>brief</b>.")
    dialog.get_by_label("Tools").fill(json.dumps(TOOLS))
    button(dialog, "Save").click()
    tab.say("Right question")
    tab.answered()
    tab.say("Second chat")
    tab.answered()
    button(tab.page.locator(".message.assistant").first, "Prompt").click()
    prompt = dialog.get_by_role("region", name="Prompt")
    expect(prompt).to_contain_text("<|im_start|>system\nBe <b>brief</b>.<|im_end|>", use_inner_text=True)
    expect(prompt).to_contain_text("Right question<|im_end|>\n<|im_start|>assistant", use_inner_text=True)
    expect(prompt).to_contain_text("get_weather")
    expect(prompt).not_to_contain_text("A right answer.")
    tab.check_accessible()
    button(dialog, "Close").click()
    expect(dialog).to_be_hidden()


def test_conversations_stay_in_the_browser_and_are_renamed_exported_and_deleted(
    visit: Start, scripted: RunningServer
) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("Right question")
    tab.answered()
    button(tab.page, "New chat").click()
    tab.say("Second chat")
    tab.answered()
    tab.page.reload()
    chats = tab.page.get_by_role("navigation", name="Conversations").get_by_role("link")
    expect(chats).to_have_text(["Second chat", "Right question"])
    expect(tab.answered()).to_contain_text("Here too.")
    chats.last.click()
    expect(tab.answered()).to_contain_text("A right answer.")
    tab.page.get_by_label("Actions of Right question").click()
    button(tab.page, "Rename").click()
    tab.page.get_by_role("textbox", name="Name").fill("Renamed")
    tab.page.get_by_role("textbox", name="Name").press("Enter")
    expect(tab.page.get_by_role("heading", level=1)).to_have_text("Renamed")
    tab.page.get_by_label("Actions of Renamed").click()
    with tab.page.expect_download() as download:
        button(tab.page, "Export").click()
    exported = json.loads(Path(download.value.path()).read_text())
    assert download.value.suggested_filename == "Renamed.json"
    assert [message["content"] for message in exported["messages"]] == ["Right question", "A right answer."]
    tab.page.reload()
    tab.delete("Renamed")
    expect(chats).to_have_text(["Second chat"])
    tab.page.reload()
    expect(chats).to_have_text(["Second chat"])


def test_a_chat_that_is_deleted_while_it_is_answered_stays_deleted(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("Count!")
    expect(tab.page.locator(".message.assistant .answer")).to_contain_text("word")
    tab.delete("Count!")
    expect(tab.page.get_by_role("heading", level=1)).to_have_text("New chat")
    tab.say("Second chat")
    tab.answered()
    chats = tab.page.get_by_role("navigation", name="Conversations").get_by_role("link")
    expect(chats).to_have_text(["Second chat"])
    tab.page.reload()
    expect(chats).to_have_text(["Second chat"])


def test_a_chat_that_another_tab_deletes_while_it_is_answered_stays_deleted(
    visit: Start, scripted: RunningServer
) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("Count!")
    expect(tab.page.locator(".message.assistant .answer")).to_contain_text("word")
    other = Visit(tab.page.context.new_page(), tab.url)
    other.open()
    other.delete("Count!")
    expect(tab.page.get_by_role("heading", level=1)).to_have_text("New chat")
    tab.say("Second chat")
    tab.answered()
    for page in (tab.page, other.page):
        chats = page.get_by_role("navigation", name="Conversations").get_by_role("link")
        expect(chats).to_have_text(["Second chat"])


def test_two_tabs_of_a_chat_lose_no_messages(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("Right question")
    tab.answered()
    other = Visit(tab.page.context.new_page(), tab.url)
    other.open("/" + tab.page.evaluate("location.hash"))
    other.say("Second chat")
    other.answered()
    said = ["Right question", "A right answer.", "Second chat", "Here too."]
    texts = tab.page.locator(".message :is(.plain, .answer)")
    expect(texts).to_have_text(said)
    tab.say("Wrong question")
    expect(tab.answered()).to_contain_text("A wrong answer.")
    tab.page.reload()
    expect(texts).to_have_text([*said, "Wrong question", "A wrong answer."])
    button(other.page, "New chat").click()
    tab.delete("Right question")
    expect(other.page.get_by_role("navigation", name="Conversations").get_by_role("link")).to_have_count(0)


def test_the_page_works_if_the_user_lets_it_store_nothing(visit: Start, closed: RunningServer, key: str) -> None:
    tab = visit(closed)
    tab.allowed = {401}
    forbidden = "{ get() { throw new DOMException('Access is denied', 'SecurityError'); } }"
    for name in ("localStorage", "sessionStorage", "indexedDB"):
        tab.page.add_init_script(f"Object.defineProperty(window, '{name}', {forbidden})")
    tab.open()
    dialog = tab.page.get_by_role("dialog", name="API key")
    dialog.get_by_label("API key").fill(key)
    dialog.get_by_label("API key").press("Enter")
    expect(dialog).to_be_hidden()
    tab.say("What is 17 + 25?")
    expect(tab.answered().locator(".answer")).to_have_text("42")


def test_the_page_says_that_the_browser_has_no_room_for_a_chat(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.page.add_init_script(FULL)
    tab.open()
    tab.say("Right question")
    tab.answered()
    expect(tab.page.get_by_role("alert")).to_contain_text("The browser cannot keep this chat: the disk is full")


def test_what_was_written_of_an_answer_outlives_a_reload(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("Count!")
    answer = tab.page.locator(".message.assistant")
    expect(answer).to_contain_text("word word")
    tab.page.reload()
    expect(answer.locator(".answer")).to_contain_text("word word")
    expect(answer.locator(".note")).to_have_text("Stopped.")
    scripted.wait_idle()


def test_what_was_written_of_an_answer_outlives_a_page_that_the_system_ends(
    visit: Start, scripted: RunningServer
) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("Count!")
    expect(tab.page.locator(".message.assistant")).to_contain_text("word word")
    tab.page.evaluate(HIDE)
    other = Visit(tab.page.context.new_page(), tab.url)
    other.open("/" + tab.page.evaluate("location.hash"))
    answer = other.page.locator(".message.assistant")
    expect(answer.locator(".answer")).to_contain_text("word word")
    expect(answer.locator(".note")).to_have_text("This answer is not complete.")
    button(tab.page, "Stop").click()
    expect(answer.locator(".note")).to_have_text("Stopped.")
    scripted.wait_idle()


def test_an_answer_and_what_another_tab_adds_to_its_chat_are_both_kept(visit: Start, scripted: RunningServer) -> None:
    tab, held = visit(scripted), list[Route]()
    tab.open()
    tab.page.route("**/v1/chat/completions", lambda route: held.append(route))
    with tab.page.expect_request("**/v1/chat/completions"):
        tab.say("Right question")
    other = Visit(tab.page.context.new_page(), tab.url)
    other.open("/" + tab.page.evaluate("location.hash"))
    other.say("Second chat")
    texts = ".message :is(.plain, .answer)"
    said = ["Right question", "", "Second chat", "Here too."]
    for page in (other.page, tab.page):
        expect(page.locator(texts)).to_have_text(said)
    held[0].continue_()
    said[1] = "A right answer."
    for page in (tab.page, other.page):
        expect(page.locator(texts)).to_have_text(said)
    tab.page.reload()
    expect(tab.page.locator(texts)).to_have_text(said)


def test_a_chat_is_renamed_after_another_tab_has_gone_on_with_it(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("Right question")
    tab.answered()
    tab.page.get_by_label("Actions of Right question").click()
    button(tab.page, "Rename").click()
    other = Visit(tab.page.context.new_page(), tab.url)
    other.open("/" + tab.page.evaluate("location.hash"))
    other.say("Second chat")
    texts = ".message :is(.plain, .answer)"
    said = ["Right question", "A right answer.", "Second chat", "Here too."]
    expect(tab.page.locator(texts)).to_have_text(said)
    tab.page.get_by_role("textbox", name="Name").fill("Renamed")
    tab.page.get_by_role("textbox", name="Name").press("Enter")
    expect(other.page.get_by_role("heading", level=1)).to_have_text("Renamed")
    other.page.reload()
    expect(other.page.locator(texts)).to_have_text(said)


def test_the_model_that_was_chosen_is_that_of_new_chats_after_a_reload_too(
    visit: Start, scripted: RunningServer
) -> None:
    models = [{"id": name, "object": "model", "state": "loaded", "kind": "text"} for name in ("first", "second")]
    tab = visit(scripted)
    tab.page.route("**/v1/models", lambda route: route.fulfill(json={"object": "list", "data": models}))
    tab.open()
    picker = tab.page.get_by_label("Model", exact=True)
    expect(picker).to_have_value("first")
    picker.select_option("second")
    button(tab.page, "New chat").click()
    expect(picker).to_have_value("second")
    tab.page.reload()
    expect(picker.get_by_role("option")).to_have_text(["first", "second"])
    expect(picker).to_have_value("second")


def test_a_wrong_key_is_refused_and_the_right_one_is_kept_for_the_tab(
    visit: Start, closed: RunningServer, key: str
) -> None:
    tab = visit(closed)
    tab.allowed = {401, 403}
    tab.open()
    dialog = tab.page.get_by_role("dialog", name="API key")
    expect(dialog).to_contain_text("needs an API key")
    tab.check_accessible()
    field = dialog.get_by_label("API key")
    field.fill("sk-wrong")
    field.press("Enter")
    expect(dialog).to_contain_text("does not know the API key")
    field.fill(key)
    field.press("Enter")
    expect(dialog).to_be_hidden()
    tab.say("What is 17 + 25?")
    expect(tab.answered().locator(".answer")).to_have_text("42")
    stored = "() => [sessionStorage.getItem('mlxpaged-key'), localStorage.getItem('mlxpaged-key')]"
    assert tab.page.evaluate(stored) == [key, None]
    assert key not in tab.page.url
    tab.page.reload()
    expect(tab.page.get_by_label("Model", exact=True)).to_have_value("demo")
    tab.page.get_by_role("link", name="Server").click()
    expect(tab.page.get_by_role("alert")).to_contain_text("needs an admin key")
    tab.page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    tab.check_fits()
    button(tab.page, "Forget key").click()
    assert tab.page.evaluate(stored) == [None, None]


def test_the_page_works_on_a_phone_and_with_the_keyboard(
    visit: Start, scripted: RunningServer, picture: Picture
) -> None:
    tab = visit(scripted, PHONE, is_mobile=True, has_touch=True)
    tab.open()
    tab.say("How do priorities age?")
    expect(tab.answered().locator("table")).to_be_visible()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
    picture(tab.page, "chat-phone")
    tab.check_accessible()
    chats = button(tab.page, "Chats")
    chats.tap()
    expect(chats).to_have_attribute("aria-expanded", "true")
    expect(tab.page.get_by_role("link", name="How do priorities age?")).to_be_visible()
    tab.check_accessible()
    chats.tap()
    desk = visit(scripted)
    desk.open()
    desk.page.keyboard.press("Tab")
    expect(desk.page.get_by_role("link", name="Skip to the content")).to_be_focused()
    desk.page.keyboard.press("Enter")
    expect(desk.page.locator("main")).to_be_focused()


def test_the_colours_follow_the_system_or_the_switch(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted, color_scheme="dark")
    tab.open()
    back = "getComputedStyle(document.body).backgroundColor"
    dark = tab.page.evaluate(back)
    tab.page.get_by_role("button", name="Colours: auto").click()
    light = tab.page.evaluate(back)
    assert (dark, light) == ("rgb(21, 24, 27)", "rgb(255, 255, 255)")
    tab.page.reload()
    assert tab.page.evaluate(back) == light
    tab.page.get_by_role("button", name="Colours: light").click()
    tab.page.emulate_media(color_scheme="light")
    assert tab.page.evaluate(back) == dark


def test_an_error_of_the_server_is_shown_in_its_own_words(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.allowed = {400}
    tab.open()
    tab.say("Right question")
    tab.answered()
    tab.say("x" * 9000)
    expect(tab.page.locator(".composer").get_by_role("alert")).to_contain_text("tokens")
    expect(tab.page.get_by_label("Message")).to_have_value("x" * 9000)
    expect(tab.page.locator(".message")).to_have_count(2)
    tab.say("Second chat")
    expect(tab.answered()).to_contain_text("Here too.")


def test_an_error_stays_under_the_answer_if_something_else_is_being_written(
    visit: Start, scripted: RunningServer
) -> None:
    tab, held = visit(scripted), list[Route]()
    tab.allowed = {503}
    tab.open()
    tab.page.route("**/v1/chat/completions", lambda route: held.append(route))
    with tab.page.expect_request("**/v1/chat/completions"):
        tab.say("Right question")
    tab.page.get_by_label("Message").fill("Second chat")
    held[0].fulfill(status=503, json={"error": {"message": "the server is full"}})
    expect(tab.answered().get_by_role("alert")).to_have_text("the server is full")
    expect(tab.page.get_by_label("Message")).to_have_value("Second chat")
