"""The states of an engine, and the errors that its callers see."""

from __future__ import annotations

from enum import Enum


class EngineState(str, Enum):
    LOADING = "loading"
    READY = "ok"
    DRAINING = "draining"
    DEAD = "dead"


class EngineUnavailableError(Exception):
    """The engine takes no request now. `state` says whether that will change."""

    def __init__(self, state: EngineState, message: str) -> None:
        super().__init__(message)
        self.state = state


class QueueFullError(Exception):
    """The server has as many requests as it takes. ever: whether an empty server would take these."""

    def __init__(self, message: str, ever: bool) -> None:
        super().__init__(message)
        self.ever = ever


class DuplicateRequestError(Exception):
    """An unfinished request has this id."""


class MinTokensError(ValueError):
    """A request's min_tokens is larger than the number of tokens that it may generate."""


class RequestFailedError(Exception):
    """The engine could not complete the answer."""


class RequestCancelledError(Exception):
    """The request was cancelled by its id."""


class DeadlineExceededError(Exception):
    """The request's deadline passed, or can no longer be met."""


class EngineBusyError(Exception):
    """The engine did not reply in time. The command may still be carried out."""
