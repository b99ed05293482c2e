"""What macOS says of itself by sysctl. Elsewhere, all is unknown. Nothing here imports mlx."""

from __future__ import annotations

import ctypes
import re
import sys

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
