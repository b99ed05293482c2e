"""The benchmarks run and print figures; what the figures are is for the reader."""

from __future__ import annotations

import asyncio
import os
import re
import runpy
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import psutil
import pytest

from mlxpaged.core.scheduling.prefill_budget import PrefillLimits
from mlxpaged.cpu import streams
from mlxpaged.engine_config import EngineConfig
from tests.attention import step_counts
from tests.models import gguf_figures
from tests.support import running_server
from tests.vision import hostile_figures

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A benchmark as a program, but in this process: what it prints. mlx-lm's products get one thread, and no time for
    others to fall asleep."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(os, "_exit", lambda status: None)
    monkeypatch.setattr(streams, "cores", lambda: 1)
    monkeypatch.setattr(import_module("baselines"), "stay_awake", lambda seconds: None)

    def run(name: str, *args: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *args])
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def shares(lines: str) -> dict[str, float]:
    """Percent by part."""
    return {line[:26].strip(): float(line[39:46]) for line in lines.splitlines()[1:]}


@pytest.mark.more
def test_the_benchmark_of_the_scheduler_measures(run: Callable[..., str]) -> None:
    output = run("scheduler.py", "--sequences", "20", "--blocks", "20000", "--steps", "2", "--minutes", "0.2")
    costs, fairness = output.split("\n\n")
    rows = costs.splitlines()[1:]
    assert len(rows) >= 30
    assert all(float(row.split()[-1]) > 0 for row in rows)
    assert [row.split()[:2] for row in fairness.splitlines()[2:5]] == [
        ["0.5", "HIGH"],
        ["0.5", "NORMAL"],
        ["0.5", "LOW"],
    ]


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The hybrid model of the engine's benchmark, with small layers."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    made = import_module("engine_models")
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4}
    return str(made.make_model(tmp_path / "hybrid", made.HYBRID | small))


@pytest.mark.more
def test_the_benchmark_of_the_engine_measures(run: Callable[..., str], hybrid: str) -> None:
    sizes = ("--batch", "1", "4", "--context", "40", "--prefill", "16", "--attention", "40", "--steps", "4")
    models = ["demo", hybrid]
    _, *sections = run("engine.py", "--model", *models, "--host", "1", "3", *sizes).split("\n\n")
    alone, delivery, graphs = sections[3:6]
    del sections[3:6]
    tables = {title.split(",")[0].strip(): parts for title, *parts in zip(*[iter(sections)] * 3, strict=True)}
    assert list(tables) == models
    for table, profile in tables.values():
        rows = table.splitlines()[1:]
        assert [row[:22].strip() for row in rows] == [
            "prefill of 16",
            "attention, 4 x 40",
            "decode, batch 1",
            "decode, batch 4",
            "batched, 4",
        ]
        for row in rows:
            theirs_ms, ours_ms, theirs, ours, ratio = (float(text) for text in row[22:].split()[:5])
            assert min(theirs_ms, ours_ms, theirs, ours, ratio) > 0
        parts = shares(profile)
        assert {"device", "scheduler", "sampler", "metadata", "statistics", "other"} <= set(parts)
        assert sum(parts.values()) == pytest.approx(100, abs=0.1)
    parts, brought = shares(tables["demo"][1]), shares(delivery)
    assert min(brought["hand-over"], brought["event loop, CPU time"]) > 0
    forward_pass = sum(parts[name] for name in ("device", "making the graph", "metadata"))
    added = 100 - forward_pass + brought["hand-over"] + brought["event loop, CPU time"]
    assert brought["with all above but"] == pytest.approx(added, abs=0.1)
    times = {line[:24].strip(): float(line.split()[-2]) for line in alone.splitlines()[1:]}
    assert list(times) == ["decode, batch 1", "decode, batch 3"]
    assert min(times.values()) > 0
    ratios = {line.split(", contexts")[0].strip(): float(line.split()[-1]) for line in graphs.splitlines()[1:]}
    assert list(ratios) == [f"{kind}, batch {n}" for kind in ("dense", "hybrid") for n in (1, 4)]
    assert min(ratios.values()) > 0


def test_the_counts_of_the_house_have_the_files_that_every_decode_step_runs(run: Callable[..., str]) -> None:
    counts, files = run("house.py").split("a decode step runs functions of ")
    assert len(re.findall(r"^.+: [\d,]+ lines( in \d+ files)?$", counts, re.MULTILINE)) == 6
    assert len(re.findall(r"^.+: \d+$", counts, re.MULTILINE)) == 6, "how the rooms are wired"
    core = {"core/step.py", "core/engine/step_loop.py", "core/scheduling/scheduler.py"}
    assert core | {"attention/layer.py"} <= set(files.split())
    assert not {"parts/images/images.py", "models/loader.py", "api/app.py"} & set(files.split())


def test_the_benchmark_of_the_host_builds_both_graphs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    host = import_module("host")
    monkeypatch.setattr(host, "LAYERS", {"dense": 2, "hybrid": 4})
    monkeypatch.setattr(sys, "argv", ["host.py", "--batch", "1", "2", "--context", "40", "--steps", "2"])
    host.main()
    titles = [line for line in capsys.readouterr().out.splitlines() if "batch" in line]
    kinds = [(kind, n) for kind in ("dense", "hybrid") for n in (1, 2)]
    assert [title.split(":")[0] for title in titles] == [f"{k}, batch {n}, contexts of 40 tokens" for k, n in kinds]
    for title in titles:
        graph, whole = (float(part.split()[-1]) for part in title.split("; "))
        assert min(graph, whole) > 0


@pytest.mark.more
def test_the_benchmark_of_decisions_has_figures_for_each_method(run: Callable[..., str]) -> None:
    lines = [line.split(" | ") for line in run("decisions.py", "demo", "--items", "3").splitlines()[2:]]
    methods = [tuple(line[1:4]) for line in lines if line[0] == "| mean"]
    assert len(set(methods)) == len(methods) == 10
    assert len(lines) == 6 * len(methods)
    for *_, accuracy, brier, error in lines:
        assert 0 <= float(accuracy.rstrip("%")) <= 100
        assert 0 <= float(brier) <= 2
        assert 0 <= float(error.rstrip(" |")) <= 1


@pytest.mark.more
def test_the_benchmark_of_many_questions_counts(run: Callable[..., str]) -> None:
    output = run("decisions_speed.py", "--input-tokens", "600", "--questions", "6")
    rows = {cells[0]: list(map(float, cells[1:])) for cells in map(cells_of, output.splitlines()[2:])}
    one, many, again, *_ = rows.values()
    assert 600 * 0.9 < one[-1] < many[-1]
    assert again[-1] < many[-1] - 600 * 0.9, "the input is computed once"
    assert all(seconds > 0 and steps > 0 for seconds, _, steps, _ in rows.values())


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_benchmark_of_the_status_stream_measures(run: Callable[..., str]) -> None:
    lines = run("watch.py", "--streams", "2", "--snapshots", "1").splitlines()
    assert lines[0].startswith("streams 2, blocks ")
    assert [line.split()[0] for line in lines[1:]] == ["step", "snapshot", "share", "map", "map", "map"]
    assert float(lines[3].split()[1].rstrip("%")) > 0


@pytest.mark.more
def test_the_benchmark_of_encoders_measures(run: Callable[..., str]) -> None:
    lines = run("encoders.py", "--texts", "40", "--layers", "1", "--longest", "20").splitlines()
    assert lines[1].startswith("40 texts of 3 to ")
    tokens = [int(line.split()[-2]) for line in lines[2:4]]
    assert tokens[0] < tokens[1]
    assert float(lines[4].split()[1]) > 0


def test_the_benchmark_of_images_measures(run: Callable[..., str]) -> None:
    sizes = ("--model", "demo", "--streams", "2", "--images", "1", "--side", "64", "--blocks", "1", "--seconds", "0.1")
    *_, alone, beside, ratio = run("images.py", *sizes).splitlines()
    for row in (alone, beside):
        assert min(map(float, row[24:].split())) > 0
    assert float(ratio.split()[-1]) > 0


def test_the_benchmark_of_grammars_measures_on_a_stand_in_device(run: Callable[..., str]) -> None:
    sizes = ("--plain", "2", "--constrained", "1", "--new-tokens", "4", "--runs", "1", "--device-ms", "30")
    *_, schema, free, ratio = run("grammar.py", *sizes).splitlines()
    for row in (schema, free):
        assert min(map(float, row[16:].split())) > 0
    assert ratio.startswith("ratio of tok/s ")


def test_the_benchmark_of_quantized_kv_measures(run: Callable[..., str]) -> None:
    _, *rows = run("quantized_kv.py", "--model", "demo", "--tokens", "40").splitlines()
    assert [row.split()[:2] for row in rows] == [["demo", dtype] for dtype in ("auto", "int8", "int4")]
    sizes, tokens, perplexities = zip(*(row.split()[2:5] for row in rows), strict=True)
    assert sorted(map(int, sizes), reverse=True) == list(map(int, sizes))
    assert len(set(tokens)) == 1
    assert float(perplexities[1]) == pytest.approx(float(perplexities[0]), rel=0.02)
    assert rows[0].split()[5] == "100.00%"


def test_the_counts_of_a_decode_step_are_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["step_counts.py", "--model", "Qwen3-0.6B", "--batch", "1", "2"])
    step_counts.main()
    headings, _, *rows = capsys.readouterr().out.splitlines()
    cells = [row.strip("| ").split(" | ") for row in (headings, *rows)]
    assert [row[:2] for row in cells] == [["model", "batch"], ["Qwen3-0.6B", "1"], ["Qwen3-0.6B", "2"]]
    for row in cells[1:]:
        for ours, theirs in (cell.split(" / ") for cell in row[2:]):
            assert 0 < float(ours) < 1.2 * float(theirs)


def test_the_figures_of_gguf_files_are_a_line_and_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gguf_figures.py", "--tokens", "800", "--layers", "1", "--files", "Q4_0"])
    gguf_figures.main()
    refused, _, _, _, row = capsys.readouterr().out.splitlines()
    assert refused.startswith("300 damaged files of 0.7 MB are refused: ")
    name, size, memory, ratio, _ = row.strip("| ").split(" | ")
    assert name == "Q4_0"
    assert float(ratio) == pytest.approx(float(memory) / float(size), rel=0.03)
    assert 1.0 < float(ratio) < 1.12  # 5 bits in memory for 4.5 in the file


def test_the_figures_of_hostile_images_are_a_table_and_the_times_of_streams(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running_server(EngineConfig(model="demo-vision", kv_cache_bytes=16_000_000)) as server:
        asyncio.run(hostile_figures.measure(server.url, psutil.Process(), num_streams=2, repeats=1, seconds=0.1))
    _, _, *rows, empty, _, alone, beside, answers = capsys.readouterr().out.splitlines()
    assert empty == ""
    assert [row.split(" | ")[0] for row in rows] == [f"| {name}" for name in hostile_figures.requests()]
    assert all(float(figure) > 0 for line in (alone, beside) for figure in line.split()[-3:])
    count = answers.split()[0]
    assert answers == f"{count} of {count} answers of 2 streams are right"


def test_the_benchmark_of_prefixes_on_a_disk_measures(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefillLimits, "seconds_roughly", lambda *_: None)  # reading is never slower than computing
    sizes = ("--models", "demo", "--tokens", "200", "--streams", "2", "--rounds", "1", "--seconds", "0.1")
    lines = run("disk_prefixes.py", *sizes).splitlines()
    computed, memory, disk = (line[24:].split() for line in lines[3:6])
    assert [int(each[2]) for each in (computed, memory, disk)] == [0, 199, 192]
    assert min(float(each[0]) for each in (computed, memory, disk)) > 0
    assert lines[6].startswith("2 streams: ")
