"""The bundled demo model that sees reads numbers in pictures: alone with mlx-lm, and over HTTP."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from PIL import Image
from transformers import AutoTokenizer

from demo_model.vision import tasks
from demo_model.vision.data import any_size, drawn, reduced
from demo_model.vision.pictures import BUILT_IN, any_number, picture
from demo_model.vision.reader import Reader
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.sources.resolve import resolve
from tests.support import RunningServer, running_server

NAME = "demo-vision"
PATH = resolve(NAME).directory
QUESTION = "What number is in the picture?"


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(PATH)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(EngineConfig(model=NAME, kv_cache_bytes=64_000_000)) as running:
        yield running


def held_out(count: int, seed: int) -> list[tuple[int, Image.Image]]:
    """Numbers that training never shows, in the font that Pillow brings along."""
    rng = random.Random(f"tests {seed}")
    numbers = [any_number(rng, held_out=True) for _ in range(count)]
    return [(number, drawn(rng, number, any_size(rng), [BUILT_IN])) for number in numbers]


def user(*content: str | tasks.Shown) -> tasks.Message:
    return tasks.Message("user", content)


def test_held_out_numbers_are_read_right(reader: Reader) -> None:
    cases = held_out(20, seed=1)
    answers = [reader.answer([user(QUESTION, tasks.Shown(number))], [reduced(image)]) for number, image in cases]
    wrong = [(number, answer) for (number, _), answer in zip(cases, answers, strict=True) if str(number) != answer]
    assert len(wrong) <= 1, wrong


def test_without_an_image_it_says_what_it_can_do(reader: Reader) -> None:
    assert reader.answer([user("Hello!")], []) == tasks.FALLBACK_ANSWER
    assert reader.answer([user("Who are you?")], []) == tasks.IDENTITY_ANSWER


def test_the_template_shows_images_of_users_and_tools() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(str(PATH))
    shown = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": "Read a.png."},
            {"role": "assistant", "content": None, "tool_calls": []},
            {"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "done"}]},
            {"role": "assistant", "content": "7"},
            {"role": "user", "content": [{"type": "text", "text": "And this?"}, {"type": "image"}]},
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert shown == (
        "<|im_start|>user\nRead a.png.<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>tool\n[IMG]done<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n"
        "<|im_start|>user\nAnd this?[IMG]<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_model_takes_at_most_3_megabytes() -> None:
    assert sum(path.stat().st_size for path in Path(PATH).iterdir()) <= 3_000_000


def image_part(image: Image.Image, kind: str = "PNG") -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, kind)
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind.lower()};base64,{data}"}}


def plain(number: int, width: int, height: int) -> Image.Image:
    return picture(random.Random(number), number, width, height, [BUILT_IN], max(1, width / 128))


def ask(server: RunningServer, messages: list[Any]) -> str:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        reply = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=60)
    return reply.choices[0].message.content or ""


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_the_server_reads_the_number_in_a_file(server: RunningServer, kind: str) -> None:
    content = [{"type": "text", "text": QUESTION}, image_part(plain(407, 320, 200), kind)]
    assert ask(server, [{"role": "user", "content": content}]) == "407"


def test_the_server_reads_several_images_of_a_conversation(server: RunningServer) -> None:
    first, second = image_part(plain(53, 96, 64)), image_part(plain(908, 500, 300))
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": QUESTION}, first]}]
    answers = [ask(server, messages)]
    messages.append({"role": "assistant", "content": answers[-1]})
    messages.append({"role": "user", "content": [{"type": "text", "text": "And in this picture?"}, second]})
    answers.append(ask(server, messages))
    messages.append({"role": "assistant", "content": answers[-1]})
    messages.append({"role": "user", "content": "What number is in the first picture?"})
    answers.append(ask(server, messages))
    assert answers == ["53", "908", "53"]
