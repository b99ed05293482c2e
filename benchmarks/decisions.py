"""How good the probabilities of decisions are on real weights, for each way to read them, as a table for the docs.

`make bench-real-quality` installs the model, SmolLM2-135M-Instruct. The figures are the same on a busy machine. For
each task and method: accuracy, the Brier score (Brier 1950; the sum over the options, so from 0 to 2), and the expected
calibration error in ten bins of equal width (Naeini et al. 2015; Guo et al. 2017).
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from quality.decision_items import TASKS, Task
from quality.serving import serving

from mlxpaged.api.decisions.calibration import calibrated, mean, probabilities
from mlxpaged.api.decisions.question import NO, YES

BINS = 10
METHODS = (
    *itertools.product(("text", "symbol"), ("none", "content_free"), (1, 2)),
    *itertools.product(("cloze",), ("none", "content_free"), (1,)),
)
Figures = tuple[float, float, float]


def figures(found: Sequence[tuple[list[float], int]]) -> Figures:
    """Accuracy, Brier score and expected calibration error. found: probabilities and the index of the right option."""
    hits = [(max(p), p.index(max(p)) == right) for p, right in found]
    brier = [sum((each - (i == right)) ** 2 for i, each in enumerate(p)) for p, right in found]
    bins: dict[int, list[tuple[float, bool]]] = {}
    for sure, hit in hits:
        bins.setdefault(min(BINS - 1, int(sure * BINS)), []).append((sure, hit))
    error = sum(abs(sum(sure for sure, _ in each) - sum(hit for _, hit in each)) for each in bins.values())
    return sum(hit for _, hit in hits) / len(hits), sum(brier) / len(brier), error / len(hits)


def options_of(task: Task) -> list[str]:
    question = task.question
    if question["type"] == "predicate":
        return [NO, YES]
    key, name = ("choices", "value") if question["type"] == "choice" else ("levels", "label")
    return [each[name] for each in question[key]]


def read(client: httpx.Client, task: Task, text: str, answers: str) -> list[list[float]]:
    """Log-probabilities in both orders, up to constants, in the order of the task's options. Both are asked together,
    as choices: a predicate is one between no and yes."""
    options = options_of(task)
    orders = [options, options[::-1]] if answers != "cloze" else [options]
    asked = [
        {
            "type": "choice",
            "instructions": task.question["instructions"],
            "choices": [{"value": value} for value in order],
        }
        for order in orders
    ]
    body = {"input": text, "questions": asked, "answers": answers, "calibration": "none", "orders": 1}
    response = client.post("/v1/decisions", json=body)
    response.raise_for_status()
    found = []
    for answer in response.json()["answers"]:
        by_value = {each["value"]: each["probability"] for each in answer["probabilities"]}
        found.append([math.log(max(by_value[value], 1e-30)) for value in options])
    return found


def task_figures(client: httpx.Client, task: Task, count: int) -> Iterator[tuple[tuple[str, str, int], Figures]]:
    """Each reading is used by all methods that need it."""
    for answers in ("text", "symbol", "cloze"):
        free = read(client, task, "", answers)
        own = [(read(client, task, text, answers), right) for text, right in task.items[:count]]
        for method in METHODS:
            if method[0] == answers:
                _, calibration, orders = method
                combined = [
                    (
                        mean(
                            [
                                probabilities(calibrated(each, empty) if calibration == "content_free" else each)
                                for each, empty in zip(reading[:orders], free[:orders], strict=True)
                            ]
                        ),
                        right,
                    )
                    for reading, right in own
                ]
                yield method, figures(combined)


def line(task: str, method: tuple[str, str, int], found: Figures) -> str:
    accuracy, brier, error = found
    answers, calibration, orders = method
    return f"| {task} | `{answers}` | `{calibration}` | {orders} | {accuracy:.0%} | {brier:.3f} | {error:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(Path(sys.prefix) / "real" / "float32"))
    parser.add_argument("--tasks", default="", help="only those whose names contain this")
    parser.add_argument("--items", type=int, default=1000, help="of each task, at most")
    args = parser.parse_args()
    of_methods: dict[tuple[str, str, int], list[Figures]] = {}
    with serving(args.model, "--max-model-len", "2048") as client:
        print("| task | answers | calibration | orders | accuracy | Brier | ECE |\n|---|---|---|---|---|---|---|")
        for task in (each for each in TASKS if args.tasks in each.name):
            for method, found in task_figures(client, task, args.items):
                of_methods.setdefault(method, []).append(found)
                print(line(task.name, method, found), flush=True)
    for method, each in of_methods.items():
        means: Any = tuple(sum(column) / len(each) for column in zip(*each, strict=True))
        print(line("mean", method, means), flush=True)


if __name__ == "__main__":
    main()
