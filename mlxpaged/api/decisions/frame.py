"""Makes the prompts of questions: the input once, and what each question adds to it.

The chat template renders a conversation that ends with a question. All that it renders before the question is the same
for every question, and so is what comes after it. So it renders two sample questions, and what their tokens have in
common is the frame. A question's own tokens are made without the input, which may be long. If a template treats
questions in another way, or a question shows an image, the whole conversation is rendered for each question.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from starlette.requests import Request

from mlxpaged.api.decisions.question import Question
from mlxpaged.api.errors import ApiError
from mlxpaged.api.generation.check import check_text_length
from mlxpaged.api.generation.images import Images, Prompt, resolve
from mlxpaged.api.generation.prompt import render, thinking_of
from mlxpaged.api.generation.request import Chat, GenerationRequest
from mlxpaged.api.server import server_of
from mlxpaged.engine.info import EngineInfo
from mlxpaged.formats import HARMONY
from mlxpaged.formats.harmony import CHANNEL, MESSAGE
from mlxpaged.models.text.control_tokens import ControlTokenError
from mlxpaged.models.text.tokenizer import ChatTemplateError, Tokenizer
from mlxpaged.vision.image import PromptImage

INSTRUCTION = "Answer the question about the input with one of the options, and nothing else."
INPUT = "Input:"
"""Before an input that is one text."""
SAMPLES = " one, two\nQuestion: Alpha?", " B, y\nQuestion: Which 2!"
"""Two questions that end with different tokens, and differ after at most a space."""
ANSWER = "\nAnswer:"
"""Before the answer of a model without a chat template."""


@dataclass(frozen=True)
class Evidence:
    """What the questions are about. messages: as chat templates expect them. media: what in them is no text. joined:
    whether a question goes on with the text of the only message."""

    messages: list[dict[str, Any]]
    media: Sequence[Any] = ()
    joined: bool = False

    def followed_by(self, question: str) -> list[dict[str, Any]]:
        """Returns the conversation that asks a question."""
        if self.joined:
            [said] = self.messages
            asked = [{**said, "content": f"{INPUT} {said['content']}\n\n{question}"}]
        else:
            asked = [*self.messages, {"role": "user", "content": question}]
        told = INSTRUCTION
        while asked and asked[0]["role"] == "system":
            told = f"{told}\n\n{asked.pop(0)['content']}"
        return [{"role": "system", "content": told}, *asked]


NOTHING = Evidence([{"role": "user", "content": ""}], joined=True)
"""The empty input of content-free calibration."""


@dataclass(frozen=True)
class Frame:
    """before, after: tokens around a question's own. images: in `before`."""

    before: list[int]
    after: list[int]
    images: tuple[PromptImage, ...] = ()

    def around(self, tokens: list[int]) -> list[int]:
        return [*self.before, *tokens, *self.after]


class Asking:
    """Makes the prompts of questions about one input. request: has the client's names of fields."""

    def __init__(self, http: Request, request: GenerationRequest, info: EngineInfo) -> None:
        self._http = http
        self._request = request
        self._info = info
        self._images = Images()
        self._frames: dict[tuple[int, str], Frame | None] = {}

    async def resolve(self, evidence: Evidence, questions: Sequence[Question]) -> tuple[Evidence, list[Question]]:
        """Returns the input and the questions with texts in the place of what the model cannot be shown. Decodes all
        images. Raises ApiError."""
        media = [*evidence.media, *(each for question in questions for each in question.media)]
        if not media:
            return evidence, list(questions)
        messages = [*evidence.messages, *({"role": "user", "content": question.text} for question in questions)]
        chat, self._images = await resolve(self._http, Chat(messages, media=media), self._info)
        count = len(evidence.messages)
        texts = [message["content"] for message in chat.messages[count:]]
        asked = [dataclasses.replace(each, text=text) for each, text in zip(questions, texts, strict=True)]
        return dataclasses.replace(evidence, messages=chat.messages[:count]), asked

    async def prompt(self, evidence: Evidence, question: Question) -> tuple[Prompt, Sequence[int]]:
        """Returns the prompt up to the answer, and the tokens at its beginning that all questions about the input
        share, as one object. Raises ApiError."""
        head, size = question.head, len(question.body)
        frame = await self._frame(evidence, head)
        if frame is None or question.media:
            prompt = await self._rendered(evidence, head + question.body, question)
            return Prompt([*prompt.token_ids, *self._closed(prompt.token_ids)], prompt.images), ()
        check_text_length(question.param, size, self._info)
        tokens = await server_of(self._http).tokenize(
            self._http, self._info.tokenizer, size, lambda: self._own_tokens(head, question.body, question.param)
        )
        return Prompt(frame.around(tokens), frame.images), frame.before

    async def answers(self, question: Question) -> list[list[int]]:
        """Returns the tokens of the question's options as answers."""
        tokenizer, texts = self._info.tokenizer, [option.text for option in question.options]

        def encode() -> list[list[int]]:
            if tokenizer.has_chat_template:
                return [plain(tokenizer, text, question.options_param) for text in texts]
            return [after(tokenizer, ANSWER, f" {text}", question.options_param) for text in texts]

        return await server_of(self._http).tokenize(self._http, tokenizer, sum(map(len, texts)), encode)

    @property
    def input_param(self) -> str:
        """Returns the client's field of the input."""
        return self._request.client_name("messages")

    @property
    def ends(self) -> list[int]:
        """Returns the tokens that end an answer."""
        tokenizer = self._info.tokenizer
        lines = [] if tokenizer.has_chat_template else tokenizer.encode("\n", add_special_tokens=False)[-1:]
        return [*sorted(tokenizer.eos_token_ids), *lines]

    async def _frame(self, evidence: Evidence, head: str) -> Frame | None:
        key = id(evidence), head
        if key not in self._frames:
            made = self._of_chat if self._info.tokenizer.has_chat_template else self._of_text
            self._frames[key] = await made(evidence, head)
        return self._frames[key]

    async def _of_chat(self, evidence: Evidence, head: str) -> Frame | None:
        """Returns None if the template shows a question in a way of its own."""
        prompts = [await self._rendered(evidence, head + sample) for sample in SAMPLES]
        one, other = (prompt.token_ids for prompt in prompts)
        own = [self._own_tokens(head, sample, head) for sample in SAMPLES]
        before = common(one, other)
        after = common(one[len(before) :][::-1], other[len(before) :][::-1])[::-1]
        frame = Frame(before[: len(before) - len(common(*own))], after, prompts[0].images)
        within = all(place < len(frame.before) for image in frame.images for place in image.positions)
        if [frame.around(tokens) for tokens in own] != [one, other] or not within:
            return None
        return dataclasses.replace(frame, after=[*after, *self._closed(one)])

    def _own_tokens(self, head: str, body: str, param: str) -> list[int]:
        ending = "" if self._info.tokenizer.has_chat_template else ANSWER
        return after(self._info.tokenizer, head, body + ending, param)

    async def _of_text(self, evidence: Evidence, head: str) -> Frame:
        """The conversation of a model without a chat template is a text."""
        said = [f"{message['role']}: {message['content']}" for message in evidence.messages]
        if evidence.joined:
            said = [f"{INPUT} {evidence.messages[0]['content']}"]
        text, param = "\n\n".join([*said, head]), self.input_param
        check_text_length(param, len(text), self._info)
        tokenizer = self._info.tokenizer
        before = await server_of(self._http).tokenize(
            self._http, tokenizer, len(text), lambda: plain(tokenizer, text, param, add_special_tokens=True)
        )
        return Frame(before, [])

    async def _rendered(self, evidence: Evidence, text: str, question: Question | None = None) -> Prompt:
        """question: whose images are shown too."""
        media = [*evidence.media, *(question.media if question is not None else ())]
        shown = {
            each.sentinel: self._images.shown[each.sentinel] for each in media if each.sentinel in self._images.shown
        }
        images = dataclasses.replace(self._images, shown=shown) if shown else Images()
        chat = Chat(evidence.followed_by(text), enable_thinking=False, media=media)
        return await render(self._http, self._request, chat, self._info, images)

    def _closed(self, prompt: list[int]) -> list[int]:
        """Returns the tokens between a prompt and an answer without a thought. Most templates have them already."""
        tokenizer, tags = self._info.tokenizer, self._info.tokenizer.tags
        if tags.tools is HARMONY:
            return tokenizer.encode(f"{CHANNEL}final{MESSAGE}", add_special_tokens=False)
        if thinking_of(self._info, Chat([]), prompt) == "open":
            return tokenizer.encode(f"{tags.think_end}\n\n", add_special_tokens=False)
        return []


def common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Returns the tokens with which both begin."""
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def plain(tokenizer: Tokenizer, text: str, param: str, add_special_tokens: bool = False) -> list[int]:
    """Returns the tokens of a text in which control tokens are text. Raises ApiError."""
    try:
        marker, *_ = tokenizer.mark([{"content": text}])
        return tokenizer.encode(text, add_special_tokens, split_special_tokens=bool(marker))
    except (ControlTokenError, ChatTemplateError) as error:
        raise ApiError(400, f"{param}: {error}", param=param, code="control_tokens") from None


def after(tokenizer: Tokenizer, head: str, text: str, param: str) -> list[int]:
    """Returns the tokens of a text that follows `head`. Raises ApiError."""
    before, whole = plain(tokenizer, head, param), plain(tokenizer, head + text, param)
    follows = whole[: len(before)] == before
    return whole[len(before) :] if follows else plain(tokenizer, text, param)
