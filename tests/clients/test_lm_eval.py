"""lm-evaluation-harness, beside `mlx_lm.evaluate` on the same model and tasks: choices by their log-likelihood, and
generated text."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import DEMO_PATH
from tests.support import RunningServer, make_tiny_model, running_server

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

import lm_eval
import lm_eval.models  # mlx_lm.evaluate registers a model: the others would then not be imported
from lm_eval.tasks import TaskManager
from mlx_lm.evaluate import MLXLM

pytestmark = pytest.mark.clients

CHOICES = """task: local_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: right
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXTS = """task: local_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[right]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12, do_sample: false, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    """Sums with three results to choose from."""
    directory, source = tmp_path_factory.mktemp("tasks"), random.Random(1)
    rows = []
    for _ in range(20):
        a, b, right = source.randrange(10, 60), source.randrange(10, 40), source.randrange(3)
        choices = [f"{a + b + i - right}" for i in range(3)]
        rows.append({"question": f"What is {a} + {b}?", "choices": choices, "right": right})
    data = directory / "sums.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in (("choices", CHOICES), ("texts", TEXTS)):
        (directory / f"{name}.yaml").write_text(task.format(data=data))
    return TaskManager(include_path=str(directory), include_defaults=False)


@pytest.fixture(scope="module", params=["demo", "tiny"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return DEMO_PATH if request.param == "demo" else make_tiny_model(tmp_path_factory.mktemp("tiny") / "m", "llama")


@pytest.fixture(scope="module")
def evaluated(path: Path) -> Iterator[RunningServer]:
    """The model to be evaluated."""
    config = EngineConfig(str(path), served_model_name="local", kv_cache_bytes=16_000_000)
    with running_server(config) as running:
        yield running


def evaluate(model: Any, tasks: TaskManager, *names: str, **options: Any) -> dict[str, Any]:
    found = lm_eval.simple_evaluate(
        model, tasks=[f"local_{name}" for name in names], task_manager=tasks, bootstrap_iters=0, **options
    )
    assert found is not None
    return dict(found)


def by_server(server: RunningServer, kind: str, endpoint: str, tasks: TaskManager, *names: str, **options: Any) -> Any:
    arguments = {"model": "local", "base_url": f"{server.url}/v1/{endpoint}", "max_length": 512, "max_retries": 1}
    arguments |= options.pop("arguments", {})
    return evaluate(kind, tasks, *names, model_args=arguments, **options)


def samples(found: dict[str, Any], name: str) -> list[Any]:
    """What the model answered, in the order of the questions."""
    return [sample["filtered_resps"] for sample in sorted(found["samples"][name], key=lambda each: each["doc_id"])]


def numbers(found: dict[str, Any], name: str) -> dict[str, Any]:
    return {metric: value for metric, value in found["results"][name].items() if "stderr" not in metric}


@pytest.mark.parametrize(
    ("backend", "batch_size", "concurrent"), [("remote", 1, 1), ("remote", 8, 1), ("huggingface", 5, 4)]
)
def test_completions_have_the_numbers_of_mlx_lm(
    evaluated: RunningServer, path: Path, tasks: TaskManager, backend: str, batch_size: int, concurrent: int
) -> None:
    names = ("choices", "texts")
    arguments = {"tokenizer_backend": backend, "num_concurrent": concurrent}
    arguments |= {"tokenizer": str(path)} if backend == "huggingface" else {}
    found = by_server(
        evaluated, "local-completions", "completions", tasks, *names, arguments=arguments, batch_size=batch_size
    )
    expected = evaluate(MLXLM(str(path), use_chat_template=False), tasks, *names)
    for name in ("local_choices", "local_texts"):
        assert numbers(found, name) == numbers(expected, name)
    assert samples(found, "local_texts") == samples(expected, "local_texts")
    for got, right in zip(samples(found, "local_choices"), samples(expected, "local_choices"), strict=True):
        assert [is_greedy for _, is_greedy in got] == [is_greedy for _, is_greedy in right]
        assert [logprob for logprob, _ in got] == pytest.approx([logprob for logprob, _ in right], abs=1e-3)


def test_chat_completions_have_the_numbers_of_mlx_lm(evaluated: RunningServer, path: Path, tasks: TaskManager) -> None:
    options: dict[str, Any] = {"apply_chat_template": True}
    found = by_server(evaluated, "local-chat-completions", "chat/completions", tasks, "texts", **options)
    expected = evaluate(MLXLM(str(path), use_chat_template=True), tasks, "texts", **options)
    assert samples(found, "local_texts") == samples(expected, "local_texts")
    assert numbers(found, "local_texts") == numbers(expected, "local_texts")
    if path == DEMO_PATH:
        assert found["results"]["local_texts"]["exact_match,none"] > 0.5, "the demo model can add"
