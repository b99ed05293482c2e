"""The batch runner: runs the requests of batches while the engine has spare capacity. Keys take turns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette

from mlxpaged.api.batches.line_queue import IDLE_SECONDS, LineQueue
from mlxpaged.api.batches.lines import FileCheck, LinePlace
from mlxpaged.api.batches.records import BatchRecord, LineError, LineErrors, OutputLine, RequestCounts, Status
from mlxpaged.api.batches.requests import (
    LineBody,
    LineRequests,
    client_of,
    failure_line,
    now,
    num_sequences,
    response_line,
)
from mlxpaged.api.batches.store import ERRORS, OUTPUT, Store
from mlxpaged.api.errors import NOT_STORED, ApiError
from mlxpaged.api.request_id import new_id
from mlxpaged.api.turns import Rules, Turn, Turns
from mlxpaged.awake import AWAKE
from mlxpaged.core.engine.errors import EngineUnavailableError
from mlxpaged.journal import Journal
from mlxpaged.library_errors import public_reason
from mlxpaged.registry.registry import Registry

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

POLL_SECONDS = 0.1
"""A batch checks at this interval whether there is room, and whether the batch or the server has to stop."""

DISK_SECONDS = 2.0
"""What could not be saved is tried again after this time."""

BATCHES = Rules("batches", at_once=8, places=1)
"""The runner asks for one turn of a key at a time. The places of the lines of 50,000 requests take 20 MB."""

PAUSE_SECONDS = 60.0
"""A batch whose lines have run for so long makes room for that of another key that waits. Its next turn checks the file
again."""

LINES = Rules("lines", at_once=10**6, places=1)
"""The size of a turn is the number of its sequences, for which the engine must have room. A batch asks for one turn at
a time."""

DISK = Rules("changes of files and batches", at_once=1, places=16)
"""There is one thread. A client is a key, or a batch, which makes one change at a time."""

MAX_GROUP = 100
"""Most refused requests whose lines are saved together."""

READING = "reading"
"""The name of the work before the first request, in a batch's journal. Requests have names of digits there."""

PROCESS_DIED = "process_died"
"""The code of what has killed the server."""


class BatchRunner:
    """Runs batches on the event loop. Each request has LOW priority and takes the same code path as one over HTTP.

    The runner ends when the server shuts down. The next start of the server runs what is left.
    """

    def __init__(self, app: Starlette, registry: Registry, store: Store) -> None:
        self._registry = registry
        self._store = store
        self.requests = LineRequests(app, registry, store)
        self._wake = asyncio.Event()  # set when there is a new batch
        self._unsaved = set[str]()  # ids of new batches
        self._current = set[str]()  # ids of batches that have their turn
        self.batch_turns, self.line_turns = Turns(BATCHES), Turns(LINES, has_room=self._has_room)
        self.disk_turns = Turns(DISK)
        self._disk_thread = ThreadPoolExecutor(1, thread_name_prefix="mlxpaged-batches")
        self.num_restarts = 0
        """How often the task that runs batches ended with an error and was started again."""
        self._restart: asyncio.TimerHandle | None = None
        self._start()

    def _start(self) -> None:
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._start_again)

    def _start_again(self, task: asyncio.Task[None]) -> None:
        """The errors of a batch end that batch. After any other error, the task that ended is replaced."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.critical("the task that runs batches ended, and is started again", exc_info=error)
        self.num_restarts += 1
        self._restart = asyncio.get_running_loop().call_later(DISK_SECONDS, self._start)

    async def add(self, batch: BatchRecord) -> None:
        """Save a new batch, and run it. Its file cannot be deleted from now on. It is saved before anything else is
        done for it. Raises OSError or TurnRefusedError if it cannot be saved, and nothing of it stays."""
        self._store.batches[batch.id] = batch
        self._unsaved.add(batch.id)
        try:
            await self._on_disk(client_of(batch), partial(self._store.add_batch, batch))
        except BaseException:
            del self._store.batches[batch.id]
            raise
        finally:
            self._unsaved.remove(batch.id)
        self._wake.set()

    async def cancel(self, batch: BatchRecord) -> None:
        """End the batch's running requests at once; finished lines stay readable. No effect while it is finalized.

        Raises OSError or TurnRefusedError if that cannot be saved. Then the batch goes on, or is cancelled when it can
        be saved.
        """

        def save() -> None:
            if batch.status in ("validating", "in_progress"):
                self._store.save_batch(batch, status="cancelling", cancelling_at=now())
                if batch.id not in self._current:
                    self._recover(batch)
                    self._publish(batch)

        await self._on_disk(client_of(batch), save)

    async def stop(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.to_thread(self._disk_thread.shutdown)

    async def _on_disk(self, client: str, function: Callable[[], Result]) -> Result:
        """Run a function that may block on the disk. One thread runs them all, and clients take turns."""
        return await self.disk_turns.run(client, 0, self._disk_thread, function)

    async def _written(self, batch: BatchRecord, function: Callable[[], Result]) -> Result:
        """Run a function that writes. While the disk refuses that, the batch waits, and its `errors` say why."""
        waits = False
        while True:
            try:
                result = await self._on_disk(batch.id, function)
            except OSError as error:
                reason = error.strerror or str(error)  # its text would name our paths
                if not waits:
                    logger.error("%s waits, because its answers cannot be saved: %s", batch.id, reason)
                waits = True
                message = f"answers cannot be saved: {reason}. The batch goes on when they can be"
                batch.errors = LineErrors(data=[LineError(code=NOT_STORED, message=message)])
                await asyncio.sleep(DISK_SECONDS)
            else:
                if waits:
                    logger.info("%s goes on", batch.id)
                    batch.errors = batch.errors if batch.status == "failed" else None
                return result

    async def _advance(self, batch: BatchRecord, old: Status, new: Status) -> None:
        """Save a new status, unless the batch was cancelled. All changes are made on the disk's thread."""

        def save() -> None:
            if batch.status == old:
                self._store.save_batch(batch, status=new, **{f"{new}_at": now()})

        await self._written(batch, save)

    async def _run(self) -> None:
        """Run the batches of each key one after the other, and those of different keys side by side."""
        with contextlib.suppress(EngineUnavailableError):
            await self._registry.wait_loaded()
            tasks: dict[str, asyncio.Task[None]] = {}  # by client
            try:
                while True:
                    for batch in list(self._store.batches.values()):
                        if batch.unfinished and batch.id not in self._unsaved and client_of(batch) not in tasks:
                            tasks[client_of(batch)] = asyncio.ensure_future(self._run_in_turn(batch))
                    self._wake.clear()
                    woken = asyncio.ensure_future(self._wake.wait())
                    try:
                        await asyncio.wait([woken, *tasks.values()], return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        woken.cancel()
                    for client in [client for client, task in tasks.items() if task.done()]:
                        tasks.pop(client).result()
            finally:
                for task in tasks.values():
                    task.cancel()
                await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _run_in_turn(self, batch: BatchRecord) -> None:
        """Run a batch until it ends or makes room for others. Raises EngineUnavailableError. Other errors end it:
        an input file that cannot be read, a bug."""
        turn = await self.batch_turns.enter(client_of(batch))
        self._current.add(batch.id)
        try:
            with AWAKE.held():
                await self._run_batch(batch)
        except EngineUnavailableError:
            raise
        except Exception as error:
            logger.exception("%s failed", batch.id)
            reason = error.strerror if isinstance(error, OSError) else None  # its text would name our paths
            message = reason or f"{type(error).__name__}: {public_reason(error)}"
            try:
                await self._fail(batch, LineError(code="batch_failed", message=message))
            except Exception:
                logger.exception("%s: the failure was not saved; a restart runs the batch again", batch.id)
                batch.status = "failed"
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                batch.status = "failed"  # it would fail again; a restart of the server runs it again
            raise
        finally:
            self._current.remove(batch.id)
            self.batch_turns.leave(turn)

    async def _fail(self, batch: BatchRecord, *errors: LineError) -> None:
        """End the batch. The finished lines stay readable."""
        try:
            results = await self._written(batch, lambda: self._publish_results(batch))
        except Exception:
            logger.exception("%s: its finished lines were not published", batch.id)
            results = {}
        ends = {"status": "failed", "failed_at": now(), "errors": LineErrors(data=list(errors)), **results}
        await self._written(batch, partial(self._store.save_batch, batch, **ends))

    async def _run_batch(self, batch: BatchRecord) -> None:
        """Run the batch from its current state to its end, or until it makes room for others. Raises
        EngineUnavailableError.

        What of it ran when a server died runs alone, and what ran in two deaths is given up.
        """
        journal = await self._written(batch, partial(self._store.journal, batch.id))
        try:
            await self._run_noted(batch, journal)
        finally:  # without a turn, for which there may be no time when the server ends
            closing = partial(journal.close, keep=batch.unfinished)
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._disk_thread, closing))

    async def _run_noted(self, batch: BatchRecord, journal: Journal) -> None:
        """journal: notes what runs."""
        if journal.has_killed(READING):
            message = "the server process died twice while it read the files of this batch"
            await self._fail(batch, LineError(code=PROCESS_DIED, message=message))
            return
        if journal.is_suspect(READING) and self._registry.num_unfinished:
            await asyncio.sleep(IDLE_SECONDS)  # it rather kills the server when these are done
        await self._written(batch, partial(journal.begin, READING))
        finished = await self._written(batch, lambda: self._recover(batch))
        if not batch.unfinished:  # it was cancelled in the meantime
            return
        file = self._store.files.get(batch.input_file_id)
        if file is None or file.status == "error":
            message = "a part of the input file is lost"
            await self._fail(batch, LineError(code="input_file_damaged", message=message, param="input_file_id"))
            return
        check = FileCheck(self._store.content(file.id), batch.endpoint)
        while not check.is_done and batch.status != "cancelling":
            await self._on_disk(batch.id, check.check_part)
        await self._on_disk(batch.id, partial(journal.end, READING))
        if check.errors:
            await self._fail(batch, *check.errors)
            return
        places = check.places
        if check.is_done:  # it was not cancelled in the meantime
            batch.request_counts.total = len(places)
        await self._advance(batch, "validating", "in_progress")
        left = [place for place in places if place.custom_id not in finished]
        logger.info("%s: %d of %d requests are left to run", batch.id, len(left), len(places))
        if not await self._run_lines(batch, left, journal):
            logger.info("%s makes room for the batches of other keys", batch.id)
            return
        await self._advance(batch, "in_progress", "finalizing")
        await self._written(batch, lambda: self._publish(batch))

    def _recover(self, batch: BatchRecord) -> set[str]:
        """Returns the custom ids of the requests that are finished, of which the record may have fewer."""
        succeeded, failed = self._store.done(batch.id, OUTPUT), self._store.done(batch.id, ERRORS)
        total = batch.request_counts.total
        batch.request_counts = RequestCounts(total=total, completed=len(succeeded), failed=len(failed))
        return succeeded | failed

    async def _run_lines(self, batch: BatchRecord, places: list[LinePlace], journal: Journal) -> bool:
        """Run requests until all are done, or the batch is cancelled or expires. Returns False if some are left because
        the batch makes room for others. journal: notes which ones run."""
        left = dict.fromkeys(places)  # requests without an output line
        waiting = LineQueue(batch.id, places, journal)
        tasks: dict[asyncio.Task[OutputLine], LinePlace] = {}
        request: tuple[LinePlace, LineBody] | None = None
        turn: Turn | None = None  # of the request
        asked, until = False, time.monotonic() + PAUSE_SECONDS
        refused: list[tuple[LinePlace, OutputLine]] = []

        async def append(finished: Sequence[tuple[LinePlace, OutputLine]]) -> None:
            """They count as done once they are on the disk. Each flush of the disk serves all of a kind."""
            for kind in (OUTPUT, ERRORS):
                lines = {place: line for place, line in finished if line.succeeded == (kind == OUTPUT)}
                if lines:
                    await self._written(batch, partial(self._store.append, batch.id, kind, list(lines.values())))
                    batch.request_counts.completed += len(lines) * (kind == OUTPUT)
                    batch.request_counts.failed += len(lines) * (kind == ERRORS)
                    for place in lines:
                        del left[place]
                    await self._on_disk(batch.id, partial(journal.end, *(place.name for place in lines)))

        message = "the server process died twice while it ran this request, so it is not run again"
        await append([(place, failure_line(place, PROCESS_DIED, message)) for place in waiting.killers])
        try:
            while left and not self._is_over(batch):
                # One line at least has had its chance, so that batches that take turns come to their ends.
                makes_room = asked and bool(self.batch_turns.waiting) and time.monotonic() >= until
                if makes_room and not tasks:
                    break
                place = None
                if request is None and not makes_room:
                    place = waiting.take(len(tasks), self._registry.num_unfinished)
                if place is not None:
                    await self._written(batch, partial(journal.begin, place.name))
                    try:
                        body, ignored = await self._on_disk(batch.id, partial(self.requests.read, batch, place))
                        request = place, self.requests.accepted(batch, body, ignored)
                    except ApiError as error:
                        refused.append((place, response_line(place, new_id("req"), error.status, error.body())))
                        if waiting and len(refused) < MAX_GROUP and not waiting.next_is_suspect:
                            continue
                if refused:
                    await append(refused)
                    refused = []
                    continue
                if request is not None and turn is None and not makes_room:
                    turn = self.line_turns.ask(client_of(batch), num_sequences(request[1]))
                    asked = True
                self.line_turns.begin()
                if request is not None and turn is not None and turn.has_begun:
                    task = asyncio.ensure_future(self.requests.answer(batch, *request))
                    task.add_done_callback(partial(self._end_line, turn))
                    tasks[task] = request[0]
                    request = turn = None
                    await asyncio.sleep(0)  # it is submitted before the next request asks whether there is room
                    continue
                if not tasks:
                    await asyncio.sleep(POLL_SECONDS)
                    continue
                done, _ = await asyncio.wait(tasks, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                await append([(tasks[task], task.result()) for task in done if task.exception() is None])
                for task in done:
                    del tasks[task]
                    task.result()  # raises EngineUnavailableError
        finally:
            if turn is not None:
                self.line_turns.leave(turn)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        ended = [task for task in tasks if not task.cancelled() and task.exception() is None]  # together with the batch
        await append(refused + [(tasks[task], task.result()) for task in ended])
        if batch.expired_at is not None:
            message = "the completion window closed before this request was answered"
            await append([(place, failure_line(place, "batch_expired", message)) for place in left])
        return not left or self._is_over(batch)

    def _end_line(self, turn: Turn, task: asyncio.Task[OutputLine]) -> None:
        self.line_turns.leave(turn)

    def _is_over(self, batch: BatchRecord) -> bool:
        """Whether the batch was cancelled or has expired. Raises EngineUnavailableError."""
        self.requests.require_server()
        if batch.status != "cancelling" and batch.expired_at is None and now() >= batch.expires_at:
            batch.expired_at = now()
        return batch.status == "cancelling" or batch.expired_at is not None

    def _has_room(self, count: int) -> bool:
        """Whether `count` sequences may start: batches use at most half of the slots, unless nothing else runs."""
        limit, unfinished = self._registry.base.max_num_seqs, self._registry.num_unfinished
        in_flight = self.line_turns.size
        alone = unfinished == in_flight == 0
        return alone or (in_flight + count <= limit // 2 and unfinished + count <= limit)

    def _publish(self, batch: BatchRecord) -> None:
        """Publish the finished lines, and end the batch. The next start of the server can repeat this."""
        ends: dict[str, Any] = {"status": "completed", "completed_at": now()}
        if batch.cancelling_at is not None:
            ends = {"status": "cancelled", "cancelled_at": now()}
        elif batch.expired_at is not None:
            ends = {"status": "expired"}
        self._store.save_batch(batch, **ends, **self._publish_results(batch))
        logger.info("%s is %s: %s", batch.id, batch.status, batch.request_counts)

    def _publish_results(self, batch: BatchRecord) -> dict[str, str | None]:
        """Returns the fields of the batch that name its results."""
        output, errors = (self._store.publish_results(batch, kind, now()) for kind in (OUTPUT, ERRORS))
        return {"output_file_id": output, "error_file_id": errors}
