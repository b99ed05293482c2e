"""Defines the engine's flags, which `serve` and `bench` share. Almost all set the field of EngineConfig in `dest`."""

from __future__ import annotations

import argparse
from typing import Any

from mlxpaged.attention.backends import BACKENDS
from mlxpaged.cli import flags
from mlxpaged.cli.flags import size
from mlxpaged.core.blocks.block_pool import SUPPORTED_BLOCK_SIZES
from mlxpaged.core.scheduling.config import MOST_MULTIPLE, step_multiple
from mlxpaged.core.scheduling.sequence import Priority
from mlxpaged.engine_config import CPU_DTYPES, DTYPES, KV_CACHE_DTYPES, SPECULATIVE, WIRED_MEMORY, EngineConfig

DEFAULTS = EngineConfig()
LOG_LEVELS = ("debug", "info", "warning", "error")

block_size = flags.fitting(int, f"one of {SUPPORTED_BLOCK_SIZES}", SUPPORTED_BLOCK_SIZES.__contains__)


@flags.checked
def tuning(text: str) -> str:
    if text.lower() != DEFAULTS.attention_tuning:
        from mlxpaged.attention.tuning import parse_tuning  # heavy, and needed only for another value

        parse_tuning(text.lower())
    return text.lower()


PRIORITIES = flags.one_of(*(each.name.lower() for each in Priority))


def priority(text: str) -> Priority:
    return Priority[PRIORITIES(text).upper()]


flags.CHOICES[priority] = flags.CHOICES[PRIORITIES]


def add_engine_flags(groups: flags.Flags) -> None:
    memory = groups.group("memory", DEFAULTS)
    pool, rest = "greatest size of the KV cache, for example 8GB", "what is left, so that a desktop stays usable"
    memory.field("--kv-cache-memory", size, pool, rest, "kv_cache_bytes")
    stored = "auto: keys and values in the model's type; int8: in 8 bits; int4: keys in 8 bits, values in 4"
    memory.field("--kv-cache-dtype", flags.one_of(*KV_CACHE_DTYPES), stored)
    computed = (
        "what a CPU computes in; auto: float32 if the weights fit; float32; model: the checkpoint's; no effect on a Mac"
    )
    memory.field("--cpu-dtype", flags.one_of(*CPU_DTYPES), computed)
    half = "half type of models in 16 bits and of scales; auto: float16 on M1 and M2 if the logits are equal"
    memory.field("--dtype", flags.one_of(*DTYPES), half)
    longest = "most tokens of a prompt and its answer together"
    memory.field("--max-model-len", flags.positive_int, longest, "the model's context length")
    lost = "space for KV blocks of preempted sequences, for example 4GB; 0: they are recomputed"
    memory.field("--swap-space", flags.or_zero(size, 0), lost, dest="swap_space_bytes")
    memory.field("--swap-dir", flags.directory, "directory for the swap space", "swap space is in memory")
    states = "checkpoints of recurrent states for the prefix cache, for example 1GB; 0: none"
    memory.field("--state-cache-memory", flags.or_zero(size, 0), states, "a tenth of it", "state_cache_bytes")
    wired = "on: keep weights and KV cache resident while a Mac waits for requests; auto, off: never"
    memory.field("--wired-memory", flags.one_of(*WIRED_MEMORY), wired)
    add_block_size(memory)
    memory.switch("--no-prefix-cache", "turn off the prefix cache: compute every prompt from its first token")

    steps = groups.group("scheduling", DEFAULTS)
    steps.field("--max-num-seqs", flags.positive_int, "most sequences in the running batch")
    steps.switch("--no-batching", "run one request at a time, as --max-num-seqs 1 does")
    steps.field("--max-num-batched-tokens", flags.positive_int, "token budget of a step, prompts and answers together")
    steps.field("--decode-preference", flags.fraction, "share of a step's tokens that is kept for decoding")
    longest = f"{step_multiple(1)} to {MOST_MULTIPLE} times as long as a step without prompts"
    steps.field("--max-step-ms", flags.milliseconds, "longest step with prompts, in ms; 0: no limit", longest)
    drafted = (
        "draft tokens to verify; ngram: repeated text; mtp: by the model's head; draft: by another model; auto; off"
    )
    steps.field("--speculative", flags.one_of(*SPECULATIVE), drafted)
    steps.field("--draft-model", str, "a smaller model with the same vocabulary, which drafts", "none")
    steps.field("--mtp", str, "file, directory or repository with the model's draft head or assistant", "its own files")
    steps.switch(
        "--batch-invariant", "give each request the same tokens and log-probabilities in any batch, to the bit; slower"
    )

    owner = groups.group("the Mac's user", DEFAULTS)
    share = "share of the time in which the GPU computes while the Mac is in use, on battery, or if it is hot"
    owner.field("--duty-cycle", flags.duty_cycle, share)
    owner.switch("--allow-sleep", "let the Mac go to sleep by itself while requests or batches run")

    attention = groups.group("attention", DEFAULTS)
    attention.field("--attention-backend", flags.one_of(*BACKENDS), ", ".join(BACKENDS))
    choices = (
        "auto: as `mlxpaged doctor` has measured; default, contiguous, matrix, few, paged, or paged:N for N keys "
        "per threadgroup"
    )
    attention.field("--attention-tuning", tuning, choices)
    add_retune(attention)
    attention.switch(
        "--no-joins", "compute each projection, addition, norm and rope of the model by itself, as mlx-lm does"
    )


def add_block_size(groups: flags.Flags) -> None:
    groups.field("--block-size", block_size, f"tokens per KV block: {', '.join(map(str, SUPPORTED_BLOCK_SIZES))}")


def add_retune(groups: flags.Flags) -> None:
    groups.switch("--retune", "measure the attention kernels now, instead of using the saved measurements")


def add_log_level(groups: flags.Flags, default: str) -> None:
    groups.group("logging").value("--log-level", flags.one_of(*LOG_LEVELS), default, ", ".join(LOG_LEVELS))


def engine_config(args: argparse.Namespace, **fields: Any) -> EngineConfig:
    """Makes a configuration of `fields` and of the flags. Raises ValueError if flags contradict each other."""
    fields |= {"prefix_caching": not args.no_prefix_cache, "joins": not args.no_joins}
    if args.no_batching:
        fields["max_num_seqs"] = 1
    return flags.from_flags(EngineConfig, args, **fields)
