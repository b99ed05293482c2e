"""What happens to others while a model is loaded or unloaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.core.engine.errors import EngineState
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.turns import Turns
from mlxpaged.progress import Progress
from mlxpaged.registry.model import Model
from mlxpaged.registry.occupants import Limits
from mlxpaged.registry.registry import Registry
from tests.api.helpers import DEADLINE, Background, FakeClock, StepGate, post, raw, run_on
from tests.api.test_batches import ended, jsonl, lines_of, submit
from tests.registry.helpers import POOL, hold_loads, models, refusal, states
from tests.support import RunningServer, running_server, wait_until


class NotWanted(Exception):
    pass


def test_a_load_that_is_not_wanted_any_more_does_not_wait_for_its_download() -> None:
    go_on, ended_by = threading.Event(), list[bool]()

    def report(progress: Progress) -> None:
        raise NotWanted

    with pytest.raises(NotWanted):
        Turns(report).during(lambda: ended_by.append(go_on.wait(DEADLINE)))
    assert not ended_by
    go_on.set()


def test_models_are_unloaded_while_another_one_loads(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(models(paths, "small", "other")) as server, raw(server) as client:
        post(server, run_on("x", 2, model="other"))
        hold_loads(monkeypatch)
        waiting = Background.post(server, "/v1/completions", run_on("x", 2, model="small"))
        queued = Background.post(server, "/v1/completions", run_on("x", 2, model="demo"))
        assert queued.text is not None
        assert client.post("/v1/models/other/unload").json()["state"] == "available"
        wait_until(lambda: server.registry.models["small"].loading is not None)
        queued = Background.post(server, "/v1/completions", run_on("x", 2, model="other"))
        wait_until(lambda: server.registry.models["other"].loading is not None)
        for name, pending in (("other", queued), ("small", waiting)):  # the first one waits for the load of the second
            assert client.post(f"/v1/models/{name}/unload").json()["state"] == "available"
            answer = pending.result()
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")
            assert "unloaded" in answer.json()["error"]["message"]
        assert states(server) == {"demo": "loaded", "small": "available", "other": "available"}


def test_a_model_of_the_start_is_not_loaded_because_the_server_ends_meanwhile(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the end would wait ten seconds for the engine thread, and not one."""
    go_on = hold_loads(monkeypatch)
    with running_server(models(paths), wait_loaded=False) as server:
        assert server.run(server.registry.drain(DEADLINE)).result(DEADLINE)
        assert states(server) == {"demo": "loading"}
        assert not server.registry.loaded
        go_on.set()


def test_a_model_that_is_loaded_already_waits_for_no_other_load(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(models(paths, "small")) as server, raw(server) as client:
        go_on = hold_loads(monkeypatch)
        waiting = Background.post(server, "/v1/completions", run_on("x", 2, model="small"))
        wait_until(lambda: server.registry.models["small"].loading is not None)
        assert client.post("/v1/models/demo/load").json()["state"] == "loaded"
        assert post(server, run_on("x", 2))["usage"]["completion_tokens"] == 2
        go_on.set()
        assert waiting.result().status_code == 200


def test_lines_of_a_batch_wait_for_another_load_if_theirs_is_ended(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_server(models(paths, "small"), data_dir=tmp_path) as server, server.client() as client:
        go_on = hold_loads(monkeypatch)
        batch = submit(client, jsonl([run_on("x", 3, model="small")]))
        wait_until(lambda: server.registry.models["small"].loading is not None)
        with raw(server) as other:
            # The line may have asked for the model again.
            assert other.post("/v1/models/small/unload").json()["state"] in ("available", "loading")
        go_on.set()
        found = ended(client, batch)
        assert found.request_counts is not None
        assert (found.request_counts.completed, found.request_counts.failed) == (1, 0)


def test_a_batch_waits_while_the_ranks_of_the_server_start_again(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[EngineState]()

    class Watched(Registry):
        def require_ready(self) -> None:
            looks.append(self.state)
            super().require_ready()

    base = EngineConfig(kv_cache_bytes=POOL)
    registry = Watched({"demo": Model("demo", base)}, base)
    with running_server(registry, data_dir=tmp_path) as server, server.client() as client, StepGate(server) as gate:
        batch = submit(client, jsonl([run_on("x", 3)] * 2))
        gate.wait_held()
        engine = server.engine
        engine.slot.callbacks.on_restart("rank 1 died")
        wait_until(lambda: looks[-3:] == [EngineState.LOADING] * 3)
        gate.open()
        assert engine.info is not None
        assert engine.stats is not None
        engine.slot.callbacks.on_ready(engine.info, engine.stats)
        found = ended(client, batch)
        assert found.request_counts is not None
        assert (found.request_counts.completed, found.request_counts.failed) == (2, 0)


def test_a_shutdown_refuses_what_waits_for_a_load(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(models(paths, "small", "other")) as server:
        hold_loads(monkeypatch)
        whole = Background.post(server, "/v1/completions", run_on("x", 2, model="small"))
        stream = Background.post(server, "/v1/completions", run_on("x", 2, model="other", stream=True))
        wait_until(lambda: all(server.registry.models[name].loading for name in ("small", "other")))
        assert server.run(server.registry.drain(DEADLINE)).result(DEADLINE)
        answer = whole.result()
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server is shutting down")
        assert "the server is shutting down" in stream.result().text.splitlines()[-2]


def test_a_model_that_gets_a_request_is_not_unloaded_with_other_idle_ones(paths: dict[str, Path]) -> None:
    clock = FakeClock()
    registry = models(paths, "small", "other", clock=clock, limits=Limits(idle_unload=10), pinned=["demo"])
    with running_server(registry, clock=clock) as server:
        for name in ("small", "other"):
            post(server, run_on("x", 2, model=name))
        small, other = (registry.models[name].engine for name in ("small", "other"))
        assert small is not None
        assert other is not None
        clock.advance(9)
        used_at = other.idle_since
        other.slot.callbacks.on_step([], server.core_of("other").stats())  # it has given back memory, for example
        with raw(server) as client:
            client.post("/tokenize", json={"model": "small", "prompt": "x"})
        assert (other.idle_since, small.idle_since) == (used_at, clock())
        unload, request = small.unload, other.reserve(1)

        async def unload_slowly() -> None:
            request.__enter__()
            await unload()

        small.unload = unload_slowly  # type: ignore[method-assign]
        server.run(advance(clock)).result(DEADLINE)
        wait_until(lambda: states(server)["small"] == "available")
        time.sleep(0.1)
        assert states(server)["other"] == "loaded"
        server.run(leave(request)).result(DEADLINE)
        wait_until(lambda: states(server)["other"] == "available")


async def advance(clock: FakeClock) -> None:
    """On the event loop, so not while it looks at one model after the other."""
    clock.advance(100)


async def leave(context: Any) -> None:
    context.__exit__(None, None, None)


def test_a_model_that_can_never_fit_unloads_no_other(paths: dict[str, Path], tmp_path: Path) -> None:
    huge = tmp_path / "huge"
    huge.mkdir()
    for file in paths["small"].iterdir():
        (huge / file.name).symlink_to(file)
    with (huge / "model-2.safetensors").open("wb") as weights:
        weights.truncate(2**42)
    with running_server(models(paths | {"huge": huge}, "small", "huge")) as server:
        post(server, run_on("x", 2, model="small"))
        status, error = refusal(server, "/v1/completions", run_on("x", 2, model="huge"))
        assert (status, error["code"]) == (507, "insufficient_memory")
        assert "4398.0 GB" in error["message"]
        assert states(server) == {"demo": "loaded", "small": "loaded", "huge": "available"}


@pytest.fixture
def one_at_a_time(paths: dict[str, Path], tmp_path: Path) -> Iterator[RunningServer]:
    with running_server(models(paths, "small", limits=Limits(max_loaded=1)), data_dir=tmp_path) as server:
        yield server


def test_lines_of_a_batch_may_name_models_that_are_not_loaded_together(one_at_a_time: RunningServer) -> None:
    server = one_at_a_time
    bodies = [run_on("x", 3, model=name) for name in ("demo", "small", "demo")]
    with server.client() as client, StepGate(server) as gate:
        batch = submit(client, jsonl(bodies))
        gate.wait_held()
        gate.open()
        found = ended(client, batch)
        assert found.request_counts is not None
        assert (found.request_counts.completed, found.request_counts.failed) == (3, 0)


def test_a_line_for_a_model_whose_engine_failed_fails_alone(paths: dict[str, Path], tmp_path: Path) -> None:
    with running_server(models(paths, "small"), data_dir=tmp_path) as server, server.client() as client:
        post(server, run_on("x", 2, model="small"))
        core: Any = server.core_of("small")
        core.scheduler.schedule = lambda: 1 / 0
        refusal(server, "/v1/completions", run_on("x", 2, model="small"))
        batch = ended(client, submit(client, jsonl([run_on("x", 3, model=name) for name in ("small", "demo")])))
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        [failed] = lines_of(client, batch.output_file_id).keys() ^ {"line-0", "line-1"}
        assert failed == "line-0"


def test_a_batch_waits_until_a_default_model_whose_engine_failed_is_loaded_again(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    with running_server(models(paths, "small"), data_dir=tmp_path) as server, server.client() as client:
        core: Any = server.core_of("demo")
        core.scheduler.schedule = lambda: 1 / 0
        waiting = submit(client, jsonl([run_on("x", 3, model=name) for name in ("demo", "small")]))
        wait_until(lambda: (counts := client.batches.retrieve(waiting.id).request_counts) and counts.completed == 1)
        assert states(server) == {"demo": "failed", "small": "loaded"}
        with raw(server) as other:
            assert other.post("/v1/models/demo/load").json()["state"] == "loaded"
        for batch, count in ((waiting, 2), (submit(client, jsonl([run_on("x", 3)])), 1)):
            found = ended(client, batch).request_counts
            assert found is not None
            assert (found.completed, found.failed) == (count, 0)


def test_a_line_of_another_model_fails_although_the_default_model_is_dead_too(
    paths: dict[str, Path], tmp_path: Path
) -> None:
    with running_server(models(paths, "small"), data_dir=tmp_path) as server, server.client() as client:
        post(server, run_on("x", 2, model="small"))
        demo, small = (server.registry.models[name].engine for name in ("demo", "small"))
        assert demo is not None
        assert small is not None
        cores: list[Any] = [server.core_of(name) for name in ("demo", "small")]
        schedule = cores[1].scheduler.schedule
        cores[0].scheduler.schedule = lambda: 1 / 0
        cores[1].scheduler.schedule = lambda: 1 / 0 if demo.state is EngineState.DEAD else schedule()
        batch = submit(client, jsonl([run_on("x", 3), run_on("x", 400, model="small")]))
        wait_until(lambda: (counts := client.batches.retrieve(batch.id).request_counts) and counts.failed == 1)
        with raw(server) as other:
            other.post("/v1/models/demo/load")
        found = ended(client, batch).request_counts
        assert found is not None
        assert (found.completed, found.failed) == (1, 1)
