"""The host's work for a decode step beside mlx-lm's, with kernels that are called and never run.

    python benchmarks/host.py [--model dense hybrid] [--batch 1 16] [--context 200 600] [--steps 60]

The dense model has the layers of Qwen3-0.6B, the hybrid one those of Qwen3.5-4B, both with few weights: graphs are
built and not evaluated. Both sides build the graph of a step in turn, in one process: mlx-lm as `generate_step` does
(batch 1) or in its `GenerationBatch`, with its own sampler, and the engine on the Metal backend.

Without a Metal device, MLX builds calls of `mx.fast.metal_kernel` while a function is exported, so they cost what they
cost on a Mac. rms_norm, rope and scaled_dot_product_attention are one operation on a GPU, but many on a CPU: for both
sides, one operation with the same inputs takes their place. CPU time is measured, because other load changes it least.
The figures to quote are the ratios of the whole step, and of the graph building with the sampler. The whole step is all
that the host does: the schedule and metadata, responses and outputs, and freeing the last graph.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from mlxpaged.attention import kernels
from mlxpaged.attention.layer import route_attention
from mlxpaged.attention.metadata import HostStep
from mlxpaged.core.engine.in_flight import InFlightStep, StepResult
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampler import SampledToken
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.engine.step_input import SampledTokens
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.head import select_rows_before_head
from mlxpaged.models.joins.fused_attention import FusedAttention, fuse_attention
from mlxpaged.models.joins.joins import join
from mlxpaged.models.layer_finder import Way, find_layers
from mlxpaged.models.layers import KV, Recurrent, bytes_per_token
from mlxpaged.models.loader import load_model
from mlxpaged.models.replacements import route_layers

# isort: split
import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import GenerationBatch
from mlx_lm.models import gated_delta, qwen3, qwen3_5
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler

GREEDY = make_sampler(temp=0)
LAYERS = {"dense": 28, "hybrid": 32}

HEADS, KV_HEADS = 16, 8
"""Of Qwen3-0.6B. The hybrid model has a quarter of each."""

HEAD_SIZE = 32
"""A quarter of Qwen3-0.6B's, for smaller KV pools."""

DEMO = load_model("demo")
"""For its tokenizer."""

EVAL = mx.eval

WHOLE = "whole step"

WARM_UP = 12
"""Steps that are not measured: the engine traces a graph in one of them."""

SAMPLING = {"temperature": 0.7, "top_p": 0.9}


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": DEMO.vocab_size,
    "head_dim": HEAD_SIZE,
}
SIZES |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 40960, "tie_word_embeddings": True}


def make_dense() -> Any:
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    config = SIZES | heads | {"model_type": "qwen3", "num_hidden_layers": LAYERS["dense"], "rope_theta": 1e6}
    return qwen3.Model(qwen3.ModelArgs.from_dict(config))


def make_hybrid() -> Any:
    heads = {"num_attention_heads": HEADS // 4, "num_key_value_heads": KV_HEADS // 4}
    config = SIZES | heads | {"model_type": "qwen3_5_text", "num_hidden_layers": LAYERS["hybrid"]}
    config |= {"full_attention_interval": 4}
    config |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32}
    config |= {"linear_value_head_dim": 32, "linear_conv_kernel_dim": 4}
    return qwen3_5.Model(qwen3_5.ModelArgs(model_type="qwen3_5", text_config=config))


MODELS: dict[str, Callable[[], Any]] = {"dense": make_dense, "hybrid": make_hybrid}


def make_model(kind: str) -> Any:
    model = MODELS[kind]()
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def rms_norm(x: mx.array, weight: mx.array | None, *_args: Any, **_options: Any) -> Any:
    return mx.depends(x, [x if weight is None else weight])


def rope(x: mx.array, *_args: Any, offset: Any, **_options: Any) -> Any:
    return mx.depends(x, [offset if isinstance(offset, mx.array) else mx.array(offset)])


def attention(queries: mx.array, keys: mx.array, values: mx.array, **_options: Any) -> Any:
    return mx.depends(queries, [keys, values])


MAKERS = {"": "_make_gated_delta_kernel", "_packed": "_make_gated_delta_packed_kernel"}
"""mlx-lm's functions; mlx-lm 0.31.3 has no packed kernel."""


def gated_delta_on_a_gpu() -> Callable[..., Any]:
    """mlx-lm's own call of its kernels, which it makes only where there is a Metal device."""
    kinds = [kind for kind in ("", "_packed") if hasattr(gated_delta, f"_gated_delta_kernel{kind}")]
    with patch.object(mx.metal, "is_available", lambda: True):
        kernels = {f"_gated_delta_kernel{kind}": getattr(gated_delta, MAKERS[kind])() for kind in kinds}

    def update(*args: Any) -> Any:
        with patch.multiple(gated_delta, **kernels):
            return gated_delta.gated_delta_kernel(*args)

    return update


@contextmanager
def operations_of_a_gpu() -> Iterator[None]:
    with (
        patch.object(gated_delta, "gated_delta_ops", gated_delta_on_a_gpu()),
        patch.object(mx.fast, "rms_norm", rms_norm),
        patch.object(mx.fast, "rope", rope),
        patch.object(mx.fast, "scaled_dot_product_attention", attention),
        patch.object(kernels, "can_run", lambda: True),
    ):
        yield


def with_kernels(run: Callable[[], None]) -> None:
    """Call `run` where kernels can be called."""
    if mx.metal.is_available():
        run()
        return

    def traced(x: mx.array) -> mx.array:
        run()
        return x

    with operations_of_a_gpu(), tempfile.TemporaryDirectory() as directory:
        mx.export_function(str(Path(directory) / "nothing"), traced, mx.zeros((1,)))


class MlxLm:
    """A step of mlx-lm's own, without evaluation. Its caches are put back after each step."""

    def __init__(self, kind: str, batch: int, context: int) -> None:
        self._model, self._batch = make_model(kind), batch
        model = self._model
        self._cache: list[Any] = make_prompt_cache(model)
        for i, spec in enumerate(find_layers(make_model(kind)).specs):
            if isinstance(spec, KV):
                whole = mx.zeros((batch, spec.num_kv_heads, context, HEAD_SIZE), mx.bfloat16)
                if batch > 1:
                    self._cache[i] = BatchKVCache([0] * batch)
                self._cache[i].update_and_fetch(whole, whole)
            elif isinstance(spec, Recurrent):
                likes = [like for like in spec.arrays if like is not None]
                self._cache[i].cache = [mx.zeros((batch, *shape), dtype) for shape, dtype in likes]
        self._tokens = mx.zeros((batch,), mx.int32)
        mx.eval(self._tokens, [layer.state for layer in self._cache])
        self._saved = [dict(vars(layer)) for layer in self._cache]
        if batch > 1:
            with patch.object(GenerationBatch, "_step"):
                self._generation = GenerationBatch(
                    model,
                    list(range(batch)),
                    self._tokens,
                    self._cache,
                    [[] for _ in range(batch)],
                    [None] * batch,  # type: ignore[list-item]  # 0.31.3 takes no None for all of them
                    GREEDY,
                    [[] for _ in range(batch)],
                    [NoStop()] * batch,  # type: ignore[list-item]
                    [10**9] * batch,
                )
            self._reset()

    def step(self) -> dict[str, float]:
        """Seconds by part."""
        built = 0.0

        def async_eval(*_arrays: Any) -> None:
            nonlocal built
            built = time.thread_time()

        with patch.object(mx, "async_eval", async_eval):
            start = time.thread_time()
            results = self._generate_step() if self._batch == 1 else self._generation.next()
            end = time.thread_time()
        del results
        for layer in self._cache:
            vars(layer).clear()
        if self._batch > 1:
            self._generation._next_tokens = self._generation._next_logprobs = None  # type: ignore[assignment]
        freed = time.thread_time()
        self._reset()
        parts = {"graph and sampler's graph": built - start, "tokens and responses": end - built}
        return parts | {"freeing the graph": freed - end}

    def _reset(self) -> None:
        """Put back what a step has changed. mlx-lm writes into the objects of its arrays, so they are new ones."""
        for layer, saved in zip(self._cache, self._saved, strict=True):
            vars(layer).update(tree_map(lambda value: mx.array(value) if isinstance(value, mx.array) else value, saved))
        if self._batch > 1:
            self._generation._next_tokens = self._tokens
            self._generation._next_logprobs = [self._tokens] * self._batch

    def _generate_step(self) -> Any:
        """What `_step` of `generate_step` does without logits processors."""
        logits = self._model(self._tokens[None], cache=self._cache)[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        results = GREEDY(logprobs), logprobs.squeeze(0)
        mx.async_eval(results)
        return results


class NoStop:
    """Stop sequences that never match, for mlx-lm 0.32, and its state machine without states, for 0.31.3."""

    def matcher(self) -> NoStop:
        return self

    def advance(self, _token: int) -> bool:
        return False

    def make_state(self) -> None:
        return None

    def match(self, _state: None, _token: int) -> tuple[None, None, str]:
        return None, None, "normal"


class Ours(ExitStack):
    """Steps of the engine, without evaluation. seconds: of CPU time by part of the last step. What a part calls is
    counted with that other part only."""

    def __init__(self, kind: str, batch: int, context: int, steps: int, **params: Any) -> None:
        super().__init__()
        model = make_model(kind)
        rows = self._rows(model, DEMO.vocab_size)
        layers = [
            replace(each, num_query_heads=each.num_kv_heads * HEADS // KV_HEADS, qkv=self._kind)
            if isinstance(each, KV)
            else each
            for each in route_layers(model, Way.ROWS)
        ]
        served = replace(DEMO, model=model, layers=layers, rows=rows)
        served = replace(served, context_length=context + steps + 128)
        config = EngineConfig(
            speculative="off",
            model="nothing",
            max_num_seqs=batch,
            kv_cache_bytes=batch * (context + steps + 128) * bytes_per_token(layers),
            max_num_batched_tokens=batch * context,
            max_step_ms=0,
            attention_backend="metal",
            attention_tuning="default",
        )
        self.core = build_engine(config, served)
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]
        self._evaluated: dict[Any, mx.array] = {}
        self._nothing = mx.zeros((1,), mx.int32)
        self._sampled = mx.zeros((batch,), mx.int32)
        mx.eval(self._nothing, self._sampled)
        core = self.core
        for owner, name, replacement in (
            (core.runner, "start_step", self._start_step),
            (InFlightStep, "read", read),
            (InFlightStep, "tokens", property(lambda step: SampledTokens(self._sampled, step.sampled_ids))),
            (core.scheduler, "schedule", self._timed(core.scheduler.schedule, "schedule")),
            (HostStep, "grown", self._timed(HostStep.grown, "metadata and plan")),
            (HostStep, "build", self._timed(HostStep.build, "metadata and plan")),
            (HostStep, "upload", self._timed(HostStep.upload, "metadata and plan")),
            (core.runner, "forward", self._timed(core.runner.forward, "graph")),
            (core.sampler, "sample", self._timed(core.sampler.sample, "sampler's graph")),
            (core.loop.results, "process", self._timed(core.loop.results.process, "update, text and outputs")),
        ):
            self.enter_context(patch.object(owner, name, replacement))
        options = SamplingParams(max_tokens=steps + 64, ignore_eos=True, **({"temperature": 0.0} | params))
        for i in range(batch):
            core.add(Request(str(i), [i + 1, *[7] * (context - 1)], options, 0.0))

    def _rows(self, model: Any, vocab_size: int) -> Any:
        route_attention(model)
        with patch.object(kernels, "can_run", lambda: False):  # its trials compute, and kernels cannot
            join(model)
        modules = [layer.self_attn for layer in model.layers if "self_attn" in layer]
        fuse_attention([(module, mx.bfloat16) for module in modules])
        kinds = {module.fusion.qkv.kind for module in modules if isinstance(module, FusedAttention)}
        self._kind = next(iter(kinds), None)
        return select_rows_before_head(model, {vocab_size}, lambda _selection: True)

    def _start_step(self, *_results: Any) -> None:
        """Instead of evaluating, take the pools and the states as written."""
        for pool in self.core.runner.pools:
            pool.memory.token = self._nothing
        for layer in self.core.runner.recurrent:
            layer._stacks = [[self._zeros(array) for array in state] for state in layer._stacks]
            layer._single = {i: [self._zeros(array) for array in state] for i, state in layer._single.items()}

    def _zeros(self, like: mx.array | None) -> mx.array:
        assert like is not None
        key = like.shape, like.dtype
        if key not in self._evaluated:
            self._evaluated[key] = mx.zeros(*key)
            EVAL(self._evaluated[key])
        return self._evaluated[key]

    def _timed(self, inner: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            self._inner.append(0.0)
            try:
                return inner(*args, **kwargs)
            finally:
                took = time.thread_time() - start
                self.seconds[part] += took - self._inner.pop()
                self._inner[-1] += took

        return timed

    def step(self) -> dict[str, float]:
        """Seconds by part."""
        self.seconds.clear()
        self._inner[0] = 0.0
        start = time.thread_time()
        self.core.step()
        total = time.thread_time() - start
        return self.seconds | {"other, freeing the last graph": total - self._inner[0]}


def read(step: InFlightStep) -> StepResult:
    return StepResult({sequence_id: [SampledToken(5)] for sequence_id in step.sampled_ids}, set())


def first_deciles(measured: list[dict[str, float]]) -> dict[str, float]:
    """Milliseconds by part. Other load, which makes even CPU time longer, changes the first decile least."""
    steps = [parts | {WHOLE: sum(parts.values())} for parts in measured]
    return {name: 1e3 * sorted(parts[name] for parts in steps)[len(steps) // 10] for name in steps[0]}


class Comparison(NamedTuple):
    """Milliseconds by part of a step of both sides, first deciles."""

    kind: str
    batch: int
    context: int
    theirs: dict[str, float]
    ours: dict[str, float]

    def __str__(self) -> str:
        theirs, ours = self.theirs["graph and sampler's graph"], self.ours["graph"] + self.ours["sampler's graph"]
        graph = f"mlx-lm {theirs:.3f} ms, ours {ours:.3f} ms, ratio {ours / theirs:.2f}"
        theirs, ours = self.theirs[WHOLE], self.ours[WHOLE]
        whole = f"whole step: mlx-lm {theirs:.3f} ms, ours {ours:.3f} ms, ratio {ours / theirs:.2f}"
        return f"{self.kind}, batch {self.batch}, contexts of {self.context} tokens: {graph}; {whole}"


def compare(kind: str, batch: int, context: int, steps: int) -> Comparison:
    """Call it inside `with_kernels`."""
    theirs = MlxLm(kind, batch, context)
    with Ours(kind, batch, context, steps) as ours, no_evaluation():
        for _ in range(WARM_UP):
            theirs.step(), ours.step()
        measured = [(theirs.step(), ours.step()) for _ in range(steps)]
    return Comparison(kind, batch, context, *(first_deciles(list(side)) for side in zip(*measured, strict=True)))


@contextmanager
def no_evaluation() -> Iterator[None]:
    with patch.object(mx, "eval", lambda *_: None), patch.object(mx, "async_eval", lambda *_: None):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, nargs="+", default=[200, 600])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()

    def run() -> None:
        for kind, batch, context in itertools.product(args.model, args.batch, args.context):
            comparison = compare(kind, batch, context, args.steps)
            print(f"\n{comparison}")
            for side, parts in (("mlx-lm", comparison.theirs), ("ours", comparison.ours)):
                for name, value in parts.items():
                    print(f"  {side:7} {name:30} {value:7.3f} ms")

    with_kernels(run)


if __name__ == "__main__":
    main()
