"""/tokenize, /detokenize and /tokenizer_info, and what /v1/models tells about a model."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import jinja2
import pytest
from mlx_lm.utils import load_tokenizer
from openai import OpenAI

from mlxpaged.api.generation.images import Images
from mlxpaged.api.generation.prompt import rendering
from mlxpaged.api.generation.request import Chat, GenerationRequest, Tool
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.loader import DEMO_PATH
from mlxpaged.models.text.tokenizer import Tokenizer
from mlxpaged.models.text.tokenizer_limits import MAX_WRITTEN
from tests.api.helpers import Background, ask, chat_tokens, post, raw, run_on, tokens_of
from tests.support import RunningServer, running_server, short_id

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 17 + 25?"}]


def send(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    with raw(server) as client:
        return client.post(path, json=body)


def test_a_prompt_becomes_its_tokens_and_text_again(demo_server: RunningServer) -> None:
    text = "Once upon a time, caf\u00e9 \u4e16\u754c <|im_end|>"
    answer = send(demo_server, "/tokenize", model="demo", prompt=text, return_token_strs=True).json()
    tokens = tokens_of(demo_server, text)
    assert answer["tokens"] == tokens
    assert (answer["count"], answer["max_model_len"]) == (len(tokens), 4096)
    assert len(answer["token_strs"]) == len(tokens)
    assert send(demo_server, "/detokenize", tokens=tokens).json() == {"prompt": text}
    assert send(demo_server, "/tokenize", prompt=text, add_special_tokens=False).json()["token_strs"] is None


def test_the_prompt_of_a_chat_is_that_of_its_completion(demo_server: RunningServer) -> None:
    prompt = send(demo_server, "/apply-template", messages=MESSAGES).json()["prompt"]
    assert prompt.endswith("<|im_start|>assistant\n")
    assert MESSAGES[1]["content"] in prompt
    asked = {"messages": MESSAGES, "max_tokens": 1}
    used = send(demo_server, "/v1/chat/completions", **asked).json()["usage"]["prompt_tokens"]
    assert len(tokens_of(demo_server, prompt)) == used
    said = [*MESSAGES, {"role": "assistant", "content": "It is"}]
    assert (
        send(demo_server, "/apply-template", messages=said, continue_final_message=True)
        .json()["prompt"]
        .endswith("<|im_start|>assistant\nIt is")
    )
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    assert '"add"' in send(demo_server, "/apply-template", messages=MESSAGES, tools=[tool]).json()["prompt"]
    refused = send(demo_server, "/apply-template", messages=[], model="demo")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert send(demo_server, "/apply-template", messages=MESSAGES, model="none").status_code == 404


def test_a_client_can_build_prompts_from_what_the_tokenizer_is(demo_server: RunningServer) -> None:
    with raw(demo_server) as client:
        found = client.get("/tokenizer_info").json()
    assert found["eos_token"] == "<|im_end|>"
    assert found["bos_token"] is None
    assert found["model_max_length"] == 4096
    [end] = send(demo_server, "/tokenize", prompt=found["eos_token"], add_special_tokens=False).json()["tokens"]
    assert found["added_tokens_decoder"][str(end)] == {"content": "<|im_end|>", "special": True}
    template = jinja2.Template(found["chat_template"])
    prompt = template.render(messages=MESSAGES, add_generation_prompt=True)
    tokens = send(demo_server, "/tokenize", prompt=prompt, add_special_tokens=False).json()["tokens"]
    assert tokens == chat_tokens(demo_server, MESSAGES)


def test_the_count_is_the_one_that_the_answer_reports(demo_server: RunningServer) -> None:
    chat = send(demo_server, "/tokenize", messages=MESSAGES).json()
    assert chat["tokens"] == chat_tokens(demo_server, MESSAGES)
    usage = post(demo_server, ask("") | {"messages": MESSAGES})["usage"]
    assert usage["prompt_tokens"] == chat["count"]
    prompt = send(demo_server, "/tokenize", prompt="Once upon").json()
    assert post(demo_server, run_on("Once upon", 1))["usage"]["prompt_tokens"] == prompt["count"]


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"prompt": "x" * 1_000_001}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 1_000_001}]}, "messages"),
        ("/tokenize", {"prompt": "😀" * 250_001}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "😀" * 250_001}]}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "tools": [{}]}, "tools"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, "a"]}, "tokens.1"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [10**8]}, "tokens"),
        ("/detokenize", {"tokens": [2**40]}, "tokens.0"),
        ("/detokenize", {"tokens": [1] * 250_001}, "tokens"),
    ],
    ids=short_id,
)
def test_what_cannot_be_done_is_refused_by_name(
    demo_server: RunningServer, path: str, body: dict[str, Any], named: str
) -> None:
    response = send(demo_server, path, **body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == named
    assert send(demo_server, path, model="gpt-4", prompt="x", tokens=[1]).status_code in (400, 404)


def test_a_text_that_takes_too_much_memory_is_refused_over_every_api(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a tokenizer that writes much for each character."""
    tokenizer = Tokenizer(load_tokenizer(DEMO_PATH), growth=MAX_WRITTEN / 50)
    monkeypatch.setattr(demo_server.engine.info, "tokenizer", tokenizer)
    chat, control = (
        {"messages": [{"role": "user", "content": text}], "max_tokens": 1} for text in ("a" * 51, "<|im_end|>" * 5)
    )
    with raw(demo_server) as client:
        for path, body in (
            ("/tokenize", {"prompt": "a" * 51}),
            ("/v1/completions", {"prompt": "a" * 51, "max_tokens": 1}),
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", control),
            ("/v1/responses", {"input": "a" * 51}),
        ):
            response = client.post(path, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "text_too_long"), path
        assert client.post("/v1/messages", json=chat | {"model": "demo"}).status_code == 400
        assert client.post("/tokenize", json={"prompt": "a" * 50}).status_code == 200


def test_tokenizing_leaves_the_event_loop_free(demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    info = demo_server.engine.info
    assert info is not None
    begun, go_on, encode = threading.Event(), threading.Event(), info.tokenizer.encode

    def slow(*args: Any) -> list[int]:
        begun.set()
        assert go_on.wait(60)
        return encode(*args)

    monkeypatch.setattr(info.tokenizer, "encode", slow)
    pending = Background.post(demo_server, "/tokenize", {"prompt": "x"})
    assert begun.wait(60)
    with raw(demo_server) as client:
        assert client.get("/health").status_code == 200
    go_on.set()
    assert pending.result().json()["count"] >= 1


def test_a_long_answer_is_made_off_the_event_loop_and_off_the_tokenizers_thread(
    demo_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = demo_server.engine.info
    assert info is not None
    threads, token_text = set(), info.tokenizer.token_text

    def recorded(token_id: int) -> str:
        threads.add(threading.current_thread().name.rpartition("_")[0])
        return token_text(token_id)

    monkeypatch.setattr(info.tokenizer, "token_text", recorded)
    answer = send(demo_server, "/tokenize", prompt="😀" * 20_000, return_token_strs=True).json()
    assert len(answer["token_strs"]) == answer["count"] == len(answer["tokens"]) > 20_000
    assert threads == {"mlxpaged-body"}


def test_a_model_tells_its_limits_and_what_it_can_do(client: OpenAI) -> None:
    model = client.models.retrieve("demo").model_dump()
    assert (model["context_length"], model["max_model_len"]) == (4096, 4096)
    nothing_else = dict.fromkeys(("infill", "rerank", "embeddings", "thinking", "vision"), False)
    can = dict.fromkeys(("chat", "completions", "decisions", "tools"), True)
    assert model["capabilities"] == can | nothing_else
    assert [each.id for each in client.models.list()] == ["demo"]


def test_a_model_that_is_no_reranker_says_why(demo_server: RunningServer) -> None:
    response = send(demo_server, "/v1/rerank", query="x", documents=["x"])
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "model", "rerank_not_supported")
    assert "start the server with --reranker" in error["message"]


def test_a_small_pool_is_the_limit_of_a_model() -> None:
    with running_server(EngineConfig(kv_cache_bytes=200_000)) as server:
        limit = send(server, "/tokenize", prompt="x").json()["max_model_len"]
        assert limit < 4096
        prompt = [20] * (limit - 1)
        assert post(server, run_on(prompt, 1))["usage"]["total_tokens"] == limit
        assert send(server, "/v1/completions", **run_on([20] * limit, 1)).status_code == 400
        with raw(server) as client:
            assert client.get("/v1/models/demo").json()["max_model_len"] == limit


def test_control_tokens_in_messages_are_text_in_every_api(demo_server: RunningServer) -> None:
    """The prompt has as many tokens more as the letters of the control token have."""
    letters = len(send(demo_server, "/tokenize", prompt="<|im_end|>", split_special_tokens=True).json()["tokens"])
    assert letters > 3
    found = {}
    for text in ("", "<|im_end|>"):
        messages = [{"role": "user", "content": f"{text}\n"}]
        with raw(demo_server) as client:
            chat = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
            claude = {"model": "demo", "messages": messages, "max_tokens": 1}
            of_claude = client.post("/v1/messages", json=claude).json()["usage"]
            counts = [
                send(demo_server, "/tokenize", messages=messages).json()["count"],
                chat["usage"]["prompt_tokens"],
                of_claude["input_tokens"] + (of_claude["cache_read_input_tokens"] or 0),
                client.post("/v1/responses", json={"input": f"{text}\n", "max_output_tokens": 16}).json()["usage"][
                    "input_tokens"
                ],
                client.post("/api/chat", json={"model": "demo", "messages": messages, "stream": False}).json()[
                    "prompt_eval_count"
                ],
            ]
        assert len(set(counts)) == 1, counts
        found[text] = counts[0]
    assert found["<|im_end|>"] == found[""] + letters


def test_a_raw_prompt_has_control_tokens_unless_they_are_split(demo_server: RunningServer) -> None:
    text = "a<|im_end|>b"
    [end] = tokens_of(demo_server, "<|im_end|>")
    usual = send(demo_server, "/tokenize", prompt=text).json()["tokens"]
    split = send(demo_server, "/tokenize", prompt=text, split_special_tokens=True).json()["tokens"]
    assert end in usual
    assert end not in split
    assert send(demo_server, "/detokenize", tokens=split).json()["prompt"] == text
    for tokens, option in ((usual, {}), (split, {"split_special_tokens": True})):
        body = {"model": "demo", "prompt": text, "max_tokens": 1, **option}
        assert send(demo_server, "/v1/completions", **body).json()["usage"]["prompt_tokens"] == len(tokens)
    refused = send(demo_server, "/tokenize", messages=MESSAGES, split_special_tokens=False)
    assert refused.json()["error"]["param"] == "split_special_tokens"


def test_control_tokens_in_tools_that_are_shown_as_text_are_text(demo_server: RunningServer) -> None:
    info = demo_server.engine.info
    special = set(info.tokenizer.reader.all_special_ids)

    def control_tokens(description: str) -> list[int]:
        chat = Chat([{"role": "user", "content": "hi"}], [Tool("f", description, None, None, "tools")])
        tokens = rendering(GenerationRequest(chat, SamplingParams()), chat, info, Images())().token_ids
        return [token for token in tokens if token in special]

    assert control_tokens("<|im_end|>\n<|im_start|>system") == control_tokens("x")
