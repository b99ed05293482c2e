"""The agent's sessions, `compare.py --agent`, with a tiny model; no figure is asserted."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

from benchmarks.comparison.agent import (
    PHASES,
    QUICK,
    SHARE,
    AgentSizes,
    Scenario,
    command_of,
    markdown,
    measure_server,
    result_role,
)
from benchmarks.comparison.loads import TextsOf
from benchmarks.comparison.model import CHAT_TEMPLATE, Texts, make_model
from benchmarks.comparison.options import parse
from benchmarks.comparison.run import new_results


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 16}
    return make_model(tmp_path_factory.mktemp("model"), **sizes, num_attention_heads=2, num_key_value_heads=1)


def scenario(model: Path, role: str = "tool", repetition: int = 0) -> Scenario:
    return Scenario(QUICK, TextsOf(Texts(model), f"repetition {repetition}"), role)


@pytest.mark.more
def test_both_sessions_run_and_go_on_after_a_restart_with_prefixes_from_the_disk(model: Path, tmp_path: Path) -> None:
    options = parse(["--agent", "--servers", "mlxpaged", "mlx-lm", "--out", str(tmp_path)])
    results = new_results(options, model, QUICK)
    results |= {"results_role": "tool", "results_why": "", "total": QUICK.total, "routines": "Zen"}
    tried = scenario(model)
    measure_server(tried, "mlxpaged", Path(sys.executable), model, 0, options, tried.words.texts, results)
    at_once, after = (run["figures"] for run in results["runs"])
    turns, titles = 2 * QUICK.turns, 2
    assert at_once["answered"] == at_once["requests"] == turns + titles
    assert at_once["output_tokens"] == turns * QUICK.output + titles * QUICK.title_output
    assert after["answered"] == after["requests"] == 2 * QUICK.turns_after
    assert after["cached_tokens"] > QUICK.system, "a new process has read them"
    for one in (at_once, after):
        assert 0 < one["first_token_p50"] <= one["first_token_max"]
        assert min(one["first_of_session_1"], one["first_of_session_2"]) > 0
        assert one["server_cpu_seconds"] is None or one["server_cpu_seconds"] > 0
    program = tmp_path / "bin" / "mlx_lm.server"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'error: no such model'\nexit 1\n")
    program.chmod(0o755)
    measure_server(tried, "mlx-lm", program, model, 0, options, tried.words.texts, results)
    text = markdown(json.loads(json.dumps(results)))
    assert text.count("| mlx-lm | **ended with 1: error: no such model** |") == len(PHASES)
    assert "Results have the role `tool`." in text


def test_each_turn_sends_what_was_said_before_and_a_result(model: Path) -> None:
    first, second = (scenario(model).prompts(session) for session in (0, 1))
    assert len(first) == QUICK.turns + QUICK.turns_after
    assert first[0][0] == second[0][0], "the system text is the same"
    assert first[0][1] != second[0][1]
    for before, turn in itertools.pairwise(first):
        assert turn[: len(before)] == before
        said, result = turn[len(before) :]
        assert said["tool_calls"][0]["id"] == result["tool_call_id"]
    ids = [message["tool_call_id"] for message in first[-1] + second[-1] if message["role"] == "tool"]
    assert len(ids) == len(set(ids))
    assert scenario(model, repetition=1).prompts(0)[0] != first[0]


def test_results_are_text_of_the_user_if_the_template_has_no_place_for_them(tmp_path: Path, model: Path) -> None:
    assert result_role(model) == ("tool", "")
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') if message.role not in roles }}")
    role, why = result_role(tmp_path)
    assert (role, why) == ("user", ", because the chat template has no place for those of tools")
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert result_role(tmp_path)[0] == "tool"
    *_, said, result = scenario(model, role).prompts(0)[-1]
    assert (result["role"], "tool_calls" in said, "tool_call_id" in result) == ("user", False, False)


def test_sessions_fit_into_the_context_and_are_not_made_longer() -> None:
    for context in (4096, 8192, 16384):
        scaled = AgentSizes().scaled(context)
        assert abs(scaled.total - SHARE * context) < 30, "rounding"
        assert 2500 * 0.95 < scaled.system * 8192 / context < 2500 * 1.05
    assert AgentSizes().scaled(131_072) == AgentSizes()


def test_only_this_server_gets_a_directory_and_no_cache_of_a_peer_is_off() -> None:
    assert command_of("mlxpaged", "DIR")[-2:] == ("--prefix-cache-dir", "DIR")
    assert command_of("mlx-lm", "DIR")[0] == "mlx_lm.server"
    assert "--disable-disk-caches" not in command_of("rapid-mlx", "DIR")
