"""The stand-in for `mx.fast.metal_kernel`: same arguments, same checks of them, other machine.

Unlike MLX it runs at once, not when its outputs are evaluated; for a kernel that writes to an input in
place, that is the order in which it was called.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from . import compiler
from .compiler import Compiled
from .errors import ResourceLimit, Unrepeatable
from .launch import MAX_THREADS_PER_THREADGROUP, Argument, Bytes, LaunchRecord, launch, poisoned
from .signature import Role, Signature, TemplateArgument, generate

_as_strided: Any = mx.as_strided

Size3 = tuple[int, int, int]
Input = mx.array | bool | int | float


class MetalKernel:
    """What `Interpreter.metal_kernel` returns: call it as one calls MLX's."""

    def __init__(
        self,
        interpreter: Interpreter,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool,
        atomic_outputs: bool,
    ) -> None:
        self.name = name
        self.last_launch: LaunchRecord | None = None
        self._interpreter = interpreter
        self._input_names = list(input_names)
        self._output_names = list(output_names)
        self._source = source
        self._header = header
        self._ensure_row_contiguous = ensure_row_contiguous
        self._atomic_outputs = atomic_outputs
        self._compiled: dict[str, Compiled] = {}

    def signature(
        self,
        inputs: Sequence[mx.array],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, TemplateArgument]] = (),
    ) -> Signature:
        return generate(
            self.name,
            self._input_names,
            inputs,
            self._output_names,
            output_dtypes,
            self._source,
            self._header,
            template,
            self._atomic_outputs,
        )

    def __call__(
        self,
        *,
        inputs: Sequence[Input],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Size3,
        threadgroup: Size3,
        template: Sequence[tuple[str, TemplateArgument]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        for given, names, what in (
            (inputs, self._input_names, "inputs"),
            (output_shapes, self._output_names, "output_shapes"),
            (output_dtypes, self._output_names, "output_dtypes"),
        ):
            if len(given) != len(names):
                raise ValueError(
                    f"[metal_kernel] Expected `{what}` to have size {len(names)} but got size {len(given)}."
                )
        if len(grid) != 3 or len(threadgroup) != 3:
            raise TypeError(f"{self.name}: grid {grid} and threadgroup {threadgroup} must have three numbers")
        for _, value in template or ():
            if not isinstance(value, (bool, int, mx.Dtype)):
                raise ValueError("[metal_kernel] Invalid template argument. Must be Dtype, int or bool.")
        if _is_cpu(stream):
            raise ValueError("[metal_kernel] Only supports the GPU.")
        if min(*grid, *threadgroup) < 1:
            raise ValueError(f"{self.name}: grid {grid} and threadgroup {threadgroup} must be positive")
        threads = threadgroup[0] * threadgroup[1] * threadgroup[2]
        if threads > MAX_THREADS_PER_THREADGROUP:
            raise ResourceLimit(
                f"{self.name}: {threads} threads in a threadgroup, Metal has {MAX_THREADS_PER_THREADGROUP}"
            )
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        mx.eval(arrays)
        signature = self.signature(arrays, output_dtypes, template or ())
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{signature.source}\n```")
        outputs = [_output(shape, dtype, init_value) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
        arguments = self._arguments(signature, arrays, outputs, output_dtypes, init_value)
        self.last_launch = self._interpreter._run(
            self, signature, self._compile(signature), arguments, grid, threadgroup
        )
        return [_to_mlx(output, dtype) for output, dtype in zip(outputs, output_dtypes, strict=True)]

    def _compile(self, signature: Signature) -> Compiled:
        if signature.function not in self._compiled:
            self._compiled[signature.function] = compiler.compile_kernel(
                self.name, signature, checked=self._interpreter.checked, cache=self._interpreter.cache
            )
        return self._compiled[signature.function]

    def _arguments(
        self,
        signature: Signature,
        arrays: Sequence[mx.array],
        outputs: Sequence[Bytes],
        output_dtypes: Sequence[mx.Dtype],
        init_value: float | None,
    ) -> list[Argument]:
        views = [_view(array) for array in arrays]
        phases = [(view.ctypes.data - _allocation_phase()) % 16 for view in views]
        if self._ensure_row_contiguous:
            for i, view in enumerate(views):
                if not view.flags.c_contiguous:
                    views[i], phases[i] = np.ascontiguousarray(view), 0
        arguments = []
        for parameter in signature.parameters:
            if parameter.role is Role.OUTPUT:
                dtype = output_dtypes[parameter.argument]
                unwritten = init_value is None
                memory = outputs[parameter.argument]
                arguments.append(Argument(parameter.name, memory, is_unwritten=unwritten, dtype=dtype))
                continue
            view = views[parameter.argument]
            constant = parameter.is_constant
            if parameter.role is Role.DATA:
                phase = phases[parameter.argument]
                memory = self._interpreter.memory_of(view)
                arguments.append(Argument(parameter.name, memory, is_constant=constant, phase=phase))
                continue
            if parameter.role is Role.SHAPE:
                memory = np.array(view.shape, np.int32)
            elif parameter.role is Role.STRIDES:
                memory = np.array([stride // view.itemsize for stride in view.strides], np.int64)
            else:
                memory = np.array(view.ndim, np.int32)
            arguments.append(Argument(parameter.name, memory, is_constant=constant))
        return arguments


def _is_cpu(stream: Any) -> bool:
    """Would MLX refuse this stream? None is the GPU's default one."""
    device = getattr(stream, "device", stream)
    return device is not None and getattr(device, "type", device) == mx.cpu


@functools.cache
def _allocation_phase() -> int:
    """Addresses of whole arrays, modulo 16: MLX's CPU allocator puts them behind a header."""
    return int(_view(mx.zeros((1000,))).ctypes.data) % 16


def _view(array: mx.array) -> Bytes:
    """The array's own memory; bfloat16 as uint16."""
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def _output(shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> Bytes:
    if init_value is None:
        return poisoned(shape, _view(mx.zeros((1,), dtype)).dtype)
    return np.array(_view(mx.full(tuple(shape), init_value, dtype)))


def _to_mlx(output: Bytes, dtype: mx.Dtype) -> mx.array:
    array = mx.array(output)
    return array.view(mx.bfloat16) if dtype == mx.bfloat16 else array


@dataclass
class Interpreter:
    """Makes kernels and keeps what they did.

    checked: every load and store is checked and counted. Unchecked is faster, for large cases.
    seconds: after which a launch is given up.
    seeds: each launch runs once per seed, from the same inputs; the results must be equal.
    """

    checked: bool = True
    seeds: Sequence[int] = (0,)
    seconds: int = 120
    cache: Path = field(default_factory=compiler.default_cache)
    launches: list[LaunchRecord] = field(default_factory=list)
    _bases: weakref.WeakValueDictionary[int, mx.array] = field(default_factory=weakref.WeakValueDictionary)

    def metal_kernel(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: Mapping[str, str] | None = None,
    ) -> MetalKernel:
        """`mx.fast.metal_kernel`. The math mode has no effect: arithmetic is always the safe one."""
        if not output_names:
            raise ValueError("[metal_kernel] Must specify at least one output.")
        for option, value in (compile_options or {}).items():
            if option != "math_mode" or value not in ("safe", "relaxed", "fast"):
                raise ValueError(f"[metal_kernel] Unknown compile option `{option}` or value `{value}`.")
        return MetalKernel(self, name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs)

    def as_strided(self, array: mx.array, *args: Any, **options: Any) -> mx.array:
        """`mx.as_strided`. It notes that the result has the buffer of `array`."""
        view: mx.array = _as_strided(array, *args, **options)
        mx.eval(array, view)
        self._bases[_view(array).ctypes.data] = array
        return view

    def memory_of(self, view: Bytes) -> Bytes:
        """What a kernel may reach through an input. As on a Mac, that is a whole buffer, but only if the input begins
        where an array that was given to `mx.as_strided` begins. For all others it is the input itself."""
        base = self._bases.get(view.ctypes.data)
        return view if base is None else _view(base)

    def last_launch(self, kernel: str) -> LaunchRecord:
        """The last launch of the kernel of that name; KeyError if it was never launched."""
        for record in reversed(self.launches):
            if record.kernel == kernel:
                return record
        raise KeyError(f"{kernel} was not launched, but {sorted({r.kernel for r in self.launches})}")

    @contextmanager
    def installed(self) -> Iterator[Interpreter]:
        """In place of `mx.fast.metal_kernel` and `mx.as_strided` while the context lasts."""
        with (
            mock.patch.object(mx.fast, "metal_kernel", self.metal_kernel),
            mock.patch.object(mx, "as_strided", self.as_strided),
        ):
            yield self

    def _run(
        self,
        kernel: MetalKernel,
        signature: Signature,
        compiled: Compiled,
        arguments: Sequence[Argument],
        grid: Size3,
        threadgroup: Size3,
    ) -> LaunchRecord:
        repeats = len(self.seeds) > 1
        before = [argument.memory.copy() for argument in arguments] if repeats else []
        first: list[Bytes] = []
        for turn, seed in enumerate(self.seeds):
            if turn:
                for argument, saved in zip(arguments, before, strict=True):
                    argument.memory[...] = saved
            record = launch(
                kernel.name,
                compiled,
                signature.source,
                arguments,
                grid,
                threadgroup,
                checked=self.checked,
                seed=seed,
                seconds=self.seconds,
                cache=self.cache,
            )
            if repeats and not turn:
                first = [argument.memory.copy() for argument in arguments]
            for argument, expected in zip(arguments, first, strict=False):
                if argument.memory.tobytes() != expected.tobytes():
                    raise Unrepeatable(
                        f"{kernel.name}: {argument.name} differs between seeds {self.seeds[0]} and {seed}",
                        buffer=argument.name,
                    )
        self.launches.append(record)
        return record
