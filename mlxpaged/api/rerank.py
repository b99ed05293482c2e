"""Handles POST /v1/rerank, in Jina's and Cohere's format, and POST /v1/score, in vLLM's.

Each document is a request of one token. It runs in the batch like all others, and the log-probabilities of "yes" and
"no" at this token make the score.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.fields import rerank as fields
from mlxpaged.api.generation.answers import Answers
from mlxpaged.api.generation.check import ContextLengthError, check_text_length
from mlxpaged.api.generation.request import GenerationRequest
from mlxpaged.api.generation.submission import start
from mlxpaged.api.schema import Body
from mlxpaged.api.server import server_of
from mlxpaged.engine.sampling_params import SamplingParams
from mlxpaged.scheduler.admission import PromptTooLongError

MAX_DOCUMENTS = 1000

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]


class Document(Body):
    text: str


class JudgedFields(Body):
    """instruction: says what a fitting document is; the model's own default if there is none. timeout: seconds."""

    model: str | None = None
    instruction: Annotated[str, Field(min_length=1)] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    user: str | None = None


class RerankRequest(JudgedFields):
    """top_n: results to return, null for all. return_documents: null is true."""

    table = fields.RERANK

    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = None


class RerankResult(Body):
    index: int  # of the document in the request
    relevance_score: float
    document: Document | None = None


class JudgedUsage(Body):
    prompt_tokens: int
    total_tokens: int


class RerankResponse(Body):
    id: str
    model: str
    results: list[RerankResult]  # the most relevant first
    usage: JudgedUsage


class ScoreRequest(JudgedFields):
    """Judges text_2 by text_1: one query for all documents, or one query for each."""

    table = fields.SCORE

    text_1: str | Texts
    text_2: str | Texts


class Score(Body):
    index: int
    object: Literal["score"]
    score: float


class ScoreResponse(Body):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: JudgedUsage


@dataclass(frozen=True)
class Judged:
    """scores: of the pairs, in their order."""

    scores: list[float]
    answers: Answers

    @property
    def usage(self) -> JudgedUsage:
        """The token that each document's answer has is not counted: clients pay for what they send."""
        prompt = self.answers.usage.prompt
        return JudgedUsage(prompt_tokens=prompt, total_tokens=prompt)


async def rerank(request: Request, body: RerankRequest) -> Response:
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    judged = await judge(request, body, [(body.query, text) for text in texts], "documents", "rerank")
    order = sorted(range(len(texts)), key=lambda index: -judged.scores[index])
    shows = body.return_documents is not False
    results = [
        RerankResult(
            index=index,
            relevance_score=judged.scores[index],
            document=Document(text=texts[index]) if shows else None,
        )
        for index in order[: body.top_n]
    ]
    answers = judged.answers
    made = RerankResponse(id=answers.context.request_id, model=answers.model, results=results, usage=judged.usage)
    return JSONResponse(made.model_dump(exclude_none=True))


async def score(request: Request, body: ScoreRequest) -> Response:
    queries, documents = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if len(queries) not in (1, len(documents)):
        message = f"must be one text, or as many as text_2 has: {len(documents)}"
        raise bad_parameter("text_1", message)
    if len(queries) == 1:
        queries = queries * len(documents)
    judged = await judge(request, body, list(zip(queries, documents, strict=True)), "text_2", "score")
    answers = judged.answers
    made = ScoreResponse(
        id=answers.context.request_id,
        object="list",
        created=int(time.time()),
        model=answers.model,
        data=[Score(index=index, object="score", score=each) for index, each in enumerate(judged.scores)],
        usage=judged.usage,
    )
    return JSONResponse(made.model_dump())


async def judge(
    request: Request, body: JudgedFields, pairs: Sequence[tuple[str, str]], param: str, id_prefix: str
) -> Judged:
    """pairs: a query and a document each. param: the client's field that has the documents. Raises ApiError and the
    engine's errors."""
    server = server_of(request)
    _, info = await server.ready(request, body.model)
    reranker = info.reranker
    if reranker is None:
        message = f"{info.model!r} is no reranker: {info.no_reranker_because}"
        raise bad_parameter("model", message, code="rerank_not_supported")
    for index, pair in enumerate(pairs):
        check_text_length(f"{param}.{index}", sum(map(len, pair)), info)
    prompts = []
    for index, pair in enumerate(pairs):  # one at a time: the tokenizer's thread serves other requests in between
        prompt = await server.tokenize(
            info.tokenizer, sum(map(len, pair)), partial(reranker.prompt, *pair, body.instruction)
        )
        try:
            info.max_new_tokens(len(prompt), 1)
        except PromptTooLongError as error:
            raise ContextLengthError(f"{param}.{index}", error) from None
        prompts.append(prompt)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=(reranker.yes, reranker.no))
    names = dict.fromkeys(("prompt", "max_tokens", "candidates"), param)

    def translate() -> GenerationRequest:
        return GenerationRequest(prompts, params, body.model, timeout=body.timeout, client_names=names)

    answers = await start(request, translate, id_prefix)
    scores = []
    for answer in await answers.collect():
        [token] = answer.logprobs
        (_, yes), (_, no) = token.top
        scores.append(reranker.score(yes, no))
    return Judged(scores, answers)
