"""The configuration of the engine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxpaged.core.blocks.block_pool import DEFAULT_BLOCK_SIZE, SUPPORTED_BLOCK_SIZES
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.config import SchedulerConfig
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.core.text.thinking_limit import ThinkingLimit
from mlxpaged.formats import FORMATS
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.files.generation_config import LIMITS
from mlxpaged.models.sources.short_names import DEMO_MODEL
from mlxpaged.vision import MOST_PIXELS

ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

WIRED_MEMORY = ("auto", "on", "off")
"""auto: off, until it is known to be safe."""

LEAST_DUTY_CYCLE = 0.1

SPECULATIVE = ("off", "auto", "ngram", "mtp", "draft")
"""ngram: what came after the same tokens earlier in the prompt or the answer."""

KV_CACHE_DTYPES = ("auto", "int8", "int4")
"""auto: the model's type. int4: 4-bit values with 8-bit keys."""

END_LOOPS = ("auto", "on", "off")
"""Requests that do not say it themselves. auto: those with tools."""

CPU_DTYPES = ("auto", "float32", "model")
"""auto: float32 if the memory has room for the weights. model: the type of the checkpoint, as on a GPU."""


DTYPES = ("auto", "float16", "bfloat16")
"""auto: float16 on M1 and M2 if it gives the same logits, else the checkpoint's."""


@dataclass(frozen=True)
class EngineConfig:
    """Raises ValueError if a value is out of range."""

    model: str = DEMO_MODEL  # directory, hub repository or "demo"
    served_model_name: str | None = None  # name in the API; None: same as `model`
    tool_parser: str | None = None  # one of FORMATS; None: by the chat template or the vocabulary
    chat_template: Path | None = None  # a file in Jinja; None: the model's own
    reranker: bool = False  # whether `model` is a reranker like Qwen3-Reranker, also if its name does not say so
    adapters: tuple[AdapterPath, ...] = ()  # LoRA adapters that are served beside the model
    only_embeds: bool = False  # whether `model` is used for embeddings only
    embedding_max_model_len: int = 8192  # tokens of the longest input for embeddings, at most the model's context

    max_model_len: int | None = None  # most tokens of a prompt and its answer; None: the model's context length
    max_image_pixels: int = MOST_PIXELS  # of an image; a larger one is reduced. 0: no vision tower is loaded
    kv_cache_bytes: int | None = None  # greatest size of the KV pools; None: `memory.kv_blocks` decides
    kv_cache_dtype: str = "auto"  # one of KV_CACHE_DTYPES: how keys and values of layers without a window are stored
    cpu_dtype: str = "auto"  # one of CPU_DTYPES: in what a CPU computes quantized and 16-bit weights
    dtype: str = "auto"  # one of DTYPES: the half type in which a model in 16 bits, or its scales, is computed
    swap_space_bytes: int = 0  # size of the swap space; 0: preempted sequences are recomputed
    swap_dir: Path | None = None  # directory of the swap file; None: the swap space is in memory
    state_cache_bytes: int | None = None  # checkpoints of recurrent states; None: `memory.state_checkpoints` decides
    wired_memory: str = "auto"  # one of WIRED_MEMORY: whether an idle Mac keeps weights and pools resident for the GPU
    allow_sleep: bool = False  # whether a Mac may go to sleep by itself while requests or batches run
    duty_cycle: float = 1.0  # share of the time in which the GPU computes while its Mac is used or short of power
    block_size: int = DEFAULT_BLOCK_SIZE  # tokens per KV block
    prefix_caching: bool = True
    prefix_cache_dir: Path | None = None  # directory of the prefix cache's tier on a disk; None: there is none
    prefix_cache_disk_bytes: int = 20 * 10**9  # most bytes of the tier, for all models that share the directory
    prefix_cache_write_bytes: int = 50 * 10**9  # most bytes that the tier writes a day

    max_num_seqs: int = 32  # sequences in the running batch
    max_num_batched_tokens: int = 2048  # token budget of a step
    max_queue: int = 256  # sequences that may wait in addition to `max_num_seqs` running ones
    decode_preference: float = 0.5  # share of a step's token budget that is kept for decoding
    speculative: str = "auto"  # one of SPECULATIVE: what proposes draft tokens, which a step verifies together
    mtp: str | None = None  # file, directory or repository with the model's draft head; None: its own files
    draft_model: str | None = None  # a smaller model with the same vocabulary that drafts; None: there is none
    max_step_ms: float | None = None  # limit for steps with prompts; 0: no limit; None: the scheduler's default
    batch_invariant: bool = False  # whether an answer is the same, to the bit, in any batch
    default_priority: Priority = Priority.NORMAL  # of requests that set none
    generation_config: bool = True  # whether the model's generation_config.json sets defaults of sampling parameters
    # Of requests that do not set the parameter; None: what the model recommends, else the default of SamplingParams.
    default_temperature: float | None = None
    default_top_p: float | None = None
    default_top_k: int | None = None
    default_min_p: float | None = None
    default_repetition_penalty: float | None = None
    default_presence_penalty: float | None = None
    default_frequency_penalty: float | None = None
    request_timeout: float | None = None  # seconds for the whole answer, for requests that set no timeout
    ttft_timeout: float | None = None  # seconds for the first token, for requests that set no timeout
    thinking_limit: ThinkingLimit | None = None  # of all requests, whatever they ask for
    close_thoughts: bool = False  # whether an end token in a thought closes the thought, and the answer begins
    end_loops: str = "auto"  # one of END_LOOPS: whose answers end if they repeat themselves
    timelines: bool = False  # whether every answer has a timeline, also if the request does not ask for it

    attention_backend: str = "auto"  # "auto", "metal", "gather" or "cpu"
    attention_tuning: str = "auto"  # "auto": measured once; or "default", "contiguous", "matrix", "paged", "paged:512"
    retune: bool = False  # whether attention_tuning "auto" measures again
    joins: bool = True  # whether operations of the model's modules are joined, so that a step launches fewer of them

    @property
    def loads_draft_head(self) -> bool:
        return self.speculative in ("auto", "mtp") and not self.batch_invariant and self.draft_model is None

    def __post_init__(self) -> None:
        self._check_attention()
        self._check_batch_invariant()
        if self.block_size not in SUPPORTED_BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {SUPPORTED_BLOCK_SIZES}, got {self.block_size}")
        self.scheduler_config(num_blocks=1)  # checks the scheduler's fields
        if self.wired_memory not in WIRED_MEMORY:
            raise ValueError(f"wired_memory must be one of {', '.join(WIRED_MEMORY)}, got {self.wired_memory!r}")
        if not LEAST_DUTY_CYCLE <= self.duty_cycle <= 1:
            raise ValueError(f"duty_cycle must be {LEAST_DUTY_CYCLE} to 1, got {self.duty_cycle}")
        if self.speculative not in SPECULATIVE:
            raise ValueError(f"speculative must be one of {', '.join(SPECULATIVE)}, got {self.speculative!r}")
        if self.mtp is not None and not self.loads_draft_head:
            raise ValueError(
                "mtp needs speculative auto or mtp, no draft_model, and an engine that is not batch_invariant"
            )
        if self.speculative == "draft" and self.draft_model is None:
            raise ValueError("speculative draft needs a draft_model")
        if self.draft_model is not None and (self.speculative not in ("auto", "draft") or self.batch_invariant):
            raise ValueError("a draft_model needs speculative auto or draft, and an engine that is not batch_invariant")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            known = ", ".join(KV_CACHE_DTYPES)
            raise ValueError(f"kv_cache_dtype must be one of {known}, got {self.kv_cache_dtype!r}")
        if self.end_loops not in END_LOOPS:
            raise ValueError(f"end_loops must be one of {', '.join(END_LOOPS)}, got {self.end_loops!r}")
        if self.cpu_dtype not in CPU_DTYPES:
            raise ValueError(f"cpu_dtype must be one of {', '.join(CPU_DTYPES)}, got {self.cpu_dtype!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.tool_parser is not None and self.tool_parser not in FORMATS:
            raise ValueError(f"tool_parser must be one of {', '.join(FORMATS)}, got {self.tool_parser!r}")
        self._check_adapters()
        lengths = "embedding_max_model_len", "max_model_len"
        for name in (*lengths, "kv_cache_bytes", "prefix_cache_disk_bytes", "request_timeout", "ttft_timeout"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {limit}")
        sizes = "swap_space_bytes", "state_cache_bytes", "prefix_cache_write_bytes"
        for name in ("max_queue", "max_image_pixels", *sizes):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        for name, limits in LIMITS.items():
            default = getattr(self, f"default_{name}")
            if default is not None and not limits.fit(default):
                raise ValueError(f"default_{name} must be {limits}, got {default}")
        if self.swap_dir is not None and not self.swap_space_bytes:
            raise ValueError("swap_dir needs swap_space_bytes (--swap-space)")
        if self.prefix_cache_dir is not None and not self.prefix_caching:
            raise ValueError(
                "prefix_cache_dir (--prefix-cache-dir) needs the prefix cache; leave out --no-prefix-cache"
            )

    def _check_adapters(self) -> None:
        names = [adapter.name for adapter in self.adapters]
        for name in names:
            if not ADAPTER_NAME.fullmatch(name) or name == "latest":
                raise ValueError(
                    f"an adapter's name has letters, digits, '.', '_' and '-', and is not 'latest', got {name!r}"
                )
            if names.count(name) > 1:
                raise ValueError(f"two adapters of a model cannot both be named {name!r} (--adapter)")

    def _check_batch_invariant(self) -> None:
        if self.batch_invariant and self.attention_backend == "cpu":
            raise ValueError("batch_invariant works only with the backends metal and gather, not with cpu")
        if self.batch_invariant and (self.retune or self.attention_tuning not in ("auto", "default")):
            raise ValueError(
                "batch_invariant decides how the Metal kernels attend: leave out attention_tuning and retune"
            )

    def _check_attention(self) -> None:
        if (self.attention_backend, self.attention_tuning) == ("auto", "auto"):
            return  # without an import of mlx, for `mlxpaged serve --help`
        from mlxpaged.attention.kv_cache import resolve_backend
        from mlxpaged.attention.tuning import DEFAULT_TUNING, parse_tuning

        try:
            resolve_backend(self.attention_backend)
        except ValueError as error:
            raise ValueError(f"attention_backend: {error}") from None
        try:
            forced = parse_tuning(self.attention_tuning)
        except ValueError as error:
            raise ValueError(f"attention_tuning {error}") from None
        if forced is not None and self.retune:
            raise ValueError(f"retune works only with attention_tuning auto, not with {self.attention_tuning}")
        if self.attention_backend in ("gather", "cpu") and (self.retune or forced not in (None, DEFAULT_TUNING)):
            backend = self.attention_backend
            raise ValueError(
                f"attention_tuning and retune work only with the metal backend, not with attention_backend {backend}"
            )

    def sampling_defaults(self, recommended: Mapping[str, float]) -> dict[str, float]:
        """Sampling parameters of requests that do not set them, by name. recommended: what the model recommends."""
        defaults = {name: getattr(SamplingParams, name) for name in LIMITS}
        if self.generation_config:
            defaults.update(recommended)
        configured = {name: getattr(self, f"default_{name}") for name in LIMITS}
        defaults.update({name: value for name, value in configured.items() if value is not None})
        return defaults | {"top_k": max(0, defaults["top_k"])}

    def scheduler_config(self, num_blocks: int, num_swap_slots: int = 0, cache_seed: bytes = b"") -> SchedulerConfig:
        """The part of this configuration that the scheduler needs. Raises ValueError if a value is out of range."""
        return SchedulerConfig(
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_swap_slots=num_swap_slots,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefix_caching=self.prefix_caching,
            decode_preference=self.decode_preference,
            max_step_seconds=None if self.max_step_ms is None else self.max_step_ms / 1000,
            cache_seed=cache_seed,
        )
