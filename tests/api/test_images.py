"""Images for a model that takes them: what each API's form becomes in the engine's request. The model is scripted, and
its format of images is made up; no tower runs."""

from __future__ import annotations

import dataclasses
import json
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from anthropic import Anthropic
from mlx_lm.utils import load_tokenizer
from PIL import Image

from mlxpaged.api.config import HttpConfig
from mlxpaged.api.generation.images import MAX_IMAGES, Images, ShownImage
from mlxpaged.api.image_hosts import Fetch, ImageHosts
from mlxpaged.api.image_threads import IMAGES
from mlxpaged.api.turns import Turns
from mlxpaged.core.engine.request import Request
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.features import Feature
from mlxpaged.models.text.tokenizer import Tokenizer
from mlxpaged.registry.model import Model
from mlxpaged.registry.registry import Registry
from mlxpaged.vision import reading
from mlxpaged.vision.families.gemma.format import Gemma3Format
from mlxpaged.vision.image import Pixels
from mlxpaged.vision.reading import CheckedImage, ClientImage, Detail, check, decode
from tests.api.helpers import DEADLINE, Background, raw, stream_events
from tests.api.test_queues import Held, check_turns
from tests.scripted import follow, make_scripted_model
from tests.support import RunningServer, running_server, wait_until
from tests.vision.files import HOSTILE, Grid, encoded, halves, text_of, url_of, without_pillow

IMAGE, PATCH, ROW = TOKENS = ("<image>", "<patch>", "<row>")
ACROSS = "!<im"
"""A control token that the end of a text and the token of an image would make together."""
TEMPLATE = """{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string or (users_only and message.role != 'user') %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ '<image>' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{%- if tools %}{{ tools | tojson }}{% endif %}"""
USERS_ONLY = "{%- set users_only = true %}" + TEMPLATE
"""Shows what other roles say as it is: a list of parts as Python writes it."""
TEXT_ONLY = TEMPLATE.replace("message.content is string", "(message.content + '') is string")
"""Refuses lists."""

RED, BLUE = encoded(halves()), encoded(halves(40, 40, "blue", "white"), "JPEG")
CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
CALL = {"id": "t", "type": "function", "function": {"name": "read", "arguments": "{}"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two models: `seeing`, and `demo`, which takes text only and is loaded when a request names it."""
    model = make_scripted_model(
        tmp_path_factory.mktemp("model"), "json_tools", more=(*TOKENS, ACROSS), template=TEMPLATE
    )
    config = EngineConfig(model=str(model), served_model_name="seeing", kv_cache_bytes=16_000_000)
    registry = Registry.of(config)
    blind = dataclasses.replace(config, model="demo", served_model_name="demo")
    registry.models["demo"] = Model("demo", blind)
    with running_server(registry, data_dir=tmp_path_factory.mktemp("data")) as server:
        follow(server, lambda prompt: "I see.")
        info = server.engine.info
        assert info is not None
        info.images = grid_of(info.tokenizer)
        yield server


@pytest.fixture
def submitted(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Request]]:
    """What reaches the engine, which then computes the prompts without their images."""
    found: list[Request] = []
    submit = server.engine.submit

    def recorded(requests: Sequence[Request]) -> Any:
        found.extend(requests)
        return submit([dataclasses.replace(each, images=()) for each in requests])

    monkeypatch.setattr(server.engine, "submit", recorded)
    yield found
    server.wait_idle(DEADLINE)


def grid_of(tokenizer: Tokenizer) -> Grid:
    return Grid(*(tokenizer.reader.convert_tokens_to_ids(token) for token in TOKENS))


def form_of(server: RunningServer) -> Grid:
    assert server.engine.info is not None
    form = server.engine.info.images
    assert isinstance(form, Grid)
    return form


def post(server: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    most = {CHAT: {"max_tokens": 4}, RESPONSES: {"max_output_tokens": 4}, MESSAGES: {"max_tokens": 4}}
    fields = {"stream": False} if path.startswith("/api/") else most.get(path, {})
    with raw(server) as client:
        return client.post(path, json={"model": "seeing"} | fields | body)


def answered(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = post(server, path, body)
    assert response.status_code == 200, response.text
    assert "x-mlxpaged-ignored" not in response.headers
    found: dict[str, Any] = response.json()
    return found


def prompt_of(server: RunningServer, request: Request) -> str:
    assert server.engine.info is not None
    return server.engine.info.tokenizer.text_with_specials(request.prompt_token_ids)


def shown(form: Grid, data: bytes, detail: Detail = "auto") -> str:
    """What a prompt has in an image's place."""
    checked = check(ClientImage(text_of(data), False, detail), form)
    return (PATCH * (checked.width // 8) + ROW) * (checked.height // 8)


def check_images(server: RunningServer, request: Request, *files: bytes, detail: Detail = "auto") -> None:
    """Each file's pixels, digest and placeholders are those of the request's image."""
    form = form_of(server)
    assert len(request.images) == len(files)
    covered: list[int] = []
    for image, data in zip(request.images, files, strict=True):
        checked = check(ClientImage(text_of(data), False, detail), form)
        assert image.digest == checked.digest
        np.testing.assert_array_equal(image.pixels, decode(checked))
        assert len(image.positions) == checked.width * checked.height // 64
        covered += image.positions
    assert covered == [i for i, token in enumerate(request.prompt_token_ids) if token == form.placeholder]


def url_part(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data)} | fields}


def block(data: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text_of(data)}}


def input_part(data: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url_of(data)} | fields


def text(said: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": said}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


FORMS: list[tuple[str, Callable[[bytes, bytes], dict[str, Any]], str]] = [
    (CHAT, lambda a, b: {"messages": [user(text("A"), url_part(a), text("B"), url_part(b))]}, "A{}B{}"),
    (
        CHAT,
        lambda a, b: {"messages": [user(*({"type": "image_url", "image_url": url_of(each)} for each in (a, b)))]},
        "{}{}",
    ),
    (
        RESPONSES,
        lambda a, b: {"input": [user(input_part(a), text("A", "input_text"), input_part(b), text("B", "input_text"))]},
        "{}A{}B",
    ),
    (MESSAGES, lambda a, b: {"messages": [user(block(a), text("A"), text("B"), block(b))]}, "{}A\nB{}"),
    (MESSAGES, lambda a, b: {"messages": [user(text("A"), block(a)), user(block(b), text("B"))]}, "A{}{}B"),
    (
        OLLAMA,
        lambda a, b: {"messages": [{"role": "user", "content": "A", "images": [text_of(a), text_of(b)]}]},
        "{}{}A",
    ),
    ("/api/generate", lambda a, b: {"prompt": "A", "images": [text_of(a), text_of(b)]}, "{}{}A"),
]


@pytest.mark.parametrize(("path", "body", "said"), FORMS)
def test_every_form_of_an_image_reaches_the_engine(
    server: RunningServer, submitted: list[Request], path: str, body: Any, said: str
) -> None:
    answer = answered(server, path, body(RED, BLUE))
    [request] = submitted
    form = form_of(server)
    said = said.format(shown(form, RED), shown(form, BLUE))
    assert prompt_of(server, request) == f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"
    check_images(server, request, RED, BLUE)
    usage = answer.get("usage", {})
    counted = usage.get("prompt_tokens", usage.get("input_tokens", answer.get("prompt_eval_count")))
    counted += (
        usage.get("cache_read_input_tokens") or 0
    )  # Anthropic's tokens of the input are those that are not cached
    assert counted == len(request.prompt_token_ids)


def test_a_stream_is_as_an_answer_at_once(server: RunningServer, submitted: list[Request]) -> None:
    body = {"model": "seeing", "max_tokens": 4, "messages": [user(url_part(RED))]}
    events = stream_events(server, CHAT, body | {"stream_options": {"include_usage": True}})
    [request] = submitted
    check_images(server, request, RED)
    assert events[-2]["usage"]["prompt_tokens"] == len(request.prompt_token_ids)


def test_counting_counts_the_tokens_of_images(server: RunningServer, submitted: list[Request]) -> None:
    messages = [user(text("A"), block(RED))]
    counted = answered(server, f"{MESSAGES}/count_tokens", {"messages": messages})["input_tokens"]
    answered(server, MESSAGES, {"messages": messages})
    items = {"input": [user(text("A", "input_text"), input_part(RED))]}
    assert answered(server, f"{RESPONSES}/input_tokens", items)["input_tokens"] == counted
    assert len(submitted[0].prompt_token_ids) == counted
    with raw(server) as client:
        body = {"model": "seeing", "messages": [user(text("A"), url_part(RED))]}
        assert client.post("/tokenize", json=body).json()["tokens"] == submitted[0].prompt_token_ids


def test_the_official_clients_send_images(server: RunningServer, submitted: list[Request]) -> None:
    with server.client(timeout=DEADLINE) as openai:
        messages: list[Any] = [user(text("A"), url_part(RED, detail="auto"))]
        openai.chat.completions.create(model="seeing", messages=messages, max_tokens=4)
        items: list[Any] = [user(text("A", "input_text"), input_part(RED, detail="auto"))]
        openai.responses.create(model="seeing", input=items, max_output_tokens=4)
    with Anthropic(base_url=server.url, api_key="none", timeout=DEADLINE, max_retries=0) as anthropic:
        blocks: list[Any] = [user(text("A"), block(RED))]
        anthropic.messages.create(model="seeing", messages=blocks, max_tokens=4)
    assert len(submitted) == 3
    for request in submitted:
        assert request.prompt_token_ids == submitted[0].prompt_token_ids
        check_images(server, request, RED)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [user(url_part(RED, detail="low"))]}),
        (RESPONSES, {"input": [user(input_part(RED, detail="low"))]}),
    ],
)
def test_little_detail_is_part_of_the_image(
    server: RunningServer, submitted: list[Request], path: str, body: dict[str, Any]
) -> None:
    answered(server, path, body)
    check_images(server, submitted[0], RED, detail="low")


def test_all_answers_to_a_prompt_have_its_images(server: RunningServer, submitted: list[Request]) -> None:
    answered(server, CHAT, {"messages": [user(url_part(RED))], "n": 2})
    for request in submitted:
        check_images(server, request, RED)
    assert len(submitted) == 2


def test_images_of_earlier_turns_are_shown_too(server: RunningServer, submitted: list[Request]) -> None:
    turns = [
        user(url_part(RED), text("A")),
        {"role": "assistant", "content": "I see."},
        user(text("B"), url_part(BLUE)),
    ]
    answered(server, CHAT, {"messages": turns})
    check_images(server, submitted[0], RED, BLUE)


def test_a_stored_response_keeps_its_images(server: RunningServer, submitted: list[Request]) -> None:
    first = answered(server, RESPONSES, {"input": [user(input_part(RED))]})
    answered(server, RESPONSES, {"input": [user(input_part(BLUE))], "previous_response_id": first["id"]})
    check_images(server, submitted[1], RED, BLUE)
    broken = {"type": "input_image", "image_url": url_of(b"<svg/>")}
    refused = post(server, RESPONSES, {"input": [user(broken)], "previous_response_id": first["id"]})
    assert refused.json()["error"]["param"] == "input.0.content.0"
    with raw(server) as client:
        [item] = client.get(f"{RESPONSES}/{first['id']}/input_items").json()["data"]
    assert item["content"] == [input_part(RED)]


RESULTS: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "messages": [
                user(text("A")),
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "t", "content": [text("R"), url_part(RED)]},
            ]
        },
    ),
    (
        MESSAGES,
        {
            "messages": [
                user(text("A")),
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "read", "input": {}}]},
                user({"type": "tool_result", "tool_use_id": "t", "content": [text("R"), block(RED)]}),
            ]
        },
    ),
    (
        RESPONSES,
        {
            "input": [
                user(text("A", "input_text")),
                {"type": "function_call", "call_id": "t", "name": "read", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "t", "output": [text("R", "input_text"), input_part(RED)]},
            ]
        },
    ),
    (
        OLLAMA,
        {
            "messages": [
                {"role": "user", "content": "A"},
                {"role": "assistant", "tool_calls": [{"function": {"name": "read", "arguments": {}}}]},
                {"role": "tool", "content": "R", "images": [text_of(RED)]},
            ]
        },
    ),
]


@pytest.mark.parametrize("template", ["TEMPLATE", "USERS_ONLY", "TEXT_ONLY"])
@pytest.mark.parametrize(("path", "body"), RESULTS)
def test_an_image_of_a_tool_stands_in_its_result(
    server: RunningServer,
    submitted: list[Request],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    template: str,
) -> None:
    """Even if the template shows no list of parts there."""
    set_template(server, monkeypatch, globals()[template])
    answered(server, path, body)
    check_images(server, submitted[0], RED)
    *_, result, _ = prompt_of(server, submitted[0]).split("<|im_start|>")
    image = shown(form_of(server), RED)
    assert result == f"tool\n{image + 'R' if path == OLLAMA else 'R' + image}<|im_end|>\n"


def test_images_of_several_roles_are_in_their_order(
    server: RunningServer, submitted: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control tokens in the texts beside them are text."""
    calls = [{"type": "tool_use", "id": name, "name": "read", "input": {}} for name in "ab"]
    results = [
        {"type": "tool_result", "tool_use_id": name, "content": [block(data)]}
        for name, data in zip("ab", (RED, BLUE), strict=True)
    ]
    turns = [user(text("A")), {"role": "assistant", "content": calls}, user(*results, text("B<image>"), block(RED))]
    for template in (TEMPLATE, USERS_ONLY):
        set_template(server, monkeypatch, template)
        answered(server, MESSAGES, {"messages": turns})
    assert submitted[0].prompt_token_ids == submitted[1].prompt_token_ids
    form = form_of(server)
    one, other = shown(form, RED), shown(form, BLUE)
    for request in submitted:
        check_images(server, request, RED, BLUE, RED)
        assert prompt_of(server, request).endswith(
            f"<|im_start|>tool\n{one}<|im_end|>\n<|im_start|>tool\n{other}<|im_end|>\n"
            f"<|im_start|>user\nB<image>{one}<|im_end|>\n<|im_start|>assistant\n"
        )


def test_tokenize_shows_images_where_a_chat_does(
    server: RunningServer, submitted: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_template(server, monkeypatch, USERS_ONLY)
    result = {"role": "tool", "tool_call_id": "t", "content": [text("R"), url_part(RED)]}
    messages = [user(text("A")), {"role": "assistant", "content": None, "tool_calls": [CALL]}, result]
    answered(server, CHAT, {"messages": messages})
    tokens = answered(server, "/tokenize", {"messages": messages})["tokens"]
    assert tokens == submitted[0].prompt_token_ids


def set_template(server: RunningServer, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    """Until the test ends, prompts are rendered by another chat template."""
    wrapped = load_tokenizer(server.core.served.path)
    wrapped.chat_template = template
    monkeypatch.setattr(server.engine.info, "tokenizer", Tokenizer(wrapped))


@pytest.mark.parametrize(
    ("template", "num_shown"),
    [
        ("{{ 'x' }}", 0),
        ("{% for message in messages * 2 %}{{ message.content }}{% endfor %}", 4),
    ],
)
def test_a_template_that_does_not_show_each_image_once_is_an_error(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, template: str, num_shown: int
) -> None:
    set_template(server, monkeypatch, template)
    response = post(server, CHAT, {"messages": [user(url_part(RED), url_part(BLUE))]})
    assert response.status_code == 400
    said = f"messages: the model's chat template shows {num_shown} of the 2 images"
    assert response.json()["error"]["message"] == said


def test_newlines_around_an_image_are_the_tokens_that_a_tokenizer_makes_of_them() -> None:
    joins = {(1, 2): 3, (2, 1): 3, (2, 2): 4}
    form = Gemma3Format(start=10, placeholder=12, end=11, newlines=2, side=8, rows=1, joins=joins)
    shown = ShownImage(b"", np.zeros((8, 8, 3), np.uint8), form.tokens(8, 8))
    images = Images(form, "<start_of_image>", {"one": shown, "two": shown})
    prompt = images.placed([7, 1, 10, 10, 8, 1], ["one", "two"])
    assert prompt.token_ids == [7, 3, 10, 12, 11, 4, 10, 12, 11, 2, 8, 1]
    assert [each.positions for each in prompt.images] == [(3,), (7,)]
    prompt = images.placed([7, 10, 1, 10], ["one", "two"])
    assert prompt.token_ids == [7, 2, 10, 12, 11, 3, 2, 10, 12, 11, 2]
    assert [each.positions for each in prompt.images] == [(3,), (8,)]


@pytest.mark.parametrize("typed", [IMAGE, PATCH, ACROSS[:1], "<ima", "ge>", "\ue000" + "0" * 32 + "\ue001"])
def test_what_a_client_types_is_no_image(server: RunningServer, submitted: list[Request], typed: str) -> None:
    answered(server, CHAT, {"messages": [user(text(typed), url_part(RED), text(typed))]})
    answered(server, CHAT, {"messages": [user(text(typed))]})
    check_images(server, submitted[0], RED)
    assert submitted[1].images == ()
    assert form_of(server).placeholder not in submitted[1].prompt_token_ids
    if "<" not in typed:
        assert prompt_of(server, submitted[0]).count(typed) == 2


def test_a_batch_takes_images(server: RunningServer, submitted: list[Request]) -> None:
    body = {"model": "seeing", "max_tokens": 4, "messages": [user(text("A"), url_part(RED))]}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body})
    with raw(server) as client:
        uploaded = client.post("/v1/files", data={"purpose": "batch"}, files={"file": line.encode()}).json()
        batch = {"input_file_id": uploaded["id"], "endpoint": CHAT, "completion_window": "24h"}
        created = client.post("/v1/batches", json=batch).json()
        wait_until(lambda: client.get(f"/v1/batches/{created['id']}").json()["status"] == "completed")
        counts = client.get(f"/v1/batches/{created['id']}").json()["request_counts"]
    assert counts == {"total": 1, "completed": 1, "failed": 0}
    check_images(server, submitted[0], RED)


# Errors


def wrong(path: str, data: str, is_url: bool = True) -> dict[str, Any]:
    """A request with an image that is not one."""
    source = {"type": "url", "url": data} if is_url else {"type": "base64", "media_type": "image/png", "data": data}
    match path:
        case "/v1/chat/completions":
            return {"messages": [user(text("A"), {"type": "image_url", "image_url": {"url": data}})]}
        case "/v1/responses":
            return {"input": [user(text("A", "input_text"), {"type": "input_image", "image_url": data})]}
        case "/v1/messages":
            return {"messages": [user(text("A"), {"type": "image", "source": source})]}
    return {"messages": [{"role": "user", "content": "A", "images": [data]}]}


PLACES = {
    CHAT: "messages.0.content.1",
    RESPONSES: "input.0.content.1",
    MESSAGES: "messages.0.content.1",
    OLLAMA: "messages.0.images.0",
}


def check_refusal(response: httpx.Response, path: str, said: str) -> None:
    """The error has the API's own format."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    if path == OLLAMA:
        message = error
    else:
        message = error["message"]
        assert error["type"] == "invalid_request_error"
        if path != MESSAGES:
            assert (error["param"], error["code"]) == (PLACES[path], "invalid_image")
    assert message.startswith(f"{PLACES[path]}: the image ")
    assert said in message


@pytest.mark.parametrize("path", PLACES)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_the_reason(server: RunningServer, path: str, name: str) -> None:
    data, said = HOSTILE[name]
    if path in (MESSAGES, OLLAMA):
        check_refusal(post(server, path, wrong(path, text_of(data), False)), path, said)
    else:
        check_refusal(post(server, path, wrong(path, url_of(data))), path, said)


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/x.png", "https://example.com/a.png", "file:///etc/passwd", "/a"]
)
def test_no_url_is_fetched_and_no_file_opened(server: RunningServer, path: str, url: str) -> None:
    check_refusal(post(server, path, wrong(path, url)), path, "send the image itself, as a data: URL with base64")


def test_images_of_allowed_hosts_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are refused, and a tool's URL is no other case."""

    class Host(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(RED)))
            self.end_headers()
            self.wfile.write(RED)

        def log_message(self, *_: Any) -> None:
            pass

    model = make_scripted_model(tmp_path, "json_tools", more=TOKENS, template=TEMPLATE)
    with ThreadingHTTPServer(("127.0.0.1", 0), Host) as host:
        thread = threading.Thread(target=host.serve_forever)
        thread.start()
        here = f"127.0.0.1:{host.server_port}"
        config = EngineConfig(model=str(model), served_model_name="seeing", kv_cache_bytes=16_000_000)
        with running_server(config, http=HttpConfig(image_hosts=(here,))) as server:
            info = server.engine.info
            assert info is not None
            info.images = grid_of(info.tokenizer)
            found: list[Request] = []
            submit = server.engine.submit

            def recorded(requests: Sequence[Request]) -> Any:
                found.extend(requests)
                return submit([dataclasses.replace(each, images=()) for each in requests])

            monkeypatch.setattr(server.engine, "submit", recorded)
            source = {"type": "url", "url": f"http://{here}/a.png"}
            answered(server, CHAT, {"messages": [user({"type": "image_url", "image_url": source["url"]})]})
            answered(server, MESSAGES, {"messages": [user({"type": "image", "source": source})]})
            for request in found:
                check_images(server, request, RED)
            assert len(found) == 2
            other = {"type": "image_url", "image_url": "http://127.0.0.1:1/a.png"}
            refused = post(server, CHAT, {"messages": [user(text("What is this?"), other)]})
            check_refusal(refused, CHAT, "is on a host that this server does not fetch images from")
        host.shutdown()
        thread.join()


@pytest.mark.parametrize("path", PLACES)
def test_wrong_base64_is_refused(server: RunningServer, path: str) -> None:
    data = "????" if path in (MESSAGES, OLLAMA) else "data:image/png;base64,????"
    check_refusal(post(server, path, wrong(path, data, False)), path, "is not valid base64")


UNREADABLE = {
    "header": (url_of(HOSTILE["41 MP"][0]), "it has 8,200 x 5,000 pixels; the limit is 40,000,000 pixels"),
    "pixels": (url_of(HOSTILE["half a JPEG"][0]), "it is a broken JPEG"),
    "URL": ("https://example.com/a.png", "it is not in the request: the server fetches no URL"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_an_image_that_cannot_be_read_ends_no_session(
    server: RunningServer, submitted: list[Request], name: str
) -> None:
    """The client sends an earlier one, and that of a tool, again in each turn."""
    url, said = UNREADABLE[name]
    wrong_part = {"type": "image_url", "image_url": {"url": url}}
    conversations = [
        [user(wrong_part, url_part(RED)), {"role": "assistant", "content": "y"}, user(text("A"))],
        [
            user(url_part(RED)),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "t", "content": [wrong_part]},
        ],
    ]
    for messages in conversations:
        response = post(server, CHAT, {"messages": messages})
        assert response.status_code == 200, response.text
        assert response.headers["x-mlxpaged-ignored"] == "messages.content.image_url"
    for request in submitted:
        check_images(server, request, RED)
        assert f"[an image was left out: {said}" in prompt_of(server, request)


def test_a_strict_server_leaves_out_no_image_that_cannot_be_read(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = server.app.state.server
    monkeypatch.setattr(inner, "http", dataclasses.replace(inner.http, strict=True))
    wrong_part = {"type": "image_url", "image_url": {"url": UNREADABLE["header"][0]}}
    turns = [user(wrong_part), {"role": "assistant", "content": "y"}, user(text("A"))]
    error = post(server, CHAT, {"messages": turns}).json()["error"]
    assert (error["param"], error["code"]) == ("messages.content.image_url", "unsupported_parameter")
    assert "an image cannot be shown: it has 8,200 x 5,000 pixels" in error["message"]


def test_too_many_images_are_refused_before_any_is_read(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "read_header", None)
    response = post(server, CHAT, {"messages": [user(*[url_part(RED)] * 200)]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].endswith(f"there are 200 images in the request; the limit is {MAX_IMAGES}")
    assert (error["param"], error["code"]) == ("messages.0.content.100", "too_many_images")


def test_images_that_do_not_fit_the_context_are_refused_before_any_is_decoded(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = use_large_images(server, monkeypatch, 8 * 130)
    monkeypatch.setattr(reading, "decode", None)
    error = post(server, CHAT, {"messages": [user(url_part(large))]}).json()["error"]
    assert (error["param"], error["code"]) == ("messages.0.content.0", "context_length_exceeded")
    assert "the images have more than 8192 tokens" in error["message"]


def test_images_and_text_that_do_not_fit_together_are_refused(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = use_large_images(server, monkeypatch, 8 * 80)
    error = post(server, CHAT, {"messages": [user(text("A" * 2000), url_part(large))]}).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def use_large_images(server: RunningServer, monkeypatch: pytest.MonkeyPatch, longest: int) -> bytes:
    """Until the test ends, images may have sides of this length. Returns one that has."""
    form = form_of(server)
    large = Grid(form.template_token, form.placeholder, form.end_of_row, longest)
    monkeypatch.setattr(server.engine.info, "images", large)
    return encoded(Image.new("RGB", (longest, longest)))


def test_an_image_that_is_sent_again_is_decoded_once(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, submitted: list[Request]
) -> None:
    fresh = encoded(halves(48, 24, "green", "yellow"))
    decoded: list[bytes] = []
    monkeypatch.setattr(reading, "decode", lambda image: (decoded.append(image.digest), decode(image))[1])
    for turns in ([user(url_part(fresh))], [user(url_part(fresh)), user(url_part(fresh))]):
        answered(server, CHAT, {"messages": turns})
    assert len(decoded) == 1
    check_images(server, submitted[1], fresh, fresh)


def test_two_images_are_read_at_a_time_and_streams_go_on(
    server: RunningServer, submitted: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text is answered meanwhile, and a file that is no image is refused."""
    go_on, lock = threading.Event(), threading.Lock()
    running: list[int] = [0]

    def held(image: CheckedImage) -> Pixels:
        with lock:
            running.append(running[-1] + 1)
        assert go_on.wait(DEADLINE)
        pixels = decode(image)
        with lock:
            running.append(running[-1] - 1)
        return pixels

    monkeypatch.setattr(reading, "decode", held)
    opened = server.app.state.server.open_requests
    files = [encoded(halves(8 * i, 8)) for i in range(1, 5)]
    bodies = [{"model": "seeing", "max_tokens": 1, "messages": [user(url_part(data))]} for data in files]
    pending = [Background.post(server, CHAT, body) for body in bodies]
    wait_until(lambda: len(list(opened)) == len(files) and max(running) == 2)
    answered(server, CHAT, {"messages": [user(text("A"))]})
    check_refusal(post(server, CHAT, wrong(CHAT, url_of(b"<svg/>"))), CHAT, "is no PNG")
    assert max(running) == 2
    go_on.set()
    assert [each.result().status_code for each in pending] == [200] * len(files)
    assert (max(running), running[-1]) == (2, 0)
    assert len(submitted) == 1 + len(files)


def test_log_probabilities_of_a_prompt_with_images_are_refused(server: RunningServer) -> None:
    response = post(server, CHAT, {"messages": [user(url_part(RED))], "prompt_logprobs": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt_logprobs"


def test_a_server_without_pillow_says_so(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pillow(monkeypatch)
    response = post(server, CHAT, {"messages": [user(url_part(encoded(halves(24, 24))))]})
    assert response.status_code == 501
    assert response.json()["error"]["message"] == "images need Pillow: pip install 'mlxpaged[vision]'"


# Models


def test_what_each_model_can_do_is_listed(server: RunningServer) -> None:
    with raw(server) as client:
        assert (
            client.post(CHAT, json={"model": "demo", "messages": [user(text("x"))], "max_tokens": 1}).status_code == 200
        )
        found = {model["id"]: model["capabilities"]["vision"] for model in client.get("/v1/models").json()["data"]}
        assert found == {"seeing": True, "demo": False}
        tags = {each["name"]: each["capabilities"] for each in client.get("/api/tags").json()["models"]}
        assert tags == {
            "seeing:latest": ["completion", "vision", "tools", "thinking"],
            "demo:latest": ["completion", "tools"],
        }
        assert client.post("/api/show", json={"model": "seeing"}).json()["capabilities"] == tags["seeing:latest"]


def test_a_model_in_other_processes_takes_text_only(server: RunningServer) -> None:
    """What it knows of itself comes from them without its format of images."""
    assert pickle.loads(pickle.dumps(server.engine.info)).images is None


def test_a_model_that_takes_no_images_names_those_that_do(server: RunningServer) -> None:
    response = post(server, CHAT, {"model": "demo", "messages": [user(url_part(RED))]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"] == "messages.0.content.0: images are not supported by this model; use 'seeing'"
    assert error["code"] == "unsupported_media"


def test_a_model_that_lost_its_tower_says_why(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.engine.info, "images", None)
    monkeypatch.setitem(server.engine.info.missing, Feature.IMAGES, "its checkpoint has no vision tower")
    error = post(server, CHAT, {"messages": [user(url_part(RED))]}).json()["error"]
    said = "messages.0.content.0: images are not supported by this model: its checkpoint has no vision tower"
    assert error["message"] == said


def test_what_no_model_takes_is_left_out_beside_images(server: RunningServer, submitted: list[Request]) -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}
    turns = [user(url_part(RED), audio), {"role": "assistant", "content": "y"}, user(text("A"))]
    response = post(server, CHAT, {"messages": turns})
    assert response.headers["x-mlxpaged-ignored"] == "messages.content.input_audio"
    check_images(server, submitted[0], RED)
    assert "\n[an audio was left out: this model takes text and images only]<" in prompt_of(server, submitted[0])


def test_a_flood_of_urls_of_a_client_delays_no_other_client(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, submitted: list[Request]
) -> None:
    """Though its hosts do not answer."""
    state = server.app.state.server
    monkeypatch.setattr(state, "http", dataclasses.replace(state.http, image_hosts=("127.0.0.1",)))
    monkeypatch.setattr(state, "image_hosts", ImageHosts(["127.0.0.1"]))
    held = Held(lambda fetch: RED, lambda fetch: fetch.parts.path.removeprefix("/"))
    monkeypatch.setattr(Fetch, "run", lambda fetch: held(fetch))

    def ask(client: str) -> Background:
        image = {"type": "image_url", "image_url": f"http://127.0.0.1/{client}"}
        body = {"model": "seeing", "max_tokens": 1, "messages": [user(image)]}
        return Background.post(server, CHAT, body, User_Agent=client)

    check_turns(lambda: state.image_hosts.turns, held, ask)


def test_a_flood_of_images_of_a_client_delays_no_other_client(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, submitted: list[Request]
) -> None:
    state = server.app.state.server
    monkeypatch.setattr(state.images, "turns", Turns(IMAGES))
    held = Held(decode, lambda image: "other" if image.header.width == 24 else "flood")
    monkeypatch.setattr(reading, "decode", held)
    sizes = iter(range(80, 320, 8))

    def ask(client: str) -> Background:
        image = url_part(encoded(halves(24 if client == "other" else next(sizes), 56)))
        return Background.post(server, CHAT, {"model": "seeing", "messages": [user(image)]}, User_Agent=client)

    check_turns(lambda: state.images.turns, held, ask)
