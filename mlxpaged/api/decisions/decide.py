"""Answers questions about one input: makes their prompts, reads the options, and combines what was read."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from starlette.requests import Request

from mlxpaged.api.access.caller import caller_of
from mlxpaged.api.decisions import calibration
from mlxpaged.api.decisions.frame import NOTHING, Asking, Evidence
from mlxpaged.api.decisions.question import Question
from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.generation.check import ContextLengthError
from mlxpaged.api.generation.readout import ReadOut, read_out
from mlxpaged.api.generation.readout_waves import ReadoutPrompt
from mlxpaged.api.generation.request import GenerationRequest
from mlxpaged.api.generation.request_context import cache_scope
from mlxpaged.api.server import server_of
from mlxpaged.core.engine.readout import Readout
from mlxpaged.core.scheduling.admission import PromptTooLongError
from mlxpaged.engine.info import EngineInfo
from mlxpaged.engine_config import EngineConfig

MAX_ROWS = 20_000
"""Rows of a request: 400 questions of 50 options of several tokens."""
MAX_KNOWN = 4096
"""Readings of questions about an empty input that are kept."""

Calibration = Literal["none", "content_free"]
Answers = Literal["text", "symbol", "cloze"]


@dataclass(frozen=True)
class Method:
    """How options are read.

    calibration: "content_free" asks about an empty input too. orders: 2 asks with the options in the reverse order too.
    answers: "text" lists the options and reads their texts, "symbol" reads a letter for each (multiple-choice
    prompting), and "cloze" reads their texts without a list of them (cloze prompting; Robinson et al. 2023 compare
    both). temperature: divides the log-probabilities.
    """

    calibration: Calibration = "none"
    orders: Literal[1, 2] = 1
    answers: Answers = "text"
    temperature: float = 1.0

    def with_given(self, **given: object) -> Method:
        """Returns the method with what a request sets; None leaves the default."""
        return dataclasses.replace(self, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Decided:
    """probabilities: of each question's options; None if the model gives none of them any. num_input, num_cached:
    tokens of the input and of the questions, and those of them that the prefix cache had."""

    request_id: str
    model: str
    probabilities: list[list[float] | None]
    num_input: int
    num_cached: int


@dataclass(frozen=True)
class Asked:
    """One way in which a question is put. order: the index in the question of each option here."""

    question: int
    prompt: ReadoutPrompt
    order: Sequence[int]
    content_free: bool


class KnownReadings:
    """The log-probabilities of questions about an empty input, which do not change. It belongs to the event loop."""

    def __init__(self) -> None:
        self._found: OrderedDict[object, list[float]] = OrderedDict()

    def get(self, key: object) -> list[float] | None:
        if key in self._found:
            self._found.move_to_end(key)
        return self._found.get(key)

    def put(self, key: object, found: list[float]) -> None:
        self._found[key] = found
        while len(self._found) > MAX_KNOWN:
            self._found.popitem(last=False)


async def decide(
    http: Request, evidence: Evidence, questions: Sequence[Question], method: Method, request: GenerationRequest
) -> Decided:
    """Answer all questions. request: with the model, deadlines, and the client's names of fields. Raises ApiError and
    the engine's errors."""
    engine, info = await server_of(http).ready(http, request.model)
    asking = Asking(http, request, info)
    evidence, questions = await asking.resolve(evidence, questions)
    asked = await ways(asking, evidence, questions, method, info)
    known: KnownReadings = http.app.state.known_readings
    keys = [key_of(http, info, request, each) if each.content_free else None for each in asked]
    found = {i: reading for i, key in enumerate(keys) if key is not None and (reading := known.get(key)) is not None}
    left = [i for i in range(len(asked)) if i not in found]
    if (count := sum(len(asked[i].prompt.readout.rows) for i in left)) > MAX_ROWS:
        message = f"have {count} rows of options; the limit is {MAX_ROWS}. Ask fewer at once, or use shorter options"
        raise bad_parameter("questions", message, code="too_many_options")
    most = 1 if http.client is None else most_rows(engine.config)  # a batch has other lines to run beside it
    timeout = engine.config.request_timeout if request.timeout is None else request.timeout
    request = dataclasses.replace(request, timeout=timeout)
    prompts = [asked[i].prompt for i in left]
    read = await read_out(http, prompts, request, "dec", engine.config.block_size, most)
    found |= dict(zip(left, read.log_probabilities, strict=True))
    for i, key in enumerate(keys):
        if key is not None:
            known.put(key, found[i])
    first = [(asked[i], cached) for i, cached in zip(left, read.num_cached, strict=True)]
    return Decided(
        read.request_id,
        read.model,
        [combined(which, len(question.options), asked, found, method) for which, question in enumerate(questions)],
        *usage(first, read),
    )


async def ways(
    asking: Asking, evidence: Evidence, questions: Sequence[Question], method: Method, info: EngineInfo
) -> list[Asked]:
    """Returns all prompts of all questions, those about the input first."""
    found = []
    for about in (evidence, NOTHING)[: 1 + (method.calibration == "content_free")]:
        for which, question in enumerate(questions):
            forward = range(len(question.options))
            num_orders = 1 if method.answers == "cloze" else method.orders
            for order in (forward, forward[::-1])[:num_orders]:
                put = question if order is forward else question.reversed()
                match method.answers:
                    case "symbol":
                        put = put.with_symbols()
                    case "cloze":
                        put = put.unlisted()
                found.append(await way(asking, about, which, put, order, info))
    return found


async def way(
    asking: Asking, about: Evidence, which: int, question: Question, order: Sequence[int], info: EngineInfo
) -> Asked:
    """Raises ApiError for options that this model cannot tell apart, and for a prompt that is too long."""
    prompt, shared = await asking.prompt(about, question)
    try:
        readout = Readout(await asking.answers(question), asking.ends)
    except ValueError as error:
        raise bad_parameter(question.options_param, f"this model cannot tell them apart: {error}") from None
    longest = max(len(row.path) for row in readout.rows)
    try:
        info.max_new_tokens(len(prompt.token_ids) + longest, 1)
    except PromptTooLongError as error:
        param = question.param if len(shared) < info.longest else asking.input_param
        raise ContextLengthError(param, error) from None
    asked = ReadoutPrompt(prompt.token_ids, readout, prompt.images, shared)
    return Asked(which, asked, order, about is NOTHING)


def key_of(http: Request, info: EngineInfo, request: GenerationRequest, asked: Asked) -> object:
    """Returns what a reading about an empty input depends on, and who may learn by its time that it was asked before.
    info: of one load of a model."""
    scope = cache_scope(caller_of(http), server_of(http).http.isolate_prefix_cache)
    model = id(info), info.created, request.model
    return scope, model, tuple(asked.prompt.token_ids), tuple(asked.prompt.readout.answers)


def most_rows(config: EngineConfig) -> int:
    """Returns how many rows of a request are in the engine at once: half of the queue, so that others find room."""
    return max(config.max_num_seqs, (config.max_num_seqs + config.max_queue) // 2)


def combined(
    which: int, count: int, asked: Sequence[Asked], found: dict[int, list[float]], method: Method
) -> list[float] | None:
    """Returns the probabilities of a question's options in the client's order."""
    of_orders: dict[tuple[int, ...], dict[bool, list[float]]] = {}
    for i, each in enumerate(asked):
        if each.question == which:
            in_order = [0.0] * count
            for place, option in enumerate(each.order):
                in_order[option] = found[i][place]
            of_orders.setdefault(tuple(each.order), {})[each.content_free] = in_order
    try:
        return calibration.mean(
            [
                calibration.probabilities(
                    calibration.calibrated(read[False], read[True]) if True in read else read[False], method.temperature
                )
                for read in of_orders.values()
            ]
        )
    except ValueError:
        return None


def usage(asked: Iterable[tuple[Asked, int]], read: ReadOut) -> tuple[int, int]:
    """Returns the tokens of the input, counted once, and of all that is asked about it, in one order; and those of them
    that were cached. Clients pay for what they send, not for how it is read."""
    pairs = [(each, cached) for each, cached in asked if not each.content_free and each.order[0] == 0]
    shared = max((each.prompt.num_shared for each, _ in pairs), default=0)
    own = sum(len(each.prompt.token_ids) - each.prompt.num_shared for each, _ in pairs)
    cached_input = min((min(cached, each.prompt.num_shared) for each, cached in pairs), default=0)
    cached_own = sum(max(0, cached - each.prompt.num_shared) for each, cached in pairs)
    return shared + own, cached_input + cached_own
