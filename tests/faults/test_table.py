"""What counts as an error with a reason, in each format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.faults.table import LostError, Outcome, judge
from tests.faults.wire import Reply

DEAD = "the engine is dead: RuntimeError: x"
FORMATS: dict[str, Any] = {
    "/v1/completions": lambda text: {"error": {"message": text, "code": "some_code"}},
    "/v1/messages": lambda text: {"type": "error", "error": {"type": "api_error", "message": text}},
    "/api/chat": lambda text: {"error": text},
}


@pytest.mark.parametrize("path", FORMATS)
def test_of_refusals_with_503_only_that_of_a_dead_engine_needs_no_retry_after(path: str) -> None:
    def refusal(text: str, **headers: str) -> Reply:
        return Reply(503, headers, json.dumps(FORMATS[path](text)).encode(), True)

    assert judge(path, refusal(DEAD), None, (200, 503)) is Outcome.REFUSED
    assert judge(path, refusal("busy", **{"retry-after": "1"}), None, (200, 503)) is Outcome.REFUSED
    with pytest.raises(LostError, match="no Retry-After"):
        judge(path, refusal("busy"), None, (200, 503))
