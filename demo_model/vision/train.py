"""Trains the demo model that sees, from nothing, on two CPU cores: ``python demo_model/vision/train.py --out DIR``.

``--fonts`` takes directories of TrueType fonts, which are used in addition to Pillow's own.  All randomness comes from
``--seed``; the data of step ``i`` depend on the seed, the fonts and on ``i`` only, so a run that was stopped can go on
from its checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

with contextlib.suppress(OSError):
    ctypes.CDLL("libopenblas.so.0", ctypes.RTLD_GLOBAL)  # see ../train.py

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten, tree_map, tree_unflatten

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, from a clone

from demo_model.tokenizer import IM_START, save_tokenizer
from demo_model.vision.data import MOST_PARTS, Batch, BatchMaker
from demo_model.vision.model import TEXT, SeeingModel, save_model
from demo_model.vision.pictures import fonts_in
from demo_model.vision.tokenizer import CHAT_TEMPLATE, OF_PICTURES, trained


class Phase(NamedTuple):
    """A stretch of training.  turns, pictures: the most in a conversation; one turn is always the plain question.
    parts: the most rows of features of a picture, one of these in a batch.  digits: the most of a number."""

    steps: int
    rows: int
    turns: int
    pictures: int
    parts: tuple[int, ...] = (MOST_PARTS,)
    digits: int = 3


PHASES = (
    Phase(400, 64, 1, 1, (6,), 1),
    Phase(400, 48, 1, 1, (9,), 2),
    Phase(800, 32, 1, 1),
    Phase(5400, 20, 3, 3, (12, 16, 24, MOST_PARTS)),
)
WARMUP_STEPS = 100
DECAY_SHARE = 0.5  # the rates are constant after the warm-up, then fall linearly to 0 over this share
MUON_RATE = 0.01  # matrices
ADAM_RATE = 0.003  # embeddings and norms
CLIP_NORM = 1.0
DIGITS_WEIGHT = 0.5
PLAIN_SHARE = 0.5
"""Steps with single pictures among those of conversations: reading is what takes longest to learn."""
THREADS = 2
"""Each computes its share of a step's rows."""
CHECK_ROWS = 60
LOG_EVERY, CHECK_EVERY, SAVE_EVERY = 50, 500, 100


def learning_rate_factor(step: int, total: int) -> float:
    """Warm up, hold, fall linearly."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (total - step) / (DECAY_SHARE * total))


def phase_of(step: int) -> Phase:
    """The phase that a step belongs to."""
    for phase in PHASES:
        if step < phase.steps:
            return phase
        step -= phase.steps
    raise ValueError("step beyond the last phase")


def make_optimizer() -> optim.MultiOptimizer:
    """Muon for the matrices of the layers, Adam for the embeddings and the norms."""
    muon = optim.Muon(learning_rate=MUON_RATE, momentum=0.95, weight_decay=0.0)
    adam = optim.Adam(learning_rate=ADAM_RATE, betas=[0.9, 0.98], bias_correction=True)
    return optim.MultiOptimizer([muon, adam], [lambda path, value: value.ndim == 2 and "embed" not in path])


def answer_logits(model: SeeingModel, batch: Batch, features: Sequence[mx.array]) -> mx.array:
    """Logits at the predicted positions only; the rest of a row needs none."""
    hidden = model.hidden_states(mx.array(batch.tokens), features, batch.sources)
    return model.logits(hidden.reshape(-1, hidden.shape[-1])[mx.array(batch.positions)])


def loss_fn(model: SeeingModel, batch: Batch) -> mx.array:
    """Weighted mean cross-entropy of the answers' tokens, and of the digits by the pictures alone."""
    features = model.features([mx.array(group) for group in batch.pixels])
    losses = nn.losses.cross_entropy(answer_logits(model, batch, features), mx.array(batch.targets))
    loss = (losses * mx.array(batch.weights)).sum() / float(batch.weights.sum())
    for group, counts in zip(features, batch.digits, strict=True):
        logits = mx.logsumexp(model.digits(group), axis=1)
        shares = mx.array(counts / counts.sum(axis=1, keepdims=True))
        loss += DIGITS_WEIGHT * nn.losses.cross_entropy(logits, shares).sum() / sum(map(len, batch.digits))
    return loss


def exact_share(model: SeeingModel, batch: Batch) -> float:
    """Share of conversations whose answers are, token by token, the most probable ones."""
    features = model.features([mx.array(group) for group in batch.pixels])
    predicted = np.array(mx.argmax(answer_logits(model, batch, features), axis=-1))
    wrong = set(batch.owners[predicted != batch.targets].tolist())
    return 1.0 - len(wrong) / len(batch.tokens)


def _save_checkpoint(path: Path, step: int, model: SeeingModel, optimizer: optim.MultiOptimizer) -> None:
    state = {"model": model.parameters(), "optimizer": optimizer.state, "next": mx.array(step)}
    temporary = path.with_name("writing-" + path.name)
    mx.save_safetensors(str(temporary), dict(tree_flatten(state)))
    temporary.replace(path)


def _load_checkpoint(path: Path, model: SeeingModel, optimizer: optim.MultiOptimizer) -> int:
    flat = mx.load(str(path))
    assert isinstance(flat, dict)
    state = tree_unflatten(list(flat.items()))
    model.update(state["model"])
    optimizer.init(model.trainable_parameters())
    optimizer.state = state["optimizer"]
    return int(state["next"].item())


def train(out: Path, fonts: Sequence[Path], seed: int, checkpoint: Path | None) -> None:
    """Train, and write the artefact to ``out`` at every save and at the end."""
    out.mkdir(parents=True, exist_ok=True)
    mx.random.seed(seed)
    tokenizer = trained(TEXT["vocab_size"], seed)
    save_tokenizer(tokenizer, out, TEXT["max_position_embeddings"], CHAT_TEMPLATE, (IM_START, *OF_PICTURES))
    model = SeeingModel()
    optimizer = make_optimizer()
    optimizer.init(model.trainable_parameters())
    first = 0
    if checkpoint is not None and checkpoint.exists():
        first = _load_checkpoint(checkpoint, model, optimizer)
    total = sum(phase.steps for phase in PHASES)
    weights: Any = tree_flatten(model.parameters())
    print(
        f"{sum(weight.size for _, weight in weights)} parameters, {len(fonts)} fonts, steps {first} to {total}",
        flush=True,
    )

    makers = {"train": BatchMaker(tokenizer, fonts), "held out": BatchMaker(tokenizer, fonts, held_out=True)}

    streams = [mx.new_stream(mx.cpu) for _ in range(THREADS)]

    def batches_of(step: int) -> list[Batch]:
        rng, phase = random.Random(f"step {seed} {step}"), phase_of(step)
        if rng.random() < PLAIN_SHARE:
            phase = phase._replace(turns=1)
        return [makers["train"].batch(rng, phase.rows // THREADS, *phase[2:]) for _ in streams]

    pool = ThreadPoolExecutor(1)  # draws the next batch meanwhile
    waiting = pool.submit(batches_of, first)
    loss_and_grad = value_and_grad(model, loss_fn)
    started, losses = time.monotonic(), []
    for step in range(first, total):
        phase, batches = phase_of(step), waiting.result()
        waiting = pool.submit(batches_of, min(step + 1, total - 1))
        factor = learning_rate_factor(step, total)
        muon, adam = optimizer.optimizers
        muon.learning_rate, adam.learning_rate = MUON_RATE * factor, ADAM_RATE * factor
        parts = []
        for stream, batch in zip(streams, batches, strict=True):
            with mx.stream(stream):  # each has a thread of its own
                parts.append(loss_and_grad(model, batch))
        mx.eval(parts)
        loss = sum(each for each, _ in parts) / THREADS
        gradients = tree_map(lambda *each: sum(each) / THREADS, *(gradients for _, gradients in parts))
        gradients, _ = optim.clip_grad_norm(gradients, CLIP_NORM)
        optimizer.update(model, gradients)
        mx.eval(loss, model.parameters(), optimizer.state)
        losses.append(loss.item())
        if (step + 1) % LOG_EVERY == 0:
            mean = sum(losses) / len(losses)
            print(f"{step + 1} loss {mean:.4f} {time.monotonic() - started:.0f} s", flush=True)
            losses = []
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == total:
            shares = {}
            for name, maker in makers.items():
                of_batches = []
                for i in range(4):  # each has two sizes of pictures
                    check = random.Random(f"check {name} {i}")
                    of_batches.append(exact_share(model, maker.batch(check, CHECK_ROWS // 4, *phase[2:])))
                shares[name] = sum(of_batches) / len(of_batches)
            print(step + 1, ", ".join(f"{name} {share:.2f}" for name, share in shares.items()), flush=True)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == total:
            save_model(model, out)
            if checkpoint is not None:
                _save_checkpoint(checkpoint, step + 1, model, optimizer)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="directory for the artefact")
    parser.add_argument("--fonts", type=Path, nargs="*", default=[], help="directories of TrueType fonts")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--checkpoint", type=Path, help="file to save progress to and go on from")
    arguments = parser.parse_args()
    train(arguments.out, fonts_in(arguments.fonts), arguments.seed, arguments.checkpoint)


if __name__ == "__main__":
    main()
