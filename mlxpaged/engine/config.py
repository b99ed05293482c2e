"""What an engine is started with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from mlxpaged.attention import DEFAULT_TUNING, parse_tuning, resolve_backend
from mlxpaged.cache.block_pool import DEFAULT_BLOCK_SIZE, SUPPORTED_BLOCK_SIZES
from mlxpaged.models import DEMO_MODEL, tool_parsers
from mlxpaged.scheduler import Priority, SchedulerConfig


@dataclass(frozen=True)
class EngineConfig:
    """model: directory, hub repository or "demo". kv_cache_bytes: size of the KV pools, None to size them from what the
    device has left after the weights. swap_space_bytes: size of the swap space, in memory or in a file in swap_dir; 0
    for none, because nobody's memory or disk is taken unasked. max_queue: requests that may wait beyond max_num_seqs
    running ones. attention_tuning: "auto" for what is fastest on this machine, measured once, "default", "paged:512" or
    "contiguous"; retune: measure again. default_priority, request_timeout, ttft_timeout (seconds) and timelines: for
    requests that do not say. max_step_ms: what prompts may make of a step; 0 for no limit, None for SchedulerConfig's
    own. tool_parser: of mlx-lm's, in place of the one that the chat template calls for.
    embedding_model: a second model, as `model`; embedding_max_model_len: tokens of the longest input for embeddings, as
    far as their model's context goes, because room for its keys and values is kept.

    Raises ValueError where a value is out of range.
    """

    model: str = DEMO_MODEL
    served_model_name: str | None = None
    tool_parser: str | None = None
    kv_cache_bytes: int | None = None
    swap_space_bytes: int = 0
    swap_dir: Path | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_queue: int = 256
    attention_backend: str = "auto"
    attention_tuning: str = "auto"
    retune: bool = False
    prefix_caching: bool = True
    default_priority: Priority = Priority.NORMAL
    request_timeout: float | None = None
    ttft_timeout: float | None = None
    timelines: bool = False
    prefill_mode: str = "mixed"
    decode_preference: float = 0.5
    max_step_ms: float | None = None
    embedding_model: str | None = None
    served_embedding_model_name: str | None = None
    embedding_max_model_len: int = 8192

    def __post_init__(self) -> None:
        resolve_backend(self.attention_backend)
        self._check_tuning()
        if self.block_size not in SUPPORTED_BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {SUPPORTED_BLOCK_SIZES}, got {self.block_size}")
        self.scheduler_config(num_blocks=1)  # refuses what the scheduler would
        if self.tool_parser not in (None, *tool_parsers()):
            raise ValueError(f"tool_parser must be one of {', '.join(tool_parsers())}, got {self.tool_parser!r}")
        self._check_embedding_model()
        if self.max_queue < 0:
            raise ValueError(f"max_queue must not be negative, got {self.max_queue}")
        for name in ("request_timeout", "ttft_timeout"):
            limit = getattr(self, name)
            if limit is not None and not 0 < limit < math.inf:
                raise ValueError(f"{name} must be positive, got {limit}")
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            raise ValueError(f"kv_cache_bytes must be positive, got {self.kv_cache_bytes}")
        if self.swap_space_bytes < 0:
            raise ValueError(f"swap_space_bytes must not be negative, got {self.swap_space_bytes}")
        if self.swap_dir is not None and not self.swap_space_bytes:
            raise ValueError("swap_dir is the place of a swap space: it needs swap_space_bytes (--swap-space) too")

    def _check_embedding_model(self) -> None:
        if self.embedding_max_model_len < 1:
            raise ValueError(f"embedding_max_model_len must be positive, got {self.embedding_max_model_len}")
        if self.embedding_model is None and self.served_embedding_model_name is not None:
            raise ValueError("served_embedding_model_name is the name of an embedding_model (--embedding-model)")
        name = self.served_embedding_model_name or self.embedding_model
        if name == (self.served_model_name or self.model):
            raise ValueError(f"two models cannot both be named {name!r} (--served-embedding-model-name)")

    def _check_tuning(self) -> None:
        try:
            forced = parse_tuning(self.attention_tuning)
        except ValueError as error:
            raise ValueError(f"attention_tuning {error}") from None
        if forced is not None and self.retune:
            raise ValueError(f"retune measures for attention_tuning auto, not for {self.attention_tuning}")
        if self.attention_backend in ("gather", "cpu") and (self.retune or forced not in (None, DEFAULT_TUNING)):
            backend = self.attention_backend
            raise ValueError(
                f"attention_tuning and retune are for the metal backend, not for attention_backend {backend}"
            )

    def scheduler_config(self, num_blocks: int, num_swap_slots: int = 0, cache_seed: bytes = b"") -> SchedulerConfig:
        """The scheduler's part, once the sizes of pool and swap space are known. Raises ValueError."""
        return SchedulerConfig(
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_swap_slots=num_swap_slots,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefix_caching=self.prefix_caching,
            prefill_mode=self.prefill_mode,
            decode_preference=self.decode_preference,
            max_step_seconds=None if self.max_step_ms is None else self.max_step_ms / 1000,
            cache_seed=cache_seed,
        )
