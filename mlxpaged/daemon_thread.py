"""Runs a function that cannot be interrupted on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


_starting = threading.Lock()


def in_daemon_thread(function: Callable[[], Result], name: str, stack_bytes: int = 0) -> Future[Result]:
    """The caller may stop waiting for the result. Unlike an executor's thread, this one delays neither the caller nor
    the exit then. stack_bytes: of the thread's stack; 0 for what the system gives, which differs."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    if not stack_bytes:
        thread.start()
        return future
    with _starting:  # the size is the process's: it is that of all threads that start now
        before = threading.stack_size(stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return future
