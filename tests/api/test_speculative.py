"""Speculative decoding over HTTP: the same answers, and what the client and the operator see of it."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import ask, metrics, post, raw
from tests.support import running_server

TEXT = "the river runs past the mill, the river runs past the inn, the river runs past the town"


def test_answers_are_those_without_drafts_and_usage_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the rule verifies all drafts, because what it decides depends on the machine."""
    monkeypatch.setattr(
        "mlxpaged.parts.drafting.draft_budget.draft_lengths",
        lambda contexts, chances, *_: [len(each) for each in chances],
    )
    with running_server(EngineConfig(kv_cache_bytes=64_000_000, speculative="ngram")) as server:
        for options in ({"temperature": 0}, {"temperature": 0.8, "seed": 7}):
            body = ask(f"Repeat: {TEXT}", max_tokens=60, **options)
            plain, drafted, one = (post(server, body | {"speculative": value}) for value in (False, True, 1))
            answers = [each["choices"][0]["message"]["content"] for each in (plain, drafted, one)]
            assert answers[0] == answers[1] == answers[2]
            assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
            details: dict[str, Any] = drafted["usage"]["completion_tokens_details"]
            assert details["accepted_prediction_tokens"] > 0
            assert details["accepted_prediction_tokens"] < drafted["usage"]["completion_tokens"]
        predicted = ask("What is 17 + 25?", max_tokens=60, temperature=0.7, seed=3, ignore_eos=True)
        plain = post(server, predicted | {"speculative": False})
        text = plain["choices"][0]["message"]["content"]
        drafted = post(server, predicted | {"prediction": {"type": "content", "content": text}})
        assert drafted["choices"][0]["message"]["content"] == text
        assert drafted["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= 30
        counted = metrics(server)
        accepted, verified = (counted[f"mlxpaged_draft_tokens{which}_total|ngram"] for which in ("_accepted", ""))
        assert 0 < accepted <= verified
        with raw(server) as client:
            status = client.get("/v1/status").json()["speculative"]
        assert status["drafters"] == ["grammar", "ngram"]
        assert (status["drafted_tokens"], status["accepted_tokens"]) == (verified, accepted)
        assert status["by_drafter"]["ngram"] == {"drafted": verified, "accepted": accepted}
        assert status["tokens_per_pass"] > 1
        assert 0 < status["share_of_steps"] <= 1
        assert status["speedup"] > 0


def test_another_model_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo drafts for itself, so every draft is accepted; and answers are those without."""
    monkeypatch.setattr(
        "mlxpaged.parts.drafting.draft_budget.draft_lengths",
        lambda contexts, chances, *_: [len(each) for each in chances],
    )
    config = EngineConfig(kv_cache_bytes=64_000_000, speculative="draft", draft_model="demo")
    with running_server(config) as server:
        for options in ({"temperature": 0}, {"temperature": 0.9, "seed": 7, "presence_penalty": 0.3}):
            body = ask("Tell me of the river.", max_tokens=40, ignore_eos=True, **options)
            plain, drafted = (post(server, body | {"speculative": value}) for value in (False, True))
            assert plain["choices"][0]["message"]["content"] == drafted["choices"][0]["message"]["content"]
            assert drafted["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 10
        with raw(server) as client:
            status = client.get("/v1/status").json()["speculative"]
        assert status["drafters"] == ["grammar", "model"]
        assert status["by_drafter"]["model"]["accepted"] == status["accepted_tokens"] > 50
