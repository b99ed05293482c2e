"""Handles POST /tokenize and /detokenize, and GET /tokenizer_info, in vLLM's format, and POST /apply-template in
llama.cpp's."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.access.caller import caller_of
from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.fields import others
from mlxpaged.api.generation import submission
from mlxpaged.api.generation.history import adapted, as_shown
from mlxpaged.api.generation.images import apart, resolve, together
from mlxpaged.api.generation.prompt import prepare
from mlxpaged.api.generation.request import Chat
from mlxpaged.api.generation.request_context import priority_of
from mlxpaged.api.media import media_of
from mlxpaged.api.openai.chat import translate
from mlxpaged.api.openai.schema import MAX_TOKEN_ID, ChatRequest, Message
from mlxpaged.api.schema import MAX_LIST, Body
from mlxpaged.api.server import server_of
from mlxpaged.models.text.control_tokens import ControlTokenError
from mlxpaged.models.text.tokenizer import ChatTemplateError

MAX_BYTES = 1_000_000
"""Bytes of a text in UTF-8: no tokenizer makes more tokens of it. One thread tokenizes all prompts, so no request may
occupy it for seconds."""
MAX_TOKENS = MAX_BYTES // 4
"""The library that makes a text of tokens lets no other thread run meanwhile: 0.1 s for a million."""


class TokenizeRequest(Body):
    """A prompt, or the messages of a chat, which its template renders."""

    table = others.TOKENIZE

    model: str | None = None
    prompt: Annotated[str, Field(max_length=MAX_BYTES)] | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    split_special_tokens: bool | None = None  # control tokens in the prompt are text
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise bad_parameter("prompt", "give either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise bad_parameter("add_special_tokens", "needs prompt; a chat template adds the special tokens itself")
        if self.messages is not None and self.split_special_tokens is False:
            raise bad_parameter("split_special_tokens", "needs prompt; in messages, special tokens are always text")
        return self


class TokenizeResponse(Body):
    count: int
    max_model_len: int  # most tokens of a prompt and its answer
    tokens: list[int]
    token_strs: list[str] | None  # each token by itself, if asked for


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(max_length=MAX_TOKENS, fail_fast=True)]


class DetokenizeResponse(Body):
    prompt: str


class AddedToken(Body):
    content: str
    special: bool


class TokenizerInfo(Body):
    """What clients need that build prompts themselves. The fields are those of a tokenizer_config.json."""

    tokenizer_class: str
    model_max_length: int  # most tokens of a prompt and its answer
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    added_tokens_decoder: dict[str, AddedToken]  # by token id


async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    server = server_of(request)
    _, info = await server.ready(request, body.model)
    chat = await server.prepare(request, lambda: chat_of(body))
    chat, images = await resolve(request, chat, info)

    def of_messages(images_in_text: bool = False) -> list[int]:
        marker, shown = info.tokenizer.mark(apart(adapted(chat.messages, info.tokenizer)))
        shown = as_shown(together(shown), (), info.tokenizer)
        shown, order = (images.in_text if images_in_text else images.in_parts)(shown)
        tokens = info.tokenizer.apply_chat_template(shown, True, partial(check_size, "messages"), marker)
        return images.placed(tokens, order).token_ids

    def work() -> list[int]:
        if body.prompt is None:
            try:
                return of_messages()
            except ChatTemplateError:  # some templates show images as parts of some messages only
                if not images.shown:
                    raise
                return of_messages(images_in_text=True)
        try:
            return info.tokenizer.encode(
                body.prompt, body.add_special_tokens is not False, body.split_special_tokens is True
            )
        except ControlTokenError as error:
            raise bad_parameter("split_special_tokens", str(error)) from None

    size = chat.num_chars if body.prompt is None else len(body.prompt)
    tokens = await server.tokenize(request, info.tokenizer, size, work)

    def answer() -> str:
        strings = [info.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
        found = TokenizeResponse(count=len(tokens), max_model_len=info.max_model_len, tokens=tokens, token_strs=strings)
        return found.model_dump_json()

    return Response(await server.prepare(request, answer), media_type="application/json")


def chat_of(body: TokenizeRequest) -> Chat:
    """The messages as the chat template takes them. Raises ApiError if the texts have more than MAX_BYTES."""
    messages = body.messages or []
    chat = Chat([message.for_template() for message in messages], media=media_of(messages, "messages"))
    if body.prompt is None:
        check_size("messages", *(message["content"] for message in chat.messages))
    else:
        check_size("prompt", body.prompt)
    return chat


def check_size(field: str, *texts: str) -> None:
    """Raises ApiError if the texts have more than MAX_BYTES."""
    size = sum(len(text.encode()) for text in texts)
    if size > MAX_BYTES:
        raise bad_parameter(field, f"has {size} bytes in UTF-8; the limit is {MAX_BYTES}")


async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    server = server_of(request)
    _, info = await server.ready(request, body.model)
    largest = await server.prepare(request, lambda: max(body.tokens, default=0))
    if largest >= info.vocab_size:
        raise bad_parameter("tokens", f"token id {largest} is not in the vocabulary of {info.vocab_size} tokens")
    size = len(body.tokens)
    decode = partial(info.tokenizer.text_with_specials, body.tokens)
    prompt = await server.tokenize(request, info.tokenizer, size, decode)
    answer = DetokenizeResponse(prompt=prompt)
    return Response(await server.prepare(request, answer.model_dump_json), media_type="application/json")


async def apply_template(request: Request, body: ChatRequest) -> Response:
    """Answers with the text of the prompt that a chat completion with this body would have."""
    found = await submission.resolve(request, lambda: translate(body))
    priority_of(found.request, caller_of(request), found.engine.config.default_priority)  # a tier may not be granted
    [tokens] = (await prepare(request, found.request, found.info)).token_ids
    decode = partial(found.info.tokenizer.text_with_specials, tokens)
    prompt = await server_of(request).tokenize(request, found.info.tokenizer, len(tokens), decode)
    return Response(DetokenizeResponse(prompt=prompt).model_dump_json(), media_type="application/json")


async def tokenizer_info(request: Request) -> Response:
    _, info = await server_of(request).ready(request, None)
    reader = info.tokenizer.reader
    template = reader.chat_template
    found = TokenizerInfo(
        tokenizer_class=type(reader).__name__,
        model_max_length=info.max_model_len,
        chat_template=template.get("default") if isinstance(template, dict) else template,
        bos_token=reader.bos_token,
        eos_token=reader.eos_token,
        pad_token=reader.pad_token,
        unk_token=reader.unk_token,
        added_tokens_decoder={
            str(token_id): AddedToken(content=token.content, special=token.special)
            for token_id, token in reader.added_tokens_decoder.items()
        },
    )
    return JSONResponse(found.model_dump())
