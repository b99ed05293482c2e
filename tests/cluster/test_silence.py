"""A process is lost if it is silent, and not if the one that waits for it was stopped."""

from __future__ import annotations

from mlxpaged.cluster.messages import BEAT_SECONDS, LOST_SECONDS
from mlxpaged.cluster.silence import Silence
from tests.api.helpers import FakeClock


def test_a_peer_is_lost_after_six_silent_seconds_and_back_when_it_is_heard() -> None:
    clock = FakeClock()
    silence = Silence(clock)
    silence.heard(0)
    silence.heard(1)
    for _ in range(11):
        clock.now += 0.5
        silence.heard(1)
        assert silence.lost() == []
    clock.now += 0.5
    assert silence.lost() == [0]
    silence.heard(0)
    assert silence.lost() == []


def test_what_was_before_a_message_is_no_silence() -> None:
    clock = FakeClock()
    silence = Silence(clock)
    clock.now += 0.9
    silence.heard()
    clock.now += 0.1
    for _ in range(6):
        assert silence.lost() == []
        clock.now += 1.0
    assert silence.lost() == [0]


def test_a_pause_of_the_one_that_waits_is_not_the_silence_of_its_peers() -> None:
    """When it goes on, it may look before it has read what they have sent."""
    clock = FakeClock()
    silence = Silence(clock)
    silence.heard()
    for _ in range(int(LOST_SECONDS / BEAT_SECONDS) - 1):
        clock.now += 1000.0
        assert silence.lost() == []
    clock.now += 1000.0
    assert silence.lost() == [0], "a peer is lost if it stays silent between the pauses"


def test_who_has_never_been_heard_is_not_lost() -> None:
    clock = FakeClock()
    silence = Silence(clock)
    clock.now += LOST_SECONDS
    assert silence.lost() == []
