"""Runs requests that want probabilities of given answers, and no text. `core/engine/readout.py` says how they are read.

Rerankers and decisions share it. Each row of a readout is a request of one token in the batch, with all that requests
have: a priority, deadlines, a client that takes turns, and an end if the client leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from mlxpaged.api.generation.answers import Answer
from mlxpaged.api.generation.request import GenerationRequest
from mlxpaged.api.generation.submission import start
from mlxpaged.api.server import server_of
from mlxpaged.core.engine.errors import DeadlineExceededError
from mlxpaged.core.engine.readout import Readout, RowReading
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.vision.image import PromptImage

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
"""The parameters of a request of which each prompt has its own."""


@dataclass(frozen=True)
class ReadoutPrompt:
    """token_ids: up to the beginning of the answer. images: that it shows. num_shared: tokens at its beginning that all
    prompts share, and that count once against the limit of a key."""

    token_ids: list[int]
    readout: Readout
    images: tuple[PromptImage, ...] = ()
    num_shared: int = 0


@dataclass(frozen=True)
class ReadOut:
    """What was read of some prompts, in their order. log_probabilities: of each one's answers. num_cached: tokens of
    each prompt that the prefix cache had when its first row began. num_rows: requests of the engine."""

    request_id: str
    model: str
    log_probabilities: list[list[float]]
    num_cached: list[int]
    num_rows: int


async def read_out(
    http: Request, prompts: Sequence[ReadoutPrompt], request: GenerationRequest, id_prefix: str, most: int | None = None
) -> ReadOut:
    """Read the probabilities of the answers to some prompts.

    request: with all but the prompts; its timeout holds for all rows together. most: rows that are in the engine at
    once. The next ones follow when all of these are done, so other requests get between them; None: all are submitted
    together. Raises ApiError and the engine's errors.
    """
    rows = [(prompt, row) for prompt in prompts for row in prompt.readout.rows]
    wave = most or len(rows)
    readings: list[RowReading] = []
    cached: list[int] = []
    request_id = model = ""
    started = server_of(http).now
    for first in range(0, len(rows), wave):
        chosen = rows[first : first + wave]
        asked = dataclasses.replace(
            request,
            prompt=[[*prompt.token_ids, *row.path] for prompt, row in chosen],
            params=ONE_TOKEN,
            of_prompts=[row.params(len(prompt.token_ids)) for prompt, row in chosen],
            images=[prompt.images for prompt, _ in chosen],
            num_counted=sum(len(prompt.token_ids) + len(row.path) - prompt.num_shared for prompt, row in chosen)
            + (0 if readings else max(prompt.num_shared for prompt in prompts)),
            timeout=left_of(request.timeout, server_of(http).now - started),
        )
        answers = await start(http, lambda asked=asked: asked, id_prefix)  # type: ignore[misc]
        request_id, model = answers.context.request_id, answers.model
        readings += map(reading_of, await answers.collect())
        cached += answers.cached_tokens
    return ReadOut(request_id, model, *by_prompt(prompts, readings, cached), len(rows))


def left_of(timeout: float | None, seconds: float) -> float | None:
    """Returns what is left of a timeout after so many seconds. Raises DeadlineExceededError."""
    if timeout is not None and seconds >= timeout:
        raise DeadlineExceededError(f"the answer was not complete within {timeout:g} s")
    return None if timeout is None else timeout - seconds


def reading_of(answer: Answer) -> RowReading:
    [sampled] = answer.logprobs
    return RowReading.of(sampled, answer.prompt_logprobs)


def by_prompt(
    prompts: Sequence[ReadoutPrompt], readings: Sequence[RowReading], cached: Sequence[int]
) -> tuple[list[list[float]], list[int]]:
    """Returns the log-probabilities and the cached tokens of each prompt. readings, cached: of all rows."""
    found, first_cached, start = list[list[float]](), list[int](), 0
    for prompt in prompts:
        end = start + len(prompt.readout.rows)
        found.append(prompt.readout.log_probabilities(readings[start:end]))
        first_cached.append(min(len(prompt.token_ids), *cached[start:end]) if end > start else 0)
        start = end
    return found, first_cached
