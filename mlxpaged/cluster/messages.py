"""What the server and its ranks tell each other."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version

from mlxpaged import __version__
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.status import EngineStats
from mlxpaged.engine.commands import Command, Question
from mlxpaged.engine.engine_thread import Failure
from mlxpaged.engine.info import EmbeddingInfo, EngineInfo, Link
from mlxpaged.engine.watchdog import StallLimits
from mlxpaged.engine_config import EngineConfig
from mlxpaged.progress import Progress

BEAT_SECONDS = 1.0
LOST_SECONDS = 6.0
"""A process that has sent nothing for so long is lost. Beats come from a thread of their own, also while a rank loads
or computes."""


Versions = tuple[tuple[str, str], ...]
"""Names and versions."""

Address = tuple[str, int]


def versions() -> Versions:
    """What must be the same on all ranks."""
    names = ("mlx", "mlx-lm")
    python = ".".join(platform.python_version_tuple()[:2])
    return ("mlxpaged", __version__), *((name, version(name)) for name in names), ("Python", python)


# -- from every rank -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """steps: where rank 0 accepts the others; None of other ranks. ring: where this rank accepts the one before it, for
    each link; empty without a ring of MLX's."""

    rank: int
    pid: int
    versions: Versions
    steps: Address | None
    ring: tuple[Address, ...]


@dataclass(frozen=True)
class Beat:
    """It is alive. Sent in both directions."""


@dataclass(frozen=True)
class Failed:
    """The rank cannot go on. lost_peer: because the link to another one broke, which is more likely at fault."""

    failure: Failure
    lost_peer: bool = False


# -- from rank 0 -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progressed:
    progress: Progress


@dataclass(frozen=True)
class Ready:
    info: EngineInfo | EmbeddingInfo
    stats: EngineStats
    link: Link | None


@dataclass(frozen=True)
class Stepped:
    outputs: list[RequestOutput]
    stats: EngineStats


@dataclass(frozen=True)
class Replied:
    """number: of the Run, whose result is None, or the Ask. error: what a question raised, instead of a result."""

    number: int
    result: object
    error: Exception | None = None


# -- to the ranks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """Goes to all ranks, once, after the last one has said Hello. steps: rank 0's. ring: of all ranks."""

    config: EngineConfig
    size: int
    backend: str
    steps: Address
    ring: tuple[tuple[Address, ...], ...]
    stall_limits: StallLimits


@dataclass(frozen=True)
class Submit:
    """Goes to rank 0, as all that follow."""

    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Run:
    number: int
    command: Command


@dataclass(frozen=True)
class Ask:
    number: int
    question: Question
