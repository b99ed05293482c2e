"""Ends answers that repeat themselves: in their text, their thoughts, or the arguments of calls."""

from __future__ import annotations

import math
from typing import NamedTuple

from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.part import Need, Part
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.request_table import RequestTable
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.models.text.tokenizer import Tokenizer
from mlxpaged.parts.repetition.cycles import Cycle, CycleFinder
from mlxpaged.parts.repetition.meant import copies_asked, is_array, is_data, nests

COPIES = 4
"""Complete copies without which a cycle is no loop."""
LEAST_TOKENS = 60
"""Tokens without which a cycle is no loop: of short ones, texts have more than COPIES copies."""
PATIENCE = 56
"""A cycle is a loop this many tokens after its last needed copy. `benchmarks/loops.py` shows what real texts and real
loops do: with 48, rulers of real files would be loops."""
DATA_PATIENCE = 1024
"""The same for what has no words or nests: real files have long arrays of equal constants, rulers and drawings."""
SHOWN = 16
"""Copies of a cycle that are read to see whether it has words, so that no constant in them is cut."""
PROMPT_TOKENS = 16_384
"""The end of a prompt in which a request for copies is looked for: it is made text for that, in 10 ms."""


class LoopStats(NamedTuple):
    """ended: answers that were ended. tokens: of their cycles."""

    ended_total: int = 0
    tokens_total: int = 0


NO_LOOPS = LoopStats()


def has_tools(params: SamplingParams) -> bool:
    return params.answer_form is not None and bool(params.answer_form.tools)


class LoopEnd(Part):
    """Ends an answer before a step: all known tokens have become text then.

    mode: one of END_LOOPS in engine_config.py, for requests that do not say whether their loops are ended.
    """

    def __init__(self, requests: RequestTable, tokenizer: Tokenizer, mode: str) -> None:
        self._requests = requests
        self._tokenizer = tokenizer
        self._mode = mode
        self._answers: dict[int, WatchedAnswer] = {}  # by sequence
        self._stats = NO_LOOPS

    def admit(self, request: Request, sequence: Sequence) -> None:
        if self._watches(request.params):
            self._answers[sequence.sequence_id] = WatchedAnswer(request.params, sequence, self._tokenizer)

    def _watches(self, params: SamplingParams) -> bool:
        """A request that ignores end tokens asks for a number of tokens, whatever they are."""
        if params.max_tokens is not None and params.max_tokens <= LEAST_TOKENS:
            return False
        if params.end_loops is not None:
            return params.end_loops
        return not params.ignore_eos and (self._mode == "on" or (self._mode == "auto" and has_tools(params)))

    def forget(self, sequence_id: int) -> None:
        self._answers.pop(sequence_id, None)

    def before_step(self, in_flight: InFlightStep | None) -> Need:
        for sequence_id, answer in list(self._answers.items()):
            if (loop := answer.loop()) is not None:
                self._end(sequence_id, loop)
        return Need.NOTHING

    def _end(self, sequence_id: int, loop: Cycle) -> None:
        ended, tokens = self._stats
        self._stats = LoopStats(ended + 1, tokens + loop.length)
        cause = f"repetition; period={loop.period}; copies={loop.copies}; tokens={loop.length}"
        self._requests.outputs.append(self._requests.complete(sequence_id, cause))

    def stats(self) -> LoopStats:
        return self._stats


class WatchedAnswer:
    def __init__(self, params: SamplingParams, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self._params = params
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._finder = CycleFinder()
        self._prompt: str | None = None  # its end, once it is text
        self._needed: dict[tuple[int, int], float] = {}  # tokens for a loop, by the cycle's beginning and its period

    def loop(self) -> Cycle | None:
        """Reads the tokens that are new. Returns the loop in which the answer is now, if any."""
        sequence, finder = self._sequence, self._finder
        first = sequence.num_prompt_tokens + len(finder.tokens)
        for token_id in sequence.token_ids[first : sequence.num_known_tokens]:
            finder.add(token_id)
        if len(finder.tokens) < self._params.min_tokens:
            return None
        return next((cycle for cycle in sorted(finder.cycles()) if self._is_loop(cycle)), None)

    def _is_loop(self, cycle: Cycle) -> bool:
        if cycle.length < max(LEAST_TOKENS, COPIES * cycle.period + PATIENCE):
            return False
        key = len(self._finder.tokens) - cycle.length, cycle.period
        if key not in self._needed:
            self._needed[key] = self._tokens_needed(cycle)
        return cycle.length >= self._needed[key]

    def _tokens_needed(self, cycle: Cycle) -> float:
        """Tokens of a cycle that is a loop for certain, if more are needed than for most."""
        unit = self._finder.tokens[-cycle.period :]
        shown = self._tokenizer.decode(unit * SHOWN)
        if is_data(shown):
            is_meant = self._params.constraint is not None and is_array(shown)
            return math.inf if is_meant else COPIES * cycle.period + DATA_PATIENCE
        text = self._tokenizer.decode(unit)
        if nests(text):
            return COPIES * cycle.period + DATA_PATIENCE
        asked = copies_asked(self._prompt_text(), text)
        return (asked + 1) * cycle.period if asked else 0

    def _prompt_text(self) -> str:
        if self._prompt is None:
            end = self._sequence.num_prompt_tokens
            self._prompt = self._tokenizer.decode(self._sequence.token_ids[max(0, end - PROMPT_TOKENS) : end])
        return self._prompt
