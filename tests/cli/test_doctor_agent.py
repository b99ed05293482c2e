"""`mlxpaged doctor --agent`: what it says of a model that does all right, and of one that does each task wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxpaged.cli.doctor.agent_answer import difference
from mlxpaged.cli.doctor.agent_tasks import EVENT, FILE, TASKS
from tests.cli.helpers import Result
from tests.formats.written import WRITTEN, named
from tests.scripted import scripted_server

pytestmark = pytest.mark.usefixtures("home")

LINES = [name for task in TASKS for name in (task.name, task.name_then) if name]
BY_NAME = {task.name: task for task in TASKS}
THOUGHT = {"harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")}
SAID = {"harmony": "<|channel|>final<|message|>{}<|return|>"}


def right(form: str) -> dict[str, str]:
    """The script of a model of this format that does all right."""
    script = {}
    for task in TASKS:
        before, after = THOUGHT.get(form, ("<think>\n", "\n</think>\n\n"))
        thought = f"{before}Is it so?{after}" if task.turn.thinks else ""
        calls = "\n".join(WRITTEN[form](name, arguments) for name, arguments in task.turn.calls)
        if form == "harmony":  # a message of its own each
            calls = calls.replace("<|call|>\n", "<|end|><|start|>assistant")
        text = SAID.get(form, "{}").format(" ".join(task.turn.says)) if task.turn.says else ""
        script[task.prompt] = thought + text + calls
        if task.then is not None:
            said = " and ".join(task.then.says)
            script[task.turn.results[-1]] = SAID.get(form, "{}").format(f"It is {said} degrees.")
    return script


@pytest.mark.parametrize("form", ["json_tools", "qwen3_coder", "harmony"])
def test_a_model_that_does_all_right_passes(form: str, tmp_path: Path, run: Callable[..., Result]) -> None:
    with scripted_server(tmp_path, form, right(form), context_length=16384) as server:
        result = run("doctor", "--agent", "scripted", "--url", server.url)
    lines = result.stdout.splitlines()
    assert lines[:2] == [
        "model     scripted",
        f"calls     read in the format {form}; the chat template shows the tools",
    ]
    assert [line[2:20].strip() for line in lines[3:-1]] == LINES, result.stdout
    assert all(" ok, " in line for line in lines[3:-1]), result.stdout
    assert lines[-1] == f"{len(LINES)} of {len(LINES)} tasks came back right, 0 skipped"
    assert result.status == 0


def test_each_task_can_fail_and_the_report_shows_what_the_model_wrote(
    tmp_path: Path, run: Callable[..., Result]
) -> None:
    write, script = WRITTEN["json_tools"], right("json_tools")
    tabs = FILE.replace("    ", "\t", 1)
    wrong = {
        "two calls at once": write("get_weather", {"city": "Lisbon", "unit": "celsius"}),
        "a nested schema": write("create_event", EVENT | {"start": {"date": "2031-04-09", "hour": "14"}}),
        "a long file": write("write_file", {"path": "tools/list_items.py", "content": tabs}),
        "no call": "<tool_call>\n" + named("add", {"numbers": [17, 25]}) + "\n</tool_call>",
        "thinking off": "<think>\nPorto?\n</think>\n\n" + write("get_weather", {"city": "Porto", "unit": "kelvin"}),
        "thinking on": "I take Lima. " + write("get_weather", {"city": "Lima", "unit": "celsius"}),
    }
    script |= {BY_NAME[name].prompt: text for name, text in wrong.items()}
    script['"light rain"'] = "It rains."
    path = tmp_path / "report.json"
    with scripted_server(tmp_path, "json_tools", script, context_length=16384) as server:
        result = run("doctor", "--agent", "scripted", "--url", server.url, "--json", "--report", str(path))
    report = json.loads(result.stdout)
    assert json.loads(path.read_text()) == report
    assert (report["right"], report["tried"], result.status) == (1, 8, 1)
    found = {task["task"]: task.get("problems") or task.get("skipped") for task in report["tasks"]}
    assert found == {
        "one call": None,
        "its result": ["the text lacks 17"],
        "two calls at once": ["one call (get_weather) instead of 2 calls"],
        "their results": "without right calls there are no results",
        "a nested schema": ['create_event: start.hour is "14" instead of 14, and the arguments do not fit the schema'],
        "a long file": [
            'write_file: line 13 of content is "\\twith open(path, encoding=\\"utf-8\\") as file:\\n" instead of '
            '"    with open(path, encoding=\\"utf-8\\") as file:\\n"'
        ],
        "no call": ["the text has the tag <tool_call>", "the text has the tag </tool_call>"],
        "thinking off": [
            'get_weather: unit is "kelvin" instead of "celsius", and the arguments do not fit the schema',
            "there are thoughts",
        ],
        "thinking on": ["there are no thoughts apart from the text"],
    }
    wrote = {task["task"]: task.get("wrote") for task in report["tasks"]}
    assert wrote["thinking off"] == wrong["thinking off"] + "<|im_end|>"


@pytest.mark.more
def test_a_model_without_thinking_skips_these_tasks_and_says_so(tmp_path: Path, run: Callable[..., Result]) -> None:
    script = right("mistral") | {TASKS[0].prompt: "I do not know" + " ".join(map(str, range(400)))}
    with scripted_server(tmp_path, "mistral", script, context_length=16384, plain=()) as server:
        result = run("doctor", "--agent", "--url", server.url, "--model", "scripted")
    assert "  thinking off       skipped: the model does not think\n" in result.stdout
    assert "  thinking on        skipped: the model does not think\n" in result.stdout
    assert "  one call           no call instead of one call\n    the model wrote:\n    | I do" in result.stdout
    assert "[...]" in result.stdout
    assert result.stdout.endswith("5 of 6 tasks came back right, 3 skipped\n")
    assert result.status == 1


def test_without_a_server_the_reason_is_said(run: Callable[..., Result]) -> None:
    result = run("doctor", "--agent", "--url", "http://127.0.0.1:1")
    assert result == Result(1, "", "mlxpaged: no server runs at http://127.0.0.1:1\n")


@pytest.mark.parametrize(
    ("wanted", "got", "said"),
    [
        (1, 1.0, None),
        (1, True, "a is true instead of 1"),
        ([1, 2], [1], "a is [1] instead of [1, 2]"),
        ({"b": None}, {}, "a.b is missing"),
        ({}, {"b": 1}, "a.b is too much"),
        ("x\ny\n", "x\ny", 'line 2 of a is "y" instead of "y\\n"'),
        ("x\ny\n", "x\n", "a ends before line 2 of 2"),
        ("x\n", "x\n\n", "a goes on after line 1"),
    ],
)
def test_differences_are_named(wanted: object, got: object, said: str | None) -> None:
    assert difference({"a": wanted}, {"a": got}) == said
