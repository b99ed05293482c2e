"""`mlxpaged doctor`: one run says what works, how fast it is, and what could not be measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.attention import tuner, tuning_cache
from mlxpaged.attention.self_check import CASES, FUSED_CASE
from mlxpaged.cli import main
from mlxpaged.cli.doctor import command, flags
from tests.support import make_tiny_model

PLAIN_CASES = [name for name, case in CASES.items() if not case.latent]
SECTIONS = [
    "machine",
    "model",
    "kernels",
    "tuning",
    "attention",
    "step_times",
    "drafts",
    "decoding",
    "prompt_steps",
    "largest_prefill",
    "long_prefill",
]


def check_measurements(found: dict[str, Any], backend: str) -> None:
    assert list(found) == SECTIONS
    assert found["attention"]["backend"] == backend
    calls = found["attention"]["calls"]
    assert [(call["call"], call["queries"]) for call in calls] == [("write", 1), ("attend", 1), ("attend", 4)]
    assert all(call["us"] > 0 for call in calls)
    assert all(call["mlx_us"] > 0 and call["keys"] == 40 for call in calls[1:])
    assert [each["batch"] for each in found["decoding"]] == [1, 2]
    assert all(each["tokens_per_second"] > 0 and each["mlx_lm_tokens_per_second"] > 0 for each in found["decoding"])
    assert found["step_times"]["1"] > 0
    assert {chance: list(counts) for chance, counts in found["drafts"].items()} == {
        "50%": ["1", "2"],
        "80%": ["1", "2"],
    }
    steps = found["prompt_steps"]
    assert steps["prompt_tokens"] == 34
    assert sum((int(rows) - 1) * count for rows, count in steps["steps_by_rows"].items()) == 34
    assert found["largest_prefill"]["tokens"] == 34
    if backend == "metal":
        assert found["long_prefill"]["tokens"] == 40
        assert found["long_prefill"]["bytes"] > 0
    else:
        assert found["long_prefill"] == {"not_measured": "40 tokens take long without the Metal kernels"}
    assert found["largest_prefill"]["bytes"] > 0


@pytest.mark.usefixtures("unchecked", "small_doctor")
def test_the_report_of_a_model_has_checks_times_rates_and_memory_and_no_name_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuner, "can_measure", lambda: True)
    # One class of steps and as much time as it takes: what is measured does not depend on the machine's speed.
    classes_of = tuner.classes_of
    monkeypatch.setattr(tuner, "classes_of", lambda *args: classes_of(*args)[:1])
    monkeypatch.setattr(tuner, "BUDGET_S", 600.0)
    monkeypatch.setattr(tuning_cache, "default_path", lambda: tmp_path / "tuning.json")
    monkeypatch.chdir(tmp_path)
    model = make_tiny_model(tmp_path / "secret" / "tiny", "llama", head_dim=32)
    assert main(["doctor", str(model), "--json", "--retune", "--block-size", "16", "--report"]) == 0
    output = capsys.readouterr().out
    found = json.loads(output)
    assert json.loads((tmp_path / flags.REPORT_FILE).read_text()) == found
    assert "secret" not in output
    check_measurements(found, "metal")
    assert found["model"] == {
        "name": "tiny",
        "layers": 2,
        "fused_layers": 2,
        "weight_bytes": found["model"]["weight_bytes"],
        "context": 512,
    }
    assert [(check["case"], check["problem"]) for check in found["kernels"]] == [
        (case, None) for case in (*PLAIN_CASES, FUSED_CASE)
    ]
    [shape] = found["tuning"]["shapes"]
    assert "blocks of 16" in shape["layers"]
    assert shape["source"] == "measured now"
    [first] = shape["classes"]
    assert first["choice"] in first["us"]
    assert first["gain"] >= 1


@pytest.mark.usefixtures("unchecked", "small_doctor")
def test_a_kernel_that_fails_is_shown_and_the_rest_is_measured_without_it(
    copied_kernels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = copied_kernels / "kv_gather.metal"
    source.write_text(source.read_text().replace("key_pool", "value_pool"))
    assert main(["doctor"]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for case in PLAIN_CASES:
        [line] = [line for line in lines if line.startswith(case)]
        assert ("differ" in line) == case.startswith(("kv_gather", "merge_partials, long", "paged_decode, many"))
    assert "attention tuning: not measured, because the Metal kernels are not used" in lines
    assert any(line.startswith("batch   2  mlxpaged ") and line.endswith(" times)") for line in lines)


@pytest.mark.skipif(mx.metal.is_available(), reason="there is a Metal device")
@pytest.mark.usefixtures("small_doctor")
def test_without_metal_the_rest_is_measured_and_what_cannot_be_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "mean nothing for a real model or for a Mac" in found.pop("note")
    check_measurements(found, "cpu")
    assert found["kernels"] == found["tuning"] == {"not_measured": "there is no Metal device"}
    assert main(["doctor", "./nothing"]) == 1
    assert "no such directory" in capsys.readouterr().err


@pytest.mark.usefixtures("small_doctor")
def test_if_mlx_lm_cannot_run_the_model_the_reason_stands_beside_our_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such generator")

    monkeypatch.setattr(command, "mlx_lm_rates", fail)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("mlx-lm ")[2] for line in lines if line.startswith("  batch")] == [
        "not measured, because RuntimeError: no such generator"
    ] * 2
    assert lines[-2].startswith("These figures are of the bundled demo model"), "the last of the report"
