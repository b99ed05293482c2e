"""Events of a stream of the responses API whose model is being loaded."""

from __future__ import annotations

import time
from typing import Any

from mlxpaged.api.errors import ApiError
from mlxpaged.api.request_id import response_id_of
from mlxpaged.api.streaming import Beginning, named_event


class ResponseBeginning(Beginning):
    """OpenAI's client refuses a stream that does not begin with `response.created`. Codex gives a stream up that has no
    event for five minutes: a model may be downloaded for longer.

    created: Unix time. num_events: those that were made, which have the first sequence numbers.
    """

    def __init__(self, request_id: str, model: str, named: str | None) -> None:
        self.created = int(time.time())
        self.num_events = 0
        self._response = {
            "id": response_id_of(request_id),
            "object": "response",
            "created_at": self.created,
            "status": "in_progress",
            "error": None,
            "model": model,
            "output": [],
            "tools": [],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
        }

    def go_on(self) -> str:
        return self._event("in_progress" if self.num_events else "created")

    def fail(self, error: ApiError) -> str:
        created = "" if self.num_events else self.go_on()
        details = {"code": error.code or error.kind, "message": error.message}
        return created + self._event("failed", status="failed", error=details)

    def _event(self, kind: str, **fields: Any) -> str:
        self.num_events += 1
        response = self._response | fields
        return named_event({"type": f"response.{kind}", "sequence_number": self.num_events - 1, "response": response})
