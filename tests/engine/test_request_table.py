"""The requests inside an engine: how they are taken and ended."""

from __future__ import annotations

from collections import Counter

import pytest

from mlxpaged.core.engine.core import EngineCore
from tests.engine.llama import core, served, submit

__all__ = ["core", "served"]


pytestmark = pytest.mark.usefixtures("overlaps")


def test_every_request_ends_exactly_once_under_aborts(core: EngineCore) -> None:
    ends: Counter[str] = Counter()
    for i in range(12):
        submit(core, str(i), [i + 1] * (5 * i + 1), max_tokens=6)
    step = 0
    while core.has_work():
        outputs = core.step()
        step += 1
        outputs += core.abort(str(step)) + core.abort("unknown")
        ends.update(output.request_id for output in outputs if output.finish_reason is not None)
    assert ends == {str(i): 1 for i in range(12)}
    assert core.scheduler.pool.usage().used == 0
