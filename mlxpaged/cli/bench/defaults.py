"""Sizes of the prompts and answers that are measured unless flags say otherwise."""

from __future__ import annotations

import argparse

CONCURRENCY = 8
PROMPTS = 15
PROMPT_TOKENS = (32, 128, 512)
FIRST_CONTEXT = 128


def complete_flags(args: argparse.Namespace, max_num_seqs: int) -> None:
    """Set the defaults that depend on other flags. Raises ValueError if flags contradict each other, or one has no
    effect."""
    for name in ("concurrency", "prompts", "prompt_tokens") if args.context_sweep else ("max_context",):
        if getattr(args, name) is not None:
            needs = "cannot be combined with" if args.context_sweep else "needs"
            raise ValueError(f"--{name.replace('_', '-')} {needs} --context-sweep")
    args.concurrency = args.concurrency or (min(CONCURRENCY, args.prompts or PROMPTS, max_num_seqs),)
    args.prompts = args.prompts or max(PROMPTS, *args.concurrency)
    most = max(args.concurrency)
    if most > max_num_seqs:
        raise ValueError(f"--concurrency is {most}, but --max-num-seqs is only {max_num_seqs}")
    if most > args.prompts:
        raise ValueError(f"--concurrency is {most}, but --prompts is only {args.prompts}")
