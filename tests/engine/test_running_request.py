"""Where an answer ends, and its text."""

from __future__ import annotations

import pytest

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.scheduling.sequence import FinishReason
from mlxpaged.models.loader import ServedModel
from tests.engine.llama import PROMPTS, core, make_core, run, served, submit, tokens
from tests.support import run_requests

__all__ = ["core", "served"]


pytestmark = pytest.mark.usefixtures("overlaps")


def test_stop_tokens_end_an_answer_and_leave_no_text(core: EngineCore, served: ServedModel) -> None:
    [free] = run_requests(make_core(served), [PROMPTS[0]], max_tokens=12)
    stop = next(token for token in free if free.index(token) >= 3)
    at = free.index(stop)
    submit(core, "stopped", PROMPTS[0], stop_token_ids=frozenset({stop}))
    outputs = run(core)["stopped"]
    assert tokens(outputs) == free[: at + 1]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].num_output_tokens == at + 1
    assert "".join(output.text for output in outputs) == served.tokenizer.decode(free[:at])


def test_an_answer_cut_inside_a_character_still_gives_all_its_text(core: EngineCore, served: ServedModel) -> None:
    for i, prompt in enumerate(PROMPTS):
        submit(core, str(i), prompt, max_tokens=40)
    for outputs in run(core).values():
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert "".join(output.text for output in outputs) == served.tokenizer.decode(tokens(outputs))
