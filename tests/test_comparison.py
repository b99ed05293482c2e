"""The comparison's arithmetic, its client, and all of its loads on a real server; no figure is asserted."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from benchmarks.comparison import client as comparison_client
from benchmarks.comparison import run as comparison
from benchmarks.comparison.client import Answer, Client, take
from benchmarks.comparison.environments import OPENBLAS, ROOT, SetupError, server_variables, telling_line
from benchmarks.comparison.loads import CAPACITY, Run, Sizes, Threads, make_loads
from benchmarks.comparison.metrics import Figures, measure, percentile
from benchmarks.comparison.model import WORDS, Texts, make_model, make_tokenizer
from benchmarks.comparison.options import Options, parse
from benchmarks.comparison.report import markdown
from benchmarks.comparison.servers import MemoryWatch, Server, ServerError, running, stop
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import chat_tokens
from tests.support import RunningServer, running_server

TINY = Sizes(
    a_requests=4,
    a_prompt=20,
    a_output=4,
    a_concurrent=(1, 2),
    b_requests=3,
    b_prefix=100,
    b_own=5,
    b_output=2,
    b_concurrent=2,
    c_streams=2,
    c_stream_prompt=5,
    c_stream_output=8,
    c_long=2,
    c_long_prompt=100,
    c_long_output=2,
    c_every_seconds=0.1,
    d_users=2,
    d_turns=3,
    d_prompt=10,
    d_output=40,
    e_requests=3,
    e_prompt=(5, 20),
    e_output=(2, 4),
    e_shares=(2.0,),
    e_concurrent=2,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The benchmark model with a hundredth of its weights."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return make_model(tmp_path_factory.mktemp("model"), **small, **heads)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with running_server(EngineConfig(model=str(model))) as server:
        yield server


def port_of(server: RunningServer) -> int:
    return int(server.url.rsplit(":", 1)[1])


class ServerInThisProcess(Server):
    """A server whose process is not looked at."""

    def died(self) -> str | None:
        return None

    def memory_bytes(self) -> int:
        return 1_000_000

    def uses_openblas(self) -> bool | None:
        return None


def starter(server: RunningServer, model: Path) -> Any:
    @contextlib.contextmanager
    def start(name: str, log: Path) -> Iterator[Server]:
        log.parent.mkdir(exist_ok=True)
        log.write_text("")
        if name == "mlx-lm":
            raise ServerError("ended with 1: no such model")
        yield ServerInThisProcess(name, str(model), port_of(server), None, log)  # type: ignore[arg-type]

    return start


def options(out: Path, *arguments: str) -> Options:
    return replace(parse(["--out", str(out), *arguments]), servers=("mlxpaged", "mlx-lm"))


def compare(server: RunningServer, model: Path, chosen: Options) -> dict[str, Any]:
    httpx.post(f"{server.url}/v1/cache/clear").raise_for_status()  # of what an earlier test asked
    results = comparison.new_results(chosen, model, TINY)
    names = list(chosen.servers)
    comparison.measure_all(chosen, TINY, Texts(model), names, starter(server, model), results)
    return json.loads(json.dumps(results))  # type: ignore[no-any-return]


@pytest.mark.more
def test_every_load_runs_and_a_server_that_does_not_start_is_shown_as_such(
    server: RunningServer, model: Path, tmp_path: Path
) -> None:
    results = compare(server, model, options(tmp_path))
    figures = {run["load"]: run["figures"] for run in results["runs"] if run["server"] == "mlxpaged"}
    assert list(figures) == ["A at 1", "A at 2", "B", "C", "D", CAPACITY, "E at 2"]
    assert [run["server"] for run in results["runs"]] == ["mlxpaged", "mlx-lm"] * len(figures)
    for name, one in figures.items():
        assert one["answered"] == one["requests"] > 0, name
        assert one["short"] == 0, "the model never ends an answer by itself"
        assert one["errors"] == {}
        assert one["output_tokens_per_second"] > 0
        assert one["ttft_p50"] <= one["ttft_p99"]
    assert figures["A at 2"]["output_tokens"] == TINY.a_requests * TINY.a_output
    assert figures["C"]["requests"] >= TINY.c_streams + TINY.c_long
    problems = {run["problem"] for run in results["runs"] if run["server"] == "mlx-lm"}
    assert problems == {"ended with 1: no such model"}
    starts = [log.name for log in (tmp_path / "logs").iterdir() if log.name.startswith("mlx-lm")]
    assert sorted(starts) == ["mlx-lm-0-A-at-1.log", "mlx-lm-0-E-at-2.log"], "once for each round of loads"
    text = markdown(results)
    assert text.count("| mlx-lm | **ended with 1: no such model** |") == len(figures)
    assert "| D | old tokens computed again in a turn | " in text


@pytest.mark.more
def test_prefixes_are_found_again_where_a_load_means_it_and_nowhere_else(
    server: RunningServer, model: Path, tmp_path: Path
) -> None:
    results = compare(server, model, options(tmp_path, "--loads", "A", "B", "D", "--repeat", "2"))
    figures = [run["figures"] for run in results["runs"] if run["figures"]]
    assert len(figures) == 8
    texts = [chat_tokens(server, [{"role": "user", "content": each}]) for each in ("a", "b")]
    template = next(i for i, (one, other) in enumerate(zip(*texts, strict=True)) if one != other)
    for one in figures:
        if one["load"].startswith("A"):
            assert one["cached_tokens"] <= template * one["requests"], "the second repetition has other words"
        elif one["load"] == "B":
            assert one["cached_tokens"] >= 2 * 96
        else:
            assert one["recomputed_beyond_new"] <= 32, "an answer that is sent back has the tokens it was made of"


def test_a_server_is_a_process_of_its_own_that_is_watched_and_stopped(model: Path, tmp_path: Path) -> None:
    with running("mlxpaged", Path(sys.executable), model, tmp_path / "server.log") as server:
        client = Client(server.port, server.model, time.perf_counter() + 60, 60)
        assert client.ask([{"role": "user", "content": "x"}], 4).output_tokens == 4
        with MemoryWatch(server) as memory:
            pass
        assert memory.peak > 10e6
        assert server.uses_openblas() in ((True, False) if sys.platform == "linux" else (None,))
        assert server.died() is None
    assert server.process.poll() is not None
    assert server.died() is not None


def test_a_server_that_ends_at_its_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerError, match=r"^ended with \d+: .*nowhere"),
        running("mlxpaged", Path(sys.executable), tmp_path / "nowhere", tmp_path / "server.log"),
    ):
        pass


def test_it_starts_on_a_python_without_any_package() -> None:
    command = [sys.executable, "-S", str(Path(__file__).parent.parent / "benchmarks" / "compare.py"), "--help"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert "--loads" in output


def test_what_comes_after_the_budget_is_left_out(server: RunningServer, model: Path, tmp_path: Path) -> None:
    results = compare(server, model, options(tmp_path, "--loads", "A", "--budget", "1e-9"))
    assert {run["problem"] for run in results["runs"]} == {"not run: 0 minutes were over"}


def test_a_request_over_the_time_of_its_load_is_given_up(
    server: RunningServer, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's clock goes on at each reading only."""
    seconds = itertools.count(0, 10)
    monkeypatch.setattr(comparison_client, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    message = [{"role": "user", "content": Texts(model).of("late", 10)}]
    late = Client(port_of(server), str(model), 1000.0, 1e9).ask(message, 4000)
    assert late.error == "the load's time was up"
    assert 1000 <= late.seconds <= 1020
    assert late.output_tokens == len(late.chunk_times) > 0
    assert late.gave_up
    server.wait_idle()
    never_sent = Client(port_of(server), str(model), 0.0, 60).ask(message, 4)
    assert (never_sent.error, never_sent.gave_up) == ("the load's time was up", False)
    assert Client(port_of(server), str(model), 1e9, 1000.0).ask(message, 4000).error == "timed out"
    server.wait_idle()


def test_a_refusal_and_a_dead_server_are_errors(server: RunningServer, model: Path) -> None:
    client = Client(port_of(server), str(model), time.perf_counter() + 60, 60)
    refused = client.ask([{"role": "user", "content": "x"}], -2)
    assert refused.error is not None
    assert refused.error.startswith("ValueError: status 400")
    gone = replace(client, port=1).ask([{"role": "user", "content": "x"}], 4)
    assert gone.error is not None
    assert gone.error.startswith("ConnectionRefusedError")


def read_request(connection: socket.socket) -> None:
    """To its end: a connection that is closed before is reset."""
    with connection.makefile("rb") as file:
        file.readline()
        file.read(int(http.client.parse_headers(file)["Content-Length"]))


def test_a_reset_connection_is_tried_again_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_client, "RETRY_SECONDS", 0.0)
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}})
    text = json.dumps({"choices": [{"delta": {"content": "word"}}]})
    stream = f"HTTP/1.0 200 OK\r\n\r\ndata: {text}\n\ndata: {usage}\n\ndata: [DONE]\n\n"

    def serve() -> None:
        first, _ = listener.accept()
        first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
        first.close()
        second, _ = listener.accept()
        with second:
            read_request(second)
            second.sendall(stream.encode())

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        client = Client(listener.getsockname()[1], "model", time.perf_counter() + 60, 60)
        answer = client.ask([{"role": "user", "content": "x"}], 1)
        served.result(60)
    assert (answer.error, answer.text, answer.output_tokens, answer.retries) == (None, "word", 1, 1)
    assert figures_of("A at 1", [answer], 1.0).retries == 1


def test_a_word_is_one_token_wherever_it_stands() -> None:
    tokenizer = make_tokenizer()
    words = WORDS[::37]
    ids = tokenizer.encode("".join(words)).ids
    assert [tokenizer.decode([token]) for token in ids] == words
    assert tokenizer.encode("".join(reversed(words))).ids == ids[::-1]
    assert tokenizer.decode(tokenizer.encode("Größe, 日本!\n").ids) == "Größe, 日本!\n"


def test_texts_are_as_long_as_asked_for_and_differ_by_name(model: Path) -> None:
    texts = Texts(model)
    assert len(make_tokenizer().encode(texts.of("a", 140)).ids) == 140
    assert texts.of("a", 140) == texts.of("a", 140)
    assert texts.of("a", 140) != texts.of("b", 140)


def an_answer(role: str, sent: float, times: list[float], **fields: Any) -> Answer:
    """100 tokens in, one out per event, ended with the last."""
    counts: dict[str, Any] = {"prompt_tokens": 100, "output_tokens": len(times)} | fields
    return Answer(role, len(times), sent, times, times[-1] if times else sent, **counts)


def figures_of(name: str, answers: list[Answer], end: float) -> Figures:
    return measure(Run(name, answers, end, (0.0, end)), 2_000_000, 0.5, end / 10)


def test_percentiles() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([float(i) for i in range(101)], 99) == 99.0
    assert percentile([1.0, 2.0], 99) == pytest.approx(1.99)
    assert percentile([], 50) is None


def test_figures_of_a_load() -> None:
    first = an_answer("request", 0.0, [1.0, 1.5, 2.0], cached_tokens=30)
    second = an_answer("request", 1.0, [4.0, 4.1, 4.2, 5.0], cached_tokens=0)
    figures = figures_of("A at 2", [first, second], 5.0)
    assert figures.output_tokens_per_second == 7 / 5
    assert figures.input_tokens_per_second == 200 / 5
    assert (figures.ttft_p50, figures.e2e_p50) == (2.0, 3.0)
    assert figures.itl_p50 == pytest.approx(0.5)
    assert (figures.cached_tokens, figures.computed_tokens) == (30, 170)
    assert (figures.peak_memory_mb, figures.client_cpu_share) == (2.0, pytest.approx(0.1))


def test_tokens_of_an_answer_that_fails_count_as_far_as_they_came() -> None:
    cut = an_answer("request", 0.0, [1.0, 2.0], error="timed out", prompt_tokens=0)
    whole = an_answer("request", 0.0, [1.0, 2.0])
    figures = figures_of("B", [cut, whole], 4.0)
    assert figures.output_tokens == 4
    assert (figures.requests, figures.answered, figures.errors) == (2, 1, {"timed out": 1})
    assert figures.cached_tokens is None, "the server does not tell"
    assert figures.e2e_p50 == 2.0


def test_several_tokens_in_an_event_are_one_wait_and_an_early_end_is_noted() -> None:
    answer = an_answer("request", 0.0, [1.0, 3.0], output_tokens=8)
    figures = figures_of("A at 1", [replace(answer, asked_tokens=10)], 4.0)
    assert (figures.itl_p50, figures.tokens_per_event, figures.short) == (2.0, 4.0, 1)


def test_in_c_the_streams_have_the_gaps_and_the_long_prompts_the_wait() -> None:
    stream = an_answer("stream", 0.0, [1.0, 2.0, 3.0, 9.0])
    long = an_answer("long", 2.0, [5.0, 5.1])
    figures = figures_of("C", [stream, long], 6.0)
    assert figures.itl_p50 == 1.0
    assert figures.itl_p99 == pytest.approx(2.96), "from 3.0 on it was waited for, until the last long prompt was done"
    assert figures.ttft_p99 == 3.0
    assert figures.output_tokens == 3 + 2


def test_what_came_after_the_last_long_prompt_is_not_counted() -> None:
    streams = [an_answer("stream", 0.0, [1.0, 2.0, 3.0, 4.0]), an_answer("stream", 6.0, [6.5, 9.0])]
    figures = figures_of("C", [*streams, an_answer("long", 2.0, [3.9, 4.0])], 4.0)
    assert (figures.itl_p50, figures.itl_p99) == (1.0, 1.0)


def test_a_wait_that_was_given_up_counts_as_long_as_it_was() -> None:
    whole = an_answer("request", 0.0, [1.0, 2.0])
    stuck = an_answer("request", 0.0, [1.0, 2.0], error="timed out", gave_up=True)
    stuck.ended = 92.0
    silent = an_answer("request", 0.0, [], error="timed out", gave_up=True)
    silent.ended = 50.0
    refused = an_answer("request", 0.0, [], error="ValueError: status 500")
    figures = figures_of("B", [whole, stuck, silent, refused], 100.0)
    assert figures.itl_p99 == pytest.approx(90, rel=0.03)
    assert figures.ttft_p99 == pytest.approx(50, rel=0.03)
    assert figures.ttft_p50 == 1.0
    assert figures.e2e_p99 == pytest.approx(92, rel=0.03)
    assert figures.e2e_p50 == 50.0


def test_what_a_turn_computes_beside_its_new_tokens() -> None:
    def turn(user: str, prompt: int, cached: int) -> Answer:
        return an_answer(user, 0.0, [1.0] * 10, prompt_tokens=prompt, cached_tokens=cached)

    turns = [turn("user 0", 50, 0), turn("user 1", 60, 0), turn("user 0", 100, 32), turn("user 1", 110, 64)]
    assert figures_of("D", turns, 1.0).recomputed_beyond_new == 28
    turns[-1].has_thinking = True  # no next prompt has that
    assert figures_of("D", turns, 1.0).recomputed_beyond_new is None


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_is_waited_for_and_not_sent_back(name: str) -> None:
    answer = an_answer("request", 0.0, [])
    for now, delta in enumerate([{"role": "assistant"}, {name: "Let me see."}, {"content": "Four."}]):
        take(answer, {"choices": [{"delta": delta}]}, float(now))
    assert (answer.chunk_times, answer.text, answer.has_thinking) == ([1.0, 2.0], "Four.", True)


def test_ratios_are_to_the_best_peer_which_an_earlier_checkout_is_not(tmp_path: Path) -> None:
    chosen = parse(["--out", str(tmp_path), "--before", str(ROOT)])
    assert chosen.servers == ("mlxpaged", "mlx-lm", "vllm-mlx", "rapid-mlx", "mlxpaged-before")
    results = comparison.new_results(chosen, tmp_path, Sizes())
    for server, pause in (("mlxpaged", 0.1), ("mlx-lm", 0.4), ("vllm-mlx", 0.2), ("mlxpaged-before", 0.05)):
        times = [1.0 + pause * i for i in range(11)]
        answers = [an_answer("stream", 0.0, times), an_answer("long", 0.0, times)]
        for load in ("A at 1", "C"):
            figures = figures_of(load, answers, times[-1])
            results["runs"].append({"server": server, "load": load, "problem": None, "figures": figures.__dict__})
    text = markdown(results)
    assert "| A at 1 | output tok/s | 1.50 | at least 1.0 |" in text
    assert "| C | inter-token p99 | 0.500 | at most 0.1 |" in text
    assert "| rapid-mlx | **not run** |" in text
    assert f"before: {comparison.commit(ROOT)}" in text


def test_a_directory_that_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--before", str(tmp_path)])
    assert f"--before {tmp_path}: not a checkout" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """Those who run tests side by side ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_after(wait: Callable[[], object]) -> threading.Thread:
    """This process gets a Ctrl-C when the call returns."""

    def interrupt() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@pytest.mark.more
def test_an_interrupt_ends_any_load_at_once_and_its_threads_with_the_server(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests in flight would take minutes, and the later ones are never sent."""
    long = replace(TINY, a_output=8000, a_concurrent=(2,), c_stream_output=8000, d_output=8000, e_requests=20)
    stopped: list[Server] = []
    asking: set[threading.Thread] = set()

    def interrupt_load(letter: str, client: Client) -> None:
        """When text arrives, or when all requests of E wait for their time."""
        [load, *_] = make_loads([letter], 0.1, long, Texts(model), 0)
        owner, name = (Threads, "sleep_until") if letter == "E" else (comparison_client, "take")
        calls, function, begun = itertools.count(1), getattr(owner, name), threading.Event()

        def noting(*args: Any) -> None:
            asking.add(threading.current_thread())
            if next(calls) >= (long.e_requests if letter == "E" else 2):  # the first event has no text
                begun.set()
            function(*args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, noting)
            interrupt_after(begun.wait)
            load.run(client)

    def measure_until_interrupted() -> None:
        with running("mlxpaged", Path(sys.executable), model, tmp_path / "server.log") as server:
            stopped.append(server)
            client = Client(server.port, server.model, time.perf_counter() + 600, 600)
            for letter in "ACD":
                with pytest.raises(KeyboardInterrupt):
                    interrupt_load(letter, client)
            interrupt_load("E", client)

    with pytest.raises(KeyboardInterrupt):
        measure_until_interrupted()
    assert stopped[0].process.poll() is not None
    asking.discard(threading.current_thread())
    assert len(asking) >= long.e_requests
    for thread in asking:
        thread.join(60)
        assert not thread.is_alive()


def test_an_interrupt_while_a_server_is_stopped_kills_it(tmp_path: Path) -> None:
    stubborn = ["sh", "-c", "trap 'echo asked to end' TERM; echo up; while :; do sleep 1; done"]
    with subprocess.Popen(stubborn, start_new_session=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        interrupt_after(process.stdout.readline)
        with pytest.raises(KeyboardInterrupt):
            stop(Server("stubborn", "model", 1, process, tmp_path / "log"), 60)
        assert process.poll() == -signal.SIGKILL


@pytest.mark.parametrize(("before", "ends"), [("SIG_DFL", True), ("SIG_IGN", False)])
def test_the_end_of_the_terminal_is_an_interrupt_except_under_nohup(before: str, ends: bool) -> None:
    lines = [
        "import signal",
        f"signal.signal(signal.SIGHUP, signal.{before})",
        "import compare",
        "compare.interrupt_on_signals()",
    ]
    code = "\n".join([*lines, "signal.raise_signal(signal.SIGHUP)", "print('goes on')"])
    directory = Path(__file__).parent.parent / "benchmarks"
    done = subprocess.run([sys.executable, "-c", code], cwd=directory, capture_output=True, text=True, timeout=60)
    assert ("KeyboardInterrupt" in done.stderr) is ends
    assert ("goes on" in done.stdout) is not ends


def answer_in(*lines: str) -> Answer:
    """What a client makes of these lines of a stream."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            read_request(connection)
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + "".join(f"{line}\n\n" for line in lines).encode())

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        served = pool.submit(serve)
        answer = Client(listener.getsockname()[1], "model", time.perf_counter() + 60, 60).ask([], 64)
        served.result(60)
    return answer


@pytest.mark.parametrize("event", [[], {"choices": [{"delta": 3}]}, {"usage": {"prompt_tokens": 3}}, {"choices": 1}])
def test_an_unexpected_event_is_an_error_of_its_answer(event: Any) -> None:
    assert answer_in(f"data: {json.dumps(event)}").error


def test_tokens_without_any_text_are_an_error() -> None:
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 64}})
    assert answer_in(f"data: {usage}", "data: [DONE]").error == "an answer without text"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
@pytest.mark.parametrize("name", ["--budget", "--request-timeout", "--load-timeout", "--capacity"])
def test_times_and_rates_are_numbers_above_zero(capsys: pytest.CaptureFixture[str], name: str, value: str) -> None:
    with pytest.raises(SystemExit):
        parse([f"{name}={value}"])
    assert f"{name} must be a number above 0" in capsys.readouterr().err


def test_results_that_could_not_be_kept_are_not_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match=r"^--out .*/file/results: Not a directory"):
        comparison.compare(parse(["--out", str(tmp_path / "file" / "results")]))


def test_results_that_cannot_be_written_in_the_end_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = comparison.new_results(parse([]), tmp_path, Sizes())
    with pytest.raises(SetupError, match=r"the results are above$"):
        comparison.save(results, tmp_path / "gone")
    assert "load average" in capsys.readouterr().out


def test_where_no_server_can_be_installed_that_is_the_result(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_network(*_: object) -> Path:
        raise SetupError("not installed: no network")

    monkeypatch.setattr(comparison, "check_system", lambda: None)
    monkeypatch.setattr(comparison, "draw", lambda *_: None)
    monkeypatch.setattr(comparison, "make_environment", no_network)
    with pytest.raises(SetupError, match=r"^nothing was measured$"):
        comparison.compare(options(tmp_path / "out", "--model", str(model)))
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["runs"] == []
    assert "mlx-lm: not installed: no network" in capsys.readouterr().out


def test_a_model_without_a_fast_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "check_system", lambda: None)
    with pytest.raises(SetupError, match=r"tokenizer\.json: "):
        comparison.compare(options(tmp_path / "out", "--model", str(tmp_path)))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"machine": 3}'])
def test_what_is_no_result_is_not_printed_as_one(tmp_path: Path, text: str) -> None:
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(SetupError, match=r"^--markdown .*/some\.json: "):
        comparison.print_saved(tmp_path / "some.json")


def test_the_rate_of_a_repetition_is_summed_before_the_median_is_taken(tmp_path: Path) -> None:
    results = comparison.new_results(parse([]), tmp_path, Sizes())
    answers = [an_answer("stream", 0.0, [1.0, 2.0])]
    for server, rates in (("mlxpaged", [(100, 0), (0, 100), (40, 40)]), ("mlx-lm", [(10, 10)] * 3)):
        for read, written in rates:
            figures = replace(
                figures_of("C", answers, 2.0), input_tokens_per_second=read, output_tokens_per_second=written
            )
            results["runs"].append({"server": server, "load": "C", "problem": None, "figures": figures.__dict__})
    assert "| C | tok/s, in and out | 5.00 |" in markdown(results)


@pytest.mark.skipif(sys.platform != "linux", reason="a Mac has its own BLAS")
def test_the_peers_get_openblas_and_mlxpaged_finds_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "what-the-caller-has.so")
    assert server_variables("mlx-lm")["LD_PRELOAD"] == OPENBLAS
    assert "LD_PRELOAD" not in server_variables("mlxpaged")


def test_no_server_is_held_to_one_thread_by_what_the_caller_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    for server in ("mlxpaged", "mlx-lm"):
        variables = server_variables(server)
        assert [name for name in variables if "THREADS" in name] == []
        assert variables["OPENBLAS_CORETYPE"] == "Haswell"


def test_of_a_failed_installation_what_helps_is_told() -> None:
    debian = "ensurepip is not\navailable.\n\n    apt install python3.11-venv\n\nFailing command: /x/bin/python\n"
    assert telling_line(debian) == "apt install python3.11-venv"
    assert telling_line("\x1b[31mERROR: no such package\x1b[0m\nsee above") == "ERROR: no such package"
    assert telling_line("CRITICAL no model\nBLAS: slow (apt install libopenblas0)\nbye") == "CRITICAL no model"
    assert telling_line("one\ntwo\n") == "two"
