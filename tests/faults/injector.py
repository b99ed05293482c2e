"""`mlxpaged` with faults on command: `python -m tests.faults.injector SOCKET FILES serve ...`.

A thread listens on a Unix socket for lines of JSON. Each arms one place of the server: the next `times` calls there
raise, after `seconds` of sleep. With a `prefix`, only calls that concern a request count whose id begins with it. The
server itself knows nothing of this. FILES: the most open files, 0 for the machine's limit.
"""

from __future__ import annotations

import errno
import functools
import json
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ERRORS: dict[str, Callable[[str], BaseException]] = {
    "RuntimeError": RuntimeError,
    "MemoryError": MemoryError,
    "LookupError": LookupError,
    "SystemExit": SystemExit,
    "no space": lambda message: OSError(errno.ENOSPC, message),
}


@dataclass
class Armed:
    """error: a name of ERRORS or of the classes that `main` adds; None: the call only takes longer."""

    times: int
    error: str | None = None
    message: str = "injected fault"
    seconds: float = 0.0


armed: dict[str, dict[str, Armed]] = {}
"""By place and prefix."""
struck: dict[str, int] = {}
shift = wall_shift = 0.0
"""Seconds by which the clock of the server, and that of the wall, were moved."""


def strike(place: str, request_ids: Iterable[str] = ("",)) -> None:
    """Called at each place: raises if it is armed. request_ids: the requests that the call concerns."""
    names = list(request_ids)
    for prefix, fault in list(armed[place].items()):
        if any(name.startswith(prefix) for name in names):
            fault.times -= 1
            if fault.times <= 0:
                armed[place].pop(prefix, None)
            struck[place] = struck.get(place, 0) + 1
            time.sleep(fault.seconds)
            if fault.error is not None:
                raise ERRORS[fault.error](fault.message)


def before(owner: Any, name: str, place: str, ids: Callable[..., Iterable[str]] = lambda *_, **__: ("",)) -> None:
    """Strike at `place` before each call of a function. ids: the requests that the call's arguments concern."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        if armed.get(place):
            strike(place, ids(*args, **options))
        return function(*args, **options)

    setattr(owner, name, wrapped)


def of_batch(_runner: Any, step: Any, *_: Any, **__: Any) -> list[str]:
    return [row.request_id for row in step.rows]


def of_request(running: Any, *_: Any) -> list[str]:
    return [running.request.request_id]


def patch() -> None:
    """Put the places in. The imports load MLX."""
    import mlx.core as mx

    from mlxpaged.api.batches.store import Store
    from mlxpaged.core.engine.constraint import GrammarError
    from mlxpaged.core.engine.model_runner import DeviceError, ModelRunner
    from mlxpaged.core.engine.running_request import RunningRequest
    from mlxpaged.core.engine.sampler import Sampler
    from mlxpaged.core.engine.swap_space import SwapSpace
    from mlxpaged.core.scheduling.scheduler import Scheduler
    from mlxpaged.engine import awake_clock
    from mlxpaged.engine.awake_clock import AwakeClock, seconds_without_sleep
    from mlxpaged.engine.engine_thread import EngineThread
    from mlxpaged.models.text.tokenizer import Tokenizer
    from mlxpaged.parts.grammar.grammar import Grammars

    ERRORS["DeviceError"], ERRORS["GrammarError"] = DeviceError, GrammarError
    before(ModelRunner, "forward", "forward", of_batch)
    before(ModelRunner, "finish_step", "device")
    before(Sampler, "sample", "sample")
    before(SwapSpace, "store", "swap out")
    before(SwapSpace, "load", "swap in")
    before(RunningRequest, "advance", "advance", of_request)
    before(Grammars, "masks", "masks")
    before(Scheduler, "schedule", "schedule")
    before(EngineThread, "_take_turn", "turn")
    before(Store, "append", "batch line")
    before(Store, "save_batch", "batch record")
    before(Tokenizer, "encode", "tokenizer", lambda _, text, *__, **___: [text])
    before(mx, "eval", "eval")
    wall = time.time
    time.time = lambda: wall() + wall_shift
    awake_clock.seconds_without_sleep = lambda: seconds_without_sleep() + shift
    AwakeClock.__init__.__defaults__ = (awake_clock.seconds_without_sleep,)  # type: ignore[misc]


def obey(order: dict[str, Any]) -> dict[str, Any]:
    """place, prefix, and the fields of Armed: arm it; without times, disarm it. jump, wall: move the clock of the
    server, and that of the wall, by these seconds. Returns how often each place was struck so far."""
    global shift, wall_shift
    shift += order.pop("jump", 0.0)
    wall_shift += order.pop("wall", 0.0)
    if (place := order.pop("place", None)) is not None:
        prefix = order.pop("prefix", "")
        if order:
            armed.setdefault(place, {})[prefix] = Armed(**order)
        else:
            armed.get(place, {}).pop(prefix, None)
    return struck


def listen(path: str) -> None:
    Path(path).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as file:
                file.write(json.dumps(obey(json.loads(file.readline()))) + "\n")


def main(path: str, open_files: int, args: list[str]) -> int:
    from mlxpaged.cli import main as run

    patch()
    if open_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    threading.Thread(target=listen, args=(path,), daemon=True).start()
    return run(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
