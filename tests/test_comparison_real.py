"""The table of a real model, `compare.py --gguf`, with a tiny model in its place; no figure is asserted."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.comparison import real
from benchmarks.comparison.environments import BEFORE, LLAMA_CPP, SetupError
from benchmarks.comparison.loads import Sizes
from benchmarks.comparison.model import Texts, make_model
from benchmarks.comparison.options import Options, parse
from benchmarks.comparison.real import Row, Subject, cells, markdown, measured, subjects
from benchmarks.comparison.servers import stat_of

TINY = Sizes(a_requests=3, a_prompt=10, a_output=4, a_concurrent=(1, 2))


@pytest.fixture
def options(tmp_path: Path) -> Options:
    gguf = tmp_path / "a.gguf"
    gguf.touch()
    return parse(["--gguf", str(gguf), "--out", str(tmp_path), "--load-timeout", "60", "--quick"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 16}
    return make_model(tmp_path_factory.mktemp("model"), **sizes, num_attention_heads=2, num_key_value_heads=1)


def test_a_server_has_a_line_for_each_load(options: Options, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "QUICK_SIZES", TINY)
    row = measured(Subject("mlxpaged", "float32", Path(sys.executable), model), options, Texts(model))
    assert row.problem == ""
    assert row.ready is not None
    assert row.first is not None
    assert row.first > row.ready
    assert row.decode is not None
    one, two = cells(row)
    assert [one[5], two[5]] == ["1", "2"]
    assert one[7] == two[7] == "3 of 3"
    load = (row.loads or {})["1"]
    assert load["output_tokens"] == 3 * 4
    assert load["ttft_max"] >= load["ttft_p50"]
    if sys.platform == "linux":
        assert load["cpu_per_token"] > 0
        assert load["peak_memory_mb"] > 50
    text = markdown(options, [row], "OpenBLAS (Zen)")
    assert "| mlxpaged | float32 |" in text
    assert "too small to mean anything" in text


def test_a_server_that_does_not_start_is_a_line_that_says_why(options: Options, tmp_path: Path, model: Path) -> None:
    row = measured(Subject("mlxpaged", "GGUF", Path(sys.executable), tmp_path / "nowhere"), options, Texts(model))
    [line] = cells(row)
    assert "nowhere" in line[5]
    assert len(line) == len(real.COLUMNS)


def test_a_server_without_a_token_in_its_time_has_a_bound(options: Options, model: Path) -> None:
    """What is too slow is said as such, and not as 0."""
    texts = Texts(model)
    row = measured(Subject("mlxpaged", "float32", Path(sys.executable), model), replace(options), texts)
    load = (row.loads or {})["1"]
    load |= {"output_tokens_per_second": 0.0, "seconds": 60.0, "answered": 0, "cpu_per_token": None}
    assert cells(row)[0][6] == "less than 1 token in 60 s"


def test_each_server_runs_what_it_can_read_and_a_failed_installation_is_a_line(
    options: Options, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def environment(name: str, packages: tuple[str, ...], cache: Path) -> Path:
        if name == "mlx-lm":
            raise SetupError("not installed: no network")
        return Path(name)

    monkeypatch.setattr(real, "make_environment", environment)
    found = subjects(replace(options, servers=("mlxpaged", "mlx-lm", BEFORE), before=tmp_path), tmp_path / "f")
    assert [(each.server, each.form) for each in found] == [
        *(("mlxpaged", "GGUF"), ("mlxpaged", "float32"), ("mlx-lm", "float32"), ("mlx-lm", "4 bits")),
        *((LLAMA_CPP, "GGUF"), (BEFORE, "float32"), (BEFORE, "GGUF")),
    ]
    failed = [each for each in found if isinstance(each, Row)]
    assert [each.problem for each in failed] == ["not installed: no network"] * 2
    models = {each.form: each.model for each in found if isinstance(each, Subject)}
    assert models == {"GGUF": options.gguf, "float32": tmp_path / "f"}


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_a_process_is_read_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "stat").write_text("7 (a) b) c) S 1 42 42 0 -1 0 0 0 0 0 30 12 5 3 20 0 1 0 9 9\n")
    stat = stat_of(tmp_path)
    assert (stat[2], sum(map(int, stat[11:15]))) == ("42", 50)
    assert stat_of(tmp_path / "ended") == []


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--gguf", str(tmp_path / "no.gguf")])
    assert "no such file" in capsys.readouterr().err
