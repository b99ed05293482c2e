"""How far a measurement is, on standard error: a bar on a terminal, a line for each part elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

REFRESHES_PER_SECOND = 4
"""Few, because drawing takes time from what is measured."""


class ProgressDisplay:
    """tokens: of all that is going to be measured."""

    def __init__(self, console: Console, tokens: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=tokens)

    def __enter__(self) -> ProgressDisplay:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, part: str) -> Callable[[int], None]:
        """What is measured now. Returns what is called with the number of tokens that have been added to those done."""
        if self._console.is_terminal:
            self._progress.update(self._task, description=part)
        else:
            print(part, file=self._console.file, flush=True)
        return lambda count: self._progress.advance(self._task, count)
