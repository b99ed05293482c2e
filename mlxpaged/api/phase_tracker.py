"""Follows the phases of requests from snapshot to snapshot, for the bars of the page.

The timeline that a client asks for (`core/engine/timeline.py`) is exact. This one is as exact as the snapshots are
frequent, and costs the engine nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxpaged.core.engine.status import SequenceState
from mlxpaged.core.scheduling.sequence import SequenceStatus

MAX_ENDED = 20
UNSEEN_SECONDS = 1.0
"""A request that is older at the first snapshot began before there was a watcher: its first phases are not known."""


@dataclass
class Track:
    """segments: [phase, seconds], in order. They add up to the request's age at its last snapshot."""

    last: SequenceState
    segments: list[tuple[str, float]]

    def describe(self) -> list[list[Any]]:
        return [[phase, round(seconds, 2)] for phase, seconds in self.segments]


class PhaseTracker:
    """The phases of one engine's requests. `ended`: the last requests that ended, the latest first."""

    def __init__(self) -> None:
        self._is_first = True
        self._tracks: dict[str, Track] = {}
        self.ended: deque[Track] = deque(maxlen=MAX_ENDED)

    def update(self, sequences: Sequence[SequenceState], all_listed: bool) -> None:
        """sequences: of a snapshot. all_listed: whether it has all unfinished ones; else one that is missing may still
        be waiting."""
        for sequence in sequences:
            phase, track = phase_of(sequence), self._tracks.get(sequence.request_id)
            if track is None or track.last.age_seconds > sequence.age_seconds:  # new, or its id was used again
                unseen = self._is_first and sequence.age_seconds > UNSEEN_SECONDS
                segments = [("unseen" if unseen else phase, sequence.age_seconds)]
                self._tracks[sequence.request_id] = Track(sequence, segments)
                continue
            more = sequence.age_seconds - track.last.age_seconds
            previous, seconds = track.segments[-1]
            if previous == phase:
                track.segments[-1] = (phase, seconds + more)
            else:
                track.segments.append((phase, more))
            track.last = sequence
        self._is_first = False
        listed = {sequence.request_id for sequence in sequences}
        for request_id in self._tracks.keys() - listed:
            track = self._tracks[request_id]
            if all_listed or track.last.status is SequenceStatus.RUNNING:
                self.ended.appendleft(self._tracks.pop(request_id))

    def segments(self, request_id: str) -> list[list[Any]]:
        return self._tracks[request_id].describe()


def phase_of(sequence: SequenceState) -> str:
    if sequence.phase is not None:
        return sequence.phase.value
    return "queued" if sequence.status is SequenceStatus.WAITING else "preempted"
