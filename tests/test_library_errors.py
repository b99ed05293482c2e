"""What a client sees of an error that another library raised."""

from __future__ import annotations

import pytest

from mlxpaged.library_errors import MAX_REASON, public_reason

RUST = """index out of bounds: the len is 1 but the index is 1
stack backtrace:
   0: rust_begin_unwind
             at /rustc/90b35a6/library/std/src/panicking.rs:665:5"""
GUIDANCE = """panic: assertion failed
<backtrace>
   0: std::backtrace::Backtrace::create
   1: llguidance::panic_utils"""


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (RUST, "index out of bounds: the len is 1 but the index is 1"),
        (GUIDANCE, "panic: assertion failed"),
        ("first\n  second\n", "first second"),
        ("at src/decoders/strip.rs:45:9: no", "at ...: no"),
        ("/Users/runner/work/parser/src/earley.rs:12:5 failed", "... failed"),
        ("[load] cannot open '/home/anna/models/a b.npy'", "[load] cannot open '... b.npy'"),
        (r"C:\\build\\mlx\\array.cpp(12): no", "...(12): no"),
        ('Traceback (most recent call last):\n  File "x.py"', "RuntimeError"),
        (
            "#/properties/a/b: and/or 3/4 of https://json-schema.org/draft",
            "#/properties/a/b: and/or 3/4 of https://json-schema.org/draft",
        ),
        ("", "RuntimeError"),
        ("x" * 10_000, f"{'x' * MAX_REASON}..."),
    ],
)
def test_a_reason_has_one_line_and_no_paths(message: str, shown: str) -> None:
    assert public_reason(RuntimeError(message)) == shown
