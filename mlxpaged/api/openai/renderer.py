"""Renders what chat completions and completions share: envelope, usage, log-probabilities, end and errors."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

from mlxpaged.api.answer_thread import give_way
from mlxpaged.api.errors import ApiError
from mlxpaged.api.generation.answers import Answer, Answers, Renderer, progress_field, timeline_field
from mlxpaged.api.generation.deltas import Usage
from mlxpaged.api.generation.logprobs import MIN_LOGPROB, described
from mlxpaged.api.openai.schema import SamplingFields
from mlxpaged.api.streaming import Beginning, event
from mlxpaged.core.engine.logprobs import PromptLogprobs, TokenLogprobs
from mlxpaged.core.engine.prompt_progress import PromptProgress
from mlxpaged.models.text.tokenizer import Tokenizer


class CompletionsRenderer(Renderer):
    """kind, chunk_kind: the "object" of a whole answer, and of a chunk. beginning: of a stream that waited for its
    model."""

    def __init__(
        self, answers: Answers, body: SamplingFields, kind: str, chunk_kind: str, beginning: ChunkBeginning | None
    ) -> None:
        self.answers = answers
        self._kind = kind
        self._prompt_logprobs = body.prompt_logprobs
        options = body.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._usage_so_far = options is not None and bool(options.continuous_usage_stats)
        self._unfinished = list(range(answers.num_choices))
        self._envelope = {
            "id": answers.context.request_id,
            "object": chunk_kind,
            "created": int(time.time()) if beginning is None else beginning.created,
            "model": answers.model,
            "service_tier": answers.context.service_tier,
        }

    def prompt_logprobs_field(self, answer: Answer) -> dict[str, Any]:
        """{"prompt_logprobs": an iterator over a list's entries}, or {} if the request did not ask for it."""
        if self._prompt_logprobs is None or answer.prompt_logprobs is None:
            return {}
        tokenizer = self.answers.info.tokenizer
        return {"prompt_logprobs": prompt_logprobs(tokenizer, answer.prompt_logprobs, self._prompt_logprobs)}

    def usage(self) -> dict[str, Any]:
        return usage_field(self.answers.usage)

    @abstractmethod
    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """A whole answer."""

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._envelope | {
            "object": self._kind,
            "choices": [self.choice(index, answer) for index, answer in enumerate(answers)],
            "usage": self.usage(),
            **timeline_field([answer.finish.timeline for answer in answers]),
        }

    def chunk(self, choice: dict[str, Any]) -> str:
        if choice["finish_reason"] is not None:
            self._unfinished.remove(choice["index"])
        usage = {"usage": self.usage() if self._usage_so_far else None} if self._include_usage else {}
        return event(self._envelope | {"choices": [choice]} | usage)

    def end(self) -> Iterator[str]:
        last = {"usage": self.usage()} if self._include_usage else {}
        last |= timeline_field(self.answers.timelines)
        if last:
            yield event(self._envelope | {"choices": []} | last)
        yield "data: [DONE]\n\n"

    @abstractmethod
    def empty_chunk(self, index: int) -> str:
        """Returns a chunk that adds nothing to a choice."""

    def keep_alive(self, progress: PromptProgress) -> str:
        """Returns a chunk with its comment: Dify drops an event that begins with a comment, and LangChain gives a
        stream up that has no chunk for two minutes."""
        return super().keep_alive(progress) + self.empty_chunk(next(iter(self._unfinished), 0))

    def progress(self, progress: PromptProgress) -> str:
        return event(self._envelope | {"choices": []} | progress_field(progress))

    def error(self, error: ApiError) -> str:
        return event(error.body())


class ChunkBeginning(Beginning):
    """kind: the "object" of a chunk. nothing: what a choice has in a chunk that adds nothing to it."""

    kind: str
    nothing: ClassVar[Mapping[str, Any]]

    def __init__(self, request_id: str, model: str, named: str | None) -> None:
        self.created = int(time.time())
        choice = {"index": 0, **self.nothing, "logprobs": None, "finish_reason": None}
        self._chunk = {
            "id": request_id,
            "object": self.kind,
            "created": self.created,
            "model": model,
            "choices": [choice],
        }

    def go_on(self) -> str:
        return event(self._chunk)


def usage_field(usage: Usage, **details: int) -> dict[str, Any]:
    """details: of the tokens of the completion, in addition to those of drafts."""
    if usage.drafted:
        details["accepted_prediction_tokens"] = usage.accepted
        details["rejected_prediction_tokens"] = usage.drafted - usage.accepted
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        **({"completion_tokens_details": details} if details else {}),
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """The content is an iterator over a list's entries."""
    return {"content": described(tokenizer, tokens), "refusal": None}


class TextOffsets:
    """Says where the tokens of one choice begin in its text, in characters. A token that is a part of a character
    begins with it.

    echo: the prompt as the text has it; empty if it has not.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], echo: str) -> None:
        self._tokenizer = tokenizer
        self._echo = echo
        self._answer = tokenizer.detokenizer(after=prompt[-1])
        self._end = len(echo)

    def of_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """Special tokens that the client has not written are no part of the text."""
        text, at, offsets = self._tokenizer.detokenizer(), 0, []
        for token_id in token_ids:
            give_way()
            offsets.append(min(at, len(self._echo)))
            special = self._tokenizer.text_alone(token_id)
            at += len(text.add(token_id)) or (len(special) if self._echo.startswith(special, at) else 0)
        return offsets

    def of_answer(self, token_id: int) -> int:
        """Returns where its next token begins."""
        start = self._end
        self._end += len(self._answer.add(token_id))
        return start


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[TokenLogprobs],
    offsets: TextOffsets,
    prompt: PromptLogprobs | None = None,
    num_top: int = 0,
) -> dict[str, list[Any]]:
    """prompt: comes before `tokens`, if it is not None. Its tokens get the `num_top` most likely ones. Its first token
    has no log-probability: nothing predicts it."""
    texts = [] if prompt is None else [tokenizer.token_text(prompt.token_ids[0])]
    logprobs: list[float | None] = [None] * len(texts)
    tops: list[dict[str, float] | None] = [None] * len(texts)
    for token in chain(() if prompt is None else prompt.tokens(num_top), tokens):
        give_way()
        texts.append(tokenizer.token_text(token.token_id))
        logprobs.append(max(token.logprob, MIN_LOGPROB))
        tops.append(top_logprobs(tokenizer, token))
    places = [] if prompt is None else offsets.of_prompt(prompt.token_ids)
    places += [offsets.of_answer(token.token_id) for token in tokens]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": places}


def top_logprobs(tokenizer: Tokenizer, token: TokenLogprobs) -> dict[str, float]:
    """Maps texts of the most likely tokens, and of the token itself, which OpenAI adds, to log-probabilities. Of tokens
    with the same text (parts of characters) the most likely one stays: lm-evaluation-harness takes a token for the most
    likely one if no log-probability here is greater."""
    found: dict[str, float] = {}
    for candidate, logprob in (*token.top, (token.token_id, token.logprob)):
        found.setdefault(tokenizer.token_text(candidate), max(logprob, MIN_LOGPROB))
    return found


def prompt_logprobs(tokenizer: Tokenizer, prompt: PromptLogprobs, num_top: int) -> Iterator[dict[str, Any] | None]:
    """Yields the entries of vLLM's format: None for the first token, and for each other one an object of token ids, its
    own first. All entries of a long prompt together would take a gigabyte."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_text(token_id)
        return {"logprob": max(logprob, MIN_LOGPROB), "rank": rank, "decoded_token": text}

    yield None
    for token, own_rank in zip(prompt.tokens(num_top), prompt.ranks.tolist(), strict=True):
        give_way()
        entries = {str(token.token_id): entry(token.token_id, token.logprob, own_rank)}
        for rank, (candidate, logprob) in enumerate(token.top, 1):
            entries.setdefault(str(candidate), entry(candidate, logprob, rank))
        yield entries
