"""Which routines of OpenBLAS are used. Each case with the library itself is a process of its own."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxpaged.cpu import openblas
from mlxpaged.cpu.openblas import AVX2, AVX512, COLUMNS, FASTER, INNER, OPENBLAS, ROWS, VARIABLE
from tests.cpu.test_blas import openblas_is_installed, run


def has_routines(*names: str) -> bool:
    return openblas_is_installed() and all(hasattr(ctypes.CDLL(OPENBLAS), f"gotoblas_{name}") for name in names)


needs_avx2 = pytest.mark.skipif(
    not (openblas.processor_flags() >= AVX2 and has_routines("PRESCOTT", "HASWELL")),
    reason="needs a processor with AVX2, and OpenBLAS with the routines of many processors",
)

PICKS_PRESCOTT = (
    "import ctypes, os",
    "libc = ctypes.CDLL(None)",
    "libc.getenv.restype = ctypes.c_char_p",
    f"libc.setenv(b'{VARIABLE}', b'Prescott', 1)",  # Python does not see it
)
"""OpenBLAS does as on a processor that it takes for a Pentium 4, until the variable is set or deleted."""

DESCRIBE = (
    "from mlxpaged.cpu import blas, openblas",
    "print(blas.describe())",
    f"print(os.environ.get('{VARIABLE}'), libc.getenv(b'{VARIABLE}'))",
    "print(openblas.routines(ctypes.CDLL(openblas.OPENBLAS)))",
)


@needs_avx2
def test_a_pick_below_the_flags_is_replaced_for_this_process_alone() -> None:
    """What is loaded later, and child processes, see no variable."""
    product = (
        "import mlx.core as mx, numpy as np",
        "a, b = (np.random.default_rng(0).integers(-9, 9, shape) for shape in ((70, 300), (300, 90)))",
        "print((np.array(mx.array(a, mx.float32) @ mx.array(b, mx.float32)) == a @ b).all())",
        "assert hasattr(libc, 'cblas_sgemm')",  # of all libraries, so of MLX too
    )
    said, variables, routines, is_exact = run(*PICKS_PRESCOTT, *DESCRIBE, *product, **{VARIABLE: None}).splitlines()
    assert routines in ("Haswell", "SkylakeX")
    assert said == f"OpenBLAS ({routines}, by the processor's flags; its own pick is Prescott)"
    assert (variables, is_exact) == ("None None", "True")


@needs_avx2
def test_the_variable_of_the_environment_wins() -> None:
    said, variables, routines = run(*PICKS_PRESCOTT[:3], *DESCRIBE, **{VARIABLE: "prescott"}).splitlines()
    assert said == f"OpenBLAS (Prescott, with {VARIABLE}=prescott)"
    assert (variables, routines) == ("prescott b'prescott'", "Prescott")


@needs_avx2
@pytest.mark.parametrize("first", ["", "import mlx.core"])
def test_what_was_loaded_before_stays_and_the_user_is_told_what_to_set(first: str) -> None:
    unset = f"del os.environ['{VARIABLE}']"
    lines = run(*PICKS_PRESCOTT[:3], unset, first, *DESCRIBE, preload=OPENBLAS, **{VARIABLE: "Prescott"}).splitlines()
    told = rf"OpenBLAS \(Prescott; it was loaded before mlxpaged, {VARIABLE}=(Haswell|SkylakeX) is faster\)"
    assert re.fullmatch(told, lines[0])
    assert lines[1:] == ["None None", "Prescott"]


NOT_IN_EFFECT = "libc.setenv(b'OPENBLAS_CORETYPE', b'Prescott', 1)"
WRONG = "self.cblas_sgemm = lambda *args: None"
FAILURES = [(NOT_IN_EFFECT, "could not be chosen"), (WRONG, "gave a wrong product")]


@needs_avx2
@pytest.mark.parametrize(
    ("change", "failure"), [(NOT_IN_EFFECT, "could not be chosen"), (WRONG, "gave a wrong product")]
)
def test_if_the_choice_fails_openblas_has_its_own_pick_and_the_log_says_so(change: str, failure: str) -> None:
    changed = (
        "class CDLL(ctypes.CDLL):",
        "    def __init__(self, *args, **more):",
        f"        {change}",
        "        super().__init__(*args, **more)",
        "ctypes.CDLL = CDLL",
    )
    said, variables, routines = run(*PICKS_PRESCOTT, *changed, *DESCRIBE, **{VARIABLE: None}).splitlines()
    assert re.fullmatch(rf"OpenBLAS \({routines}; (Haswell|SkylakeX) {failure}\)", said)
    assert variables.startswith("None")
    if change == WRONG:
        alone = (
            "import ctypes",
            f"core_name = ctypes.CDLL('{OPENBLAS}').openblas_get_corename",
            "core_name.restype = ctypes.c_char_p",
            "print(core_name().decode())",
        )
        assert routines == run(*alone, **{VARIABLE: None}).strip()


# -- without the library -----------------------------------------------------------------------------------------------


class Library:
    """As much of OpenBLAS as is asked. routines: that it picks. has: routines that it has. change: what is wrong with
    its products."""

    def __init__(
        self, routines: str = "Prescott", has: tuple[str, ...] = (), change: Callable[[Any], Any] = lambda c: c
    ) -> None:
        self._change = change
        self.openblas_get_corename = lambda: routines.encode()
        for name in has:
            setattr(self, f"gotoblas_{name.upper()}", None)

    def openblas_set_num_threads(self, count: int) -> None:
        assert count == 1

    def cblas_sgemm(self, order: int, a_kind: int, b_kind: int, m: int, n: int, k: int, *rest: Any) -> None:
        """Integers, by NumPy: it uses no BLAS for them."""
        _, a, lda, b, ldb, _, c, ldc = (each.value if isinstance(each, ctypes.c_void_p) else each for each in rest)
        assert (order, a_kind, b_kind in (111, 112)) == (101, 111, True)
        left = matrix(a, ROWS, lda)[:m, :k].astype(np.int64)
        right = matrix(b, COLUMNS, ldb).T if b_kind == 112 else matrix(b, INNER, ldb)
        matrix(c, m, ldc)[:, :n] = self._change(left @ right[:k, :n].astype(np.int64))


def matrix(address: int, rows: int, columns: int) -> Any:
    pointer = ctypes.cast(address, ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(pointer, (rows, columns))


def one_wrong(c: Any) -> Any:
    c[-1, -1] += 1
    return c


def two_rows_changed(c: Any) -> Any:
    return np.concatenate([c[:-2], c[:-3:-1]])


def last_column_left_out(c: Any) -> Any:
    c[:, -1] = 0
    return c


def only_the_large_one_wrong(c: Any) -> Any:
    return one_wrong(c) if c.size == ROWS * COLUMNS else c


def only_a_single_row_wrong(c: Any) -> Any:
    return one_wrong(c) if len(c) == 1 else c


WRONG_PRODUCTS = (
    *(one_wrong, two_rows_changed, last_column_left_out),
    *(only_the_large_one_wrong, only_a_single_row_wrong, np.zeros_like),
)


def test_the_product_is_numpys() -> None:
    assert openblas.is_right(Library())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        one_wrong,
        two_rows_changed,
        last_column_left_out,
        only_the_large_one_wrong,
        only_a_single_row_wrong,
        np.zeros_like,
    ],
)
def test_a_wrong_product_is_noticed(change: Callable[[Any], Any]) -> None:
    assert not openblas.is_right(Library(change=change))  # type: ignore[arg-type]


KNIGHTS_LANDING = AVX2 | {"avx512f", "avx512cd", "avx512er", "avx512pf"}


@pytest.mark.parametrize(
    ("picked", "flags", "expected"),
    [
        ("Prescott", AVX512, ["SkylakeX", "Haswell"]),
        ("PRESCOTT", AVX2, ["Haswell"]),  # a build for one processor writes it like that
        ("Opteron_SSE3", AVX2 | {"sse2"}, ["Haswell"]),
        ("Sandybridge", {"avx"}, []),
        ("Prescott", AVX2 - {"fma"}, []),
        ("Nehalem", set(), []),
        ("Zen", AVX2, []),
        ("Zen", AVX512, ["SkylakeX"]),
        ("Haswell", AVX512 - {"avx512vl"}, []),
        ("Haswell", KNIGHTS_LANDING, []),
        ("SkylakeX", AVX512, []),
        ("Cooperlake", AVX512, []),
        ("SapphireRapids", AVX512, []),
        ("Excavator", AVX2, []),  # it has AVX2 in halves
        ("neoversen1", AVX512, []),
        ("Unknown", AVX512, []),
        ("", AVX512, []),
    ],
)
def test_what_is_faster_depends_on_the_flags(
    picked: str, flags: set[str], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cpuinfo := tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {' '.join(flags)}\nflags\t\t: none\n")
    monkeypatch.setattr(openblas, "CPUINFO", cpuinfo)
    assert openblas.faster(picked) == expected


def test_without_flags_nothing_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openblas, "CPUINFO", tmp_path / "absent")
    assert openblas.faster("Prescott") == []
    (cpuinfo := tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    monkeypatch.setattr(openblas, "CPUINFO", cpuinfo)
    assert openblas.faster("Prescott") == []


def test_the_flags_are_not_read_if_the_pick_is_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openblas, "processor_flags", pytest.fail)
    assert "skylakex" not in FASTER
    assert openblas.faster("SkylakeX") == []


@pytest.mark.parametrize(
    ("has", "said"),
    [
        ((), "Prescott; this build lacks the faster SkylakeX"),
        (("Haswell",), f"Prescott; it was loaded before mlxpaged, {VARIABLE}=Haswell is faster"),
        (("Haswell", "SkylakeX"), f"Prescott; it was loaded before mlxpaged, {VARIABLE}=SkylakeX is faster"),
    ],
)
def test_why_nothing_is_chosen_is_said(has: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(openblas, "processor_flags", lambda: AVX512)
    library: Any = Library(has=has)
    assert openblas.chosen(library, stays=True) == said
