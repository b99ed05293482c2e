"""Shows the progress of a measurement on standard error: as a bar on a terminal, elsewhere as a line for each part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from mlxpaged.cli.bench.plan import Begin

REFRESHES_PER_SECOND = 4
"""It is low, because drawing takes time from the measurement."""


@contextlib.contextmanager
def progress_display(console: Console, tokens: int) -> Iterator[Begin]:
    """tokens: the total of the measurement."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(
        *columns,
        console=console,
        refresh_per_second=REFRESHES_PER_SECOND,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=tokens)

        def begin(part: str) -> Callable[[int], None]:
            if console.is_terminal:
                progress.update(task, description=part)
            else:
                print(part, file=console.file, flush=True)
            return lambda count: progress.advance(task, count)

        yield begin
