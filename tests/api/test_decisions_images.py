"""Decisions about images, by the bundled model that sees: in the input and in a question, in every dialect."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from typing import Any

import pytest

from demo_model.vision.pictures import BUILT_IN, picture
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import DEADLINE, raw
from tests.support import RunningServer, running_server

NUMBERS = (407, 152)
ASKED = "What number is in the picture?"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(EngineConfig(model="demo-vision", kv_cache_bytes=64_000_000)) as running:
        yield running
        running.wait_idle(DEADLINE)


def base64_of(number: int) -> str:
    file = io.BytesIO()
    picture(random.Random(number), number, 320, 200, [BUILT_IN], 2.5).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


IMAGES = {number: base64_of(number) for number in NUMBERS}


def part(number: int) -> dict[str, Any]:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{IMAGES[number]}"}


def text(words: str) -> dict[str, Any]:
    return {"type": "input_text", "text": words}


def post(server: RunningServer, path: str, **body: Any) -> Any:
    with raw(server) as client:
        response = client.post(path, json={"calibration": "none", "orders": 1} | body)
    assert response.status_code == 200, response.text
    return response.json()


def choice(instructions: Any) -> dict[str, Any]:
    return {"type": "choice", "instructions": instructions, "choices": [{"value": str(each)} for each in NUMBERS]}


def of_first(answer: dict[str, Any]) -> float:
    return float(answer["probabilities"][0]["probability"])


def test_an_image_of_the_input_decides(server: RunningServer) -> None:
    found = {}
    for number in (*NUMBERS, NUMBERS[0]):
        items = [{"role": "user", "content": [text("Look."), part(number)]}]
        answer = post(server, "/v1/decisions", input=items, questions=[choice(ASKED), choice("Which one is shown?")])
        first, second = map(of_first, answer["answers"])
        assert found.setdefault(number, (first, second)) == pytest.approx((first, second), abs=1e-5)
    assert found[NUMBERS[0]][0] > found[NUMBERS[1]][0] + 0.01
    assert found[NUMBERS[0]][1] != pytest.approx(found[NUMBERS[1]][1], abs=1e-3)


def test_an_image_of_a_question_is_shown_to_this_question_only(server: RunningServer) -> None:
    asked = [choice(ASKED), *(choice([text(ASKED), part(number)]) for number in NUMBERS), choice(ASKED)]
    found = [of_first(each) for each in post(server, "/v1/decisions", input="Look.", questions=asked)["answers"]]
    assert found[0] == pytest.approx(found[3], abs=1e-5)
    assert found[1] > found[2] + 0.01
    assert found[0] != pytest.approx(found[1], abs=1e-3)
    again = post(server, "/v1/decisions", input="Look.", questions=asked[1:2])["answers"]
    assert of_first(again[0]) == pytest.approx(found[1], abs=1e-5)


def test_images_beside_a_state_are_shown_before_it(server: RunningServer) -> None:
    """By URL, and as base64, which mlx-vlm and Rapid-MLX take."""
    criteria = {str(number): None for number in NUMBERS}
    question = {"type": "choice", "instructions": ASKED, "criteria": criteria}
    items = [{"role": "user", "content": [part(NUMBERS[0]), text("Look.")]}]
    shown = post(server, "/v1/decisions", input=items, questions=[choice(ASKED)])["answers"][0]
    for path, images in (
        ("/v1/decisions", [IMAGES[NUMBERS[0]]]),
        ("/v1/systemone", [part(NUMBERS[0])["image_url"]]),
    ):
        body: dict[str, Any] = {"state": "Look.", "images": images, "questions": {"q": question}}
        answer = post(server, path, **body)["answers"]["q"]
        assert set(answer["probabilities"]) == set(criteria)
        other = post(server, path, **body | {"images": [IMAGES[NUMBERS[1]]]})["answers"]["q"]
        assert answer["probabilities"]["407"] > other["probabilities"]["407"] + 0.01
    assert of_first(shown) > 0


def test_an_image_without_a_state_suffices_for_mlx_vlm(server: RunningServer) -> None:
    body = {"images": [IMAGES[NUMBERS[0]]], "questions": {"q": {"type": "bool", "instructions": "Is it 407?"}}}
    assert 0 <= post(server, "/v1/decisions", **body)["answers"]["q"]["probability"] <= 1


def test_an_image_that_cannot_be_read_is_named(server: RunningServer) -> None:
    broken = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    with raw(server) as client:
        asked = [choice(ASKED), choice([text(ASKED), broken])]
        response = client.post("/v1/decisions", json={"input": "x", "questions": asked})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "questions.1.instructions.1"
        body = {"state": "x", "images": ["AAAA"], "questions": {"q": {"type": "bool"}}}
        response = client.post("/v1/systemone", json={"model": "demo-vision"} | body)
        assert response.status_code == 400
        assert response.json()["error"].startswith("images.0: ")
