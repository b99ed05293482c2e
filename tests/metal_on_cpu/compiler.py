"""From a generated signature to a loaded object: clang from the `ziglang` package, and a cache on disk.

The kernel is compiled as C++ for OpenCL against the headers in msl/ and MLX's own utils.h from the
installed wheel. Checked builds carry a call before every load and store (-fsanitize=thread without its
runtime: ours takes its place). What an object does when it runs is runtime/'s and launch.py's business.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import dialect
from .errors import MetalCompileError
from .signature import ATTRIBUTES, Signature

_HERE = Path(__file__).parent
_PREAMBLE = ("utils.h", "bf16.h", "bf16_math.h", "complex.h", "defines.h", "logging.h")
KERNELS = "mlx/backend/metal/kernels"

_TARGETS = {
    "x86_64": ("x86_64-linux-gnu", ["-mf16c"]),
    "aarch64": ("aarch64-linux-gnu", []),
}
_LANGUAGE = [
    "-x", "clcpp", "-cl-std=clc++2021", "-nostdinc", "-cl-no-stdinc",
    "-Xclang", "-cl-ext=-all,+cl_khr_fp16,+__opencl_c_generic_address_space",
]  # fmt: skip
_CODE = [
    # -O1 without vectorizers: a float4 load stays one, four float loads stay four. Everything is inlined,
    # so that each call in the source is a place of its own in the code, which is how divergence is told.
    "-O1", "-fPIC", "-fno-vectorize", "-fno-slp-vectorize", "-fno-exceptions", "-fno-math-errno",
    "-fno-optimize-sibling-calls", "-fno-finite-loops",
    "-mllvm", "-inline-threshold=1000000", "-mllvm", "-enable-tail-merge=0",
    "-mllvm", "-disable-tail-duplicate", "-mllvm", "-disable-early-taildup",
    "-mllvm", "-tail-dup-placement=0",
    # Plain arithmetic: no contraction, each half and bfloat operation rounded by itself.
    "-ffp-contract=off",
    "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
    # Uninitialised locals hold NaN or garbage, never a lucky zero.
    "-ftrivial-auto-var-init=pattern", "-gline-tables-only", "-gdwarf-4",
]  # fmt: skip
_CHECKS = [
    "-fsanitize=thread", "-mllvm", "-tsan-instrument-func-entry-exit=0",
    "-mllvm", "-tsan-instrument-read-before-write=1",
    "-fsanitize=array-bounds,integer-divide-by-zero", "-fno-sanitize-recover=all",
]  # fmt: skip
_WARNINGS = [
    "-Wno-unknown-attributes", "-Wno-everything", "-Werror=uninitialized", "-Werror=sometimes-uninitialized",
    "-Werror=conditional-uninitialized", "-Werror=return-type", "-Werror=array-bounds",
]  # fmt: skip

# Implicit conversions in clang's tree that Metal rejects and clang allows for its builtin type: of a float
# or half to bfloat, and, where the two meet in an expression, of a bfloat (the node below) to half.
_IMPLICIT_CAST = re.compile(r"ImplicitCastExpr .*'(?:__private )?(__bf16|half)' <FloatingCast>(?! part_of_explicit)")
_VECTOR_COMPARISON = re.compile(r"BinaryOperator .*ext_vector_type.*' '(?:[<>]=?|[=!]=|&&|\|\|)'$")
_PLACE = re.compile(r"(?:line|([^\s<>,:]+)):(\d+):\d+")


@dataclass(frozen=True)
class Compiled:
    """A kernel's shared object and the file it was compiled from."""

    library: ctypes.CDLL
    path: Path
    source: Path


def is_supported() -> bool:
    """Linux on a known processor. On a Mac the kernels run for real."""
    return platform.system() == "Linux" and platform.machine() in _TARGETS


def default_cache() -> Path:
    """$METAL_ON_CPU_CACHE, or a directory of the user alone under the temporary one: code comes from it."""
    given = os.environ.get("METAL_ON_CPU_CACHE")
    if given:
        return Path(given)
    path = Path(tempfile.gettempdir()) / f"metal_on_cpu-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user; set METAL_ON_CPU_CACHE")
    return path


@functools.cache
def _zig() -> str:
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise RuntimeError("metal_on_cpu needs the `ziglang` package (pip install ziglang): it brings clang")
    return str(Path(spec.origin).parent / "zig")


def run_zig(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """zig's own cache is in the home by default, which may be read-only."""
    cache = {"ZIG_GLOBAL_CACHE_DIR": str(default_cache() / "zig")}
    return subprocess.run([_zig(), *arguments], capture_output=True, text=True, check=False, env=cache | os.environ)


@functools.cache
def _fingerprint() -> str:
    """Of everything but the kernel that goes into an object: compiler, headers, flags, MLX."""
    digest = hashlib.sha256()
    for path in sorted((_HERE / "msl").iterdir()):
        digest.update(path.read_bytes())
    digest.update(run_zig(["version"]).stdout.encode())
    digest.update(Path(__file__).read_bytes() + Path(dialect.__file__).read_bytes())
    for name in _PREAMBLE:
        digest.update(wheel_header(name).read_bytes())
    return digest.hexdigest()


def wheel_header(name: str) -> Path:
    # mlx is a namespace package; its compiled core lies beside include/.
    core = importlib.util.find_spec("mlx.core")
    assert core is not None
    assert core.origin is not None
    return Path(core.origin).parent / "include" / KERNELS / name


def _store(path: Path, content: str) -> None:
    """Written whole or not at all: test processes may share the cache."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_text(content)
    part.replace(path)


@functools.cache
def clang_arguments(cache: Path, *, checked: bool) -> list[str]:
    """Target, language, flags, and the two libraries (ours and MLX's utils.h), parsed once for all."""
    root = cache / f"mlx-{_fingerprint()[:16]}"
    for name in _PREAMBLE:
        if not (root / KERNELS / name).exists():
            _store(root / KERNELS / name, dialect.rewrite(wheel_header(name).read_text(), is_body=False))
    triple, machine = _TARGETS[platform.machine()]
    arguments = ["-target", triple, *machine, *_LANGUAGE, *_WARNINGS, *_CODE, *(_CHECKS if checked else [])]
    arguments += ["-isystem", str(_HERE / "msl"), "-isystem", str(root)]
    key = hashlib.sha256(f"{_fingerprint()} {_HERE} {checked}".encode()).hexdigest()[:16]
    parsed = cache / f"libraries-{key}.pch"
    if not parsed.exists():
        libraries = cache / f"libraries-{key}.h"
        _store(libraries, f'#include <metal_stdlib>\n#include "{KERNELS}/utils.h"\n')
        part = parsed.with_name(f"{parsed.name}.{os.getpid()}")
        emit = [
            "-Xclang",
            "-emit-pch",
            "-Xclang",
            "-fno-pch-timestamp",
            "-c",
            "-o",
            str(part),
            str(libraries),
        ]
        done = run_zig(["clang", *arguments, *emit])
        if done.returncode:
            raise RuntimeError(f"metal_on_cpu's libraries do not compile:\n{done.stderr}")
        part.replace(parsed)
    return [*arguments, "-include-pch", str(parsed)]


_runtime: list[ctypes.CDLL] = []


def runtime(cache: Path) -> ctypes.CDLL:
    """The runtime, loaded once a process: its symbols are global, and every kernel finds its hooks there."""
    if not _runtime:
        _runtime.append(_load_runtime(cache))
    return _runtime[0]


def _load_runtime(cache: Path) -> ctypes.CDLL:
    sources = sorted((_HERE / "runtime").glob("*.c"))
    digest = hashlib.sha256(run_zig(["version"]).stdout.encode())
    for path in sorted((_HERE / "runtime").iterdir()):
        digest.update(path.read_bytes())
    target = cache / f"runtime-{digest.hexdigest()[:24]}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        part = cache / f"{target.stem}.{os.getpid()}.so"
        flags = [
            "-O2",
            "-g0",
            "-std=gnu11",
            "-fno-sanitize=undefined",
            "-U_FORTIFY_SOURCE",
            "-shared",
            "-fPIC",
        ]
        done = run_zig(["cc", *flags, "-o", str(part), *map(str, sources), "-lm", "-lrt"])
        if done.returncode:
            raise RuntimeError(f"metal_on_cpu's runtime does not compile:\n{done.stderr}")
        part.replace(target)
    return ctypes.CDLL(str(target), mode=ctypes.RTLD_GLOBAL)


def _entry(signature: Signature) -> str:
    """The C function that a fiber starts in: reads the attributes and calls the kernel."""
    arguments = []
    for i, parameter in enumerate(signature.parameters):
        pointer = f"({parameter.type.rstrip('*&')}*)arguments[{i}]"
        arguments.append(f"*{pointer}" if parameter.type.endswith("&") else pointer)
    lines = []
    for attribute in signature.attributes:
        which = list(ATTRIBUTES).index(attribute)
        lines.append(f"  uint a_{attribute}[3]; mc_attribute({which}, a_{attribute});")
        vector = f"uint3{{a_{attribute}[0], a_{attribute}[1], a_{attribute}[2]}}"
        arguments.append(vector if ATTRIBUTES[attribute] == "uint3" else f"a_{attribute}[0]")
    call = f"{signature.function}{signature.template_arguments}({', '.join(arguments)});"
    return "\n".join(
        [
            "",
            '#line 1 "entry"',
            'extern "C" void mc_attribute(int, __private uint*);',
            'extern "C" __attribute__((no_sanitize("thread")))',
            "void mc_entry(const __private ulong* arguments) {",
            *lines,
            f"  {call}",
            "}",
            "",
        ]
    )


def translation_unit(signature: Signature) -> str:
    """What clang compiles. Lines are numbered as in the source that MLX generates (`signature.source`)."""
    head = re.sub(r"\[\[[^\]]*\]\]", "", signature.head)
    types = re.findall(r"typename (\w+)", head.partition("\n")[0])
    body = dialect.rewrite(signature.body, is_body=True, types=types)
    return (
        '#line 1 "kernel"\n'
        + dialect.rewrite(signature.header, is_body=False)
        + head
        + body
        + signature.tail
        + _entry(signature)
    )


def _check_dialect(name: str, signature: Signature) -> None:
    template_types = re.findall(r"typename (\w+)", signature.head.partition("\n")[0])
    first_body_line = (signature.header + signature.head).count("\n")
    for part, offset in ((signature.header, 0), (signature.body, first_body_line)):
        try:
            dialect.check(part, template_types)
        except dialect.DialectError as error:
            line = error.line + offset
            text = signature.source.splitlines()[line - 1]
            raise MetalCompileError(f"{name}: line {line}: {error.message}\n    {text.strip()}") from None


def _check_tree(arguments: list[str], source: Path) -> None:
    """What clang takes for OpenCL without a word, and Metal does not, is found in its syntax tree."""
    done = run_zig(["clang", *arguments, "-fsyntax-only", "-Xclang", "-ast-dump", str(source)])
    file, number = "", 0
    nodes = done.stdout.splitlines()
    for node, below in zip(nodes, [*nodes[1:], ""], strict=True):
        fault = ""
        cast = _IMPLICIT_CAST.search(node)
        if cast and (cast[1] == "__bf16" or "__bf16'" in below):
            fault = "implicit conversion to or from bfloat: Metal has none but to float, use static_cast"
        elif _VECTOR_COMPARISON.search(node):
            fault = "vector comparison: bools in Metal, integers in OpenCL; compare the elements"
        # The dump names a file or a line only where it differs from the one named before.
        begin: tuple[str, int] | None = None
        for place in _PLACE.finditer(node):
            file, number = place[1] or file, int(place[2])
            begin = begin or (file, number)
        in_file, line = begin or (file, number)
        if fault and in_file == "kernel":
            text = source.read_text().partition('#line 1 "kernel"\n')[2].splitlines()[line - 1]
            raise MetalCompileError(f": line {line}: {fault}\n    {text.strip()}")


def compile_kernel(name: str, signature: Signature, *, checked: bool, cache: Path) -> Compiled:
    """The kernel as a loaded object, from the cache if it is there. Raises MetalCompileError."""
    if not is_supported():
        raise RuntimeError("metal_on_cpu runs on Linux; on a Mac use mx.fast.metal_kernel itself")
    _check_dialect(name, signature)
    try:
        unit = translation_unit(signature)
    except dialect.DialectError as error:
        raise MetalCompileError(f"{name}: line {error.line} of the body: {error.message}") from None
    key = hashlib.sha256(f"{_fingerprint()} {checked} {unit}".encode()).hexdigest()[:32]
    target = cache / f"{key}.so"
    source = cache / f"{key}.cl"
    refused = cache / f"{key}.error"
    if refused.exists():
        raise MetalCompileError(f"{name}{refused.read_text()}")
    if not target.exists():
        try:
            _build(unit, source, target, checked=checked, cache=cache)
        except MetalCompileError as error:
            _store(refused, str(error))
            raise MetalCompileError(f"{name}{error}") from None
    runtime(cache)
    return Compiled(ctypes.CDLL(str(target)), target, source)


def _build(unit: str, source: Path, target: Path, *, checked: bool, cache: Path) -> None:
    _store(source, unit)
    arguments = clang_arguments(cache, checked=checked)
    part = target.with_name(f"{target.stem}.{os.getpid()}")
    done = run_zig(["clang", *arguments, "-c", "-o", f"{part}.o", str(source)])
    if done.returncode:
        raise MetalCompileError(f" does not compile:\n{_as_metal(done.stderr)}")
    _check_tree(arguments, source)
    linked = run_zig(["ld.lld", "-shared", "-o", f"{part}.so", f"{part}.o"])
    if linked.returncode:
        raise MetalCompileError(f" does not link:\n{linked.stderr}")
    Path(f"{part}.o").unlink()
    Path(f"{part}.so").replace(target)


def _as_metal(diagnostics: str) -> str:
    """clang's words with Metal's names for the address spaces, less its notes on our entry function."""
    diagnostics = re.sub(r"(?m)^entry:.*note:.*\n(?: +\d* \|.*\n)*", "", diagnostics)
    for opencl, metal in (
        ("__global", "device"),
        ("__local", "threadgroup"),
        ("__constant", "constant"),
        ("__private", "thread"),
        ("__bf16", "bfloat"),
    ):
        diagnostics = diagnostics.replace(opencl, metal)
    return diagnostics
