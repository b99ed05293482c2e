"""Runs requests that want probabilities of given answers, and no text. `core/engine/readout.py` says how they are read.

Rerankers and decisions share it. Each row of a readout is a request of one token in the batch, with all that requests
have: a priority, deadlines, a client that takes turns, and an end if the client leaves. `readout_waves.py` says which
rows run first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from mlxpaged.api.access.caller import caller_of
from mlxpaged.api.generation.answers import Answer
from mlxpaged.api.generation.readout_waves import EngineRow, ReadoutPrompt, waves_of
from mlxpaged.api.generation.request import GenerationRequest
from mlxpaged.api.generation.request_context import choose_id
from mlxpaged.api.generation.submission import start
from mlxpaged.api.open_requests import OpenRequest
from mlxpaged.api.server import server_of
from mlxpaged.core.engine.errors import DeadlineExceededError
from mlxpaged.core.engine.readout import RowReading
from mlxpaged.core.engine.sampling_params import SamplingParams

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
"""The parameters of a request of which each prompt has its own."""


@dataclass(frozen=True)
class ReadOut:
    """What was read of some prompts, in their order. log_probabilities: of each one's answers. num_cached: tokens of
    each prompt that the prefix cache had before."""

    request_id: str
    model: str
    log_probabilities: list[list[float]]
    num_cached: list[int]


async def read_out(
    http: Request,
    prompts: Sequence[ReadoutPrompt],
    request: GenerationRequest,
    id_prefix: str,
    block_size: int,
    most: int | None = None,
) -> ReadOut:
    """Read the probabilities of the answers to some prompts.

    request: with all but the prompts; its timeout holds for all rows together. block_size: of the engine. most: rows
    that are in the engine at once. The next ones follow when all of these are done, so other requests get between them;
    None: all of a wave are submitted together. Raises ApiError and the engine's errors.
    """
    server = server_of(http)
    opened = OpenRequest(choose_id(http, id_prefix), caller_of(http))
    http.state.has_begun = True  # all parts have this id
    waves = [
        wave[first : first + (most or len(wave))]
        for wave in waves_of(prompts, block_size)
        for first in range(0, len(wave), most or len(wave))
    ]
    rows, found, model = list[EngineRow](), list[tuple[Answer, int]](), ""
    started = server.now
    try:
        for number, wave in enumerate(waves, 1):
            opened.goes_on = number < len(waves)
            asked = dataclasses.replace(
                request,
                prompt=[row.token_ids for row in wave],
                params=ONE_TOKEN,
                of_prompts=[row.params for row in wave],
                images=[row.images for row in wave],
                num_counted=[row.num_counted for row in wave],
                timeout=left_of(request.timeout, server.now - started),
            )
            answers = await start(http, lambda asked=asked: asked, id_prefix, part_of=opened)  # type: ignore[misc]
            model = answers.model
            rows += wave
            found += zip(await answers.collect(), answers.cached_tokens, strict=True)
    finally:
        server.open_requests.close(opened)
    return ReadOut(opened.request_id, model, *by_prompt(prompts, rows, found))


def left_of(timeout: float | None, seconds: float) -> float | None:
    """Returns what is left of a timeout after so many seconds. Raises DeadlineExceededError."""
    if timeout is not None and seconds >= timeout:
        raise DeadlineExceededError(f"the answer was not complete within {timeout:g} s")
    return None if timeout is None else timeout - seconds


def reading_of(answer: Answer) -> RowReading:
    [sampled] = answer.logprobs
    return RowReading.of(sampled, answer.prompt_logprobs)


def by_prompt(
    prompts: Sequence[ReadoutPrompt], rows: Sequence[EngineRow], found: Sequence[tuple[Answer, int]]
) -> tuple[list[list[float]], list[int]]:
    """Returns the log-probabilities and the cached tokens of each prompt. found: the answer of each row, and the tokens
    that the prefix cache had of it."""
    readings: list[list[RowReading]] = [[] for _ in prompts]
    cached: list[int | None] = [None] * len(prompts)
    for row, (answer, num_cached) in zip(rows, found, strict=True):
        for index in row.prompts:
            # What an earlier row has computed was not cached before. The last token of a row is always computed.
            if cached[index] is None and (row.is_whole or num_cached < len(row.token_ids) - 1):
                cached[index] = num_cached
        if row.reads:
            readings[row.prompts[0]].append(reading_of(answer))
    pairs = zip(prompts, readings, strict=True)
    return [prompt.readout.log_probabilities(each) for prompt, each in pairs], [each or 0 for each in cached]
