"""The states of an engine, and the errors that it raises for its callers."""

from __future__ import annotations

from enum import Enum


class EngineState(str, Enum):
    LOADING = "loading"
    READY = "ok"
    STALLED = "stalled"  # a step or a load has not ended in time; `EngineThread.stall` says which
    DRAINING = "draining"
    DEAD = "dead"


class EngineUnavailableError(Exception):
    """The engine takes no requests now. `state` says whether that can change."""

    def __init__(self, state: EngineState, message: str) -> None:
        super().__init__(message)
        self.state = state


class QueueFullError(Exception):
    """The server already has as many requests as it takes. ever: whether it would take these if it had no others."""

    def __init__(self, message: str, ever: bool) -> None:
        super().__init__(message)
        self.ever = ever


class DuplicateRequestError(Exception):
    """An unfinished request has this id."""


class MinTokensError(ValueError):
    """A request's min_tokens is larger than the most tokens that it may generate."""


class RequestFailedError(Exception):
    """The engine could not complete the answer."""


class ConstraintFailedError(Exception):
    """The request's constraint cannot be enforced any further: its grammar has become too complex."""


class OutOfMemoryError(Exception):
    """An allocation failed while the request was computed. Later there may be enough memory."""


class RequestCancelledError(Exception):
    """The request was cancelled by its id."""


class DeadlineExceededError(Exception):
    """The request's deadline passed, or can no longer be met."""


class EngineBusyError(Exception):
    """The engine did not reply in time. It may still carry out the command."""


class RankLostError(Exception):
    """A rank failed or was lost, so that the ranks are not in the same state any more. The engine cannot go on: the
    model has to be loaded again, by new processes, because MLX makes a group only once in a process."""
