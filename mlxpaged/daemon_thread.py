"""Runs a function that cannot be interrupted on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_daemon_thread(function: Callable[[], Result], name: str) -> Future[Result]:
    """The caller may stop waiting for the result. Unlike an executor's thread, this one delays neither the caller nor
    the exit then."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
