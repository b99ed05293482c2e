"""The whole server on the Metal backend: on a Mac for real, elsewhere with the kernels interpreted on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import answer_text, ask, stream_together
from tests.metal_on_cpu.fixtures import metal
from tests.support import poison_new_blocks, running_server

__all__ = ["metal"]

PREFIX = "Repeat: " + "blue river stone green hill " * 6


def questions() -> list[dict[str, Any]]:
    """Three share a prefix, and one has a grammar."""
    bodies = [ask(f"{PREFIX}{word}", max_tokens=6) for word in ("sand", "leaf", "moon")]
    choice = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [17, 42]}}}
    return [*bodies, ask("What is 17 + 25?", max_tokens=6, response_format=choice)]


@pytest.mark.more
@pytest.mark.usefixtures("metal")
def test_requests_over_http_get_the_answers_of_the_reference_backend() -> None:
    answers = []
    for backend in ("gather", "metal"):
        tuning = "auto" if backend == "gather" else "default"
        config = EngineConfig(kv_cache_bytes=8_000_000, attention_backend=backend, attention_tuning=tuning)
        with running_server(config) as server:
            poison_new_blocks(server.core)
            first = answer_text(server, ask("What is 17 + 25?"))
            answers.append([first, *stream_together(server, questions())])
            assert server.core.runner.backend == backend
            assert server.core.runner.overlaps == (backend == "metal")
            assert server.engine.stats.scheduler.prefix_hit_tokens_total > 0
            server.wait_idle()
    assert answers[0] == answers[1]
    assert answers[1][0] == answers[1][-1] == "42"
