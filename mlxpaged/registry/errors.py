"""Why a model is not loaded or unloaded."""


class ModelUnknownError(Exception):
    """No model of this name is served, and none is on this machine."""


class LoadFailedError(Exception):
    """The model cannot be loaded. The message says why."""


class NoRoomError(Exception):
    """The model does not fit beside those that stay loaded. The message has the numbers. for_now: whether one of them
    runs requests, so that a later attempt may succeed. in_time: whether it will fit when these have ended, and the
    models that may be unloaded are."""

    def __init__(self, message: str, for_now: bool, in_time: bool = False) -> None:
        super().__init__(message)
        self.for_now, self.in_time = for_now, in_time


class ModelBusyError(Exception):
    """The model runs requests, so that it is not unloaded."""
