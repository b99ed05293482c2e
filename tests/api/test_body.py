"""What stays of a body after its request."""

from __future__ import annotations

import json
from pathlib import Path

from mlxpaged.api.batches.lines import read_line
from mlxpaged.api.body import parse
from mlxpaged.api.openai.schema import CompletionRequest
from tests.api.helpers import checked_file

TEXT = "known to one client"


def test_the_parser_keeps_no_text_of_a_request() -> None:
    """It would return the text that it keeps, and not an equal one."""
    body = json.dumps({"prompt": "a", "user": TEXT}).encode()
    first, second = (parse(body, CompletionRequest).user for _ in range(2))
    assert first == second == TEXT
    assert first is not second


def test_the_parser_keeps_no_text_of_a_batch(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    url = "/v1/completions"
    path.write_text(json.dumps({"custom_id": TEXT, "method": "POST", "url": url, "body": {"prompt": TEXT}}))
    [first], [second] = checked_file(path, url).places, checked_file(path, url).places
    assert first.custom_id == TEXT
    assert first.custom_id is not second.custom_id
    assert read_line(path, first).body["prompt"] is not read_line(path, first).body["prompt"]


def test_a_byte_order_mark_before_json_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "input.jsonl"
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": TEXT}}
    path.write_text(json.dumps(line), encoding="utf-8-sig")
    check = checked_file(path, "/v1/completions")
    assert not check.errors
    [place] = check.places
    assert parse(json.dumps(read_line(path, place).body).encode("utf-8-sig"), CompletionRequest).prompt == [TEXT]
