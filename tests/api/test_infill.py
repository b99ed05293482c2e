"""`suffix` in POST /v1/completions and /api/generate: the middle of a text, if tokens of the vocabulary mark it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.helpers import DEADLINE, raw
from tests.scripted import PLAIN, follow, scripted_server
from tests.support import RunningServer

COMPLETIONS, GENERATE = "/v1/completions", "/api/generate"
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
ENDS = ("<|fim_pad|>", "<|file_sep|>")
MIDDLE = "return a + b"
ASKED: dict[str, Any] = {"model": "scripted", "prompt": "def f(a, b):\n    ", "suffix": "\n\nprint(f(1, 2))"}
PROMPT = "<|fim_prefix|>def f(a, b):\n    <|fim_suffix|>\n\nprint(f(1, 2))<|fim_middle|>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The marks are no special tokens in Qwen's vocabulary either."""
    path = tmp_path_factory.mktemp("model")
    with scripted_server(path, "json_tools", {"": MIDDLE}, plain=(*PLAIN, *MARKS, *ENDS)) as server:
        yield server


@pytest.fixture
def shown(server: RunningServer) -> Iterator[list[str]]:
    """The prompts that the model was given. It answers MIDDLE, and after that what follows in a file."""
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return f"{MIDDLE}{ENDS[0]}and more"

    follow(server, answer)
    yield prompts
    server.wait_idle(DEADLINE)


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with raw(server) as client:
        yield client


def completed(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = http.post(COMPLETIONS, json=ASKED | {"max_tokens": 100} | fields)
    assert response.status_code == 200, response.text
    assert "x-mlxpaged-ignored" not in response.headers
    found: dict[str, Any] = response.json()
    return found


def test_the_middle_is_filled_in_and_ends_with_the_familys_token(http: httpx.Client, shown: list[str]) -> None:
    answer = completed(http)
    [choice] = answer["choices"]
    assert shown == [PROMPT]
    assert (choice["text"], choice["finish_reason"]) == (MIDDLE, "stop")
    assert answer["usage"]["completion_tokens"] == len(MIDDLE) + 1
    assert answer["usage"]["prompt_tokens"] == len(ASKED["prompt"]) + len(ASKED["suffix"]) + 3


def test_a_stream_has_the_same_text(server: RunningServer, shown: list[str]) -> None:
    with server.client(timeout=DEADLINE) as client:
        chunks = list(client.completions.create(**ASKED, max_tokens=100, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == MIDDLE
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert shown == [PROMPT]


def test_without_a_suffix_the_prompt_is_as_before(http: httpx.Client, shown: list[str]) -> None:
    for fields in ({"suffix": ""}, {"suffix": None}):
        assert completed(http, **fields)["choices"][0]["text"].startswith(MIDDLE + ENDS[0])
    assert shown == [ASKED["prompt"]] * 2


def test_several_prompts_and_answers_have_the_same_suffix(http: httpx.Client, shown: list[str]) -> None:
    answer = completed(http, prompt=["a", "b"], n=2)
    assert [choice["text"] for choice in answer["choices"]] == [MIDDLE] * 4
    assert set(shown) == {PROMPT.replace(ASKED["prompt"], prompt) for prompt in "ab"}


def test_the_prompt_may_be_tokens_or_empty(http: httpx.Client, server: RunningServer, shown: list[str]) -> None:
    tokens = server.core.served.tokenizer.encode(ASKED["prompt"])
    assert completed(http, prompt=tokens)["choices"][0]["text"] == MIDDLE
    completed(http, prompt="")
    assert shown == [PROMPT, PROMPT.replace(ASKED["prompt"], "")]


def test_echo_shows_the_prompt_alone_before_the_middle(http: httpx.Client, shown: list[str]) -> None:
    assert completed(http, echo=True)["choices"][0]["text"] == ASKED["prompt"] + MIDDLE
    refused = http.post(COMPLETIONS, json=ASKED | {"echo": True, "logprobs": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")


def test_log_probabilities_are_those_of_the_middle(http: httpx.Client, shown: list[str]) -> None:
    logprobs = completed(http, logprobs=1)["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]).startswith(MIDDLE)
    assert logprobs["text_offset"][: len(MIDDLE)] == list(range(len(MIDDLE)))
    prompt = completed(http, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    assert len(prompt) == len(ASKED["prompt"]) + len(ASKED["suffix"]) + 3


def test_ignore_eos_goes_on_after_the_familys_end(http: httpx.Client, shown: list[str]) -> None:
    text = completed(http, ignore_eos=True, max_tokens=len(MIDDLE) + 9)["choices"][0]["text"]
    assert text == f"{MIDDLE}{ENDS[0]}and more"


def test_control_tokens_in_the_texts_are_text_if_the_request_says_so(http: httpx.Client, shown: list[str]) -> None:
    tokens = len(MARKS) + len("a<|im_end|>") + len(ASKED["suffix"])
    assert completed(http, prompt="a<|im_end|>", split_special_tokens=True)["usage"]["prompt_tokens"] == tokens
    assert completed(http, prompt="a<|im_end|>")["usage"]["prompt_tokens"] == tokens - len("<|im_end|>") + 1


@pytest.mark.parametrize("raw_prompt", [False, True])
def test_ollamas_suffix_does_the_same(http: httpx.Client, shown: list[str], raw_prompt: bool) -> None:
    response = http.post(GENERATE, json=ASKED | {"stream": False, "raw": raw_prompt})
    answer = response.json()
    assert response.status_code == 200, answer
    assert (answer["response"], answer["done_reason"]) == (MIDDLE, "stop")
    assert shown == [PROMPT]


@pytest.mark.parametrize("field", [{"system": "Be brief."}, {"think": True}, {"images": ["aGk="]}])
def test_what_only_a_chat_template_shows_is_refused_beside_it(http: httpx.Client, field: dict[str, Any]) -> None:
    response = http.post(GENERATE, json=ASKED | field)
    assert response.status_code == 400
    assert f"{next(iter(field))}: cannot be combined with suffix" in response.json()["error"]


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
def test_a_vocabulary_without_marks_is_a_400_that_says_so(demo_server: RunningServer, path: str) -> None:
    with raw(demo_server) as http:
        response = http.post(path, json=ASKED | {"model": "demo"})
    error = response.json()["error"]
    message = error if path == GENERATE else error["message"]
    assert response.status_code == 400
    assert (
        "suffix: this model cannot fill in the middle of a text: its vocabulary has no tokens that mark it" in message
    )
    assert path == GENERATE or (error["param"], error["code"]) == ("suffix", "unsupported_parameter")


def test_the_lists_of_models_say_so(http: httpx.Client) -> None:
    [model] = http.get("/v1/models").json()["data"]
    assert model["capabilities"]["infill"] is True
    for shown in (http.post("/api/show", json={"model": "scripted"}), http.get("/api/tags")):
        found = shown.json()
        assert "insert" in found.get("models", [found])[0]["capabilities"]
