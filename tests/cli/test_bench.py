"""`mlxpaged bench`: what it prints and writes, and that its figures fit each other. Speed itself is not tested."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged import __version__
from mlxpaged.cli import main
from mlxpaged.cli.bench import command
from mlxpaged.cli.bench.figures import comparison_figures, sweep_figures
from mlxpaged.cli.bench.load import Answer, Load, Pass, make_prompts
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.engine_config import EngineConfig
from tests.cli.helpers import DEADLINE, Result, environment, mlxpaged
from tests.support import make_tiny_model

QUICK = ("--prompts", "6", "--prompt-tokens", "5,20,70", "--max-tokens", "6", "--runs", "2")
SMALL_POOL = ("--kv-cache-memory", "16MB")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("MLXPAGED_"):
            monkeypatch.delenv(name)


def assert_spread(spread: dict[str, float]) -> None:
    assert 0 < spread["p50"] <= spread["p99"]
    assert spread["avg"] > 0


def assert_load(load: dict[str, Any], concurrency: int, prompts: int, prompt_tokens: int, max_tokens: int) -> None:
    """One column of the table: `prompts` prompts of `prompt_tokens` tokens together, per run."""
    runs = load["runs"]
    assert load["concurrency"] == concurrency
    assert load["answers"] == prompts * len(runs)
    assert load["prompt_tokens"] == prompt_tokens * len(runs)
    assert load["output_tokens"] == prompts * max_tokens * len(runs)
    assert load["cached_tokens"] == 0
    assert load["seconds"] == pytest.approx(sum(run["seconds"] for run in runs))
    assert load["output_tokens_per_second"] == pytest.approx(load["output_tokens"] / load["seconds"])
    assert load["prompt_tokens_per_second"] == pytest.approx(load["prompt_tokens"] / load["seconds"])
    for run in runs:
        assert (run["answers"], run["output_tokens"]) == (prompts, prompts * max_tokens)
        assert run["output_tokens_per_second"] == pytest.approx(run["output_tokens"] / run["seconds"])
    for name in ("latency_seconds", "ttft_seconds", "inter_token_seconds"):
        assert_spread(load[name])
    assert load["ttft_seconds"]["avg"] < load["latency_seconds"]["avg"] < load["seconds"]
    # The latency of an answer is its TTFT plus its inter-token times, and clients are served no longer than the run.
    gaps = (max_tokens - 1) * load["inter_token_seconds"]["avg"]
    assert load["latency_seconds"]["avg"] == pytest.approx(load["ttft_seconds"]["avg"] + gaps)
    assert load["latency_seconds"]["avg"] * load["answers"] <= load["seconds"] * concurrency * 1.001


def test_the_figures_fit_each_other_in_the_table_and_in_the_file(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    flags = (*QUICK, *SMALL_POOL, "--concurrency", "2,4", "--json", str(target))
    with mlxpaged(tmp_path, "bench", *flags) as bench:
        assert bench.wait_end() == 0, bench.stderr
    found = json.loads(target.read_text())
    assert found["interrupted"] is False
    assert found["machine"]["mlxpaged"] == __version__
    assert {"device", "system", "packages", "BLAS"} <= found["machine"].keys()
    assert found["model"] == {"name": "demo", "num_layers": 4, "weight_bytes": 3544576, "context_length": 4096}
    assert found["engine"]["attention_backend"] == ("metal" if mx.metal.is_available() else "cpu")
    assert found["engine"]["kv_cache_bytes"] <= 16_000_000
    assert (found["max_tokens"], found["runs"], found["context_sweep"]) == (6, 2, None)
    comparison = found["comparison"]
    assert (comparison["prompts"], comparison["prompt_tokens"]) == (6, [5, 20, 70])
    single, batched = comparison["single"], comparison["batched"]
    for load, concurrency in zip([single, *batched], [1, 2, 4], strict=True):
        assert len(load["runs"]) == 2
        assert_load(load, concurrency, prompts=6, prompt_tokens=190, max_tokens=6)
    for load in batched:
        gain = load["speedup"]
        alone = single["output_tokens_per_second"]
        assert gain["ratio"] == pytest.approx(load["output_tokens_per_second"] / alone)
        for ratio, ours, alone_run in zip(gain["by_run"], load["runs"], single["runs"], strict=True):
            alone = alone_run["output_tokens_per_second"]
            assert ratio == pytest.approx(ours["output_tokens_per_second"] / alone)

    assert "\x1b" not in bench.stdout + bench.stderr, "no terminal, no colours"
    assert "6 prompts (2 of 5, 2 of 20, 2 of 70 tokens), 6 tokens each; 2 runs" in bench.stdout
    rows = {line.split("  ")[0]: re.split(r"\s{2,}", line)[1:] for line in bench.stdout.splitlines()}
    loads = [single, *batched]
    assert rows["output tokens/s"] == [f"{load['output_tokens_per_second']:.1f}" for load in loads]
    assert rows["speed-up"] == ["1.00", *(f"{load['speedup']['ratio']:.2f}" for load in batched)]
    assert rows["answers"] == ["12", "12", "12"]
    assert [line for line in bench.stderr.splitlines() if "run 2" in line] == [
        "one at a time, run 2 of 2",
        "2 at a time, run 2 of 2",
        "4 at a time, run 2 of 2",
    ]


def test_by_default_five_short_five_medium_and_five_long_prompts_are_measured(
    run: Callable[..., Result],
) -> None:
    """With --json -, standard output has the figures and nothing else."""
    bench = run("bench", "--runs", "1", "--max-tokens", "3", "--json", "-")
    assert bench.status == 0, bench.stderr
    comparison = json.loads(bench.stdout)["comparison"]
    assert (comparison["prompts"], comparison["prompt_tokens"]) == (15, [32, 128, 512])
    assert_load(comparison["single"], 1, prompts=15, prompt_tokens=5 * (32 + 128 + 512), max_tokens=3)
    [batched] = comparison["batched"]
    assert_load(batched, 8, prompts=15, prompt_tokens=5 * (32 + 128 + 512), max_tokens=3)
    assert "speed-up" in bench.stderr


@pytest.mark.parametrize(
    ("flags", "prompts", "concurrency"),
    [
        (("--prompts", "3"), 3, [1, 3]),
        (("--prompts", "1"), 1, [1]),
        (("--prompts", "2", "--no-batching"), 2, [1]),
        (("--max-num-seqs", "4"), 15, [1, 4]),
        (("--concurrency", "1,2,16"), 16, [1, 2, 16]),
    ],
    ids=str,
)
def test_defaults_fit_the_flags_that_are_given(
    run: Callable[..., Result], flags: tuple[str, ...], prompts: int, concurrency: list[int]
) -> None:
    short = ("--prompt-tokens", "5", "--max-tokens", "2", "--runs", "1", "--json", "-")
    bench = run("bench", "--model", "demo", *flags, *short, *SMALL_POOL)
    assert bench.status == 0, bench.stderr
    comparison = json.loads(bench.stdout)["comparison"]
    assert comparison["prompts"] == prompts
    assert [load["concurrency"] for load in (comparison["single"], *comparison["batched"])] == concurrency


def test_no_prompt_begins_as_another_does() -> None:
    prompts = make_prompts([1, 5, 9] * 67, vocab_size=300)[:200]
    assert [len(prompt) for prompt in prompts[:4]] == [1, 5, 9, 1]
    assert len({prompt[0] for prompt in prompts}) == 200
    assert all(0 <= token < 300 for prompt in prompts for token in prompt)


def test_long_prompts_are_clipped_to_the_models_context(
    tmp_path: Path, run: Callable[..., Result], caplog: pytest.LogCaptureFixture
) -> None:
    model = make_tiny_model(tmp_path / "model", "llama", max_position_embeddings=100)
    bench = run("bench", str(model), "--runs", "1", "--max-tokens", "8", "--json", "-")
    assert bench.status == 0, bench.stderr
    assert json.loads(bench.stdout)["comparison"]["prompt_tokens"] == [32, 92, 92]
    assert "shortened to fit" in bench.stderr
    bench = run("bench", str(model), "--max-tokens", "69")
    assert bench.status == 1
    message = "no room for a prompt of 32 tokens and an answer of 69 (--max-tokens): this model's context length is 100"
    assert message in bench.stderr
    assert "Traceback" not in bench.stderr + caplog.text
    assert bench.stdout == ""


def test_a_batch_that_does_not_fit_the_pool_shows_preemptions(run: Callable[..., Result]) -> None:
    flags = ("--prompts", "4", "--prompt-tokens", "60", "--max-tokens", "40", "--runs", "1", "--concurrency", "4")
    bench = run("bench", *flags, "--kv-cache-memory", "590KB", "--json", "-")
    assert bench.status == 0, bench.stderr
    found = json.loads(bench.stdout)
    assert found["engine"]["num_blocks"] == 9
    [batched] = found["comparison"]["batched"]
    assert batched["preemptions"] > 0
    assert batched["answers"] == 4
    assert re.search(rf"preemptions +0 +{batched['preemptions']}\n", bench.stderr)


def test_the_sweep_measures_prefill_and_decoding_at_growing_contexts(
    tmp_path: Path, run: Callable[..., Result]
) -> None:
    flags = ("--context-sweep", "--max-context", "300", "--max-tokens", "5", "--runs", "2", *SMALL_POOL)
    bench = run("bench", *flags, "--json", str(tmp_path / "figures.json"))
    assert bench.status == 0, bench.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["comparison"] is None
    assert [one["context"] for one in found["context_sweep"]] == [128, 256, 300]
    for one in found["context_sweep"]:
        assert (one["answers"], one["prompt_tokens"], one["decoded_tokens"]) == (2, 2 * one["context"], 2 * 4)
        assert one["prefill_tokens_per_second"] == pytest.approx(one["prompt_tokens"] / one["prefill_seconds"])
        assert one["decode_tokens_per_second"] == pytest.approx(one["decoded_tokens"] / one["decode_seconds"])
        assert one["ttft_seconds"]["avg"] == pytest.approx(one["prefill_seconds"] / 2)
        assert one["inter_token_seconds"]["avg"] == pytest.approx(one["decode_seconds"] / 8)
        assert_spread(one["ttft_seconds"])
    assert "cpu attention" in bench.stdout
    rates = [one["decode_tokens_per_second"] for one in found["context_sweep"]]
    costs = [one["token_cost"] for one in found["context_sweep"]]
    assert costs == pytest.approx([rates[1] / rate for rate in rates])
    assert "token cost, 256 = 1" in bench.stdout
    rows = [line.split() for line in bench.stdout.splitlines()[-3:]]
    assert [row[0] for row in rows] == ["128", "256", "300"]
    assert [row[-1] for row in rows] == [f"{cost:.2f}" for cost in costs]


def test_the_sweep_ends_where_the_pool_does(run: Callable[..., Result]) -> None:
    flags = ("--context-sweep", "--max-tokens", "5", "--runs", "1", "--kv-cache-memory", "700KB", "--json", "-")
    bench = run("bench", *flags)
    assert bench.status == 0, bench.stderr
    found = json.loads(bench.stdout)
    longest = found["engine"]["num_blocks"] * 32 + 1 - 5
    assert [one["context"] for one in found["context_sweep"]] == [128, 256, longest]


@pytest.mark.parametrize("target", ["-", "figures.json"])
def test_an_interrupt_shows_what_was_measured_until_then(tmp_path: Path, target: str) -> None:
    path = target if target == "-" else str(tmp_path / target)
    with mlxpaged(tmp_path, "bench", *QUICK, "--runs", "100000", "--concurrency", "3", "--json", path) as bench:
        bench.wait_logged("one at a time, run 2")
        bench.process.send_signal(signal.SIGINT)
        assert bench.wait_end() == 130
    assert "Traceback" not in bench.stderr
    assert "interrupted" in bench.stderr
    found = json.loads(bench.stdout if target == "-" else Path(path).read_text())
    assert found["interrupted"] is True
    [batched] = found["comparison"]["batched"]
    for load in (found["comparison"]["single"], batched):
        assert 6 <= load["answers"] < 600_000
        assert load["output_tokens"] >= 6 * load["answers"]
        assert load["output_tokens_per_second"] == pytest.approx(load["output_tokens"] / load["seconds"])
    table = bench.stderr if target == "-" else bench.stdout
    assert table.index("results until then:") < table.index("speed-up")


def test_an_interrupt_while_the_model_loads_ends_the_command(tmp_path: Path) -> None:
    """The hub has been asked, and does not answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(DEADLINE)
        env = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "HF_HOME": str(tmp_path), "NO_PROXY": "*"}
        with mlxpaged(tmp_path, "bench", "someone/model", env=env) as bench:
            connection, _ = silent.accept()
            bench.process.send_signal(signal.SIGINT)
            assert bench.wait_end() == 130
            connection.close()
    assert "interrupted" in bench.stderr
    assert "Traceback" not in bench.stderr
    assert bench.stdout == ""


def test_a_terminal_gets_a_bar_and_lines(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mlxpaged", "bench", *QUICK, "--concurrency", "2"],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=environment({"TERM": "xterm", "COLUMNS": "80"}),
    )
    os.close(theirs)
    shown = b"".join(read_all(ours)).decode()
    assert process.wait(DEADLINE) == 0, shown
    assert "━" in shown
    assert "100%" in shown
    assert "───" in shown, "the table's head"
    assert "speed-up" in shown


def read_all(descriptor: int) -> Iterator[bytes]:
    with open(descriptor, "rb", buffering=0) as terminal:
        while True:
            try:
                data = terminal.read(4096)
            except OSError:  # on Linux, the end of a pseudo-terminal
                return
            if not data:
                return
            yield data


def test_no_such_model_is_said_in_a_sentence(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    with mlxpaged(tmp_path, "bench", str(tmp_path / "nothing"), "--json", str(target)) as bench:
        assert bench.wait_end() == 1
    [sentence] = [line for line in bench.stderr.splitlines() if line.startswith("mlxpaged: ")]
    assert str(tmp_path / "nothing") in sentence
    assert "Traceback" not in bench.stderr
    assert bench.stdout == ""
    assert not target.exists()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "4,"], "--concurrency"),
        (["--concurrency", "two"], "--concurrency"),
        (
            ["--concurrency", "16", "--prompts", "15"],
            "--concurrency is 16, but --prompts is only 15",
        ),
        (["--concurrency", "2,33", "--prompts", "40"], "--concurrency is 33, but --max-num-seqs is only 32"),
        (["--no-batching", "--concurrency", "8"], "--concurrency is 8, but --max-num-seqs is only 1"),
        (["one", "--model", "two"], "--model"),
        (["--prompts", "0"], "--prompts"),
        (["--prompt-tokens", "32,-1"], "--prompt-tokens"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--runs", "0"], "--runs"),
        (["--max-context", "500"], "--max-context needs --context-sweep"),
        (["--context-sweep", "--concurrency", "2"], "--concurrency cannot be combined with --context-sweep"),
        (["--context-sweep", "--prompts", "2"], "--prompts cannot be combined with --context-sweep"),
        (["--context-sweep", "--prompt-tokens", "2"], "--prompt-tokens cannot be combined with --context-sweep"),
        (["--json", "/no/such/directory/figures.json"], "--json"),
        (["--json", "/"], "--json"),
        (["--block-size", "24"], "--block-size"),
        (["--retune", "--attention-backend", "gather"], "only with the metal backend"),
        (["--port", "80"], "--port"),
        (["demo", "demo"], "demo"),
    ],
)
def test_a_bad_flag_ends_with_status_2_and_is_named(
    capsys: pytest.CaptureFixture[str], args: list[str], named: str
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *args])
    assert end.value.code == 2
    streams = capsys.readouterr()
    assert named in streams.err
    assert streams.out == ""


def test_the_engine_has_the_flags_of_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[EngineConfig] = []

    class NoBench:
        engine = None

        def __init__(self, config: EngineConfig, *rest: Any) -> None:
            found.append(config)

        async def run(self) -> int:
            return 0

    monkeypatch.setattr(command, "Bench", NoBench)
    monkeypatch.setattr(command, "set_up", lambda level: None)
    monkeypatch.setattr(command, "exit_status", lambda status: status)  # else this process would end
    assert main(["bench"]) == 0
    monkeypatch.setenv("MLXPAGED_BLOCK_SIZE", "16")
    assert main(["bench", "someone/model", "--max-num-seqs", "9", "--swap-space", "1GB", "--no-prefix-cache"]) == 0
    assert main(["bench", "--no-batching", "--concurrency", "1"]) == 0
    assert found == [
        EngineConfig(),
        EngineConfig("someone/model", block_size=16, max_num_seqs=9, swap_space_bytes=10**9, prefix_caching=False),
        EngineConfig(block_size=16, max_num_seqs=1),
    ]


def test_an_engine_that_fails_ends_with_status_1_and_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Result]
) -> None:
    """The device works for about three runs, and then never again. The process ends as it is: MLX may need the
    interpreter for longer than Python knows of its thread."""
    forward = ModelRunner.forward
    calls = 0

    def failing_forward(self: ModelRunner, *args: Any, **more: Any) -> mx.array:
        nonlocal calls
        calls += 1
        if calls > 200:
            raise RuntimeError("the device is on fire")
        return forward(self, *args, **more)

    monkeypatch.setattr(ModelRunner, "forward", failing_forward)
    bench = run("bench", *QUICK, "--runs", "50", "--concurrency", "2", *SMALL_POOL)
    assert bench.status == 1
    assert "the device is on fire" in bench.stderr
    assert "output tokens/s" in bench.stdout


def answer(prompt_tokens: int, submitted: float, *token_times: float, complete: bool = True) -> Answer:
    return Answer(prompt_tokens, submitted, list(token_times), complete=complete)


def load(concurrency: int, *passes: Pass, lengths: tuple[int, ...] = (10, 30)) -> Load:
    return Load("", concurrency, lengths, list(passes))


def test_rates_percentiles_and_speed_up_of_known_times() -> None:
    alone = load(1, Pass([answer(10, 0, 1, 2, 3), answer(30, 3, 5, 6, 7)], seconds=8))
    together = load(2, Pass([answer(10, 0, 1, 2, 3), answer(30, 0, 2, 3, 4)], seconds=4, preemptions=1))
    single, batched = comparison_figures([alone, together])
    assert (single["prompt_tokens"], single["output_tokens"], single["seconds"], single["answers"]) == (40, 6, 8, 2)
    assert (single["prompt_tokens_per_second"], single["output_tokens_per_second"]) == (5, 0.75)
    assert (single["latency_seconds"]["avg"], single["latency_seconds"]["p50"]) == (3.5, 3.5)
    assert single["latency_seconds"]["p99"] == pytest.approx(3.99)
    assert single["ttft_seconds"]["avg"] == 1.5
    assert single["inter_token_seconds"]["p99"] == 1
    assert batched["preemptions"] == 1
    assert batched["speedup"] == {"ratio": 2, "by_run": [2]}


def test_what_was_not_measured_has_no_figure() -> None:
    assert comparison_figures([load(1), load(2)]) == []
    assert comparison_figures([load(1, Pass([answer(10, 0, complete=False)], seconds=1))]) == []
    assert sweep_figures([load(1)]) == []
    [begun] = comparison_figures([load(1, Pass([answer(10, 0, 2, complete=False)], seconds=4), Pass())])
    assert (begun["answers"], begun["output_tokens"], begun["output_tokens_per_second"]) == (0, 1, 0.25)
    assert begun["latency_seconds"] is None
    assert begun["inter_token_seconds"] is None
    assert len(begun["runs"]) == 1
    [context] = sweep_figures([load(1, Pass([answer(128, 0, 2)], seconds=2), lengths=(128,))])
    assert (context["prefill_tokens_per_second"], context["decode_tokens_per_second"]) == (64, None)
    assert context["token_cost"] is None


@pytest.mark.parametrize("lines", [0, 1])
def test_a_reader_who_leaves_is_told_of_in_a_sentence(tmp_path: Path, lines: int) -> None:
    """As with `mlxpaged bench | head -1`: before the first line, or before the table."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mlxpaged", "bench", *QUICK, "--concurrency", "2", *SMALL_POOL],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment({}),
        text=True,
    )
    assert process.stdout is not None
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        said = process.stderr.read()
    assert process.wait(DEADLINE) == 1
    assert "mlxpaged: the figures cannot be printed: Broken pipe" in said
    assert "Traceback" not in said
    assert "Exception ignored" not in said
