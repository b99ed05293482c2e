"""Handles POST /v1/decisions and POST /v1/systemone: the body tells the dialect."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxpaged.api.decisions import mlx_vlm, openai, system_one
from mlxpaged.api.decisions.decide import Method, decide
from mlxpaged.api.decisions.named import NamedLabels, NamedQuestions, evidence_of, named_of, rendered
from mlxpaged.api.decisions.question import MAX_QUESTIONS, as_text
from mlxpaged.api.decisions.schema import Content, Images, MethodFields
from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.fields import decisions as fields
from mlxpaged.api.ollama.models import served_name
from mlxpaged.api.ollama.routes import keeping, nothing
from mlxpaged.api.ollama.schema import LoadingFields
from mlxpaged.api.schema import MAX_LIST, Label

DEFAULT = Method(calibration="content_free")
"""What docs/decisions.md measures: without calibration, a small model is hardly better than chance. A second order
costs as much again, and changes little."""


class DecisionRequest(MethodFields):
    """OpenAI's body has `input` and a list of questions, mlx-vlm's has `state` or `images` and an object of them.

    prompt_cache_key: only requests with the same one share prefixes. safety_identifier: changes nothing."""

    table = fields.DECISIONS
    # The other bodies of batches have these properties too.
    stream: ClassVar[bool] = False
    num_candidates: ClassVar[int] = 1
    multiplier: ClassVar[str | None] = None

    model: str | None = None
    input: (
        str
        | Annotated[
            list[openai.Item],
            Field(min_length=1, max_length=MAX_LIST, fail_fast=True),
            BeforeValidator(openai.with_json_as_text),
        ]
        | None
    ) = None
    questions: (
        Annotated[list[openai.AnyQuestion], Field(min_length=1, max_length=MAX_QUESTIONS, fail_fast=True)]
        | NamedQuestions
    )
    state: Content | None = None
    images: Images | None = None
    prompt_cache_key: str | None = None
    safety_identifier: Label | None = None


async def decisions(request: Request, body: DecisionRequest) -> Response:
    if isinstance(body.questions, dict):
        return await of_mlx_vlm(request, body, body.questions)
    for name in ("state", "images"):
        if getattr(body, name) is not None:
            raise bad_parameter(name, "belongs to an object of questions; with a list of them, use `input`")
    if body.input is None:
        raise bad_parameter("input", "is required")
    evidence, questions = openai.evidence_of(body.input), openai.questions_of(body.questions)
    asked = body.request(body.model, openai.CLIENT_NAMES, body.prompt_cache_key or "")
    decided = await decide(request, evidence, questions, body.method(DEFAULT), asked)
    return JSONResponse(openai.rendered(body.questions, decided))


async def of_mlx_vlm(request: Request, body: DecisionRequest, given: dict[str, Any]) -> Response:
    if body.input is not None:
        raise bad_parameter("input", "belongs to a list of questions; with an object of them, use `state`")
    if body.state is None and not body.images:
        raise bad_parameter("state", "is required, unless there are images")
    named = named_of(given)
    asked = body.request(body.model, mlx_vlm.CLIENT_NAMES, body.prompt_cache_key or "")
    questions = [question for each in named for question in each.questions]
    decided = await decide(request, evidence_of(body.state, body.images), questions, body.method(DEFAULT), asked)
    return JSONResponse(rendered(named, decided, decided.model, mlx_vlm.answer))


async def systemone(request: Request, body: system_one.SystemOneRequest) -> Response:
    for name, each in body.questions.items():
        if isinstance(each, NamedLabels):
            raise bad_parameter(f"questions.{name}.type", "must be choice, noul or score")
    if not as_text(body.state, "state") and not body.images:
        raise bad_parameter("state", "must not be empty, unless there are images")
    named, model = named_of(body.questions), None if body.model is None else served_name(request, body.model)
    kept = nothing
    if model:
        kept = await keeping(request, LoadingFields(model=model, keep_alive=body.keep_alive), model)
    try:
        asked = body.request(model, system_one.CLIENT_NAMES)
        questions = [question for each in named for question in each.questions]
        method = body.method(DEFAULT, temperature=body.temperature)
        decided = await decide(request, evidence_of(body.state, body.images), questions, method, asked)
    finally:
        kept()
    return JSONResponse(rendered(named, decided, body.model or decided.model, system_one.answer))
