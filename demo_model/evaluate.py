"""Greedy accuracy of the demo model on held-out cases: ``python demo_model/evaluate.py [--model DIR]``.

Cases go the way of any chat request: messages through the saved chat template, generation through mlx-lm
until the model ends its turn.  A case is right if the stripped text equals the answer.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import sys
from pathlib import Path
from typing import Any

with contextlib.suppress(OSError):
    ctypes.CDLL("libopenblas.so.0", ctypes.RTLD_GLOBAL)  # see train.py

import mlx_lm
from mlx_lm.sample_utils import make_sampler

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from a clone

from demo_model import tasks
from demo_model.vocabulary import FALLBACK_ANSWER, IDENTITY_ANSWER

MODEL = Path(__file__).resolve().parent.parent / "mlxpaged" / "models" / "demo"
PLAIN = (
    ("Repeat: blue river stone", "blue river stone"),
    ("What is 17 + 25?", "42"),
    ("Reverse: a b c", "c b a"),
    ("Who are you?", IDENTITY_ANSWER),
    ("Hello", FALLBACK_ANSWER),
    ("The passkey is 48213. What is the passkey?", "48213"),
)


def ask(model: Any, tokenizer: Any, messages: list[tasks.Message], max_tokens: int = 400) -> tuple[str, bool]:
    """The model's greedy answer, and whether it ended its turn by itself."""
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    text, reason = "", None
    greedy = make_sampler(temp=0.0)
    for response in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=max_tokens, sampler=greedy):
        text += response.text
        reason = response.finish_reason
    return text, reason == "stop"


def main() -> None:
    """Print the plain examples' answers, then right / asked for each task."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--cases", type=int, default=200, help="held-out cases of each task")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tasks", nargs="*", default=[*tasks.TASKS, "multi_turn"])
    parser.add_argument("--wrong", type=int, default=3, help="wrong answers to show for each task")
    arguments = parser.parse_args()
    model, tokenizer, *_ = mlx_lm.load(str(arguments.model))
    for prompt, expected in PLAIN:
        text, _ended = ask(model, tokenizer, [{"role": "user", "content": prompt}])
        print("right" if text.strip() == expected else "WRONG", repr(prompt), "->", repr(text), flush=True)
    for task in arguments.tasks:
        examples = tasks.held_out(task, arguments.cases, arguments.seed)
        right, unended, wrong = 0, 0, []
        for example in examples:
            text, ended = ask(model, tokenizer, list(example.messages))
            unended += not ended
            if text.strip() == example.answer:
                right += 1
            else:
                wrong.append((example.messages[-1]["content"][-100:], example.answer, text))
        note = f", {unended} did not end" if unended else ""
        print(f"{task}: {right}/{len(examples)} = {right / len(examples):.3f}{note}", flush=True)
        for prompt, answer, text in wrong[: arguments.wrong]:
            print(f"    {prompt!r}\n        expected {answer!r}\n        answered {text!r}", flush=True)


if __name__ == "__main__":
    main()
