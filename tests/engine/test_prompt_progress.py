"""The line of the requests that wait for their first step."""

from __future__ import annotations

from mlxpaged.core.engine.prompt_progress import WaitingLine
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import Priority


def request(arrival_time: float, priority: Priority = Priority.NORMAL) -> Request:
    return Request("r", [1], SamplingParams(), arrival_time, priority)


def test_requests_stand_in_line_by_class_and_age() -> None:
    line = WaitingLine()
    places = [
        line.enter(request(1.0)),
        line.enter(request(1.0)),  # as old as the first one, and came after it
        line.enter(request(0.0, Priority.LOW)),
        line.enter(request(10.5, Priority.HIGH)),  # a class is worth ten seconds
        line.enter(request(11.5, Priority.HIGH)),
    ]
    assert [line.before(place) for place in places] == [1, 2, 4, 0, 3]


def test_a_request_that_left_the_line_is_before_no_other() -> None:
    line = WaitingLine()
    first, second, third = (line.enter(request(float(time))) for time in range(3))
    line.leave(second)
    assert [line.before(place) for place in (first, third)] == [0, 1]
    line.leave(first)
    assert line.before(third) == 0
