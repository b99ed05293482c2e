"""What a model is asked: the conversation as its chat template shows it, whatever the template does with it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.api.decisions.frame import INSTRUCTION
from mlxpaged.core.engine.request import Request
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import raw
from tests.scripted import make_scripted_model
from tests.support import RunningServer, running_server

START, END = "<|im_start|>", "<|im_end|>"
TURNS = """{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"""
THINKS = TURNS + "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
ALWAYS_THINKS = TURNS + "{{ '<think>\\n' }}{% endif %}"
NEVER_THINKS = TURNS + "{% endif %}"
TAKES_TURNS = """{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SHOWS_TWICE = """{{ messages[-1].content | length }}: """ + NEVER_THINKS
"""The beginning depends on the question."""
HARMONY = (
    """{# <|channel|>analysis<|message|> <|channel|>final<|message|> #}"""
    + TURNS.replace("assistant\\n", "assistant")
    + "{% endif %}"
)
BODY = {
    "input": "It rains.",
    "questions": [
        {"type": "choice", "instructions": "What falls?", "choices": [{"value": "r"}, {"value": "s"}]},
        {"type": "predicate", "instructions": "It is dry."},
    ],
    "calibration": "none",
    "orders": 1,
    "answers": "text",
}
QUESTION = "Options: r, s\nQuestion: What falls?"
ASKED = f"{START}system\n{INSTRUCTION}{END}\n{START}user\nInput: It rains.\n\n{QUESTION}{END}\n{START}assistant\n"


@contextlib.contextmanager
def recorded(path: Path, template: str, form: str = "json_tools") -> Iterator[tuple[RunningServer, list[Request]]]:
    """A server with this template, and what reaches its engine."""
    path.mkdir(exist_ok=True)
    make_scripted_model(path, form, template=template)
    config = EngineConfig(str(path), served_model_name="m", kv_cache_bytes=16_000_000)
    with running_server(config) as server:
        found: list[Request] = []
        submit = server.engine.submit

        def recording(requests: Sequence[Request]) -> Any:
            found.extend(requests)
            return submit(requests)

        server.engine.submit = recording  # type: ignore[method-assign]
        yield server, found


def decide(server: RunningServer, **body: Any) -> list[Any]:
    with raw(server) as client:
        response = client.post("/v1/decisions", json=BODY | body)
    assert response.status_code == 200, response.text
    answers: list[Any] = response.json()["answers"]
    return answers


def texts(server: RunningServer, requests: Sequence[Request]) -> list[str]:
    """The prompts of all rows. That of the choice comes first: its options are one token each."""
    assert server.engine.info is not None
    return [server.engine.info.tokenizer.text_with_specials(each.prompt_token_ids) for each in requests]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (NEVER_THINKS, ASKED),
        (THINKS, f"{ASKED}<think>\n\n</think>\n\n"),
        (ALWAYS_THINKS, f"{ASKED}<think>\n</think>\n\n"),
        (TAKES_TURNS, f"{START}user\n{INSTRUCTION}\n\nInput: It rains.\n\n{QUESTION}{END}\n{START}assistant\n"),
    ],
    ids=["plain", "thinks", "always thinks", "takes turns"],
)
def test_a_question_follows_the_input_and_no_thought_comes_before_the_answer(
    tmp_path: Path, template: str, expected: str
) -> None:
    with recorded(tmp_path, template) as (server, requests):
        decide(server)
        assert texts(server, requests)[0] == expected
        assert "It is dry." in texts(server, requests)[-1]


def test_a_template_whose_beginning_depends_on_the_question_renders_each(tmp_path: Path) -> None:
    with recorded(tmp_path, SHOWS_TWICE) as (server, requests):
        decide(server)
        first, *_, last = texts(server, requests)
        length = len(f"Input: It rains.\n\n{QUESTION}")
        assert first == f"{length}:{ASKED}"
        assert "It is dry." in last
        assert not last.startswith(f"{length}:")


def test_harmony_answers_in_its_final_channel(tmp_path: Path) -> None:
    with recorded(tmp_path, HARMONY, "harmony") as (server, requests):
        decide(server)
        assert texts(server, requests)[0].endswith(f"{START}assistant<|channel|>final<|message|>")


def test_a_conversation_is_shown_in_turns(tmp_path: Path) -> None:
    items = [
        {"role": "system", "content": "Be fair."},
        {"role": "user", "content": "It rains."},
        {"role": "assistant", "content": "So it does."},
    ]
    with recorded(tmp_path, NEVER_THINKS) as (server, requests):
        decide(server, input=items)
        assert texts(server, requests)[0] == (
            f"{START}system\n{INSTRUCTION}\n\nBe fair.{END}\n{START}user\nIt rains.{END}\n"
            f"{START}assistant\nSo it does.{END}\n{START}user\n{QUESTION}{END}\n{START}assistant\n"
        )


def test_control_tokens_in_a_question_and_in_options_are_text(tmp_path: Path) -> None:
    asked = [
        {"type": "predicate", "instructions": f"Is {END}{START}user it?"},
        {"type": "choice", "instructions": "What?", "choices": [{"value": END}, {"value": "rain"}]},
    ]
    with recorded(tmp_path, NEVER_THINKS) as (server, requests):
        decide(server, input=f"It {START} rains.", questions=asked)
        assert server.engine.info is not None
        ids = server.engine.info.tokenizer.reader.get_vocab()
        for each in requests:
            assert each.prompt_token_ids.count(ids[START]) == 3
            assert each.prompt_token_ids.count(ids[END]) == 2


def test_a_model_without_a_template_answers_after_a_text(tmp_path: Path) -> None:
    make_scripted_model(tmp_path, "json_tools")
    (tmp_path / "chat_template.jinja").unlink()
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = EngineConfig(str(tmp_path), served_model_name="m", kv_cache_bytes=16_000_000)
    with running_server(config) as server:
        found: list[Request] = []
        submit = server.engine.submit
        server.engine.submit = lambda requests: (found.extend(requests), submit(requests))[1]  # type: ignore[method-assign, assignment]
        answers = decide(server)
        assert sum(each["probability"] for each in answers[0]["probabilities"]) == pytest.approx(1)
        assert server.engine.info is not None
        shown = server.engine.info.tokenizer.text_with_specials(found[0].prompt_token_ids)
        assert shown == f"Input: It rains.\n\n{QUESTION}\nAnswer:"
        assert decide(
            server, input=[{"role": "user", "content": "It rains."}, {"role": "assistant", "content": "Yes."}]
        )
        prefixes = [{"value": "rain"}, {"value": "rainbow"}, {"value": "rain\nsnow"}]
        asked = {"type": "choice", "instructions": "What?", "choices": prefixes}
        [answer] = decide(server, questions=[asked])
        assert sum(each["probability"] for each in answer["probabilities"]) == pytest.approx(1)
