"""Which requests the ranks get after they have died, in which order, and which ones are given up."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from mlxpaged.cluster.unfinished import UnfinishedRequests
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.core.scheduling.sequence import FinishReason, Priority


def request(name: str, priority: Priority = Priority.NORMAL, fork_of: str | None = None) -> Request:
    return Request(name, [1, 2], SamplingParams(seed=1), 0.0, priority, fork_of)


def unfinished(*names: str, room: int = 4) -> UnfinishedRequests:
    found = UnfinishedRequests()
    found.room = room
    found.add([request(name) for name in names])
    return found


def token(name: str, last: bool = False) -> RequestOutput:
    return RequestOutput(name, 0.0, "x", (7,), finish_reason=FinishReason.LENGTH if last else None)


def taken(requests: UnfinishedRequests) -> list[str]:
    return [each.request_id for each in requests.take()]


def given_up(requests: UnfinishedRequests) -> list[str]:
    return [each.request.request_id for each in requests.lose()]


def test_new_requests_are_taken_at_once() -> None:
    requests = unfinished(*"abcdef", room=2)
    assert taken(requests) == list("abcdef")
    assert not requests.holds_back
    assert taken(requests) == []


def test_forks_share_their_parents_blocks_until_the_ranks_have_died() -> None:
    requests = UnfinishedRequests()
    requests.add([request("a"), request("b", fork_of="a")])
    assert [each.fork_of for each in requests.take()] == [None, "a"]
    requests.lose()
    assert [each.fork_of for each in requests.take(at_once=True)] == [None, None]


def test_after_a_death_each_request_waits_until_the_one_before_has_gone_on() -> None:
    requests = unfinished(*"abc")
    taken(requests)
    requests.note(token("a"))
    assert given_up(requests) == []
    requests.add([request("new"), request("urgent", Priority.HIGH)])
    assert taken(requests) == ["urgent", "a"]
    assert requests.holds_back
    requests.note(token("urgent"))
    assert taken(requests) == []
    requests.note(token("a"))
    assert taken(requests) == ["b"]
    requests.note(token("b", last=True))
    assert taken(requests) == ["c"]
    requests.note(token("c"))
    assert taken(requests) == ["new"]
    assert not requests.holds_back


def test_a_request_is_not_taken_to_wait_for_a_slot() -> None:
    requests = unfinished(*"abc", room=2)
    taken(requests)
    requests.lose()
    for name in "ab":
        assert taken(requests) == [name]
        requests.note(token(name))
    assert taken(requests) == []
    requests.note(token("a", last=True))
    assert taken(requests) == ["c"]


def test_a_request_that_goes_on_between_deaths_is_never_given_up() -> None:
    requests = unfinished("a")
    for _ in range(5):
        assert taken(requests) == ["a"]
        requests.note(token("a"))
        assert given_up(requests) == []
    taken(requests)
    assert given_up(requests) == ["a"]


def test_a_request_that_the_ranks_did_not_have_has_seen_no_death() -> None:
    requests = unfinished("a")
    for _ in range(5):
        assert given_up(requests) == []


def test_a_request_that_was_never_alone_is_given_up_after_some_more_deaths() -> None:
    requests, failed = unfinished(*"ab"), list[str]()
    for deaths in range(1, 5):
        requests.take(at_once=True)  # because some are cancelled
        requests.note(token("b"))
        failed = given_up(requests)
        assert bool(failed) == (deaths == 4)
    assert failed == ["a"]


@pytest.mark.parametrize("seed", range(20))
def test_of_any_requests_those_that_kill_are_given_up_and_the_others_end(seed: int) -> None:
    """A request kills when it is to get a certain token."""
    rng = random.Random(seed)
    names = [f"{i}" for i in range(16)]
    kills_at = {name: rng.randrange(4) for name in rng.sample(names, rng.randrange(4))}
    lengths = {name: rng.randrange(5, 12) for name in names}
    failed, deaths = play(names, lengths, kills_at, room=rng.choice([2, 5, 16]))
    assert failed == kills_at.keys()
    assert deaths <= 3 * len(kills_at)


def play(
    names: Sequence[str], lengths: Mapping[str, int], kills_at: Mapping[str, int], room: int
) -> tuple[set[str], int]:
    """Returns the requests that are given up, and how often the ranks have died."""
    requests, num_tokens, failed, deaths = unfinished(*names, room=room), dict.fromkeys(names, 0), set[str](), 0
    on_ranks: list[str] = []
    while len(requests):
        on_ranks += taken(requests)
        assert on_ranks, "nothing goes on"
        running = on_ranks[:room]
        if any(kills_at.get(name) == num_tokens[name] for name in running):
            on_ranks, deaths = [], deaths + 1
            for each in requests.lose():
                failed.add(each.request.request_id)
                requests.note(token(each.request.request_id, last=True))
            continue
        for name in running:
            num_tokens[name] += 1
            requests.note(token(name, last=num_tokens[name] == lengths[name]))
            if num_tokens[name] == lengths[name]:
                on_ranks.remove(name)
    return failed, deaths
