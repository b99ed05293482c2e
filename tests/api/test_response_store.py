"""What the store of responses keeps, and whose it forgets."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpaged.api.openai.responses import store as response_store
from mlxpaged.api.openai.responses.schema import MessageItem
from mlxpaged.api.openai.responses.store import ITEM, Key, ResponseStore

NAMES = iter(range(10**6))


def put(store: ResponseStore, owner: str, size: int = 1000, previous: Key | None = None) -> Key:
    """Its owner and id. The question has so many characters, the answer is "Yes."."""
    number = next(NAMES)
    content = [{"type": "output_text", "text": "Yes.", "annotations": [{}] * 10}]
    answer = {"id": f"msg-{number}", "type": "message", "role": "assistant", "content": content}
    response = {"id": f"resp-{number}", "output": [answer]}
    before = None if previous is None else store.responses[previous]
    store.add(owner, response, before, [MessageItem(role="user", content="x" * size)])
    return owner, f"resp-{number}"


def text_of(item: Any) -> str:
    return item.content if isinstance(item.content, str) else item.content[0].text


def test_a_conversation_outlives_the_responses_before_it() -> None:
    store = ResponseStore()
    first = put(store, "anna", 1)
    second = put(store, "anna", 2, first)
    store.delete(*first)
    third = put(store, "anna", 3, second)
    assert [text_of(item) for item in store.responses[third].conversation] == ["x", "Yes.", "xx", "Yes.", "xxx", "Yes."]
    assert first not in store.responses
    assert store.item("anna", f"{first[1]}-input-0") is None
    held = store.num_bytes
    store.delete(*second)
    assert store.num_bytes == held  # the third needs them
    store.delete(*third)
    assert store.num_bytes == 0


def test_a_response_that_comes_again_is_kept_once() -> None:
    store = ResponseStore()
    for _ in range(2):  # of requests "1" and "resp_1", at once
        store.add("anna", {"id": "resp_1", "output": []}, None, [MessageItem(role="user", content="x")])
    assert store.num_bytes == store.responses["anna", "resp_1"].num_bytes
    store.delete("anna", "resp_1")
    assert store.num_bytes == 0


def test_a_response_that_is_deleted_while_it_is_continued_counts_again() -> None:
    store = ResponseStore()
    first = put(store, "anna", 1000)
    key = put(store, "anna", 2000, first)
    second = store.responses[key]
    held = store.num_bytes
    for response in (first, key):  # the next request has read the conversation
        store.delete(*response)
    store.add("anna", {"id": "third", "output": []}, second, [])
    third = store.responses["anna", "third"]
    assert [text_of(item) for item in third.conversation] == ["x" * 1000, "Yes.", "x" * 2000, "Yes."]
    assert store.num_bytes == held + third.num_bytes
    store.delete("anna", "third")
    assert store.num_bytes == 0


def test_what_a_conversation_holds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each response continues the one before: deleting those frees nothing, until the chain itself is too long."""
    monkeypatch.setattr(response_store, "MAX_BYTES", 100_000)
    store, last = ResponseStore(), None
    for _ in range(300):
        last = put(store, "anna", 2000, last if last in store.responses else None)
        assert store.num_bytes <= 100_000
    assert store.responses
    assert put(store, "anna", 200_000) not in store.responses


def test_nothing_is_deleted_for_a_conversation_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_BYTES", 100_000)
    store, other = ResponseStore(), None
    last = put(store, "anna", 60_000)
    for size in (1000, 30_000):
        other, last = put(store, "anna", 1, other), put(store, "anna", size, last)
    assert last in store.responses
    kept = dict(store.responses)
    assert put(store, "anna", 30_000, last) not in store.responses
    assert store.responses == kept


@pytest.mark.parametrize(("limit", "value"), [("MAX_BYTES", 60_000), ("MAX_RESPONSES", 20)])
def test_a_key_loses_nothing_by_what_another_stores(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(response_store, limit, value)
    store = ResponseStore()
    hers = [put(store, "anna") for _ in range(5)]
    last = None
    for _ in range(200):
        last = put(store, "bert", 1500, last if last in store.responses else None)
    assert all(name in store.responses for name in hers)
    assert last in store.responses
    kept = put(store, "carl")
    assert all(name in store.responses for name in (*hers, kept))


def test_items_are_found_by_their_owners() -> None:
    store = ResponseStore()
    _, name = put(store, "anna", 3)
    number = name.removeprefix("resp-")
    for item_id, text in ((f"{name}-input-0", "xxx"), (f"msg-{number}", "Yes.")):
        found = store.item("anna", item_id)
        assert found is not None
        assert text_of(ITEM.validate_json(found)) == text
        assert store.item("ben", item_id) is None
        assert store.item("root", item_id, any_owner=True) == found
    assert store.item("anna", "msg-none") is None


def test_two_owners_may_have_the_same_id() -> None:
    store = ResponseStore()
    for owner in ("anna", "ben"):
        store.add(owner, {"id": "resp_1", "output": []}, None, [MessageItem(role="user", content=owner)])
    found = {owner: store.find(owner, "resp_1") for owner in ("anna", "ben")}
    assert [each and text_of(each.conversation[0]) for each in found.values()] == ["anna", "ben"]
    store.delete("anna", "resp_1")
    assert store.find("anna", "resp_1") is None
    assert store.find("anna", "resp_1", any_owner=True) is found["ben"]
