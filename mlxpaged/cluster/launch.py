"""`mlx.launch`, run by the server's own interpreter: `python -m mlxpaged.cluster.launch`. The script may not be in the
PATH.

It has one thread for each rank, which waits with `select` until the rank has written something, or can take input. A
rank can take input nearly always, so these threads never wait: together they take one core for as long as the ranks run
(MLX 0.32). `select_readable` takes the place of `select` there.
"""

from __future__ import annotations

from collections.abc import Sequence
from select import select

from mlx._distributed_utils import launch

INPUT_SECONDS = 0.2
"""How late input reaches a rank: it gets one line, at its start."""

SPOKEN: set[int] = set()
"""Inputs of ranks that have written something."""


def select_readable(
    readers: Sequence[int], writers: Sequence[int], _: Sequence[int], seconds: float
) -> tuple[list[int], list[int], list[int]]:
    """Like `select`, but it waits only for what can be read.

    Nothing can be written before something was read: the first output of a remote rank shows that its terminal does not
    echo any more. `mlx.launch` reads its first line as the name of a file, and gives that to commands. An echo of the
    secret must not be this line.
    """
    readable = select(readers, [], [], min(seconds, INPUT_SECONDS))[0]
    if readable:
        SPOKEN.update(writers)
    return readable, [each for each in writers if each in SPOKEN], []


if __name__ == "__main__":
    assert vars(launch)["select"] is select
    vars(launch)["select"] = select_readable
    launch.main()
