"""POST /v1/systemone, as Ollama's client and Rapid-MLX send it. tests/clients/ has Ollama's client itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import DEADLINE, raw
from tests.support import RunningServer, running_server

STATE = {"river": "blue", "stones": [1, None]}
QUESTIONS = {
    "calm": {"type": "noul", "instructions": "Is it calm?", "criteria": {"false": "it foams", "true": "it is flat"}},
    "what": {
        "type": "choice",
        "instructions": {"ask": "What is it?"},
        "criteria": {"river": "it flows", "stone": None},
    },
    "good": {"type": "score", "instructions": ["How", "good?"], "criteria": ["bad", "so so", "good"]},
    "plain": {"type": "noul", "instructions": "Is there a stone?"},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(EngineConfig(kv_cache_bytes=32_000_000)) as server:
        yield server
        server.wait_idle(DEADLINE)


def ask(server: RunningServer, status: int = 200, **body: Any) -> Any:
    with raw(server) as client:
        response = client.post("/v1/systemone", json={"model": "demo", "state": STATE, "questions": QUESTIONS} | body)
    assert response.status_code == status, response.text
    return response.json()


def test_questions_are_answered_by_name_in_order(server: RunningServer) -> None:
    found = ask(server)
    assert found["model"] == "demo"
    answers = found["answers"]
    assert list(answers) == list(QUESTIONS)
    assert answers["calm"].keys() == {"type", "noul"}
    what, good = answers["what"], answers["good"]
    assert sum(what["probabilities"].values()) == pytest.approx(1)
    assert what["choice"] == max(what["probabilities"], key=what["probabilities"].get)
    assert what["confidence"] == pytest.approx(2 * max(what["probabilities"].values()) - 1)
    assert good["legend"] == {"0": "bad", "1": "so so", "2": "good"}
    assert good["score"] == pytest.approx(sum(int(key) * p for key, p in good["probabilities"].items()))
    assert good["confidence"] == pytest.approx((3 * max(good["probabilities"].values()) - 1) / 2)
    assert found["usage"]["output_tokens"] == 0


def test_a_temperature_flattens_the_probabilities(server: RunningServer) -> None:
    one, hot = (
        ask(server, temperature=temperature, calibration="none", orders=1)["answers"]["what"]["probabilities"]
        for temperature in (1.0, 2.0)
    )
    odds = [(each["river"] / each["stone"]) for each in (one, hot)]
    assert odds[1] == pytest.approx(odds[0] ** 0.5, rel=1e-3)


def test_ollamas_tag_and_stay_are_known(server: RunningServer) -> None:
    assert ask(server, model="demo:latest", keep_alive="10m")["model"] == "demo:latest"
    assert ask(server, model=None)["model"] == "demo"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"questions": {}}, "questions"),
        ({"questions": {f"q{i}": {"type": "noul"} for i in range(401)}}, "questions"),
        ({"questions": {"q": {"type": "guess"}}}, "questions.q"),
        ({"questions": {"q": {"type": "multi_label", "criteria": ["a"]}}}, "questions.q.type"),
        ({"questions": {"q": {"type": "choice", "criteria": {"a": None}}}}, "questions.q.criteria"),
        ({"questions": {"q": {"type": "score", "criteria": []}}}, "questions.q.criteria"),
        ({"questions": {"q": {"type": "noul", "criteria": {"maybe": "x"}}}}, "questions.q.criteria"),
        ({"state": None}, "state"),
        ({"state": ""}, "state"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"temperature": 0}, "temperature"),
        ({"videos": [["x"]]}, "videos"),
    ],
)
def test_a_bad_body_is_refused_in_ollamas_form(server: RunningServer, body: dict[str, Any], field: str) -> None:
    error = ask(server, 400, **body)
    assert error.keys() == {"error"}
    assert error["error"].startswith(field)


def test_an_unknown_model_is_named(server: RunningServer) -> None:
    assert "'other' does not exist" in ask(server, 404, model="other")["error"]
