"""What macOS says of itself and of its user, and its assertions against sleep. Nothing is decided here.

Elsewhere, all is unknown. Nothing here imports mlx.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

Answer = TypeVar("Answer")

PRODUCT, KERNEL, BRAND = b"kern.osproductversion", b"kern.osrelease", b"machdep.cpu.brand_string"

FIRST_YEAR = 26
"""macOS 26 follows 15: numbers between are given to programs that were built for an older system."""


def sysctl_text(name: bytes) -> str:
    """A text by its name; "" if the system does not have it."""
    if sys.platform != "darwin":
        return ""
    text, size = ctypes.create_string_buffer(128), ctypes.c_size_t(128)
    found = ctypes.CDLL(None).sysctlbyname(name, text, ctypes.byref(size), None, ctypes.c_size_t(0))
    return text.value.decode() if found == 0 else ""


def chip() -> str:
    """The name of the chip, as "Apple M4 Max"; "" if macOS does not say."""
    return sysctl_text(BRAND)


def release() -> tuple[int, int]:
    """Major and minor number of macOS; (0, 0) elsewhere."""
    return release_of(sysctl_text(PRODUCT), sysctl_text(KERNEL))


def version() -> str:
    """As "26.2.1"; "" elsewhere than on macOS."""
    return version_of(sysctl_text(PRODUCT), sysctl_text(KERNEL))


def version_of(product: str, kernel: str) -> str:
    return product if is_true(product) else "{}.{}".format(*release_of(product, kernel))


def release_of(product: str, kernel: str) -> tuple[int, int]:
    """The release by the system's own number and that of its kernel.

    `platform.mac_ver()` is no source: a Python that was linked with an older SDK is told that macOS 26 is 16.0
    (python/cpython#135675), and the minor number is lost. If the system's number has that form too, the kernel's
    decides: Darwin 25.2 is macOS 26.2, since 26.0."""
    if is_true(product):
        return two_numbers(product)
    major, minor = two_numbers(kernel)
    return major + 1, minor


def is_true(product: str) -> bool:
    return not 15 < two_numbers(product)[0] < FIRST_YEAR


def two_numbers(text: str) -> tuple[int, int]:
    major, minor, *_ = [*map(int, re.findall(r"\d+", text)), 0, 0]
    return major, minor


# Frameworks, by ctypes. Each call returns None where the system cannot say it.

UTF8 = 0x08000100
ASSERTION = "PreventUserIdleSystemSleep"
"""The type of an assertion against idle sleep. The display may sleep, and so may the system if its lid is closed or
it is asked to (IOKit/pwr_mgt/IOPMLib.h)."""
LEVEL_ON = 255
SUCCESS = 0
PLUGGED_IN = -2.0
"""kIOPSTimeRemainingUnlimited: the system has another source than the battery."""
INT64 = 4
"""kCFNumberSInt64Type."""


def framework(name: str) -> Any:
    return ctypes.CDLL(f"/System/Library/Frameworks/{name}.framework/{name}")


def asked(ask: Callable[[], Answer]) -> Answer | None:
    """What a call of a framework answers; None elsewhere than on macOS, and if the framework lacks it."""
    if sys.platform != "darwin":
        return None
    try:
        return ask()
    except (OSError, AttributeError):
        return None


def core_foundation() -> Any:
    library = framework("CoreFoundation")
    library.CFStringCreateWithCString.restype = ctypes.c_void_p
    library.CFStringCreateWithCString.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint32]
    library.CFRelease.argtypes = [ctypes.c_void_p]
    library.CFNumberGetValue.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_void_p]
    library.CFNumberGetValue.restype = ctypes.c_bool
    return library


def hold_awake(why: str) -> int | None:
    """Forbid idle sleep. why: `pmset -g assertions` shows it. Returns the number for `let_sleep`; None if the system
    has refused. It ends with the process."""

    def ask() -> int | None:
        foundation, kit = core_foundation(), framework("IOKit")
        kit.IOPMAssertionCreateWithName.argtypes = (
            *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32)),
        )
        texts = [foundation.CFStringCreateWithCString(None, each.encode(), UTF8) for each in (ASSERTION, why)]
        number = ctypes.c_uint32(0)
        status = kit.IOPMAssertionCreateWithName(texts[0], LEVEL_ON, texts[1], ctypes.byref(number))
        for text in texts:
            foundation.CFRelease(text)
        return number.value if status == SUCCESS else None

    return asked(ask)


def let_sleep(assertion: int) -> None:
    asked(lambda: framework("IOKit").IOPMAssertionRelease(ctypes.c_uint32(assertion)))


def idle_seconds() -> float | None:
    """Seconds since keyboard, mouse or trackpad were used last."""

    def ask() -> float | None:
        foundation, kit = core_foundation(), framework("IOKit")
        kit.IOServiceMatching.restype = ctypes.c_void_p
        kit.IOServiceGetMatchingService.argtypes = [ctypes.c_uint32, ctypes.c_void_p]
        kit.IOServiceGetMatchingService.restype = ctypes.c_uint32
        kit.IORegistryEntryCreateCFProperty.argtypes = [
            *(ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
        ]
        kit.IORegistryEntryCreateCFProperty.restype = ctypes.c_void_p
        service = kit.IOServiceGetMatchingService(0, kit.IOServiceMatching(b"IOHIDSystem"))  # it releases the match
        if not service:
            return None
        key = foundation.CFStringCreateWithCString(None, b"HIDIdleTime", UTF8)
        value = kit.IORegistryEntryCreateCFProperty(service, key, None, 0)
        foundation.CFRelease(key)
        kit.IOObjectRelease(service)
        if not value:
            return None
        nanoseconds = ctypes.c_int64(0)
        is_read = foundation.CFNumberGetValue(value, INT64, ctypes.byref(nanoseconds))
        foundation.CFRelease(value)
        return nanoseconds.value / 1e9 if is_read else None

    return asked(ask)


def on_battery() -> bool | None:
    def ask() -> bool:
        kit = framework("IOKit")
        kit.IOPSGetTimeRemainingEstimate.restype = ctypes.c_double
        return bool(kit.IOPSGetTimeRemainingEstimate() != PLUGGED_IN)

    return asked(ask)


def low_power() -> bool | None:
    """Whether the low power mode is on."""
    answer = process_info(b"isLowPowerModeEnabled", ctypes.c_bool)
    return None if answer is None else bool(answer)


def thermal_state() -> int | None:
    """0: nominal, 1: fair, 2: serious, 3: critical (NSProcessInfoThermalState)."""
    answer = process_info(b"thermalState", ctypes.c_long)
    return None if answer is None else int(answer)


def process_info(name: bytes, kind: Any) -> Any:
    """What NSProcessInfo says. kind: the type of the answer."""

    def ask() -> Any:
        framework("Foundation")  # the class is there once it is loaded
        objc = ctypes.CDLL("/usr/lib/libobjc.A.dylib")
        objc.objc_getClass.restype = objc.sel_registerName.restype = ctypes.c_void_p
        address = ctypes.cast(objc.objc_msgSend, ctypes.c_void_p).value or 0
        send_object = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(address)
        send = ctypes.CFUNCTYPE(kind, ctypes.c_void_p, ctypes.c_void_p)(address)
        info = send_object(objc.objc_getClass(b"NSProcessInfo"), objc.sel_registerName(b"processInfo"))
        return send(info, objc.sel_registerName(name))

    return asked(ask)
