"""`make mac-report`: one file with what the doctor and the loads have found, whatever fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import mac_report
from benchmarks.mac_report import NO_MAC, Part, main, markdown, questions, run_part
from mlxpaged.cli import main as mlxpaged

MACHINE = {"device": "Apple M4 Max (Device(gpu, 0), applegpu_g16s)", "neural accelerators": "none"}
DOCTOR = {
    "machine": MACHINE,
    "kernels": [{"case": "kv_write", "problem": None}, {"case": "kv_gather", "problem": "differs"}],
    "tuning": {"not_measured": "the Metal kernels are not used"},
    "step_times": {"1": 14.0, "32": 29.04},
    "decoding": [
        {"batch": 1, "tokens_per_second": 50.0, "mlx_lm_tokens_per_second": 40.0},
        {"batch": 4, "tokens_per_second": 90.0, "mlx_lm_tokens_per_second": {"not_measured": "RuntimeError: no"}},
    ],
    "prompt_steps": {"prompt_tokens": 2048, "steps_by_rows": {"64": 32}},
    "largest_prefill": {"tokens": 2048, "bytes": 800},
}


def test_each_question_that_only_a_mac_can_answer_has_an_answer_or_why_not() -> None:
    found = dict(questions(DOCTOR))
    assert found["neural accelerators"] == "none"
    assert found["kernels compared with MLX's own operations"] == "1 of 2 wrong kv_gather"
    assert found["attention tuning, what it gains over the default"] == ("not measured: the Metal kernels are not used")
    assert found["milliseconds of a decoding step by rows"] == "{'1': 14.0, '32': 29.04}"
    assert found["decoding, batch 1"] == "50.0 tokens/s, mlx-lm 40.0, 1.25 times"
    assert found["decoding, batch 4"] == "90.0 tokens/s, mlx-lm not measured: RuntimeError: no"
    assert found["steps by rows, a prompt beside one stream"] == "{'64': 32}"
    assert found["memory of a prompt"] == "2048 tokens: 800 bytes"
    assert found["memory of a long prompt"] == "missing"


@pytest.mark.usefixtures("small_doctor")
def test_a_real_report_of_the_doctor_answers_all_questions(tmp_path: Path) -> None:
    report = tmp_path / "doctor.json"
    assert mlxpaged(["doctor", "demo", "--report", str(report)]) == 0
    found = dict(questions(json.loads(report.read_text())))
    missing = {question for question, answer in found.items() if answer == "missing"}
    assert missing <= {"memory", "GPU limit"}, "what a CPU has not"


@pytest.mark.parametrize(
    ("is_mac", "device", "said"),
    [
        (False, "AMD EPYC", NO_MAC),
        (True, "Apple M4 Max", None),
        (True, "Apple Paravirtual device", "**The GPU is a virtual one"),
    ],
)
def test_the_file_says_whose_figures_these_are(
    is_mac: bool, device: str, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mac_report, "IS_MAC", is_mac)
    third = markdown("m", Part("text", {"machine": {"device": device}}, ""), None).splitlines()[2]
    assert third.startswith(said or "| Question")


def test_of_a_program_that_is_ended_what_it_wrote_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("doctor", 5.0, output=b"begun\n")

    monkeypatch.setattr(subprocess, "run", run)
    written = tmp_path / "found.json"
    written.write_text(json.dumps(DOCTOR))
    part = run_part("the doctor", ["doctor"], written, 5.0)
    assert (part.text, part.found, part.problem) == ("begun\n", DOCTOR, "it was ended after 5 seconds")


def test_the_reason_of_a_program_that_fails_is_kept(tmp_path: Path) -> None:
    code = "import sys; print('begun'); print('first', file=sys.stderr); sys.exit('no such model')"
    part = run_part("the doctor", [sys.executable, "-c", code], tmp_path / "nothing", 1000.0)
    assert (part.text, part.found, part.problem) == ("begun\n", {}, "exit status 1: no such model")


def test_a_part_that_fails_is_named_and_the_other_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mac_report, "run_doctor", lambda *_: Part("all of it\n", DOCTOR, "exit status 1"))
    monkeypatch.setattr(mac_report, "run_loads", lambda *_: Part("| a | table |\n", {}, ""))
    out = tmp_path / "report.md"
    monkeypatch.setattr(sys, "argv", ["mac_report.py", "demo", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    text = out.read_text()
    assert "**The doctor did not end well: exit status 1.**" in text
    assert "\n| a | table |\n" in text
    assert "\n```\nall of it\n```\n" in text
    assert str(out) in capsys.readouterr().out
