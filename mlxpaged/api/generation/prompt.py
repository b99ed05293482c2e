"""Turns a request's prompts into tokens and engine parameters. The chat template renders conversations."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request

from mlxpaged.api.errors import NOT_RENDERED, ApiError
from mlxpaged.api.generation import check, images
from mlxpaged.api.generation.history import adapted, as_shown, in_turns, with_thought_apart
from mlxpaged.api.generation.images import Images, Prompt, apart, together
from mlxpaged.api.generation.profiles import with_profile
from mlxpaged.api.generation.request import Chat, GenerationRequest, Tool
from mlxpaged.api.generation.structured_output import (
    parameters_of,
    structured_output,
    with_loose_text,
    with_loose_tools,
)
from mlxpaged.api.generation.thinking_limits import with_thinking_limits
from mlxpaged.api.generation.tool_prompt import tool_prompt
from mlxpaged.api.server import server_of
from mlxpaged.core.engine.constraint import Constraint, StructuredOutput, Thinking
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.text.answer_parser import AnswerForm, AnswerParser
from mlxpaged.engine.info import EngineInfo
from mlxpaged.models.text.control_tokens import ControlTokenError
from mlxpaged.models.text.template_form import plain
from mlxpaged.models.text.tokenizer import ChatTemplateError
from mlxpaged.vision.image import PromptImage

NO_THOUGHTS = "this model does not think: its vocabulary has no thinking tags"

MOST_FOR_TOOLS = 0.5
"""The share of the context that a description of tools may take. Some clients always send many tools: a model with a
short context answers without them."""


def no_parser() -> None:
    return None


@dataclass(frozen=True)
class Prompts:
    """A request's prompts, ready for the engine. param: the client's field that holds them. echoes: their texts, if the
    answers begin with them. new_parser: makes a parser for one answer, or None if all of it is text. images: of each
    prompt."""

    param: str
    token_ids: list[list[int]]
    params: SamplingParams
    echoes: Sequence[str] = ()
    new_parser: Callable[[], AnswerParser | None] = no_parser
    images: tuple[PromptImage, ...] = ()


async def prepare(http: Request, request: GenerationRequest, info: EngineInfo) -> Prompts:
    """Tokenizes the prompts. Raises ApiError for prompts and parameters that this model cannot take."""
    server = server_of(http)
    request, left_out = await server.prepare(http, lambda: with_loose_text(request))
    name_ignored(http, left_out)
    chat = request.prompt
    if isinstance(chat, Chat):
        return await of_chat(http, request, chat, info)
    prompts = await of_texts(http, request, info)
    await server.compile(http, info, prompts.params.constraint)
    return prompts


def name_ignored(http: Request, left_out: Sequence[str]) -> None:
    """Names what a schema has and no grammar enforces. Raises ApiError if the server is strict."""
    for name in left_out:
        server_of(http).ignore(http, name, "cannot be enforced")


async def of_chat(http: Request, request: GenerationRequest, chat: Chat, info: EngineInfo) -> Prompts:
    chat = await with_usable_tools(http, request, chat, info)
    if (chat.asks_thinking or chat.effort not in (None, "none")) and not info.tokenizer.tags.thinks:
        server_of(http).ignore(http, request.client_name("thinking"), NO_THOUGHTS)
    tags, param = info.tokenizer.tags, request.client_name("messages")
    chat, shown = await images.resolve(http, chat, info)
    prompt = await render(http, request, chat, info, shown)
    tokens = prompt.token_ids
    check.check_token_ids(request, param, [tokens], info)
    if prompt.images and request.params.prompt_logprobs is not None:  # an image's tokens have none
        raise request.refusal("prompt_logprobs", "is not available if the prompt has images")
    thinking = thinking_of(info, chat, tokens)
    form = await enforced(http, request, chat, info, thinking)
    tools = [tool.for_template() for tool in chat.offered_tools]
    opened = thinking == "open"
    goes_on = opened and chat.continue_final_message and not info.tokenizer.ends_with(tokens, tags.think_start)
    answer_form = AnswerForm(opened, tools, chat.one_call, form, goes_on)
    params = dataclasses.replace(
        request.params,
        answer_form=answer_form,
        think_tags=True,
        tool_tags=bool(tools),
        continues_text=chat.continue_final_message,
        begins_thinking=opened,
        close_thought=info.close_thoughts and bool(tags.think_start),
        constraint=form,
        predicted=await tokens_of_prediction(http, chat.prediction, info),
    )
    if not tags.thinks:
        params = dataclasses.replace(params, thinking_budget=None)
    elif check.asked_to_think(chat) is False and info.tokenizer.thinking_switch is None:
        check.check_thinking_limit(request)
        params = dataclasses.replace(params, thinking_budget=0)
    elif check.asked_to_think(chat) is not False:
        params = with_thinking_limits(request, params, info, len(tokens))
    return Prompts(param, [tokens], params, new_parser=partial(answer_form.parser, tags), images=prompt.images)


async def tokens_of_prediction(http: Request, text: str, info: EngineInfo) -> tuple[int, ...]:
    """Returns none if nothing is drafted from them. Raises ApiError."""
    if not text or "ngram" not in info.drafters:
        return ()
    check.check_text_length("prediction", len(text), info)
    encode = partial(info.tokenizer.encode, text)
    return tuple(await server_of(http).tokenize(http, info.tokenizer, len(text), encode))


async def enforced(
    http: Request, request: GenerationRequest, chat: Chat, info: EngineInfo, thinking: Thinking
) -> StructuredOutput | None:
    """Returns what a grammar enforces, and compiles it. What cannot be enforced is named as ignored, unless the request
    insists on it: by `strict`, of a text or of a tool that must be called. Raises ApiError."""
    server, loose = server_of(http), set[str]()
    chat, left_out = await server.prepare(http, lambda: with_loose_tools(request, chat, info.tokenizer.tags.tools))
    name_ignored(http, left_out)
    collect = partial(structured_output, request, chat, info.tokenizer.tags, thinking, loose)
    required = chat.tool_choice.mode == "required"
    optional = {tool.param: tool for tool in chat.offered_tools if bool(tool.strict) != required}
    of_all = {request.client_name(name) for name in ("tools", "tool_choice")}
    while True:
        try:
            form = await server.prepare(http, collect)
            await server.compile(http, info, form)
            return form
        except ApiError as error:
            blamed = {param for param in optional if error.param in (param, *of_all)} - loose
            if not blamed or info.tokenizer.tags.tools.written is None:
                raise with_way_out(error, chat, request) from None
            first = optional[min(blamed)]
            name = parameters_of(request, first)
            if not required:
                name = re.sub(r"\.[0-9]+", "", f"{first.param}.strict")
            server.ignore(http, name, error.message.removeprefix(f"{error.param}: "))
            loose |= blamed


def with_way_out(error: ApiError, chat: Chat, request: GenerationRequest) -> ApiError:
    """Returns the same error. If a schema is refused only because it is strict, it says so."""
    text = request.params.constraint
    strict = {tool.param for tool in chat.offered_tools if tool.strict}
    if isinstance(text, Constraint) and text.is_strict:
        strict.add(text.param)
    if error.param in strict:
        message = f"{error.message}. If you leave out `strict`, what cannot be enforced is ignored by name"
        return ApiError(error.status, message, param=error.param, code=error.code, reason=error.reason)
    return error


async def of_texts(http: Request, request: GenerationRequest, info: EngineInfo) -> Prompts:
    prompts, param = request.prompt, request.client_name("prompt")
    assert isinstance(prompts, list)
    longest = max((len(prompt) for prompt in prompts if isinstance(prompt, str)), default=0)
    infill = check.infill_of(request, info)
    check.check_text_length(param, longest + len(request.suffix), info)

    def encode() -> Prompts:
        encode_text = partial(info.tokenizer.encode, split_special_tokens=request.split_special_tokens)
        try:
            if infill is None:
                tokens = [encode_text(each) if isinstance(each, str) else each for each in prompts]
            else:
                tokens = [infill.prompt(encode_text, each, request.suffix) for each in prompts]
        except ControlTokenError as error:
            raise request.refusal("split_special_tokens", str(error)) from None
        check.check_token_ids(request, param, tokens, info)
        params = dataclasses.replace(request.params, continues_text=True)
        if infill is not None and not params.ignore_eos:
            params = dataclasses.replace(params, stop_token_ids=params.stop_token_ids | infill.ends)
        if not request.echo:
            return Prompts(param, tokens, params)
        texts = [each if isinstance(each, str) else info.tokenizer.decode(each) for each in prompts]
        return Prompts(param, tokens, params, texts)

    num_chars = sum(len(prompt) + len(request.suffix) for prompt in prompts)
    return await server_of(http).tokenize(http, info.tokenizer, num_chars, encode)


async def count_tokens(http: Request, translate: Callable[[], GenerationRequest]) -> int:
    """Returns the number of tokens of a conversation. Raises what `submission.start` raises."""
    server = server_of(http)
    request = await server.prepare(http, lambda: check.check_request(translate()))
    _, info = await server.ready(http, request.model)
    profile = server.started().names.profile_in(request.model)
    info, request = await server.with_template(info, profile), with_profile(request, profile)
    assert isinstance(request.prompt, Chat)
    chat = await with_usable_tools(http, request, request.prompt, info)
    chat, shown = await images.resolve(http, chat, info)
    return len((await render(http, request, chat, info, shown)).token_ids)


async def with_usable_tools(http: Request, request: GenerationRequest, chat: Chat, info: EngineInfo) -> Chat:
    """Returns the chat, without its tools if they leave no room for a conversation and none must be called. Raises
    ApiError if the server is strict."""
    tools, tokenizer = chat.offered_tools, info.tokenizer
    if not tools or tokenizer.shows_tools or not tokenizer.has_chat_template:
        return chat
    if chat.tool_choice.mode == "required" or await leave_room(http, tools, info):
        return chat
    reason = f"their description takes more than {MOST_FOR_TOOLS:.0%} of the context"
    server_of(http).ignore(http, request.client_name("tools"), reason)
    return dataclasses.replace(chat, tools=())


async def leave_room(http: Request, tools: Sequence[Tool], info: EngineInfo) -> bool:
    """Whether the description of the tools takes at most MOST_FOR_TOOLS of the context."""
    server, tokenizer, most = server_of(http), info.tokenizer, MOST_FOR_TOOLS * info.max_model_len
    text = await server.prepare(
        http, lambda: tool_prompt([tool.for_template() for tool in tools], tokenizer.tags.tools)
    )
    if tokenizer.least_tokens(len(text)) > most:
        return False
    return len(await server.tokenize(http, tokenizer, len(text), lambda: tokenizer.encode(text))) <= most


async def render(http: Request, request: GenerationRequest, chat: Chat, info: EngineInfo, shown: Images) -> Prompt:
    """Returns the tokens of a conversation up to the beginning of the answer. Raises ApiError."""
    server = server_of(http)
    rendered = await server.prepare(http, lambda: rendering(request, chat, info, shown))
    try:
        return await server.tokenize(http, info.tokenizer, chat.num_chars, rendered)
    except ChatTemplateError as error:
        raise request.refusal("messages", str(error), reason=NOT_RENDERED) from None


def rendering(request: GenerationRequest, chat: Chat, info: EngineInfo, shown_images: Images) -> Callable[[], Prompt]:
    """Returns a function that renders the prompt, for the tokenizer's thread. Raises ApiError."""
    check.check_template(request, chat, info)
    tokenizer = info.tokenizer
    variables = {**chat.chat_template_kwargs, **check.thinking_variables(request, chat, info)}
    if chat.continue_final_message:
        variables["continue_final_message"] = True
    opens_answer = chat.add_generation_prompt
    if opens_answer is None:
        opens_answer = not chat.continue_final_message
    tools = [tool.for_template() for tool in chat.offered_tools]
    num_chars = chat.num_chars + sum(len(json.dumps(tool)) for tool in tools)

    def check_length(num_chars: int) -> None:
        check.check_text_length(request.client_name("messages"), num_chars, info)

    check_length(num_chars)

    def of(
        conversation: Sequence[dict[str, Any]], images_in_text: bool = False, told: Sequence[dict[str, Any]] = tools
    ) -> Callable[[], Prompt]:
        marker, messages, shown, options = tokenizer.mark(apart(adapted(conversation, tokenizer)), told, variables)
        messages = as_shown(together(messages), shown, tokenizer)
        if shown and tokenizer.shows_tools:
            options["tools"] = shown
        messages, order = (shown_images.in_text if images_in_text else shown_images.in_parts)(messages)

        def prompt() -> Prompt:
            # Only the rendered text has all calls and reasoning of earlier turns, as far as the template shows them.
            tokens = tokenizer.apply_chat_template(
                messages, opens_answer, lambda text: check_length(len(text)), marker, **options
            )
            return shown_images.placed(tokens, order)

        return prompt

    try:
        as_given = of(chat.messages)
    except ChatTemplateError as error:
        raise request.refusal("messages", str(error), reason=NOT_RENDERED) from None
    *earlier, last = chat.messages
    # Some templates take a thought out of the text, which cannot be continued then. Others do not show all images, or
    # cannot write every schema.
    thought = with_thought_apart(last, tokenizer.tags) if chat.continue_final_message else None

    def render() -> Prompt:
        try:
            return as_given()
        except ChatTemplateError:
            if thought is not None:
                return of([*earlier, thought])()
            if shown_images.shown:
                return of(chat.messages, images_in_text=True)()
            if (told := plain(tools)) != tools:
                return of(chat.messages, told=told)()
            raise

    return render


def thinking_of(info: EngineInfo, chat: Chat, prompt: list[int]) -> Thinking:
    """Whether the prompt ends inside a think block, or the model may open one."""
    tags = info.tokenizer.tags
    if not tags.think_start:
        return "never"
    if chat.continue_final_message:
        last = str(in_turns(chat.messages, info.tokenizer.form)[-1]["content"])
        return "open" if last.rfind(tags.think_start) > last.rfind(tags.think_end) else "never"
    if info.tokenizer.ends_with(prompt, tags.think_start):
        return "open"
    return "never" if info.tokenizer.ends_with(prompt, tags.think_end) else "may"
