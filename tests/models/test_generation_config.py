"""What generation_config.json recommends is read, and nothing in it can keep a model from loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxpaged.api.openai.schema import ChatRequest
from mlxpaged.models.files.generation_config import LIMITS, MAX_END_TOKENS, read_generation_config
from mlxpaged.models.loader import DEMO_PATH, read_tokenizer
from tests.support import make_tiny_model


def write(directory: Path, content: Any) -> Path:
    (directory / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def test_sampling_parameters_and_end_tokens_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0, "repetition_penalty": 1.05}
    found = read_generation_config(
        write(tmp_path, given | {"do_sample": True, "max_length": 20, "eos_token_id": [1, 2]})
    )
    assert (found.sampling, found.end_tokens) == (given, [1, 2])
    assert read_generation_config(write(tmp_path, {"eos_token_id": 0})).end_tokens == [0]
    most = [7] * MAX_END_TOKENS
    assert read_generation_config(write(tmp_path, {"eos_token_id": most})).end_tokens == most
    assert read_generation_config(write(tmp_path, {"temperature": None, "eos_token_id": None})) == ({}, [])
    assert not caplog.records


@pytest.mark.parametrize(("given", "found"), [([5, 7], {5, 7}), (5, {5}), ([5, -1], set()), ([5] * 2000, set())])
def test_end_tokens_of_older_models_are_in_config(given: Any, found: set[int], tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama", eos_token_id=given)
    write(directory, {"temperature": 1})
    own = read_tokenizer(str(DEMO_PATH)).reader.eos_token_id
    assert read_tokenizer(str(directory)).eos_token_ids == found | {own}


def test_a_model_that_does_not_sample_has_a_temperature_of_zero(tmp_path: Path) -> None:
    given = {"temperature": 0.6, "repetition_penalty": 1.05}
    for do_sample in (True, None, "false", 0):
        assert read_generation_config(write(tmp_path, given | {"do_sample": do_sample})).sampling == given
        assert read_generation_config(write(tmp_path, {"do_sample": do_sample})).sampling == {}
    greedy = read_generation_config(write(tmp_path, given | {"do_sample": False})).sampling
    assert greedy == {"temperature": 0.0, "repetition_penalty": 1.05}
    assert read_generation_config(write(tmp_path, {"do_sample": False})).sampling == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 2.5),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", "0.9"),
        ("top_k", 2.5),
        ("top_k", 10**400),
        ("min_p", [0.1]),
        ("repetition_penalty", 0.0),
        ("presence_penalty", {}),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [2, None]),
        ("eos_token_id", [True]),
        ("eos_token_id", -1),
        ("eos_token_id", [1] * (MAX_END_TOKENS + 1)),
    ],
)
def test_a_bad_value_is_ignored_and_named(
    name: str, value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = read_generation_config(write(tmp_path, {"frequency_penalty": 1, name: value}))
    assert found == ({"frequency_penalty": 1}, [])
    (record,) = caplog.records
    assert f"generation_config.json: {name} is ignored" in record.getMessage()


@pytest.mark.parametrize("content", ["{", "[1]", "\ufeff", '"x"'])
def test_a_file_that_is_no_object_is_ignored(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_generation_config(write(tmp_path, content)) == ({}, [])
    assert "generation_config.json is ignored" in caplog.text
    assert read_generation_config(tmp_path / "missing") == ({}, [])


def test_defaults_have_the_limits_of_requests() -> None:
    fields = ChatRequest.model_json_schema()["properties"]
    for name, limits in LIMITS.items():
        (schema,) = (branch for branch in fields[name]["anyOf"] if branch["type"] != "null")
        least = schema.get("exclusiveMinimum" if limits.excluded else "minimum")
        most = schema["exclusiveMaximum"] - 1 if limits.whole else schema["maximum"]
        assert (least, most, schema["type"] == "integer") == (limits.least, limits.most, limits.whole), name
