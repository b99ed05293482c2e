"""The source that MLX generates around a kernel body, and the name it gives the function.

Follows mlx/backend/common/metal_kernel.cpp of MLX 0.32. A test compares the text with MLX's own, byte for
byte. Knows nothing of compiling or running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import mlx.core as mx

TemplateArgument = int | bool | mx.Dtype

# Inputs with fewer elements are passed in the constant address space.
MAX_CONSTANT_SIZE = 8

# In MLX's order, which is alphabetical; runtime/schedule.c answers them by position.
ATTRIBUTES: dict[str, str] = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

_TYPE_NAMES: dict[mx.Dtype, str] = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}


class Role(Enum):
    """Which part of an argument a parameter is given."""

    DATA = "data"
    SHAPE = "shape"
    STRIDES = "strides"
    NDIM = "ndim"
    OUTPUT = "output"


@dataclass(frozen=True)
class Parameter:
    """One buffer parameter of C++ type `type`; `argument` counts the inputs or the outputs."""

    name: str
    type: str
    role: Role
    argument: int

    @property
    def is_constant(self) -> bool:
        return " constant " in self.type


@dataclass(frozen=True)
class Signature:
    """The generated source in its parts; `source` is what MLX compiles."""

    function: str
    header: str
    head: str
    body: str
    instantiation: str
    template_arguments: str
    parameters: tuple[Parameter, ...]
    attributes: tuple[str, ...]

    tail = "\n}\n"

    @property
    def source(self) -> str:
        return self.header + self.head + self.body + self.tail + self.instantiation


def type_name(dtype: mx.Dtype) -> str:
    """MLX's name of a dtype in Metal source; ValueError where it has none (float64)."""
    if dtype not in _TYPE_NAMES:
        raise ValueError(f"[metal_kernel] {dtype} has no Metal type")
    return _TYPE_NAMES[dtype]


def _template_kind(argument: TemplateArgument) -> str:
    if isinstance(argument, bool):
        return "bool"
    return "int" if isinstance(argument, int) else "typename"


def _template_value(argument: TemplateArgument) -> str:
    return str(int(argument)) if isinstance(argument, int) else type_name(argument)


def generate(
    name: str,
    input_names: Sequence[str],
    inputs: Sequence[mx.array],
    output_names: Sequence[str],
    output_dtypes: Sequence[mx.Dtype],
    source: str,
    header: str,
    template: Sequence[tuple[str, TemplateArgument]],
    atomic_outputs: bool,
) -> Signature:
    """The source for these inputs; it depends on their dtypes, sizes and number of dimensions."""
    values = ", ".join(_template_value(argument) for _, argument in template)
    function = f"custom_kernel_{name}"
    if template:
        # Not quite an identifier without it: MLX 0.32.4 turns the minus sign of an argument into an
        # underscore.
        function += "__" + values.replace(", ", "_").replace("-", "_")
    for array in inputs:
        function += "_" + type_name(array.dtype)
        function += "s" if array.ndim == 0 else "c" if array.size < MAX_CONSTANT_SIZE else ""
    for dtype in output_dtypes:
        function += "_" + type_name(dtype)

    parameters: list[Parameter] = []
    for i, (input_name, array) in enumerate(zip(input_names, inputs, strict=True)):
        space = "constant" if array.size < MAX_CONSTANT_SIZE else "device"
        mark = "*" if array.ndim else "&"
        parameters.append(Parameter(input_name, f"const {space} {type_name(array.dtype)}{mark}", Role.DATA, i))
        if array.ndim:
            for role, of_role in (
                (Role.SHAPE, "const constant int*"),
                (Role.STRIDES, "const constant int64_t*"),
                (Role.NDIM, "const constant int&"),
            ):
                if f"{input_name}_{role.value}" in source:
                    parameters.append(Parameter(f"{input_name}_{role.value}", of_role, role, i))
    for i, (output_name, dtype) in enumerate(zip(output_names, output_dtypes, strict=True)):
        of_output = f"atomic<{type_name(dtype)}>" if atomic_outputs else type_name(dtype)
        parameters.append(Parameter(output_name, f"device {of_output}*", Role.OUTPUT, i))
    attributes = tuple(attribute for attribute in ATTRIBUTES if attribute in source)

    head = ""
    if template:
        kinds = ", ".join(f"{_template_kind(argument)} {key}" for key, argument in template)
        head += f"template <{kinds}>\n"
    lines = [f"  {p.type} {p.name} [[buffer({i})]]" for i, p in enumerate(parameters)]
    lines += [f"  {ATTRIBUTES[attribute]} {attribute} [[{attribute}]]" for attribute in attributes]
    head += f"[[kernel]] void {function}(\n" + ",\n".join(lines) + ") {\n"
    instantiation = ""
    if template:
        instance = f"{function}<{values}>"
        instantiation = f'\ntemplate [[host_name("{function}")]] [[kernel]] decltype({instance}) {instance};\n'
    return Signature(
        function=function,
        header=header,
        head=head,
        body=source,
        instantiation=instantiation,
        template_arguments=f"<{values}>" if template else "",
        parameters=tuple(parameters),
        attributes=attributes,
    )
