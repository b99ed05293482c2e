"""What speculative decoding says of itself."""

from __future__ import annotations

import logging

import pytest

from mlxpaged.parts.drafting.draft_budget import DraftBudget
from mlxpaged.parts.drafting.draft_stats import LOG_SECONDS, DraftGain, GainLog


def test_tokens_are_compared_with_what_plain_steps_would_have_brought() -> None:
    budget = DraftBudget(lambda: lambda rows, keys: 0.1)
    gain = DraftGain()
    assert (gain.tokens_per_pass, gain.share_of_steps, gain.speedup) == (1.0, 0.0, 1.0)
    for has_drafts, tokens, seconds in ((False, 4, 0.1), (True, 10, 0.125), (True, 4, 0.125)):
        took = budget.note_step(4, 400, (4, 400) if has_drafts else (0, 0), seconds)
        gain = gain.plus(has_drafts, 4, tokens, took * 4)
    assert gain.tokens_per_pass == 18 / 12
    assert gain.share_of_steps == 2 / 3
    assert gain.plain_tokens == pytest.approx(4 + 5 + 5), "a step without drafts is what it is"
    assert gain.speedup == pytest.approx(18 / 14)


def test_what_the_device_waits_for_drafts_counts_as_time() -> None:
    budget = DraftBudget(lambda: lambda rows, keys: 0.1)
    for _ in range(200):
        budget.note_exposed(9.0)
    assert budget.exposed == pytest.approx(0.1), "a wait counts as one step at most"
    assert budget.note_step(1, 100, (1, 100), 0.1) == pytest.approx(2.0)


def test_the_log_has_a_line_of_each_minute_with_drafts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log, gain = GainLog(0.0), DraftGain()
    for second in range(int(3 * LOG_SECONDS) + 1):
        gain = gain.plus(second < LOG_SECONDS, 2, 3 if second < LOG_SECONDS else 2, 2.5)
        log.write(gain, float(second))
    assert [record.getMessage() for record in caplog.records] == [
        "drafts: 1.49 tokens a pass, in 98 % of 61 decoding steps; 1.19 times the tokens of plain steps"
    ], "the other minutes had none"
