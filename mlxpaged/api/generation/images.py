"""Decides what becomes of the images of a conversation when its model is known, and puts them into its prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.requests import Request

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.generation.check import ContextLengthError
from mlxpaged.api.generation.request import Chat
from mlxpaged.api.media import END, START, Shown, names_of
from mlxpaged.api.models import models_for
from mlxpaged.api.server import program_of, server_of
from mlxpaged.core.scheduling.admission import PromptTooLongError
from mlxpaged.engine.info import EngineInfo
from mlxpaged.models.features import Feature
from mlxpaged.models.text.tokenizer import ChatTemplateError
from mlxpaged.vision.headers import ImageError
from mlxpaged.vision.image import ImageFormat, Pixels, PromptImage
from mlxpaged.vision.reading import CheckedImage, ClientImage, check

MAX_IMAGES = 100
"""Images of a request. Anthropic's limit."""
HTTP_URL = re.compile("https?:", re.IGNORECASE)
SENTINEL = re.compile(f"({START}[0-9a-f]{{32}}{END})")


@dataclass(frozen=True)
class ShownImage:
    """digest, pixels: as in PromptImage. tokens: what the prompt has in its place."""

    digest: bytes
    pixels: Pixels
    tokens: list[int]


@dataclass(frozen=True)
class Prompt:
    """token_ids: with those of the images."""

    token_ids: list[int]
    images: tuple[PromptImage, ...] = ()


@dataclass(frozen=True)
class Images:
    """The images of a conversation, by their sentinels. form: None if there are none. token_text: of its
    `template_token`."""

    form: ImageFormat | None = None
    token_text: str = ""
    shown: Mapping[str, ShownImage] = field(default_factory=dict)

    def in_parts(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
        """Returns the messages for the chat template, with the content of those with images as a list of parts; and
        the sentinels in their order."""
        order: list[str] = []
        changed = []
        for message in messages:
            pieces = SENTINEL.split(message["content"]) if START in message["content"] else []
            found = [piece for piece in pieces if piece in self.shown]
            order += found
            parts = [
                {"type": "image"} if piece in self.shown else {"type": "text", "text": piece}
                for piece in filter(None, pieces)
            ]
            changed.append({**message, "content": parts} if found else dict(message))
        return changed, order

    def in_text(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
        """Does the same for templates that show no parts: an image is the token that a template writes for it. Those
        of Mistral do not show a tool's parts, and refuse a message of the user right after a result."""
        texts = dict.fromkeys(self.shown, self.token_text)
        changed = [
            {**message, "content": SENTINEL.sub(lambda found: texts.get(found[0], found[0]), message["content"])}
            for message in messages
        ]
        return changed, self.in_parts(messages)[1]

    def placed(self, token_ids: list[int], order: Sequence[str]) -> Prompt:
        """Puts the images into a rendered prompt. Raises ChatTemplateError if it does not show all of them."""
        if self.form is None:
            return Prompt(token_ids)
        num_shown = token_ids.count(self.form.template_token)
        if num_shown != len(self.shown):
            message = f"the model's chat template shows {num_shown} of the {len(self.shown)} images"
            raise ChatTemplateError(message)
        placed: list[int] = []
        images, start = [], 0
        for shown in map(self.shown.__getitem__, order):
            end = token_ids.index(self.form.template_token, start)
            join(placed, token_ids[start:end], self.form.joins)
            join(placed, shown.tokens, self.form.joins)
            first, placeholder = len(placed) - len(shown.tokens), self.form.placeholder
            positions = tuple(first + i for i, token in enumerate(shown.tokens) if token == placeholder)
            images.append(PromptImage(shown.digest, shown.pixels, positions))
            start = end + 1
        join(placed, token_ids[start:], self.form.joins)
        return Prompt(placed, tuple(images))


def join(placed: list[int], more: list[int], joins: Mapping[tuple[int, int], int]) -> None:
    """Appends tokens in place. Where they meet, two become one if the tokenizer would have made one."""
    joined = joins.get((placed[-1], more[0])) if placed and more else None
    if joined is not None:
        placed[-1], more = joined, more[1:]
    placed += more


def apart(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the messages with the texts before and after each sentinel apart, so that control tokens at the end of
    each are found. `together` joins them."""
    return [
        {**message, "content": SENTINEL.split(message["content"])} if START in message["content"] else message
        for message in messages
    ]


def together(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**each, "content": "".join(each["content"])} if isinstance(each["content"], list) else dict(each)
        for each in messages
    ]


def with_texts(content: str, texts: Mapping[str, str]) -> str:
    """Returns a message's content with texts in the place of sentinels, each in lines of its own."""

    def text_of(match: re.Match[str]) -> str:
        if not texts.get(match[0]):
            return texts.get(match[0], match[0])
        start, end = match.span()
        before = "\n" if start and content[start - 1] != "\n" else ""
        after = "\n" if end < len(content) and content[end] not in ("\n", START) else ""
        return before + texts[match[0]] + after

    return SENTINEL.sub(text_of, content)


async def resolve(http: Request, chat: Chat, info: EngineInfo) -> tuple[Chat, Images]:
    """Returns the conversation with a text in the place of each part that the model does not take or that cannot be
    read, and the images that are left in it, decoded. All limits are checked before one is decoded. Raises ApiError.

    Such a part in the newest turn is an error: no answer pretends to have seen it. One in an earlier turn or in a
    tool's result, which the client sends again each time, does not end the session: the model is told why it was left
    out, and so is the client."""
    if not chat.media:
        return chat, Images()
    form, server = info.images, server_of(http)
    left: dict[str, str] = {}  # why each part is left out, by its sentinel
    for each in chat.media:
        if form is None or each.part.image is None:
            if each.is_newest:
                reason = info.missing[Feature.IMAGES]
                because = f": {reason}" if reason else ""
                message = f"{unsupported(each)}{because}{advice(http)}"
                raise bad_parameter(each.param, message, code="unsupported_media")
            left[each.sentinel] = f"this model takes text {'only' if form is None else 'and images only'}"
    images = Images()
    kept = [each for each in chat.media if each.sentinel not in left]
    if form is not None and kept:
        checked = await check_all(http, kept, form, info, left)
        shown = await decode_all(http, kept, form, checked, left)
        if shown:
            images = Images(form, info.tokenizer.text_with_specials([form.template_token]), shown)
    if left:
        named = {each.field: each for each in chat.media if each.sentinel in left}
        for name, each in reversed(named.items()):
            server.ignore(http, name, f"{names_of(each.part.type)[0]} cannot be shown: {left[each.sentinel]}")
        texts = {each.sentinel: each.instead(left[each.sentinel]) for each in chat.media if each.sentinel in left}
        messages = [message | {"content": with_texts(message["content"], texts)} for message in chat.messages]
        chat = replace(chat, messages=messages, media=[each for each in kept if each.sentinel not in left])
    return chat, images


def unsupported(each: Shown) -> str:
    return f"{names_of(each.part.type)[1]} not supported by this model"


def advice(http: Request) -> str:
    """The end of an error about an image: the loaded models that take some."""
    infos = [model.engine.info for model in models_for(http, server_of(http)) if model.is_loaded and model.engine]
    names = [repr(info.model) for info in infos if isinstance(info, EngineInfo) and info.images is not None]
    return f"; use {' or '.join(names)}" if names else ""


async def check_all(
    http: Request, media: Sequence[Shown], form: ImageFormat, info: EngineInfo, left: dict[str, str]
) -> dict[str, CheckedImage]:
    """Checks images by their headers, and notes in `left` those that are left out. Raises ApiError."""
    if len(media) > MAX_IMAGES:
        message = f"there are {len(media)} images in the request; the limit is {MAX_IMAGES}"
        raise bad_parameter(media[MAX_IMAGES].param, message, code="too_many_images")
    found: dict[str, CheckedImage] = {}
    num_tokens = 0
    for each in media:
        image = each.part.image
        assert image is not None
        http.state.body_size = max(0, http.state.body_size - len(image.data))  # what is left is text
        try:
            data = await fetched(http, image)
            size = len(image.data if data is None else data)
            checked = await server_of(http).check_image(http, size, partial(check, image, form, data))
        except ImageError as error:
            leave_out(each, error, left)
            continue
        found[each.sentinel] = checked
        num_tokens += len(form.tokens(checked.width, checked.height))
        if num_tokens > info.longest:
            message = f"the images have more than {info.longest} tokens; {info.limit}"
            raise ContextLengthError(each.param, PromptTooLongError(message, num_tokens, info.longest))
    return found


async def fetched(http: Request, image: ClientImage) -> bytes | None:
    """Returns the file of an image that is a URL, from a host that the operator allows; None for other images.
    Raises ImageError."""
    server = server_of(http)
    if not (image.is_url and server.http.image_hosts and HTTP_URL.match(image.data)):
        return None
    return await server.image_hosts.fetch(program_of(http), image.data)


async def decode_all(
    http: Request,
    media: Sequence[Shown],
    form: ImageFormat,
    checked: Mapping[str, CheckedImage],
    left: dict[str, str],
) -> dict[str, ShownImage]:
    """Decodes images, and notes in `left` those that are left out. Raises ApiError."""
    server = server_of(http)
    found: dict[str, ShownImage] = {}
    for each in media:
        if (image := checked.get(each.sentinel)) is None:
            continue
        try:
            pixels = await server.images.decode(program_of(http), image)
        except ImageError as error:
            leave_out(each, error, left)
            continue
        tokens = form.tokens(image.width, image.height)
        found[each.sentinel] = ShownImage(image.digest, pixels, tokens)
    return found


def leave_out(each: Shown, error: ImageError, left: dict[str, str]) -> None:
    """Raises ApiError if the image is in the newest turn."""
    if each.is_newest:
        raise bad_parameter(each.param, f"the image {error}", code="invalid_image")
    left[each.sentinel] = f"it {error}"
