"""Turns panics of the tokenizers library into errors.

Python's binding of Rust code (PyO3) raises what Rust calls a panic as a BaseException. Nothing that handles the errors
of one request expects that: it would end the engine's thread, or the task that runs batches.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from mlxpaged.library_errors import public_reason

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class TokenizerPanicError(RuntimeError):
    """The tokenizer failed with this text or these tokens."""


def guarded(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Makes a function raise TokenizerPanicError for a panic."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        try:
            return function(*args, **options)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            logger.warning("the model's tokenizer failed: %s", error)
            raise TokenizerPanicError(f"the model's tokenizer failed: {public_reason(error)}") from None

    return call
