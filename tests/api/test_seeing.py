"""A tiny Mistral 3 with random weights and a tower sees images through every API: its answers depend on them, and are
the same each time, from the prefix cache too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tokenizers import Tokenizer

from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.features import Feature
from tests.api.helpers import DEADLINE, raw, side_by_side, stream_events, text_of
from tests.api.test_images import CHAT, MESSAGES, OLLAMA, RESPONSES, TEMPLATE, block, input_part, text, url_part, user
from tests.models.test_vision import PREPROCESSOR, config_of, torch_weights
from tests.scripted import make_scripted_model
from tests.support import SMALL, RunningServer, larger_matrices, running_server, since_mlx_lm_0_32
from tests.vision.files import encoded, halves
from tests.vision.files import text_of as base64_of
from tests.vision.tiny import MERGED, tiny_tower

pytestmark = since_mlx_lm_0_32

TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
RED, GREEN = encoded(halves(60, 60)), encoded(halves(50, 60, "green", "white"), "JPEG")
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("model")
    make_scripted_model(path, "json_tools", more=TOKENS, template=TEMPLATE.replace("<image>", TOKENS[0]))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    sizes = replace(MERGED, output=SMALL["hidden_size"])
    told = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 2048}
    rope = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.0, "original_max_position_embeddings": 2048}
    config = config_of(sizes, "mistral3") | {
        "text_config": {"model_type": "ministral3"} | SMALL | told | {"rope_parameters": rope},
        "image_token_index": tokenizer.token_to_id(TOKENS[0]),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    model_class, args_class = _get_classes(config)
    mx.random.seed(3)
    text_weights: dict[str, mx.array] = dict(tree_flatten(model_class(args_class.from_dict(config)).parameters()))
    weights = larger_matrices(text_weights) | torch_weights(tiny_tower(sizes))
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    with running_server(EngineConfig(model=str(path), served_model_name="m", kv_cache_bytes=16_000_000)) as server:
        assert server.core.served.missing[Feature.IMAGES] == ""
        yield server
        server.wait_idle(DEADLINE)


def body(*files: bytes, question: str = "What is it?") -> dict[str, Any]:
    fields = {"model": "m", "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return fields | {"messages": [user(text(question), *map(url_part, files))]}


def answer(server: RunningServer, *files: bytes, **fields: Any) -> tuple[str, int, int]:
    """The text, the tokens of the prompt, and how many of them were in the prefix cache."""
    with raw(server) as client:
        response = client.post(CHAT, json=body(*files, **fields))
    assert response.status_code == 200, response.text
    found = response.json()
    usage = found["usage"]
    content = found["choices"][0]["message"]["content"]
    return content, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_an_answer_depends_on_its_images_and_their_order(server: RunningServer) -> None:
    prompts = [(RED,), (GREEN,), (RED, GREEN), (GREEN, RED), ()]
    first = [answer(server, *files) for files in prompts]
    assert len({found for found, _, _ in first}) == len(prompts)
    again = [answer(server, *files) for files in prompts]
    assert [(found, length) for found, length, _ in again] == [(found, length) for found, length, _ in first]
    for (_, length, cached), files in zip(again, prompts, strict=True):
        assert length - cached <= 2 * server.core.scheduler.config.block_size, files


def test_images_in_one_batch_are_seen_by_their_requests_only(server: RunningServer) -> None:
    alone = [answer(server, file, question="And?")[0] for file in (RED, GREEN)]
    server.run(server.engine.clear_cache()).result(DEADLINE)
    together = side_by_side(
        lambda: answer(server, RED, question="And?")[0], lambda: answer(server, GREEN, question="And?")[0]
    )
    assert list(together) == alone


def test_a_stream_says_what_an_answer_at_once_says(server: RunningServer) -> None:
    assert text_of(stream_events(server, CHAT, body(RED))) == answer(server, RED)[0]


def test_every_api_shows_the_same_image(server: RunningServer) -> None:
    """The prompt is the same in all of them."""
    length = answer(server, RED, question="")[1]
    asked: dict[str, dict[str, Any]] = {
        RESPONSES: {"input": [user(input_part(RED))], "max_output_tokens": 1},
        MESSAGES: {"messages": [user(block(RED))], "max_tokens": 1},
    }
    with raw(server) as client:
        for path, fields in asked.items():
            usage = client.post(path, json={"model": "m"} | fields).json()["usage"]
            assert usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) == length
        message = {"role": "user", "content": "", "images": [base64_of(RED)]}
        fields = {"messages": [message], "options": {"num_predict": 1}, "stream": False}
        assert client.post(OLLAMA, json={"model": "m"} | fields).json()["prompt_eval_count"] == length
