"""Trains the bundled demo model from nothing, on one CPU core: ``python demo_model/train.py --out DIR``.

The defaults are what made the committed artefact.  All randomness comes from ``--seed``; the data of step
``i`` depend on the seed and on ``i`` only, so a run that was stopped can go on from its checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

with contextlib.suppress(OSError):
    # On Linux MLX's CPU build calls the BLAS that is loaded first; OpenBLAS is many times faster than the
    # reference one.  On a Mac the library does not exist and is not needed.
    ctypes.CDLL("libopenblas.so.0", ctypes.RTLD_GLOBAL)

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.qwen3 import Model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from a clone

from demo_model import tasks
from demo_model.data import Batch, PasskeyMix, RowMaker
from demo_model.model import CONFIG, hidden_states, new_model, parameter_count, save_model
from demo_model.tokenizer import save_tokenizer, text_of_tasks, train_tokenizer


@dataclass(frozen=True)
class Phase:
    """A stretch of training with one mix of row lengths, drawn anew for each step."""

    steps: int
    lengths: tuple[int, ...]  # one is drawn with equal chance; repeat an entry for a greater share
    tokens: int  # per step
    passkeys: PasskeyMix


PHASES = (
    Phase(2000, (128,), 2048, PasskeyMix(rows=0.5, follow_up=0.3)),
    Phase(2000, (128, 256), 2048, PasskeyMix(rows=0.5, follow_up=0.3)),
    Phase(3000, (128, 128, 256, 512, 1024), 2048, PasskeyMix(rows=0.5, follow_up=0.3)),
    # Many questions for each long context that was read, which is what costs time.
    Phase(1000, (128, 128, 512, 1024), 2048, PasskeyMix(rows=0.8, follow_up=0.6)),
)
WARMUP_STEPS = 100
DECAY_SHARE = 0.4  # the rates are constant after the warm-up, then fall linearly to 0 over this share
MUON_RATE = 0.02  # matrices
ADAM_RATE = 0.003  # embeddings and norms
CLIP_NORM = 1.0
LOG_EVERY, CHECK_EVERY, SAVE_EVERY = 50, 250, 250


def learning_rate_factor(step: int, total: int) -> float:
    """Warm up, hold, fall linearly."""
    decay_steps = DECAY_SHARE * total
    return min(1.0, (step + 1) / WARMUP_STEPS, (total - step) / decay_steps)


def phase_of(step: int, phases: Sequence[Phase]) -> Phase:
    """The phase that a step belongs to."""
    for phase in phases:
        if step < phase.steps:
            return phase
        step -= phase.steps
    raise ValueError("step beyond the last phase")


def make_optimizer() -> optim.MultiOptimizer:
    """Muon for the matrices of the layers, Adam for the embeddings and the norms."""
    muon = optim.Muon(learning_rate=MUON_RATE, momentum=0.95, weight_decay=0.0)
    adam = optim.Adam(learning_rate=ADAM_RATE, betas=[0.9, 0.98], bias_correction=True)
    return optim.MultiOptimizer([muon, adam], [lambda path, value: value.ndim == 2 and "embed" not in path])


def answer_logits(model: Model, batch: Batch) -> mx.array:
    """Logits at the predicted positions only; the rest of a row needs none."""
    hidden = hidden_states(model, mx.array(batch.tokens))
    wanted = hidden.reshape(-1, hidden.shape[-1])[mx.array(batch.positions)]
    logits: mx.array = model.model.embed_tokens.as_linear(wanted)
    return logits


def loss_fn(model: Model, batch: Batch) -> mx.array:
    """Weighted mean cross-entropy of the answers' tokens."""
    losses = nn.losses.cross_entropy(answer_logits(model, batch), mx.array(batch.targets))
    return (losses * mx.array(batch.weights)).sum() / float(batch.weights.sum())


def exact_share(model: Model, rows: RowMaker, examples: Sequence[tasks.Example]) -> float:
    """Share of single-turn examples whose answer is, token by token, the most probable one.

    Given the right tokens before it, which is the same as greedy decoding being right throughout.
    """
    batch, owner = rows.examples(examples)
    predicted = np.array(mx.argmax(answer_logits(model, batch), axis=-1))
    wrong = set(owner[predicted != batch.targets].tolist())
    return 1.0 - len(wrong) / len(examples)


def _check_sets() -> dict[str, list[tasks.Example]]:
    sizes = {
        "repeat": 100,
        "passkey": 12,
        "add": 100,
        "reverse": 100,
        "identity": 20,
        "count": 20,
        "fallback": 20,
    }
    return {task: tasks.held_out(task, n, seed=99) for task, n in sizes.items()}


def _save_checkpoint(path: Path, step: int, model: Model, optimizer: optim.MultiOptimizer) -> None:
    state = {"model": model.parameters(), "optimizer": optimizer.state, "next": mx.array(step)}
    temporary = path.with_name("writing-" + path.name)
    mx.save_safetensors(str(temporary), dict(tree_flatten(state)))
    temporary.replace(path)


def _load_checkpoint(path: Path, model: Model, optimizer: optim.MultiOptimizer) -> int:
    flat = mx.load(str(path))
    assert isinstance(flat, dict)
    state = tree_unflatten(list(flat.items()))
    model.update(state["model"])
    optimizer.init(model.trainable_parameters())
    optimizer.state = state["optimizer"]
    return int(state["next"].item())


def train(out: Path, seed: int, checkpoint: Path | None) -> None:
    """Train, and write the artefact to ``out`` at every save and at the end."""
    out.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    tokenizer = train_tokenizer(CONFIG["vocab_size"], text_of_tasks(seed))
    save_tokenizer(tokenizer, out, CONFIG["max_position_embeddings"])
    rows = RowMaker(tokenizer)
    model = new_model()
    optimizer = make_optimizer()
    optimizer.init(model.trainable_parameters())
    first = 0
    if checkpoint is not None and checkpoint.exists():
        first = _load_checkpoint(checkpoint, model, optimizer)
    total = sum(phase.steps for phase in PHASES)
    print(f"{parameter_count(model)} parameters, steps {first} to {total}", flush=True)

    loss_and_grad = value_and_grad(model, loss_fn)
    checks = _check_sets()
    started, losses = time.monotonic(), []
    for step in range(first, total):
        rng = random.Random(f"step {seed} {step}")
        phase = phase_of(step, PHASES)
        length = rng.choice(phase.lengths)
        factor = learning_rate_factor(step, total)
        muon, adam = optimizer.optimizers
        muon.learning_rate, adam.learning_rate = MUON_RATE * factor, ADAM_RATE * factor
        loss, gradients = loss_and_grad(model, rows.batch(rng, phase.tokens // length, length, phase.passkeys))
        gradients, _ = optim.clip_grad_norm(gradients, CLIP_NORM)
        optimizer.update(model, gradients)
        mx.eval(loss, model.parameters(), optimizer.state)
        losses.append(loss.item())
        if (step + 1) % LOG_EVERY == 0:
            mean = sum(losses) / len(losses)
            print(f"{step + 1} loss {mean:.4f} length {length} {time.monotonic() - started:.0f} s", flush=True)
            losses = []
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == total:
            shares = {task: exact_share(model, rows, examples) for task, examples in checks.items()}
            print(step + 1, " ".join(f"{task} {share:.2f}" for task, share in shares.items()), flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == total:
            save_model(model, out)
            if checkpoint is not None:
                _save_checkpoint(checkpoint, step + 1, model, optimizer)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the artefact")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--checkpoint", type=Path, help="file to save progress to and go on from")
    arguments = parser.parse_args()
    train(arguments.out, arguments.seed, arguments.checkpoint)


if __name__ == "__main__":
    main()
