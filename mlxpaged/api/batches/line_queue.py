"""Orders the requests of a batch that are left. What ran when a server died runs last, one request at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from mlxpaged.api.batches.lines import LinePlace
from mlxpaged.journal import Journal

logger = logging.getLogger(__name__)

IDLE_SECONDS = 2.0
"""A request that may have killed a server waits so long until no other request runs. Then it runs beside them: a busy
server must not keep it for ever."""


class LineQueue:
    """killers: requests that ran in two deaths of a server, and are not in the queue."""

    def __init__(self, batch_id: str, places: Sequence[LinePlace], journal: Journal) -> None:
        self._journal = journal
        self.killers = [place for place in places if journal.has_killed(place.name)]
        suspects = [place for place in places if self._is_suspect(place) and not journal.has_killed(place.name)]
        others = [place for place in places if not self._is_suspect(place)]
        self._waiting = [*others, *suspects][::-1]
        self._alone_since = time.monotonic()  # no request of the batch runs since then
        if suspects:
            logger.warning("%s: %d requests ran when a server died, and run one at a time", batch_id, len(suspects))
        if self.killers:
            logger.error("%s: %d requests fail: a server died twice while each ran", batch_id, len(self.killers))

    def _is_suspect(self, place: LinePlace) -> bool:
        return self._journal.is_suspect(place.name)

    @property
    def next_is_suspect(self) -> bool:
        return bool(self._waiting) and self._is_suspect(self._waiting[-1])

    def take(self, num_running: int, num_others: int) -> LinePlace | None:
        """Returns the next request, if it may be read and run now. num_running, num_others: requests of this batch, and
        all others, that run now."""
        now = time.monotonic()
        if num_running:
            self._alone_since = now
        must_wait = num_running or (num_others and now < self._alone_since + IDLE_SECONDS)
        if not self._waiting or (must_wait and self.next_is_suspect):
            return None
        return self._waiting.pop()

    def __bool__(self) -> bool:
        return bool(self._waiting)
