"""How many command buffers MLX makes of a decoding step, by its own rule."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from benchmarks.command_buffers import (
    CommitLimits,
    Operation,
    command_buffers,
    commit_limits,
    count,
    count_commits,
    evaluation_order,
    operations,
    peak_bytes,
)
from mlxpaged.attention import kernels
from mlxpaged.attention.kv_cache import LayerKVCache
from mlxpaged.attention.layout import KVLayout
from mlxpaged.attention.metadata import AttentionMetadata
from mlxpaged.attention.qkv import Qkv, Rope
from mlxpaged.attention.quantization import quantization_of
from mlxpaged.attention.tuning import CONTIGUOUS, MATRIX, Tuning
from mlxpaged.mlx_settings import LONG_BUFFERS
from mlxpaged.models.loader import LoadOptions, load_model
from mlxpaged.parts.memory.fitting import LEAST_STEP
from mlxpaged.parts.memory.step_memory import GPU_TOKENS, extrapolated
from tests.attention.step_graphs import MODELS, fused_functions, our_step, prompt_step, step_of_mlx_lm

LIMITS = {"base or Pro": commit_limits("applegpu_g16g"), "Max": commit_limits("applegpu_g14s")}
LONG = CommitLimits(*map(int, LONG_BUFFERS.values()))


SLOW = ("Qwen3-4B", "Llama-3.1-8B", "Qwen3-30B-A3B")
"""Layers as in the smallest model, or in one with experts and more."""
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS]


@pytest.mark.parametrize("batch", [1, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_a_decoding_step_takes_hardly_more_command_buffers_than_mlx_lms_own(name: str, batch: int) -> None:
    ours, theirs = our_step(MODELS[name], batch), step_of_mlx_lm(MODELS[name], batch)
    for limits in (*LIMITS.values(), LONG):
        assert count_commits(ours, limits) <= count_commits(theirs, limits) + 2


@pytest.mark.parametrize(("name", "saved"), [("Qwen3-0.6B", 6), ("Llama-3.1-8B", 4)])
def test_a_fused_layer_saves_the_launches_of_two_products_two_norms_and_two_ropes(name: str, saved: int) -> None:
    fused, separate = (
        sum(each.dispatches for each in our_step(MODELS[name], 1, fused=fused)) for fused in (True, False)
    )
    assert separate - fused == saved * MODELS[name].config["num_hidden_layers"]


def test_neither_rows_nor_queries_of_latents_are_joined() -> None:
    names = [each.name for each in our_step(MODELS["GLM-4.7-Flash"], 1)]
    assert "QuantizedMatmul" in names
    assert "Concatenate" not in names


@pytest.mark.parametrize("name", NAMES)
def test_longer_command_buffers_help_each_model(name: str) -> None:
    step = our_step(MODELS[name], 1, joined=False, fused=False)
    for limits in LIMITS.values():
        assert count_commits(step, limits) >= 4 * count_commits(step, LONG)


@pytest.mark.parametrize(
    ("name", "fewer"),
    [
        ("Qwen3-0.6B", 3),
        pytest.param("Llama-3.1-8B", 3, marks=pytest.mark.slow),
        ("Qwen3-30B-A3B", 6),
        pytest.param("Qwen3-4B", 3, marks=pytest.mark.slow),
        pytest.param("gpt-oss-20b", 8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("batch", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_joins_save_dispatches_in_each_layer(name: str, fewer: int, batch: int) -> None:
    """A product, and two additions. Experts need indices for each of three products, and gpt-oss's have biases."""
    with_joins, without = (dispatches(our_step(MODELS[name], batch, joined=joined)) for joined in (True, False))
    assert without - with_joins == fewer * MODELS[name].config["num_hidden_layers"]


@pytest.mark.parametrize(("name", "layers"), [("Qwen3-0.6B", 28), ("gpt-oss-20b", 12)])
def test_a_layer_merges_nothing_up_to_512_keys(name: str, layers: int) -> None:
    """Half of gpt-oss's layers have a window of 128 keys."""
    short, long = (our_step(MODELS[name], 1, context) for context in (512, 513))
    assert dispatches(long) - dispatches(short) == layers


def dispatches(step: list[Operation]) -> int:
    return sum(each.dispatches for each in step)


def test_no_kernel_binds_a_whole_pool(metal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the limit of 40 M elements, a pool of 80 MB would end every command buffer."""
    bound: list[tuple[str, int]] = []
    launch = kernels.launch

    def recording(name: str, inputs: list[Any], *rest: Any, **options: Any) -> list[mx.array]:
        bound.extend((name, array.size) for array in inputs if isinstance(array, mx.array))
        return launch(name, inputs, *rest, **options)

    monkeypatch.setattr(kernels, "launch", recording)
    layout = KVLayout(2, 32, 32, mx.float16, 32)
    kv, matrix_kv = (
        LayerKVCache.from_layout(1000, layout, "metal", each) for each in (Tuning(), Tuning(chunks=MATRIX))
    )
    meta = AttentionMetadata.build([1, 5, 128], [700, 5, 128], [list(range(22)), [30], [31, 32, 33, 34]])
    rows, qkv = mx.zeros((meta.num_tokens, 2, 32), mx.float16), Qkv(2, None, Rope(32, base=1e4))
    long_rows = mx.zeros((meta.num_tokens, 2, 64), mx.float16)
    quantized = KVLayout(2, 64, 64, mx.float16, 32, quantization=quantization_of("int8", 64, 64))
    packed = LayerKVCache.from_layout(1000, quantized, "metal")
    latents = LayerKVCache.from_layout(1000, KVLayout(1, 32, 20, mx.float16, 32, latent=True), "metal")
    for _ in range(2):
        kv.write(rows, rows, meta)
        kv.write_rows(mx.zeros((meta.num_tokens, 3 * 64), mx.float16), qkv, meta)
        kv.attend(rows, meta, scale=1.0)
        matrix_kv.attend(rows, meta, scale=1.0)
        kv.copy_blocks([(0, 1)])
        kv.write_blocks([2], *kv.read_blocks([3]))
        kv.clear()
        packed.write(long_rows, long_rows, meta)
        packed.attend(long_rows, meta, scale=1.0)
        latents.write(rows[:, :1, :20], rows[:, :1, 20:], meta)
        latents.attend(rows[..., :20], meta, scale=1.0, q_pe=rows[..., 20:])
    assert {name for name, _ in bound} == kernels.INPUTS_AND_OUTPUTS.keys() - {"add_rms_norm"}  # it gets no pool
    assert max(size for _, size in bound) <= 3 * rows.size < kv.arrays[0].size / 50


def test_a_chunk_attends_over_copied_keys_without_further_copies(metal: None) -> None:
    layout = KVLayout(2, 32, 32, mx.float16, 32)
    kv = LayerKVCache.from_layout(8, layout, "metal", Tuning(chunks=CONTIGUOUS))
    meta = AttentionMetadata.build([64], [100], [[0, 1, 2, 3]])
    mx.eval(kv.arrays, meta.positions, meta.slot_mapping, meta.block_tables)
    records: list[dict[str, Any]] = []

    def attend(rows: mx.array) -> mx.array:
        return kv.attend(rows, meta, scale=1.0).reshape(64, 64)

    with fused_functions():
        mx.export_function(records.append, attend, mx.zeros((64, 2, 32), mx.float16))
    assert "Gather" not in [each.name for each in operations(records)]


def test_command_buffers_of_a_step_are_counted_by_the_limits_that_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    served = load_model("demo", LoadOptions(joins=False))
    for name in ("OPS", "MB"):
        monkeypatch.delenv(f"MLX_MAX_{name}_PER_BUFFER", raising=False)
    with fused_functions():
        few = command_buffers(served, 32)
        monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "10")
        many = command_buffers(served, 32)
        monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "1000")
        assert command_buffers(served, 32) == 1
    assert 1 < few < many


# MLX's rule


def test_limits_are_those_of_the_chip() -> None:
    assert [commit_limits(f"applegpu_g15{letter}") for letter in "pgsd"] == [
        CommitLimits(20, 40),
        CommitLimits(40, 40),
        CommitLimits(50, 50),
        CommitLimits(50, 50),
    ]
    assert commit_limits("") == commit_limits("unknown?") == CommitLimits(40, 40)


def small(dispatches: int = 1) -> Operation:
    return Operation("Add", dispatches, {"a": 1})


def test_a_command_buffer_ends_after_the_dispatch_beyond_the_limit() -> None:
    assert count_commits([], CommitLimits(3, 40)) == 1
    assert count_commits([small()] * 3, CommitLimits(3, 40)) == 1
    assert count_commits([small()] * 4, CommitLimits(3, 40)) == 2
    assert count_commits([small()] * 8, CommitLimits(3, 40)) == 3
    assert count_commits([small(2)] * 4, CommitLimits(3, 40)) == 3, "an operation is never divided"


def test_a_command_buffer_ends_with_the_elements_beyond_the_limit_each_buffer_once() -> None:
    large = [Operation("Matmul", 1, {name: 2**20}) for name in "abcdef"]
    limits = CommitLimits(1000, 2)
    assert count_commits(large[:2], limits) == 1
    assert count_commits(large[:3], limits) == 2
    assert count_commits(large, limits) == 3
    assert count_commits([large[0]] * 50, limits) == 1
    assert count_commits([large[0], large[1], large[0], large[2], large[0]], limits) == 2


def chain(length: int, donates: bool = False) -> list[Operation]:
    """Each reads the result of the one before, and nothing else does. Results have 10 bytes."""
    return [
        Operation("Multiply", 1, {f"r{i}": 1, f"r{i + 1}": 1}, {f"r{i + 1}"}, 0, {f"r{i + 1}": 10}, [f"r{i}"], donates)
        for i in range(length)
    ]


def test_results_exist_until_the_command_buffer_that_reads_them_has_ended() -> None:
    """Ten run while the host makes the next one."""
    assert peak_bytes(chain(40), CommitLimits(1000, 40)) == 400, "in one command buffer, all exist at once"
    assert peak_bytes(chain(40), CommitLimits(0, 40)) == 10 * (1 + 10 + 1), "what ten read, and the two of the next"
    assert peak_bytes(chain(40), CommitLimits(1, 40)) == 10 * (2 * 10 + 2 + 1)
    assert peak_bytes(chain(40, donates=True), CommitLimits(1000, 40)) == 10, "memory is passed on"


def test_memory_that_is_read_by_others_is_not_passed_on() -> None:
    """Nor that of another size."""
    records: list[dict[str, Any]] = []

    def run(x: mx.array) -> mx.array:
        y = mx.exp(x)  # passes nothing on: x is no result
        passed = mx.square(y) * 2.0
        kept = mx.exp(passed)
        return kept + mx.matmul(kept, kept)

    mx.export_function(records.append, run, mx.zeros((8, 8)))
    step = operations(records)
    assert [(each.name, bool(each.made)) for each in step if each.name == "Exp"] == [("Exp", True)] * 2
    assert peak_bytes(step, CommitLimits(1000, 40)) == 3 * 256


@pytest.mark.parametrize("name", [name for name in NAMES if name != "GLM-4.7-Flash"])
def test_the_memory_of_a_prompt_is_extrapolated_to_no_less_than_it_is(name: str) -> None:
    """By MLX's rules, with each limit of command buffers. A GPU keeps LEAST_STEP free in any case."""
    steps = {tokens: prompt_step(MODELS[name], tokens) for tokens in (*GPU_TOKENS, 2048)}
    for limits in (*LIMITS.values(), CommitLimits(1000, 100), LONG):
        peaks = {tokens: peak_bytes(step, limits) for tokens, step in steps.items()}
        whole = peaks.pop(2048)
        assert whole <= max(LEAST_STEP, extrapolated(peaks, 2048)) <= max(LEAST_STEP, 4 * whole)


def test_operations_of_a_graph_leave_out_views_and_count_their_buffers() -> None:
    records: list[dict[str, Any]] = []

    def run(x: mx.array, cache: mx.array) -> mx.array:
        row = x[None, :4].reshape(2, 2).transpose()
        cache[3:5] = row
        return mx.concatenate([cache[2:4], row, row]) * row[:1]

    mx.export_function(records.append, run, mx.zeros((8,)), mx.zeros((100, 2)))
    found = operations(records)
    assert [(each.name, each.dispatches) for each in found] == [
        ("SliceUpdate", 1),
        ("Concatenate", 3),
        ("Multiply", 1),
    ]
    [x, cache] = (name for name, _, _ in records[0]["inputs"])
    assert found[0].bound == {cache: 200, x: 4}, "the cache is written in place"
    assert found[0].written == {cache}
    assert found[1].bound.items() >= {cache: 4, x: 4}.items()
    assert [each.bytes_read for each in found] == [16, 16 + 16 + 16, 4 * (6 * 2 + 2)]


def test_a_barrier_comes_before_what_was_written_is_read_and_before_what_was_read_is_written() -> None:
    def launch(reads: str, writes: str) -> Operation:
        return Operation("Add", 1, dict.fromkeys(reads + writes, 1), set(writes))

    def barriers(*step: Operation, ops: int = 100) -> int:
        return count(step, CommitLimits(ops, 40)).barriers

    assert barriers(launch("a", "b"), launch("a", "c"), launch("d", "e")) == 0
    assert barriers(launch("a", "b"), launch("b", "c")) == 1
    assert barriers(launch("a", "b"), launch("c", "a")) == 1, "the first may still read it"
    assert barriers(launch("a", "b"), launch("c", "d"), launch("bd", "e")) == 1, "one for both"
    assert barriers(launch("a", "b"), launch("b", "c"), launch("b", "d")) == 1, "it has waited for b"
    assert barriers(launch("a", "b"), launch("b", "c"), ops=0) == 0, "a command buffer ends between them"


def test_the_order_is_breadth_first_from_the_results_with_the_last_first() -> None:
    def primitive(inputs: str, outputs: str) -> dict[str, Any]:
        return {"inputs": [(name, (1,), None) for name in inputs], "outputs": [(name, (1,), None) for name in outputs]}

    def order(results: str, *primitives: dict[str, Any]) -> str:
        return " ".join("".join(o for o, _, _ in p["outputs"]) for p in evaluation_order(primitives, list(results)))

    chains = [primitive("x", "a"), primitive("a", "b"), primitive("x", "c"), primitive("c", "d")]
    assert order("e", *chains, primitive("bd", "e")) == "c a d b e"
    assert order("e", *chains, primitive("abd", "e")) == "c a d b e", "a comes up after b has, which reads it"
    siblings = [primitive("x", "ab"), primitive("a", "c"), primitive("b", "d"), primitive("cd", "e")]
    assert order("e", *siblings) == "ab d c e"


def test_a_wide_graph_goes_down_before_it_goes_on() -> None:
    wide = [[(f"{kind}{i}", (1,), None) for i in range(30)] for kind in "ab"]
    primitives: list[dict[str, Any]] = [{"inputs": [], "outputs": [each]} for each in wide[0]]
    primitives += [{"inputs": [a], "outputs": [b]} for a, b in zip(*wide, strict=True)]
    primitives.append({"inputs": wide[1], "outputs": [("end", (1,), None)]})
    found = [each["outputs"][0][0] for each in evaluation_order(primitives, ["end"])]
    assert len(found) == len(primitives)
    assert found[-21:] == [f"b{i}" for i in reversed(range(20))] + ["end"]
    assert found[-22] == "a0", "those that come up wait until there is room"


def test_experts_are_read_once_and_as_many_as_are_expected() -> None:
    records: list[dict[str, Any]] = []
    weights, rows = mx.zeros((8, 16, 32)), mx.zeros((2, 1, 1, 32))

    def run(weights: mx.array, rows: mx.array) -> mx.array:
        return mx.gather_mm(rows, weights.swapaxes(-1, -2), rhs_indices=mx.array([[0, 1], [1, 2]]))

    mx.export_function(records.append, run, weights, rows)
    [product] = [each for each in operations(records) if each.name == "GatherMM"]
    expected = weights.nbytes * (1 - (7 / 8) ** 4)
    assert expected < product.bytes_read < expected + 2 * rows.nbytes + 100
