"""Why a model cannot be served."""

MAX_MESSAGE = 500
"""Characters of a library's error message."""


class ModelNotFoundError(Exception):
    """There is no model of this name, here or on the hub."""


class HubError(ModelNotFoundError):
    """The hub cannot be reached, or did not send all of a model."""


class UnsupportedModelError(Exception):
    """The model exists but cannot be served, or cannot make embeddings. The message says why."""


class InsufficientMemoryError(UnsupportedModelError, MemoryError):
    """The model could be served if `missing_bytes` more of memory were free. The message has both amounts."""

    def __init__(self, message: str, missing_bytes: int) -> None:
        super().__init__(message)
        self.missing_bytes = missing_bytes


class AssistantError(UnsupportedModelError):
    """The model is an assistant, which only drafts for another one."""


class EncoderError(UnsupportedModelError):
    """The model makes embeddings or judges pairs, and generates no text: an encoder, or a decoder without a head."""


class AdapterError(UnsupportedModelError):
    """An adapter cannot be used with its model. The message names it and says why."""


def in_one_line(error: Exception) -> str:
    """The message of a library, which can have a line for each of thousands of weights."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}..."
