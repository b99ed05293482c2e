"""What the start of a model computes, counted: evaluations, forward passes and multiply-adds.

    python -m tests.attention.step_counts --start [--model Llama-3.1-8B ...]

`load_core` loads a model with the layers, experts and top-k of the known one, and with small widths, as it does on a
GPU without Metal kernels: nothing is changed for the CPU, and the step memory is measured with a GPU's tokens. Each
product notes its rows, inputs and outputs. Only those count that MLX has computed at the end. Widths are then replaced
by those of the known model. A product of R rows, N inputs and M outputs is R * N * M multiply-adds. Attention over K
keys is R * K * (key size + value size) for each query head, masked ones included.

An evaluation is a call that waits for MLX: `mx.eval`, or one that reads a result. A forward pass is a product of the
output head. Weights that are read are left out, and so is what only the Metal backend does: the cases of the kernels'
self-check, which have no weights, the tuner, and 12 decode steps of one and two rows by which replayed steps are
checked.
"""

from __future__ import annotations

import io
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxpaged.attention import kernels
from mlxpaged.attention.kv_cache import POOLS
from mlxpaged.cpu import streams
from mlxpaged.engine import builder
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models import replacements
from tests.support import demo_vocab_size, make_tiny_model, quantize

READERS = ("item", "tolist", "__bool__", "__int__", "__float__")
"""Methods of an array that wait for it."""

PHASES: dict[str, tuple[Any, str]] = {
    "reference": (replacements, "make_reference"),
    "joins": (replacements, "join"),
    "fused attention": (replacements, "fuse_attention"),
    "probe": (replacements, "probe"),
    "output head": (replacements, "select_rows_before_head"),
    "step memory": (builder, "measure_step"),
    "times of rows, at most": (builder, "time_rows"),
}
"""Functions whose work is counted apart, with the modules that call them."""
OTHER = "other"


@dataclass
class Counted:
    """products: (rows, inputs, outputs) of those that were computed. attention: (rows, keys, heads, key and value
    sizes) in the same way."""

    evaluations: int = 0
    products: list[tuple[int, int, int]] = field(default_factory=list)
    attention: list[tuple[int, int, int, int]] = field(default_factory=list)

    def passes(self, vocab_size: int) -> int:
        return sum(outputs == vocab_size for _, _, outputs in self.products)

    def multiply_adds(self, real: Callable[[int], int] = int, real_head: Callable[[int], int] = int) -> int:
        """real: the width of the known model that stands for a small one. real_head: the same for numbers of query
        heads, and for sizes of a key and a value together."""
        products = sum(rows * real(inputs) * real(outputs) for rows, inputs, outputs in self.products)
        return products + sum(
            rows * keys * real_head(heads) * real_head(size) for rows, keys, heads, size in self.attention
        )


class Counter:
    """Counts by phase what its own thread does. A phase within another one is counted apart. Other engines of the
    process use MLX on threads of their own, at any time."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.phases: dict[str, Counted] = {name: Counted() for name in (*PHASES, OTHER)}
        self._running = [OTHER]
        self._noted: list[tuple[mx.array, list[Any], Any]] = []
        """Results, each with the list to which its shape is added if it was computed."""

    @contextmanager
    def installed(self) -> Iterator[Counter]:
        with ExitStack() as stack:
            for name, rows_inputs_outputs in PRODUCTS.items():
                owner, attribute = (mx.array if name.startswith("__") else mx), name
                stack.enter_context(
                    mock.patch.object(owner, attribute, self._counted(getattr(owner, name), rows_inputs_outputs))
                )
            attend = mx.fast.scaled_dot_product_attention
            stack.enter_context(mock.patch.object(mx.fast, "scaled_dot_product_attention", self._attending(attend)))
            for name in ("eval", "async_eval"):
                stack.enter_context(mock.patch.object(mx, name, self._evaluating(getattr(mx, name))))
            for name in READERS:
                stack.enter_context(mock.patch.object(mx.array, name, self._evaluating(getattr(mx.array, name))))
            for name, (module, function) in PHASES.items():
                stack.enter_context(
                    mock.patch.object(module, function, self._as_phase(name, getattr(module, function)))
                )
            yield self
        self._settle()

    @property
    def _is_own(self) -> bool:
        return threading.get_ident() == self._thread

    @property
    def _now(self) -> Counted:
        return self.phases[self._running[-1]]

    def _counted(self, own: Any, shape_of: Callable[..., tuple[int, int, int]]) -> Any:
        def product(*args: Any, **options: Any) -> Any:
            out = own(*args, **options)
            if isinstance(out, mx.array) and self._is_own:
                self._noted.append((out, self._now.products, shape_of(out, *args, **options)))
            return out

        return product

    def _attending(self, own: Any) -> Any:
        def attend(queries: mx.array, keys: mx.array, values: mx.array, *args: Any, **options: Any) -> mx.array:
            out: mx.array = own(queries, keys, values, *args, **options)
            batch, heads, rows, size = queries.shape
            shape = batch * rows, keys.shape[2], heads, size + values.shape[3]
            if self._is_own:
                self._noted.append((out, self._now.attention, shape))
            return out

        return attend

    def _evaluating(self, own: Any) -> Any:
        def evaluate(*args: Any, **options: Any) -> Any:
            if self._is_own:
                self._now.evaluations += any(is_pending(array) for array in arrays_in(args))
            return own(*args, **options)

        return evaluate

    def _as_phase(self, name: str, own: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            self._running.append(name)
            try:
                return own(*args, **options)
            finally:
                self._running.pop()
                self._settle()

        return run

    def _settle(self) -> None:
        """Add what has been computed so far, and let go of it."""
        left = []
        for out, found, shape in self._noted:
            if is_pending(out):
                left.append((out, found, shape))
            else:
                found.append(shape)
        self._noted = left


def arrays_in(values: Any) -> list[mx.array]:
    leaves: Any = tree_flatten(list(values))
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def is_pending(array: mx.array) -> bool:
    """Whether MLX has an operation for it that it has not computed."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return "shape=rectangle" in graph.getvalue()


def of_matrices(out: mx.array, a: mx.array, *_: Any, **__: Any) -> tuple[int, int, int]:
    return out.size // out.shape[-1], a.shape[-1], out.shape[-1]


PRODUCTS: dict[str, Callable[..., tuple[int, int, int]]] = {
    "__matmul__": of_matrices,
    "matmul": of_matrices,
    "quantized_matmul": of_matrices,
    "gather_mm": of_matrices,
    "gather_qmm": of_matrices,
    "addmm": lambda out, c, a, *_, **__: of_matrices(out, a),
}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Without Metal kernels, which cannot run here."""
    info = mx.device_info() | {"memory_size": 2**36, "max_recommended_working_set_size": 2**35}
    with ExitStack() as stack:
        for owner, name, value in (
            (streams, "on_cpu", lambda: False),
            (mx.metal, "is_available", lambda: True),
            (kernels, "can_run", lambda: False),
            (mx, "device_info", lambda: info),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(mock.patch.dict(POOLS))
        POOLS.pop("cpu", None)
        yield


@dataclass(frozen=True)
class SmallModel:
    """A model that stands for a known one. config: of the small one. widths, heads: those of the known model by the
    small one's; none stands for two. vocab_size: of the known one."""

    architecture: str
    config: dict[str, Any]
    widths: dict[int, int]
    heads: dict[int, int]


LLAMA = SmallModel(
    "llama",
    {"num_hidden_layers": 32, "hidden_size": 64, "intermediate_size": 160}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24},
    {64: 4096, 96: 4096, 48: 1024, 192: 6144, 160: 14336, 320: 28672, demo_vocab_size(): 128256},
    {4: 32, 48: 256},
)
QWEN = SmallModel(
    "qwen3_moe",
    {"num_hidden_layers": 48, "hidden_size": 64, "intermediate_size": 6144, "moe_intermediate_size": 96}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 40, "num_experts": 128}
    | {"num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    {64: 2048, 160: 4096, 80: 512, 320: 5120, 96: 768, 192: 1536, 128: 128, demo_vocab_size(): 151936},
    {4: 32, 80: 256},
)
SMALL_MODELS = {"Llama-3.1-8B": LLAMA, "Qwen3-30B-A3B": QWEN}


def count_start(path: Path, **options: Any) -> dict[str, Counted]:
    """Counts by phase. The clock stands still: steps are timed with all numbers of rows."""
    config = EngineConfig(str(path), kv_cache_bytes=2**26, wired_memory="off", attention_backend="auto", **options)
    with as_on_a_gpu(), Counter().installed() as counter:
        core = builder.load_core(config, lambda: 0.0, lambda _: None)
    core.close()
    return counter.phases


def count_known(name: str) -> Iterator[tuple[str, int, int, int]]:
    """Phase, evaluations, forward passes, and multiply-adds of a known model."""
    small = SMALL_MODELS[name]
    vocab_size = demo_vocab_size()
    with tempfile.TemporaryDirectory() as directory:
        made = make_tiny_model(
            Path(directory) / "model", small.architecture, max_position_embeddings=4096, **small.config
        )
        phases = count_start(quantize(made, 4))
    for phase, counted in phases.items():
        macs = counted.multiply_adds(small.widths.__getitem__, small.heads.__getitem__)
        yield phase, counted.evaluations, counted.passes(vocab_size), macs


def table(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        rows = list(count_known(name))
        _, evaluations_of, passes_of, macs_of = zip(*rows, strict=True)
        total = "together", sum(evaluations_of), sum(passes_of), sum(macs_of)
        yield f"| {name} | evaluations | forward passes | 10^9 multiply-adds |"
        yield "| --- | --- | --- | --- |"
        for phase, evaluations, passes, macs in (*rows, total):
            yield f"| {phase} | {evaluations:,} | {passes} | {macs / 1e9:,.0f} |"
