"""Real parts for tests: a server on a free port, tiny models with random weights, and poisoned KV blocks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import functools
import json
import shutil
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import pytest
import uvicorn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import _get_classes, quantize_model
from mlx_lm.utils import load_model as load_plain_model
from openai import OpenAI
from starlette.applications import Starlette

from mlxpaged.api.app import create_app
from mlxpaged.api.config import HttpConfig
from mlxpaged.cli.http_protocol import HttpProtocol
from mlxpaged.cli.serve import listen
from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.errors import EngineState
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.engine.worker import Worker
from mlxpaged.core.step import BlockMoves
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import DEMO_PATH
from mlxpaged.registry.model import Model
from mlxpaged.registry.registry import Registry
from tests.attention.scenes import fill_blocks

Result = TypeVar("Result")

since_mlx_lm_0_32 = pytest.mark.skipif(version("mlx-lm") == "0.31.3", reason="needs mlx-lm 0.32, so Python 3.11")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def every(step: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the first and each `step`-th one after it run by default, all of them as slow tests."""
    found = []
    for i, value in enumerate(values):
        marks = () if i % step == 0 else (pytest.mark.slow,)
        found.append(pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks))
    return found


def short_id(value: object) -> str:
    """The id of a parameter that may be long."""
    return str(value)[:100]


@functools.cache
def demo_vocab_size() -> int:
    config: dict[str, Any] = json.loads((DEMO_PATH / "config.json").read_text())
    return int(config["vocab_size"])


def larger_matrices(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The default initialisation makes logits almost equal; larger weights make greedy choices clear-cut."""
    return {name: array * 3 if array.ndim > 1 else array for name, array in weights.items()}


def make_tiny_model(
    directory: Path,
    model_type: str,
    seed: int = 0,
    weights: Callable[[dict[str, mx.array]], dict[str, mx.array]] = larger_matrices,
    **overrides: Any,
) -> Path:
    """A model of the given mlx-lm architecture with random float32 weights and the demo model's tokenizer.

    weights: changes the weights that mlx-lm initialises, given by name."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"model_type": model_type, "vocab_size": demo_vocab_size(), "eos_token_id": 0} | SMALL | overrides
    model_class, args_class = _get_classes(config)
    mx.random.seed(seed)
    model = model_class(args_class.from_dict(config))
    parameters: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(directory / "model.safetensors"), weights(dict(parameters)))
    (directory / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_PATH / name, directory / name)
    return directory


def quantize(path: Path, bits: int, group_size: int = 32) -> Path:
    """Quantize a model in place as `mlx_lm.convert` does: some architectures keep more bits for some layers."""
    model, config = load_plain_model(path)
    model, config = quantize_model(model, config, group_size, bits)
    save_weights(path, model)
    (path / "config.json").write_text(json.dumps(config))
    return path


def cast(path: Path, dtype: mx.Dtype) -> Path:
    """Give a model's weights another float type in place as `mlx_lm.convert` does: some architectures keep a few."""
    model, _ = load_plain_model(path)
    casts = getattr(model, "cast_predicate", lambda name: True)

    def cast_array(name: str, array: mx.array) -> mx.array:
        return array.astype(dtype) if casts(name) and mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map_with_path(cast_array, model.parameters()))
    save_weights(path, model)
    return path


def make_adapter(model: Path, directory: Path, seed: int, num_layers: int = 8, dora: bool = False, **lora: Any) -> Path:
    """What `mlx_lm.lora` saves for a model, with random weights that change its answers. lora: parameters of LoRA."""
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.1} | lora
    plain, _ = load_plain_model(model)
    linear_to_lora_layers(plain, num_layers, parameters, use_dora=dora)
    mx.random.seed(seed)
    weights: dict[str, mx.array] = {}
    arrays: Any = tree_flatten(plain.parameters())
    for name, array in arrays:
        if name.endswith((".lora_a", ".lora_b")):
            weights[name] = 0.3 * mx.random.normal(array.shape)
        elif name.endswith(".m"):
            weights[name] = array * mx.random.uniform(0.8, 1.2, array.shape)
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "dora" if dora else "lora", "num_layers": num_layers, "lora_parameters": parameters}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def save_weights(path: Path, model: Any) -> None:
    weights: Any = tree_flatten(model.parameters())
    mx.save_safetensors(str(path / "model.safetensors"), dict(weights))


def make_embedding_model(
    directory: Path,
    pooling: str = "lasttoken",
    modules: tuple[str, ...] = ("Transformer", "Pooling", "Normalize"),
    seed: int = 7,
    **overrides: Any,
) -> Path:
    """A tiny Qwen3 as Qwen3-Embedding is published: a bare decoder without a head, sentence-transformers' files, and a
    tokenizer that ends every text with its end token. `directory`-whole has the same weights for mlx-lm itself."""
    overrides = {"tie_word_embeddings": True} | overrides
    whole = make_tiny_model(directory.with_name(f"{directory.name}-whole"), "qwen3", seed, **overrides)
    shutil.copytree(whole, directory)
    weights: dict[str, mx.array] = mx.load(str(whole / "model.safetensors"))  # type: ignore[assignment]
    bare = {name.removeprefix("model."): array for name, array in weights.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), bare)
    end = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end["id"], "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {end["id"]: end},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_modules(directory, pooling, modules)
    return directory


def make_reranker(directory: Path, **overrides: Any) -> Path:
    """A tiny Qwen3 whose vocabulary has the words of a reranker. Its name must be that of one."""
    size = demo_vocab_size()
    path = make_tiny_model(directory, "qwen3", vocab_size=size + 1, **overrides)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": size, "content": "yes", "special": False})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def write_modules(directory: Path, pooling: str, modules: tuple[str, ...]) -> None:
    """The files in which sentence-transformers keeps how states become an embedding."""
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": False for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    name = {"mean": "mean_tokens", "weightedmean": "weightedmean_tokens"}.get(pooling, pooling)
    config = {"word_embedding_dimension": SMALL["hidden_size"], **modes, f"pooling_mode_{name}": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config | {"include_prompt": True}))


@dataclass
class RunningServer:
    """A server in a thread of this process, so that tests can look inside."""

    url: str
    app: Starlette

    @property
    def engine(self) -> AsyncEngine:
        """Of the default model."""
        engine: AsyncEngine = self.registry.default.engine
        return engine

    @property
    def registry(self) -> Registry:
        registry: Registry = self.app.state.server.registry
        return registry

    @property
    def core(self) -> EngineCore:
        """The engine's inside. Only the engine thread may change it."""
        core = self.core_of(self.registry.default.name)
        assert isinstance(core, EngineCore)
        return core

    def core_of(self, model: str) -> Worker:
        engine = self.registry.models[model].engine
        assert engine is not None
        assert engine.slot.core is not None
        return engine.slot.core

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine on the server's event loop."""
        loop = self.registry.loop
        assert loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, loop)

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Until no request is left and every block is back."""
        wait_until(lambda: self.engine.num_unfinished == 0 and self.engine.stats.scheduler.blocks.used == 0, seconds)


@contextlib.contextmanager
def running_server(
    config: EngineConfig | Registry | None,
    wait_loaded: bool = True,
    clock: Callable[[], float] = time.monotonic,
    http: HttpConfig | None = None,
    data_dir: Path | None = None,
) -> Iterator[RunningServer]:
    """A server on a thread. Without `max_step_ms`, the steps of a single model do not depend on how long they take."""
    if isinstance(config, EngineConfig):
        if config.max_step_ms is None:
            config = dataclasses.replace(config, max_step_ms=0)
        registry: Registry | None = Registry.of(config, clock)
    else:
        registry = config
    app = create_app(registry, clock, http, data_dir)
    with listen("127.0.0.1", 0) as listener:
        uvicorn_config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            loop="uvloop",
            http=HttpProtocol,
            lifespan="on",
            timeout_keep_alive=30,  # as in http_server: httpx gives a connection up after 5 s, which is the default
            timeout_graceful_shutdown=5,
        )
        server = uvicorn.Server(uvicorn_config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive())
            if registry is not None and wait_loaded:
                wait_until(lambda: registry.loop is not None and registry.state is not EngineState.LOADING, 60)
                assert registry.state is EngineState.READY, registry.reason
            yield RunningServer(f"http://127.0.0.1:{listener.getsockname()[1]}", app)
        finally:
            server.should_exit = True
            thread.join(60)
            if thread.is_alive():
                faulthandler.dump_traceback()  # of all threads: what it waits for
            assert not thread.is_alive()


def with_embeddings(config: EngineConfig, path: Path, name: str = "vectors") -> Registry:
    """A registry of the configuration's model, and of one that only makes embeddings."""
    registry = Registry.of(config)
    embeds = dataclasses.replace(config, model=str(path), served_model_name=name, only_embeds=True)
    registry.models[name] = Model(name, embeds)
    registry.num_at_start = 2
    return registry


def wait_until(condition: Callable[[], object], seconds: float = 60.0, pause: float = 0.005) -> None:
    """seconds: long enough for a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(pause)


def run_requests(
    core: EngineCore, prompts: list[list[int]], adapters: Sequence[str | None] = (), **params: Any
) -> list[list[int]]:
    """The generated tokens of every prompt, all submitted together and stepped to the end; greedy by default.
    adapters: of the prompts; none by default."""
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True} | params
    names, arrived = adapters or [None] * len(prompts), time.monotonic()
    for i, (prompt, adapter) in enumerate(zip(prompts, names, strict=True)):
        core.add(Request(f"request-{i}", prompt, SamplingParams(**options), arrived, adapter=adapter))
    outputs: dict[str, list[int]] = {f"request-{i}": [] for i in range(len(prompts))}
    while core.has_work():
        for output in core.step():
            assert output.error is None, output.error
            outputs[output.request_id] += output.token_ids
    return [outputs[f"request-{i}"] for i in range(len(prompts))]


def poison_new_blocks(core: EngineCore) -> None:
    """Fill every block with NaN when it is handed out: a read before it is rewritten spoils the answer."""
    pool, runner = core.scheduler.pool, core.runner
    allocate, forward, move_blocks, copy_blocks = (
        pool.allocate,
        runner.forward,
        runner.move_blocks,
        runner.copy_blocks,
    )
    fresh: set[int] = set()

    def poisoning_allocate(count: int) -> list[int]:
        blocks = allocate(count)
        fresh.update(blocks)
        return blocks

    def poison() -> None:
        for kv in runner.pools if fresh else ():
            fill_blocks(kv, sorted(fresh))
        fresh.clear()

    def poisoning_moves(moves: BlockMoves) -> None:
        """A block that was just handed out may still be the source of a move, and be its target."""
        move_blocks(BlockMoves(moves.swap_out, moves.copies, states_out=moves.states_out))
        fresh.difference_update(target for _, target in moves.copies)
        poison()
        move_blocks(BlockMoves(swap_in=moves.swap_in, states_in=moves.states_in))

    def poisoning_forward(*args: Any) -> mx.array:
        poison()
        return forward(*args)

    def poisoning_copies(moves: Mapping[int, int]) -> None:
        poison()
        copy_blocks(moves)

    def poisoning_writes(blocks: Sequence[int], rows: Any) -> None:
        poison()
        write_blocks(blocks, rows)

    write_blocks = runner.write_blocks
    runner.write_blocks = poisoning_writes  # type: ignore[method-assign]
    runner.copy_blocks = poisoning_copies  # type: ignore[method-assign]
    pool.allocate = poisoning_allocate  # type: ignore[method-assign]
    runner.forward = poisoning_forward  # type: ignore[method-assign]
    runner.move_blocks = poisoning_moves  # type: ignore[method-assign]
