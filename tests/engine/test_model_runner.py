"""One forward pass: what it counts, what it uploads, who may run it, and what is left after it failed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxpaged.attention import metadata
from mlxpaged.attention.metadata import AttentionMetadata, HostStep
from mlxpaged.core.engine import model_runner
from mlxpaged.core.engine.model_runner import DeviceError, ModelRunner
from mlxpaged.core.engine.step_input import SampledTokens
from mlxpaged.core.step import PENDING, Row, Step
from mlxpaged.cpu import attention as cpu_attention
from mlxpaged.cpu import attention_plan, blas, kv_pool
from mlxpaged.cpu.small_products import WeightFirstLinear
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import ServedModel, load_model
from tests.support import make_tiny_model, run_requests


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return load_model(str(make_tiny_model(tmp_path_factory.mktemp("model") / "m", "llama", num_hidden_layers=3)))


@pytest.fixture
def runner(served: ServedModel) -> ModelRunner:
    return ModelRunner(served, num_blocks=8, block_size=8, backend="auto")


def rows(*parts: tuple[list[int], int, int]) -> Step:
    """Of each sequence of tokens, those from `start` on, `count` of them."""
    found = []
    for i, (tokens, start, count) in enumerate(parts):
        samples = start + count == len(tokens)
        logits = range(start + count - samples, start + count)
        found.append(Row(i, start, tokens[start : start + count], logits, int(samples)))
    return Step(found)


on_cpu = pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="only for the CPU backend")

TABLES = [[5, 2, -1], [0, -1, -1], [7, 1, 3]]
LONG = [9, 8, 7, 6, 5, 4, 3, 2, 1, 2]


def forward(runner: ModelRunner, batch: Step, tables: list[list[int]] = TABLES) -> mx.array:
    return runner.forward(with_tables(batch, tables))


def with_tables(batch: Step, tables: list[list[int]]) -> Step:
    found = zip(batch.rows, tables, strict=False)
    return Step([row._replace(tables=np.array([table], dtype=np.int32)) for row, table in found])


def test_logits_are_those_of_the_model_for_the_rows_that_sample_in_order(
    runner: ModelRunner, served: ServedModel
) -> None:
    logits = forward(runner, rows((LONG, 0, 10), ([4, 5, 6], 0, 2), ([1] * 20, 0, 20)))
    assert logits.shape == (2, served.vocab_size)
    model: Any = served.model
    expected = [model(mx.array([tokens]))[0, -1] for tokens in (LONG, [1] * 20)]
    np.testing.assert_allclose(np.array(logits), np.array(mx.stack(expected)), atol=1e-4)


def test_a_step_calls_the_model_once_and_attention_once_per_layer(runner: ModelRunner) -> None:
    for step in range(1, 4):
        mx.eval(forward(runner, rows((LONG, 0, 10), ([4, 5, 6], 0, 2), ([1] * 20, 0, 20))))
        runner.finish_step()
        assert runner.model_calls == step
        assert runner.attention_calls == 3 * step


def test_a_step_builds_its_metadata_once(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[AttentionMetadata] = []
    original = HostStep.on_device

    def on_device(*args: Any) -> tuple[list[AttentionMetadata], list[mx.array]]:
        made = original(*args)
        built.extend(made[0])
        return made

    monkeypatch.setattr(HostStep, "on_device", on_device)
    mx.eval(forward(runner, rows((LONG, 8, 2), ([4, 5, 6], 2, 1))))
    (meta,) = built
    assert meta.positions.tolist() == [8, 9, 2]
    assert meta.slot_mapping.tolist() == [16, 17, 2]
    assert len([key for key in meta.derived if key[0] in ("plan", "gather")]) == 1


class CountingMlx:
    """MLX as a module sees it, with a list of the arrays that it uploads."""

    def __init__(self) -> None:
        self.uploads: list[mx.array] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def array(self, *args: Any) -> mx.array:
        self.uploads.append(mx.array(*args))
        return self.uploads[-1]


@pytest.mark.parametrize("pending", [False, True])
def test_whatever_the_model_has_to_know_of_a_step_is_one_upload(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, pending: bool
) -> None:
    tokens = [*LONG[:9], PENDING] if pending else LONG
    batch = rows((tokens, 9, 1), ([4, 5, 6], 0, 2), ([1] * 20, 0, 20))
    sampled = SampledTokens(mx.array([7, LONG[9]]), [5, 0])
    expected = np.array(forward(runner, rows((LONG, 0, 10), ([4, 5, 6], 0, 2), ([1] * 20, 0, 20))))
    seen = CountingMlx()
    monkeypatch.setattr(model_runner, "mx", seen)
    monkeypatch.setattr(metadata, "mx", seen)
    logits = runner.forward(with_tables(batch, TABLES), sampled)
    assert [upload.shape for upload in seen.uploads] == [((3 + pending) * 24 + 8 + 3 * 8,)]
    np.testing.assert_allclose(np.array(logits), expected, atol=1e-4)


@on_cpu
def test_the_plan_of_a_decode_step_is_uploaded_once_for_all_layers(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indices of queries and of blocks, and their bias; how the pieces of sequences would be merged."""
    forward(runner, rows((LONG, 0, 9), ([4, 5, 6], 0, 2)))
    seen = CountingMlx()
    for module in (model_runner, metadata, kv_pool, cpu_attention, attention_plan):
        monkeypatch.setattr(module, "mx", seen)
    forward(runner, rows((LONG, 9, 1), ([4, 5, 6], 2, 1)))
    assert len(runner.layers) > 1
    assert len(seen.uploads) == 1 + 4


def test_a_table_that_is_too_short_for_its_context_is_refused(runner: ModelRunner) -> None:
    """A token after its end would be written into block -1."""
    for tables in ([[5, -1]], [[5]]):
        with pytest.raises(ValueError, match=r"too short|lack blocks"):
            forward(runner, rows((LONG, 0, 10)), tables)
    assert runner.model_calls == 0


def test_a_step_that_samples_nothing_still_runs(runner: ModelRunner, served: ServedModel) -> None:
    logits = forward(runner, rows((LONG, 0, 4)))
    runner.finish_step()
    assert logits.shape[0] == 1
    rest = forward(runner, rows((LONG, 4, 6)))
    other = forward(ModelRunner(served, 8, 8, "auto"), rows((LONG, 0, 10)))
    np.testing.assert_allclose(np.array(rest), np.array(other), atol=1e-4)


def test_another_thread_is_refused(runner: ModelRunner) -> None:
    errors: list[BaseException] = []

    def call() -> None:
        try:
            forward(runner, rows((LONG, 0, 10)))
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert [str(error) for error in errors] == ["the model runs on the engine thread only"]
    assert runner.model_calls == 0


def keys_of(runner: ModelRunner) -> list[Any]:
    return [np.array(layer.kv.read_blocks(list(range(8)))[0]) for layer in runner.layers]


def test_a_forward_that_raises_leaves_the_pools_and_the_next_step_intact(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = np.array(forward(runner, rows((LONG, 0, 10))))
    runner.finish_step()
    before = keys_of(runner)
    with monkeypatch.context() as patch:

        def broken(*_args: Any, **_kwargs: Any) -> mx.array:
            raise RuntimeError("injected")

        patch.setattr(type(runner.layers[1]), "attend", broken)
        with pytest.raises(RuntimeError, match="injected"):
            forward(runner, rows(([4, 5, 6], 0, 3)), [[0]])
    runner.finish_step()
    after = keys_of(runner)
    for layer_before, layer_after in zip(before, after, strict=True):
        np.testing.assert_array_equal(layer_before[[2, 5]], layer_after[[2, 5]])
    np.testing.assert_allclose(np.array(forward(runner, rows((LONG, 0, 10)))), first, atol=1e-6)


@on_cpu
@pytest.mark.usefixtures("many_streams")
def test_an_error_on_a_cpu_stream_ends_with_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX would raise it in the next work of that stream. The thread that used MLX first gets no error twice, so this
    runs on another thread."""
    monkeypatch.setattr(blas, "small_products", False)
    logits: list[Any] = []
    linear = WeightFirstLinear.__call__

    def steps() -> None:
        runner = ModelRunner(load_model(str(make_tiny_model(tmp_path / "m", "llama"))), 8, 8, "auto")
        for fails in (False, True, False, False):
            if fails:
                monkeypatch.setattr(WeightFirstLinear, "__call__", failing_linear)
            try:
                wanted = forward(runner, rows((LONG, 0, 10)))
                runner.finish_step(wanted)
                logits.append(np.array(wanted))
            except Exception as error:
                logits.append(str(error))
                monkeypatch.setattr(WeightFirstLinear, "__call__", linear)
                runner.rebuild_pools()

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join()
    assert len(logits) == 4
    assert isinstance(logits[1], str)
    for after in logits[2:]:
        np.testing.assert_allclose(after, logits[0], atol=1e-6)


def failing_linear(layer: WeightFirstLinear, x: mx.array) -> mx.array:
    """Fails when it is computed."""
    four = mx.zeros(4)
    four[mx.array([True] * 4)] = mx.ones(2)
    return x @ layer.weight.T + four.sum()


def test_an_error_of_the_device_has_a_type_of_its_own_and_the_pools_can_be_rebuilt(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = np.array(forward(runner, rows((LONG, 0, 10))))
    runner.finish_step()
    with monkeypatch.context() as patch:

        def failing(*args: Any) -> None:
            raise RuntimeError("device lost")

        patch.setattr(mx, "eval", failing)
        patch.setattr(mx, "async_eval", failing)
        for call in (runner.start_step, runner.finish_step):
            with pytest.raises(DeviceError, match="RuntimeError: device lost"):
                call()
    runner.rebuild_pools()
    assert not any(keys.any() for keys in keys_of(runner))
    np.testing.assert_allclose(np.array(forward(runner, rows((LONG, 0, 10)))), first, atol=1e-6)


def test_pools_are_rebuilt_although_memory_is_short_once_more(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = np.array(forward(runner, rows((LONG, 0, 10))))
    evaluate, failures = mx.eval, [1, 2]

    def failing(*args: Any) -> None:
        if failures:
            failures.pop()
            raise RuntimeError("[malloc] Unable to allocate 1024 bytes.")
        evaluate(*args)

    monkeypatch.setattr(model_runner, "REBUILD_PAUSES", (0.0, 0.0))
    monkeypatch.setattr(mx, "eval", failing)
    runner.rebuild_pools()
    assert not failures
    np.testing.assert_allclose(np.array(forward(runner, rows((LONG, 0, 10)))), first, atol=1e-6)
    failures += [1] * 3
    with pytest.raises(DeviceError, match="Unable to allocate"):
        runner.rebuild_pools()


def test_pools_keep_their_place_in_memory_from_step_to_step(runner: ModelRunner) -> None:
    def addresses() -> list[int]:
        arrays = [array for layer in runner.layers for array in layer.kv.arrays]
        return [np.asarray(memoryview(array)).__array_interface__["data"][0] for array in arrays]  # type: ignore[arg-type]

    before = addresses()
    for start in range(4):
        mx.eval(forward(runner, rows((LONG[: start + 1], start, 1), ([1] * 8, 0, 8 - start))))
        runner.finish_step()
    assert addresses() == before


def test_a_step_that_fails_after_sampling_is_repeated_with_the_same_penalties(served: ServedModel) -> None:
    """A token that was sampled in the failed step must not count as part of the answer."""

    def answers(failures: int) -> list[list[int]]:
        core = build_engine(EngineConfig(served.name, kv_cache_bytes=3_000_000), served)
        original, since = core.runner.finish_step, iter(range(1000))
        left = failures

        def finish_step(*logits: mx.array) -> None:
            nonlocal since, left
            hit_before = any(running.sequence.num_step_failures for running in core.requests.by_sequence.values())
            if left and not hit_before and next(since) == 2:
                since, left = iter(range(1000)), left - 1
                raise DeviceError("injected")
            original(*logits)

        core.runner.finish_step = finish_step  # type: ignore[method-assign]
        prompts = [[i + 1] * 5 for i in range(4)]
        made = run_requests(core, prompts, temperature=0.9, seed=5, frequency_penalty=2.0, repetition_penalty=1.5)
        assert left == 0
        return made

    assert answers(failures=2) == answers(failures=0)
