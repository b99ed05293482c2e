"""The requests that the ranks have not finished, and how they go on after the ranks were started again.

One of them may be what has killed the ranks. So those that the ranks had are given to them one at a time, each after
the one before has got a further token. If the ranks die twice before a request has got one, it is the first one that
they get, and alone. If they die of that too, it is given up. The others go on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mlxpaged.core.engine.request import Request, RequestOutput

MOST_DEATHS = 2
"""A request that the ranks had in so many deaths, without a token in between, is given to them alone."""
HOPELESS_DEATHS = 4
"""It is given up after so many also if it was never alone: requests that are to be cancelled are given to the ranks at
once."""


@dataclass
class Unfinished:
    """A request that rank 0 has or is to get, and what it has given for it.

    token_ids: of the answer. num_logprobs: of its tokens, those whose log-probabilities were given: they come with the
    text. repeated: tokens that were given before the restart, and that the ranks compute again for their
    log-probabilities. is_sent: whether the ranks have it. went_on: whether they have given something for it since.
    deaths: how often in a row they have died without that.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list)
    num_logprobs: int = 0
    has_begun: bool = False
    repeated: int = 0
    is_sent: bool = False
    went_on: bool = False
    deaths: int = 0

    def note(self, output: RequestOutput) -> RequestOutput:
        """The output without what was given before: a repeated token and its text. Of a token whose end may begin a
        stop string, the text before that was given without its log-probabilities."""
        if self.repeated and output.token_ids:
            self.repeated -= 1
            output = output._replace(text="", token_ids=())
        self.has_begun = self.went_on = True
        self.token_ids += output.token_ids
        self.num_logprobs += len(output.logprobs)
        return output

    def resumed(self) -> Request:
        """The request for what is missing of the answer."""
        params, count = self.request.params, len(self.token_ids)
        if params.logprobs is not None:
            count = self.num_logprobs
        self.repeated = len(self.token_ids) - count
        if self.has_begun:
            params = dataclasses.replace(params, prompt_logprobs=None)
        return dataclasses.replace(self.request, params=params, fork_of=None, resumed=tuple(self.token_ids[:count]))

    @property
    def is_suspect(self) -> bool:
        """Whether the ranks died while they had it, and it has not gone on since."""
        return self.deaths > 0 and not self.went_on

    @property
    def runs_alone(self) -> bool:
        return self.is_suspect and self.deaths >= MOST_DEATHS


class UnfinishedRequests:
    """In the order in which they came. room: sequences that the ranks compute at once."""

    def __init__(self) -> None:
        self._all: dict[str, Unfinished] = {}
        self.room = 1
        self.holds_back = False
        """Whether rank 0 has to get some of them later."""

    def __iter__(self) -> Iterator[Unfinished]:
        return iter(self._all.values())

    def __len__(self) -> int:
        return len(self._all)

    def add(self, requests: Sequence[Request]) -> None:
        self._all.update((request.request_id, Unfinished(request)) for request in requests)
        self.holds_back = True

    def clear(self) -> None:
        self._all.clear()
        self.holds_back = False

    def note(self, output: RequestOutput) -> RequestOutput:
        """What the client of an output is to get."""
        if (unfinished := self._all.get(output.request_id)) is None:
            return output
        output = unfinished.note(output)
        if output.finish_reason is not None:
            del self._all[output.request_id]
        return output

    def take(self, at_once: bool = False) -> list[Request]:
        """What rank 0 is to get now. at_once: all that it has not got, whatever they did."""
        waiting = [each for each in self if not each.is_sent]
        waiting.sort(key=lambda each: (not each.runs_alone, each.request.priority, each.request.arrival_time))
        sent = [each for each in self if each.is_sent]
        num_sent, on_trial = len(sent), any(each.is_suspect for each in sent)
        taken: dict[str, Request] = {}
        for each in waiting:
            # One that waits for a sequence slot cannot go on, and would seem to be the cause of another death.
            room = 1 if each.runs_alone else self.room
            if not at_once and (on_trial or (each.is_suspect and num_sent >= room)):
                break
            each.is_sent, on_trial = True, each.is_suspect
            num_sent += 1
            shares = each.request.fork_of in taken and not (each.has_begun or each.deaths)
            taken[each.request.request_id] = each.request if shares else each.resumed()
        self.holds_back = len(taken) < len(waiting)
        return list(taken.values())

    def lose(self) -> list[Unfinished]:
        """The ranks have died. Returns the requests that are given up."""
        was_alone = sum(each.is_sent for each in self) == 1
        given_up = []
        for each in self:
            if each.is_sent:
                most = MOST_DEATHS if was_alone else HOPELESS_DEATHS
                each.deaths = 1 if each.went_on else each.deaths + 1
                if each.deaths >= most:
                    given_up.append(each)
            each.is_sent = each.went_on = False
        self.holds_back = bool(self._all)
        return given_up
