"""Makes what computes a model's steps: attention kernels that are checked and tuned, the runner, the sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from mlxpaged.attention.backends import BACKENDS
from mlxpaged.attention.kv_cache import resolve_backend
from mlxpaged.attention.self_check import choose_backend
from mlxpaged.attention.tuner import Limits, choose_tunings
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.sampler import Sampler
from mlxpaged.engine.sizes import Sizes
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.layers import unfused
from mlxpaged.models.loader import ServedModel
from mlxpaged.models.turns import Turns
from mlxpaged.parts.graphs.step_graphs import StepGraphs
from mlxpaged.parts.graphs.warm_up import warm_up
from mlxpaged.parts.images.images import Images
from mlxpaged.parts.invariant.tiled_runner import TiledRunner
from mlxpaged.parts.memory.wired_memory import unwire_memory
from mlxpaged.parts.ranks.ranks import Ranks, least
from mlxpaged.parts.ranks.shared_runner import SharedRunner
from mlxpaged.progress import Report, Stage, reporter


@dataclass(frozen=True)
class Executor:
    """served: with the layers that the backend fuses. backend: the name that prefixes on a disk are stored under.
    images: None if the model sees none. kernels_off: as in BackendChoice."""

    served: ServedModel
    backend: str
    runner: ModelRunner
    sampler: Sampler
    images: Images | None
    kernels_off: str | None


def executor_of(
    config: EngineConfig,
    served: ServedModel,
    sizes: Sizes,
    pads: bool,
    report: Report,
    turns: Turns,
    ranks: Ranks | None,
) -> Executor:
    """pads: as in Rollback. Raises MemoryError, and SwapSpaceError if the swap space's directory cannot be used."""
    shapes = [spec.attention_shape(config.block_size) for spec in served.kv_layers]
    fusions = [fusion for fusion in (spec.qkv_shape(config.block_size) for spec in served.kv_layers) if fusion]
    choice = choose_backend(config.attention_backend, shapes, reporter(Stage.COMPILING, report), fusions)
    served = replace(served, layers=[unfused(spec, choice.unfused, config.block_size) for spec in served.layers])
    own_backend = "gather" if config.batch_invariant and choice.backend == "cpu" else choice.backend
    backend = common_backend(own_backend, ranks)
    limits = Limits(served.max_model_len, config.max_num_seqs)
    timing = reporter(Stage.TIMING, report)
    tuning = "default" if config.batch_invariant else config.attention_tuning
    tunings = choose_tunings(backend, tuning, shapes, limits, config.retune, timing)
    images = None if served.vision is None else Images(served.vision)
    inputs = [] if images is None else [images]
    slots = sizes.scheduler.num_swap_slots
    runner = runner_type(config, ranks, images)(
        *(served, sizes.start_blocks, config.block_size, backend, tunings, slots, config.swap_dir, sizes.layout),
        inputs=inputs,
        graphs=StepGraphs,
        unwire=unwire_memory,
    )
    runner.rollback.pad(pads)
    on_gpu = mx.default_device() != mx.Device(mx.cpu)
    absent = served.tokenizer.absent_ids(served.vocab_size)
    sampler = Sampler(served.vocab_size, compiled=on_gpu, one_by_one=config.batch_invariant, absent=absent)
    if on_gpu:
        turns.begin(Stage.WARMING_UP)
        warm_up(runner)
        sampler.warm_up()
    if isinstance(runner, SharedRunner):
        runner.lead()
    return Executor(served, backend, runner, sampler, images, choice.kernels_off)


def runner_type(config: EngineConfig, ranks: Ranks | None, images: Images | None) -> Callable[..., ModelRunner]:
    if ranks is not None:
        return partial(SharedRunner, ranks, images)
    return TiledRunner if config.batch_invariant else ModelRunner


def common_backend(own: str, ranks: Ranks | None) -> str:
    """The backend that all ranks chose, or "gather", which runs anywhere: backends fill up a step to different sizes,
    and a collective needs equal ones."""
    index = BACKENDS.index(resolve_backend(own))
    return own if least(index, ranks) == -least(-index, ranks) else "gather"
