"""Versions of turns in Chromium: what Edit and Regenerate keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Route, expect

from tests.browser.conftest import Visit
from tests.browser.test_chat import button
from tests.support import RunningServer

pytestmark = pytest.mark.browser

Start = Callable[..., Visit]

STORE_OLD = """async () => {
    const { Conversations } = await import("/web/chat/conversations.js");
    const stored = new Conversations();
    const chat = stored.add("scripted", { system: "", tools: "", thinking: "", numbers: {} });
    chat.title = "Old chat";
    chat.messages = [
        { role: "user", content: "Old question" },
        { role: "assistant", content: "Old answer", reasoning: "", toolCalls: [], model: "scripted", finish: "stop" },
    ];
    await stored.save(chat);
}"""
RUN = """async ([steps]) => {
    const { branchOff, choose, placeOf } = await import("/web/chat/versions.js");
    const messages = [];
    const say = (content, versions) => messages.push({ content, ...(versions && { versions }) });
    for (const [step, ...values] of steps) {
        const at = (content) => messages.find((each) => each.content === content);
        if (step === "say") say(values[0]);
        if (step === "replace") say(values[1], branchOff(messages, at(values[0])));
        if (step === "choose") choose(messages, at(values[0]), values[1]);
        if (step === "fail") at(values[0]).error = "broken", at(values[0]).content = "";
    }
    return messages.map((each) => [each.content, placeOf(each)?.number ?? 0, placeOf(each)?.count ?? 0]);
}"""


def texts(tab: Visit) -> Any:
    return tab.page.locator(".message :is(.plain, .answer)")


def place(message: Any) -> Any:
    return message.get_by_role("group", name="Versions").locator("span")


def sent(body: str | None) -> list[str]:
    return [message["content"] for message in json.loads(body or "")["messages"]]


def test_versions_of_versions_are_kept_and_found_again(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()

    def run(*steps: tuple[Any, ...]) -> Any:
        return tab.page.evaluate(RUN, [steps])

    inner = (("say", "a"), ("say", "b"), ("say", "c"), ("replace", "c", "C"), ("replace", "b", "B"), ("say", "d"))
    assert run(*inner) == [["a", 0, 0], ["B", 2, 2], ["d", 0, 0]]
    assert run(*inner, ("choose", "B", 1)) == [["a", 0, 0], ["b", 1, 2], ["C", 2, 2]]
    back = (*inner, ("choose", "B", 1), ("choose", "C", 1), ("choose", "b", 2))
    assert run(*back) == [["a", 0, 0], ["B", 2, 2], ["d", 0, 0]]
    assert run(*back, ("choose", "B", 1)) == [["a", 0, 0], ["b", 1, 2], ["c", 1, 2]]
    assert run(*inner, ("choose", "B", 1), ("replace", "b", "x")) == [["a", 0, 0], ["x", 3, 3]]
    assert run(*inner, ("choose", "B", 3), ("choose", "B", 0)) == run(*inner)


def test_an_attempt_that_failed_is_no_version(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    failed = [("say", "a"), ("say", "b"), ("fail", "b"), ("replace", "", "c")]
    assert tab.page.evaluate(RUN, [failed]) == [["a", 0, 0], ["c", 0, 0]]
    later = [("say", "b"), ("replace", "b", "c"), ("fail", "c"), ("replace", "", "d")]
    assert tab.page.evaluate(RUN, [later]) == [["d", 2, 2]]


def test_an_edited_message_keeps_the_version_before_with_what_followed_it(
    visit: Start, scripted: RunningServer
) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("Wrong question")
    expect(tab.answered()).to_contain_text("A wrong answer.")
    tab.say("Second chat")
    expect(tab.answered()).to_contain_text("Here too.")
    first = tab.page.locator(".message.user").first
    button(first, "Edit").click()
    field = tab.page.get_by_label("Edit your message")
    expect(field).to_be_focused()
    field.press("Escape")
    expect(tab.page.locator(".message")).to_have_count(4)
    button(first, "Edit").click()
    field.fill("Right question")
    field.press("Enter")
    expect(tab.answered()).to_contain_text("A right answer.")
    expect(texts(tab)).to_have_text(["Right question", "A right answer."])
    expect(place(first)).to_have_text("2 / 2")
    expect(button(first, "Next version")).to_be_disabled()
    tab.check_accessible()
    button(first, "Previous version").click()
    expect(texts(tab)).to_have_text(["Wrong question", "A wrong answer.", "Second chat", "Here too."])
    expect(place(first)).to_have_text("1 / 2")
    expect(button(first, "Next version")).to_be_focused()
    expect(tab.page.locator("#announcer")).to_have_text("Version 1 of 2")
    with tab.page.expect_request("**/v1/chat/completions") as request:
        tab.say("Right question")
    wrong = ["Wrong question", "A wrong answer.", "Second chat", "Here too.", "Right question"]
    assert sent(request.value.post_data) == wrong
    tab.answered()
    tab.page.reload()
    expect(texts(tab)).to_have_text([*wrong, "A right answer."])
    button(first, "Next version").click()
    with tab.page.expect_request("**/v1/chat/completions") as request:
        tab.say("Second chat")
    assert sent(request.value.post_data) == ["Right question", "A right answer.", "Second chat"]
    tab.answered()


def test_a_regenerated_answer_keeps_the_one_before(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("Right question")
    answer = tab.answered()
    tab.page.route("**/v1/chat/completions", answer_other)
    button(answer, "Regenerate").click()
    expect(tab.page.locator(".message.assistant")).to_have_count(1)
    expect(answer.locator(".answer")).to_have_text("Another answer.")
    expect(place(answer)).to_have_text("2 / 2")
    tab.page.reload()
    button(answer, "Previous version").click()
    expect(answer.locator(".answer")).to_have_text("A right answer.")
    tab.page.get_by_label("Actions of Right question").click()
    with tab.page.expect_download() as download:
        button(tab.page, "Export").click()
    exported = json.loads(Path(download.value.path()).read_text())
    versions = exported["messages"][1]["versions"]
    assert [tail and [each["content"] for each in tail] for tail in versions["tails"]] == [None, ["Another answer."]]


def answer_other(route: Route) -> None:
    chunk = {"choices": [{"delta": {"content": "Another answer."}, "finish_reason": "stop"}]}
    route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")


def test_versions_stay_while_an_answer_is_written(visit: Start, scripted: RunningServer) -> None:
    tab = visit(scripted)
    tab.open()
    tab.say("Count!")
    answer = tab.page.locator(".message.assistant")
    expect(answer).to_contain_text("word word")
    button(tab.page, "Stop").click()
    expect(answer.locator(".note")).to_have_text("Stopped.")
    button(answer, "Regenerate").click()
    expect(answer).to_contain_text("word word")
    button(answer, "Previous version").click()
    expect(place(answer)).to_have_text("2 / 2")
    button(tab.page, "Stop").click()
    expect(answer.locator(".note")).to_have_text("Stopped.")
    button(answer, "Previous version").click()
    expect(place(answer)).to_have_text("1 / 2")
    scripted.wait_idle()


def test_a_conversation_that_was_stored_before_there_were_versions_goes_on(
    visit: Start, scripted: RunningServer
) -> None:
    tab = visit(scripted)
    tab.open()
    expect(tab.page.get_by_label("Message")).to_be_visible()
    tab.page.evaluate(STORE_OLD)
    tab.page.reload()
    tab.page.get_by_role("link", name="Old chat").click()
    expect(texts(tab)).to_have_text(["Old question", "Old answer"])
    expect(tab.page.get_by_role("group", name="Versions")).to_have_count(0)
    button(tab.answered(), "Regenerate").click()
    expect(place(tab.answered())).to_have_text("2 / 2")
    button(tab.answered(), "Previous version").click()
    expect(texts(tab)).to_have_text(["Old question", "Old answer"])
