"""Our MSL library against Metal code that others wrote for the real one: headers of MLX's own kernels.

They compile with Apple's compiler as they are, so what they use exists there; that they compile here shows
that the library is like it. Headers with function constants, or with threadgroup variables outside the body
that MLX is given, are left out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from . import compiler, dialect

HEADERS = [
    "steel/gemm/mma.h",
    "steel/gemm/loader.h",
    "steel/gemm/transforms.h",
    "steel/attn/mma.h",
    "steel/attn/loader.h",
    "steel/attn/transforms.h",
    "steel/utils/integral_constant.h",
    "erf.h",
    "expm1f.h",
    "cexpf.h",
    "unary_ops.h",
    "ternary_ops.h",
]


@pytest.fixture(scope="session")
def rewritten(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's headers with `dialect.rewrite` applied, as the package does with utils.h."""
    root = tmp_path_factory.mktemp("mlx")
    kernels = compiler.wheel_header("utils.h").parent
    for header in kernels.rglob("*.h"):
        target = root / compiler.KERNELS / header.relative_to(kernels)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(dialect.rewrite(header.read_text(), is_body=False))
    return root


@pytest.mark.parametrize("header", HEADERS)
def test_rewriting_keeps_line_numbers(header: str) -> None:
    text = (compiler.wheel_header("utils.h").parent / header).read_text()
    assert "".join(token.text for token in dialect.tokenize(text)) == text
    for is_body in (False, True):
        assert dialect.rewrite(text, is_body=is_body).count("\n") == text.count("\n")


@pytest.mark.parametrize("header", HEADERS)
def test_header_of_mlx_compiles(rewritten: Path, tmp_path: Path, header: str) -> None:
    source = tmp_path / "include.cl"
    defines = f'#include "{compiler.KERNELS}/steel/defines.h"\n' if header.startswith("steel") else ""
    source.write_text(f'{defines}#include "{compiler.KERNELS}/{header}"\n')
    arguments = compiler.clang_arguments(compiler.default_cache(), checked=True)
    done = compiler.run_zig(["clang", *arguments, "-isystem", str(rewritten), "-fsyntax-only", str(source)])
    assert done.returncode == 0, done.stderr
