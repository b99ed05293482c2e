"""Handles POST /v1/rerank, in Jina's and Cohere's format, and POST /v1/score, in vLLM's.

If the reranker generates text, the probabilities of "yes" and "no" are read after each document, and make its score. A
cross-encoder gives the scores itself: its pairs are inputs of the embedder.
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

from mlxpaged.api.embeddings import check_total, run_embedder
from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.fields import rerank as fields
from mlxpaged.api.generation.check import ContextLengthError, check_text_length
from mlxpaged.api.generation.readout import ONE_TOKEN, read_out
from mlxpaged.api.generation.readout_waves import ReadoutPrompt
from mlxpaged.api.generation.request import GenerationRequest
from mlxpaged.api.schema import Body
from mlxpaged.api.server import program_of, server_of
from mlxpaged.core.engine.readout import Readout, normalized
from mlxpaged.core.scheduling.admission import PromptTooLongError
from mlxpaged.engine.async_engine import AsyncEngine
from mlxpaged.engine.info import EmbeddingInfo
from mlxpaged.models.encoders.embedding import EmbeddingFacts
from mlxpaged.models.features import Feature
from mlxpaged.parts.embeddings.embedding_line import EmbeddingRequest

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
    """scores: of the pairs, in their order. num_tokens: of their texts. The token that each document's answer may have
    is not counted: clients pay for what they send."""

    request_id: str
    model: str
    scores: list[float]
    num_tokens: int

    @property
    def usage(self) -> JudgedUsage:
        return JudgedUsage(prompt_tokens=self.num_tokens, total_tokens=self.num_tokens)


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
    made = RerankResponse(id=judged.request_id, model=judged.model, results=results, usage=judged.usage)
    # It has the documents, and takes as long as the body that they came in.
    body_of_answer = await server_of(request).prepare(request, lambda: made.model_dump_json(exclude_none=True))
    return Response(body_of_answer, media_type=JSONResponse.media_type)


async def score(request: Request, body: ScoreRequest) -> Response:
    queries, documents = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if len(queries) not in (1, len(documents)):
        message = f"must be one text, or as many as text_2 has: {len(documents)}"
        raise bad_parameter("text_1", message)
    if len(queries) == 1:
        queries = queries * len(documents)
    judged = await judge(request, body, list(zip(queries, documents, strict=True)), "text_2", "score")
    made = ScoreResponse(
        id=judged.request_id,
        object="list",
        created=int(time.time()),
        model=judged.model,
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
    engine, info = await server.reranker(request, body.model)
    if isinstance(info, EmbeddingInfo) and info.cross_encoder is not None:
        if body.instruction is not None:
            raise bad_parameter("instruction", f"{info.model!r} takes no instruction", code="unsupported_parameter")
        return await judge_by_encoder(request, engine, info.cross_encoder, body.timeout, pairs, param, id_prefix)
    reranker = None if isinstance(info, EmbeddingInfo) else info.reranker
    if isinstance(info, EmbeddingInfo) or reranker is None:
        message = f"{info.model!r} is no reranker: {info.missing[Feature.RERANKING]}"
        raise bad_parameter("model", message, code="rerank_not_supported")
    for index, pair in enumerate(pairs):
        check_text_length(f"{param}.{index}", sum(map(len, pair)), info)
    prompts = []
    for index, pair in enumerate(pairs):  # one at a time: the tokenizer's thread serves other requests in between
        prompt = await server.tokenize(
            request, info.tokenizer, sum(map(len, pair)), partial(reranker.prompt, *pair, body.instruction)
        )
        try:
            info.max_new_tokens(len(prompt), 1)
        except PromptTooLongError as error:
            raise ContextLengthError(f"{param}.{index}", error) from None
        prompts.append(prompt)
    names = dict.fromkeys(("prompt", "max_tokens", "candidates"), param)
    asked = GenerationRequest([], ONE_TOKEN, body.model or info.model, timeout=body.timeout, client_names=names)
    readout = Readout([[reranker.yes], [reranker.no]])
    rows = [ReadoutPrompt(prompt, readout) for prompt in prompts]
    read = await read_out(request, rows, asked, id_prefix, engine.config.block_size)
    scores = [normalized(each)[0] for each in read.log_probabilities]
    return Judged(read.request_id, read.model, scores, sum(map(len, prompts)))


async def judge_by_encoder(
    request: Request,
    engine: AsyncEngine,
    model: EmbeddingFacts,
    timeout: float | None,
    pairs: Sequence[tuple[str, str]],
    param: str,
    id_prefix: str,
) -> Judged:
    """Does what `judge` does."""
    server, inputs = server_of(request), list[tuple[list[int], int]]()
    least = [model.tokenizer.least_tokens(sum(map(len, pair))) for pair in pairs]
    for index, count in enumerate(least):
        check_pair(model, f"{param}.{index}", count, "at least ")
    check_total(sum(least), param, "at least ")

    async def tokenize() -> None:
        for index, pair in enumerate(pairs):
            encode = partial(model.tokenizer.encode_pair, *pair)
            inputs.append(await server.tokenize(request, model.tokenizer, sum(map(len, pair)), encode))
            check_pair(model, f"{param}.{index}", len(inputs[-1][0]))
        check_total(sum(len(tokens) for tokens, _ in inputs), param)

    def made(request_id: str) -> EmbeddingRequest:
        tokens, seconds = zip(*inputs, strict=True)
        return EmbeddingRequest(request_id, tokens, 1, seconds, program_of(request))

    request_id, vectors, _ = await run_embedder(request, engine, id_prefix, tokenize, made, timeout)
    num_tokens = sum(len(tokens) for tokens, _ in inputs)
    return Judged(request_id, model.name, vectors[:, 0].tolist(), num_tokens)


def check_pair(model: EmbeddingFacts, param: str, num_tokens: int, about: str = "") -> None:
    """Raises ApiError if a query and a document are too long together."""
    if num_tokens > model.max_tokens:
        message = f"has {about}{num_tokens} tokens with its query; the limit of {model.name!r} is {model.max_tokens}"
        raise bad_parameter(param, message, code="context_length_exceeded")
