"""OpenAI's and Ollama's clients ask decisions, and parse the answers into their own types."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

from tests.clients.conftest import installed, run
from tests.support import RunningServer

pytestmark = pytest.mark.clients

PROGRAMS = Path(__file__).parent / "programs" / "decisions"


def said(seeing: RunningServer, images: list[Path], home: Path, library: str) -> list[tuple[str, str, str]]:
    """What a program prints: about which input, what of the answers, and the value."""
    url = f"data:image/png;base64,{base64.b64encode(images[0].read_bytes()).decode()}"
    python = installed(library) / "bin" / "python"
    shown = run(home, python, "-I", PROGRAMS / f"{library}.py", seeing.url, json.dumps(url))
    return re.findall(r"^(?:(\w+) )?(\w+): (.*)$", shown, flags=re.MULTILINE)


def test_openais_client_parses_every_type_of_answer(seeing: RunningServer, images: list[Path], tmp_path: Path) -> None:
    lines = said(seeing, images, tmp_path, "openai")
    expected = {
        "types": "['predicate', 'choice', 'score']",
        "names": "[None, 'route', 'quality']",
        "classes": "['AnswerAnswerResourcePredicate', 'AnswerAnswerResourceChoice', 'AnswerAnswerResourceScore']",
        "predicate": "True",
        "values": "['sales', True, 'true']",
        "labels": "[[0, 'bad'], [1, 'fine'], [2, 'good']]",
        "sums": "[1.0, 1.0]",
        "usage": "True 0",
    }
    for label in ("text", "conversation", "image"):
        assert {what: value for about, what, value in lines if about == label} == expected
    assert [value for _, what, value in lines if what == "refused"] == [
        *("questions", "questions", "questions.0", "questions.0.choices", "questions.0.levels", "input.0.call_id")
    ]


def test_ollamas_client_parses_every_type_of_answer(seeing: RunningServer, images: list[Path], tmp_path: Path) -> None:
    lines = said(seeing, images, tmp_path, "ollama")
    expected = {
        "names": "['safe', 'route', 'good']",
        "classes": "['SystemOneNoulAnswer', 'SystemOneChoiceAnswer', 'SystemOneScoreAnswer']",
        "noul": "True",
        "choice": "True",
        "legend": '{"0": "bad", "1": "fine", "2": "good"}',
        "sums": "[1.0, 1.0]",
        "usage": "True 0",
    }
    for label in ("text", "json"):
        assert {what: value for about, what, value in lines if about == label} == expected
    assert [value for about, what, value in lines if (about, what) == ("plain", "names")] == ["['q']"]
    assert [value for _, what, value in lines if what == "refused"] == ["400 questions", "400 questions.q.criteria"]
