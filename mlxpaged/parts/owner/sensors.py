"""What says whether a Mac is used by a person, or short of power or cooling. Nothing here imports mlx."""

from __future__ import annotations

import math
import sys
from enum import IntEnum
from typing import NamedTuple, Protocol

from mlxpaged import macos


class Thermal(IntEnum):
    """NSProcessInfoThermalState. macOS slows the chip down from SERIOUS on."""

    NOMINAL = 0
    FAIR = 1
    SERIOUS = 2
    CRITICAL = 3


class Readings(NamedTuple):
    """idle_seconds: since keyboard, mouse or trackpad were used last; inf if that is not known."""

    idle_seconds: float = math.inf
    on_battery: bool = False
    low_power: bool = False
    thermal: Thermal = Thermal.NOMINAL


class Sensors(Protocol):
    def read(self) -> Readings: ...


class MacSensors:
    """A reading takes some calls of macOS's frameworks. What these do not know reads as unused."""

    def read(self) -> Readings:
        idle, thermal = macos.idle_seconds(), macos.thermal_state()
        return Readings(
            math.inf if idle is None else idle,
            macos.on_battery() or False,
            macos.low_power() or False,
            Thermal(min(max(thermal or 0, 0), Thermal.CRITICAL)),
        )


def sensors_here() -> Sensors | None:
    """None elsewhere than on a Mac."""
    return MacSensors() if sys.platform == "darwin" else None
