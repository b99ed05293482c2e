"""Loads OpenBLAS, with the fastest routines that the flags of the processor allow.

OpenBLAS picks its routines when it is loaded, by the family and model of the processor, and never again. It takes
Intel's families 18 and 19 and QEMU's kvm64 for a Pentium 4, and QEMU's qemu64 for an Opteron, whatever flags they have
(0.3.21 and 0.3.33). One core of an AMD EPYC has 19 GFLOP/s with the routines of 2004, and 81 with those for AVX2 (512 x
512 x 512, float32). OPENBLAS_CORETYPE names the routines, but it must be set before. So OpenBLAS is loaded and asked.
If its pick is too low, it is unloaded, and loaded again with the variable: that and the check take 40 ms. Only glibc
unloads a library, and only if nothing else in the process uses it.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
from array import array
from collections.abc import Sequence
from operator import mul
from pathlib import Path

OPENBLAS = "libopenblas.so.0"
VARIABLE = "OPENBLAS_CORETYPE"
CPUINFO = Path("/proc/cpuinfo")

AVX2 = frozenset({"avx2", "fma", "bmi1", "bmi2", "abm", "f16c", "movbe"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
NEEDED = {"SkylakeX": AVX512, "Haswell": AVX2}
"""The flags that the compiler may use in routines (-march=haswell, -march=skylake-avx512), the fastest ones first."""

OLD = (
    *("katmai", "coppermine", "northwood", "prescott", "banias", "atom", "core2", "penryn", "dunnington", "nehalem"),
    *("athlon", "opteron", "opteron_sse3", "barcelona", "nano", "sandybridge", "bobcat"),
    *("bulldozer", "piledriver", "steamroller"),
)
"""Routines for processors without AVX2 (OpenBLAS, driver/others/dynamic.c)."""

FASTER = dict.fromkeys(OLD, ("SkylakeX", "Haswell")) | dict.fromkeys(("haswell", "zen"), ("SkylakeX",))
"""What may replace a pick. A pick that is not here stays: it has AVX-512, is for one processor only (Excavator), for
another architecture, or newer than this table."""

ROWS, INNER, COLUMNS = 67, 401, 77
"""Sizes of the product that is checked: more than one block of the inner dimension, an edge in each, and more than the
million multiply-adds up to which the routines for AVX-512 are others."""


def load(only_if_loaded: bool) -> str:
    """Load OpenBLAS, so that libraries that are loaded later use it. Returns its routines, with how they were chosen if
    OpenBLAS has not picked them; empty if OpenBLAS does not tell. only_if_loaded: leave it as it is, and load nothing.
    Raises OSError if it is not installed, or not loaded."""
    library = ctypes.CDLL(OPENBLAS, mode=os.RTLD_NOLOAD if only_if_loaded else ctypes.DEFAULT_MODE)
    found = chosen(library, only_if_loaded)
    ctypes.CDLL(OPENBLAS, mode=ctypes.RTLD_GLOBAL)  # only now: what is unloaded again must not be bound to
    return found


def chosen(library: ctypes.CDLL, stays: bool) -> str:
    """Replace the routines if others are faster. Returns what `load` does. stays: the library cannot be unloaded."""
    picked = routines(library)
    if (value := os.environ.get(VARIABLE)) is not None:
        return picked and f"{picked}, with {VARIABLE}={value}"
    allowed = faster(picked)
    name = next((each for each in allowed if hasattr(library, f"gotoblas_{each.upper()}")), "")
    if not name:
        return f"{picked}; this build lacks the faster {allowed[0]}" if allowed else picked
    if stays or not is_unloaded(library):
        return f"{picked}; it was loaded before mlxpaged, {VARIABLE}={name} is faster"
    os.environ[VARIABLE] = name  # C libraries see it too
    try:
        library = ctypes.CDLL(OPENBLAS)
    finally:
        del os.environ[VARIABLE]
    if routines(library) != name:
        failure = f"{name} could not be chosen"
    elif not is_right(library):
        failure = f"{name} gave a wrong product"
    else:
        return f"{name}, by the processor's flags; its own pick is {picked}"
    is_unloaded(library)
    return f"{routines(ctypes.CDLL(OPENBLAS))}; {failure}"


def faster(picked: str) -> list[str]:
    """The routines that are faster than a pick and that the processor can run, the fastest ones first. It reads the
    flags only if there can be any: that takes 0.1 ms."""
    names = FASTER.get(picked.lower(), ())
    flags = processor_flags() if names else frozenset()
    return [name for name in names if NEEDED[name] <= flags]


def routines(library: ctypes.CDLL) -> str:
    """The processor that its routines are for; empty if it does not tell."""
    try:
        core_name = library.openblas_get_corename
    except AttributeError:
        return ""
    core_name.restype = ctypes.c_char_p
    return str(core_name().decode())


def processor_flags() -> frozenset[str]:
    """Those of the first processor of an x86, which are what the kernel supports of it; empty elsewhere."""
    try:
        with CPUINFO.open(errors="replace") as lines:
            found = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return frozenset()
    return frozenset(found.partition(":")[2].split())


def is_unloaded(library: ctypes.CDLL) -> bool:
    """Unload it. False if that had no effect, because something else uses it or the C library unloads nothing."""
    _ctypes.dlclose(library._handle)
    try:
        again = ctypes.CDLL(OPENBLAS, mode=os.RTLD_NOLOAD)
    except OSError:
        return True
    _ctypes.dlclose(again._handle)
    return False


def is_right(library: ctypes.CDLL) -> bool:
    """Whether products of matrices of small integers, which float32 has exactly, are exact: a large one, one of some
    rows and columns, and one of a row, with the second matrix as it is and transposed. NumPy, which would take 0.1 s to
    import, is not needed: the first matrix is an outer product, so one row of the result gives all of them."""
    if not hasattr(library, "cblas_sgemm"):
        return False
    first, last = -(ROWS // 2), ROWS - ROWS // 2
    factors = [integer(i) for i in range(INNER)]
    b = [[integer(INNER + k * COLUMNS + j) for j in range(COLUMNS)] for k in range(INNER)]
    one = [sum(map(mul, factors, column)) for column in zip(*b, strict=True)]
    a = array("f", [scale * factor for scale in range(first, last) for factor in factors])
    plain = array("f", [number for row in b for number in row])
    transposed = array("f", [number for column in zip(*b, strict=True) for number in column])
    return all(
        product(library, a, matrix, rows, columns, is_transposed)
        == [scale * number for scale in range(first, first + rows) for number in one[:columns]]
        for rows, columns in ((ROWS, COLUMNS), (7, 9), (1, COLUMNS))
        for is_transposed, matrix in ((False, plain), (True, transposed))
    )


def integer(i: int) -> int:
    """The i-th of a sequence without a pattern, from -7 to 7."""
    return (i * 2654435761 >> 16) % 15 - 7


def product(
    library: ctypes.CDLL, a: array[float], b: array[float], rows: int, columns: int, is_transposed: bool
) -> Sequence[float]:
    """The first rows and columns of a product: a[ROWS, INNER] and b[INNER, COLUMNS], or b[COLUMNS, INNER] if that
    is_transposed. On one thread, as MLX's products are computed."""
    row_major, as_it_is, other = 101, 111, 112
    found = array("f", bytes(4 * rows * columns))
    pointers = (ctypes.c_void_p(each.buffer_info()[0]) for each in (a, b, found))
    library.openblas_set_num_threads(1)
    library.cblas_sgemm(
        *(row_major, as_it_is, other if is_transposed else as_it_is, rows, columns, INNER),
        *(ctypes.c_float(1), next(pointers), INNER),
        *(next(pointers), INNER if is_transposed else COLUMNS),
        *(ctypes.c_float(0), next(pointers), columns),
    )
    return found.tolist()
