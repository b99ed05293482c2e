"""Writes GGUF files with llama.cpp's own quantizers and writer, in an interpreter of its own.

Reads JSON from standard input: `file`, whose tensors are in float32; `made`, the files to be written: for each path,
the type of each tensor that gets another one; `numbers`, ggml's numbers of these types. Beside each file it writes
another one, with the values of its tensors in float32 again, as llama.cpp dequantizes them. The bindings have no
function for this. Their library exports those of ggml.h and gguf.h.
"""

from __future__ import annotations

import ctypes
import json
import sys
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from typing import Any

from xllamacpp import xllamacpp  # type: ignore[import-not-found]

VALUES = ".values"
"""What the name of the file with the values ends with."""
FLOAT32 = 0
DEQUANTIZE = {"F16": "ggml_fp16_to_fp32_row", "BF16": "ggml_bf16_to_fp32_row"}
LONGEST_ROW = 2**14
MEMORY_BYTES = 2**26
"""Most bytes of the tensors of a file that get another type."""


class Memory(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class Reading(ctypes.Structure):
    """gguf_init_params."""

    _fields_ = (("no_alloc", c_bool), ("ctx", POINTER(c_void_p)))


def functions() -> Any:
    library: Any = ctypes.CDLL(xllamacpp.__file__)
    given: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "ggml_init": (c_void_p, (Memory,)),
        "ggml_free": (None, (c_void_p,)),
        "ggml_get_tensor": (c_void_p, (c_void_p, c_char_p)),
        "ggml_get_data": (c_void_p, (c_void_p,)),
        "ggml_nelements": (c_int64, (c_void_p,)),
        "ggml_nrows": (c_int64, (c_void_p,)),
        "ggml_n_dims": (c_int, (c_void_p,)),
        "ggml_new_tensor": (c_void_p, (c_void_p, c_int, c_int, POINTER(c_int64))),
        "ggml_set_name": (c_void_p, (c_void_p, c_char_p)),
        "ggml_quantize_chunk": (c_size_t, (c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p)),
        "gguf_init_from_file": (c_void_p, (c_char_p, Reading)),
        "gguf_init_empty": (c_void_p, ()),
        "gguf_free": (None, (c_void_p,)),
        "gguf_get_n_tensors": (c_int64, (c_void_p,)),
        "gguf_get_tensor_name": (c_char_p, (c_void_p, c_int64)),
        "gguf_get_tensor_ne": (POINTER(c_int64), (c_void_p, c_int64)),
        "gguf_set_kv": (None, (c_void_p, c_void_p)),
        "gguf_add_tensor": (None, (c_void_p, c_void_p)),
        "gguf_write_to_file": (c_bool, (c_void_p, c_char_p, c_bool)),
    }
    for name, (result, arguments) in given.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def made_of(own: Any, memory: Any, name: bytes, kind: int, like: tuple[Any, int]) -> Any:
    """A new tensor. like: the sizes and their number."""
    tensor = own.ggml_new_tensor(memory, kind, like[1], like[0])
    own.ggml_set_name(tensor, name)
    return tensor


def main() -> None:
    asked, own = json.load(sys.stdin), functions()
    equal = (c_float * LONGEST_ROW)(*[1.0] * LONGEST_ROW)  # importance of the columns, which some types ask for
    tensors = c_void_p()
    read = own.gguf_init_from_file(asked["file"].encode(), Reading(False, ctypes.pointer(tensors)))
    for path, kinds in asked["made"].items():
        memory = own.ggml_init(Memory(MEMORY_BYTES, None, False))
        files = {path: own.gguf_init_empty(), f"{path}{VALUES}": own.gguf_init_empty()}
        for made in files.values():
            own.gguf_set_kv(made, read)
        for i in range(own.gguf_get_n_tensors(read)):
            name = own.gguf_get_tensor_name(read, i)
            written = again = given = own.ggml_get_tensor(tensors, name)
            if (kind := kinds.get(name.decode())) is not None:
                like = own.gguf_get_tensor_ne(read, i), own.ggml_n_dims(given)
                written = made_of(own, memory, name, asked["numbers"][kind], like)
                again = made_of(own, memory, name, FLOAT32, like)
                count, rows = own.ggml_nelements(given), own.ggml_nrows(given)
                values, data = own.ggml_get_data(given), own.ggml_get_data(written)
                own.ggml_quantize_chunk(asked["numbers"][kind], values, data, 0, rows, count // rows, equal)
                function = getattr(own, DEQUANTIZE[kind] if kind in DEQUANTIZE else f"dequantize_row_{lower(kind)}")
                function.argtypes = c_void_p, c_void_p, c_int64
                function(data, own.ggml_get_data(again), count)
            for made, tensor in zip(files.values(), (written, again), strict=True):
                own.gguf_add_tensor(made, tensor)
        for file, made in files.items():
            if not own.gguf_write_to_file(made, file.encode(), False):
                sys.exit(f"llama.cpp cannot write {file}")
            own.gguf_free(made)
        own.ggml_free(memory)


def lower(kind: str) -> str:
    """The end of the names of ggml's functions for a type."""
    return kind.lower().replace("_k", "_K")


if __name__ == "__main__":
    main()
