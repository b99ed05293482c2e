"""Which source line an address in a compiled kernel belongs to: a reader of DWARF 4 line tables.

Only what clang writes for one small 64-bit little-endian object, as no tool for it comes with the compiler.
"""

from __future__ import annotations

import struct
from pathlib import Path


class _Reader:
    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def number(self, size: int, *, signed: bool = False) -> int:
        value = int.from_bytes(self.data[self.at : self.at + size], "little", signed=signed)
        self.at += size
        return value

    def leb(self, *, signed: bool = False) -> int:
        value = shift = 0
        while True:
            byte = self.number(1)
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        return value - (1 << shift) if signed and byte & 64 else value

    def string(self) -> str:
        end = self.data.index(b"\0", self.at)
        text = self.data[self.at : end].decode()
        self.at = end + 1
        return text


def _section(elf: bytes, wanted: str) -> bytes:
    offset, size, count, names_index = struct.unpack_from("<Q10xHHH", elf, 40)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, begin, length in headers:
        if _Reader(elf, names + name).string() == wanted:
            return elf[begin : begin + length]
    return b""


def line_of(path: Path, address: int) -> tuple[str, int] | None:
    """(file, line) of the code at `address`, counted from the start of the object; None if it has none."""
    table = _section(path.read_bytes(), ".debug_line")
    at = 0
    while at < len(table):
        length = int.from_bytes(table[at : at + 4], "little")
        found = _search_unit(_Reader(table, at + 4), at + 4 + length, address)
        if found is not None:
            return found
        at += 4 + length
    return None


def _search_unit(unit: _Reader, end: int, address: int) -> tuple[str, int] | None:
    if unit.number(2) != 4:
        return None
    program = unit.number(4) + unit.at
    least_instruction = unit.number(1)
    unit.number(2)  # operations per instruction, default_is_stmt
    line_base, line_range, opcode_base = unit.number(1, signed=True), unit.number(1), unit.number(1)
    operands = [unit.number(1) for _ in range(opcode_base - 1)]
    while unit.string():
        pass
    files = [""]
    while name := unit.string():
        files.append(name)
        for _ in range(3):
            unit.leb()
    unit.at = program
    pc, file, line = 0, 1, 1
    before: tuple[int, int, int] | None = None
    while unit.at < end:
        opcode = unit.number(1)
        emit = ends = False
        if opcode >= opcode_base:
            step = opcode - opcode_base
            pc += step // line_range * least_instruction
            line += line_base + step % line_range
            emit = True
        elif opcode == 0:
            length = unit.leb()
            extended = unit.number(1)
            if extended == 1:
                emit = ends = True
            elif extended == 2:
                pc = unit.number(8)
            else:
                unit.at += length - 1
        elif opcode == 1:
            emit = True
        elif opcode == 2:
            pc += unit.leb() * least_instruction
        elif opcode == 3:
            line += unit.leb(signed=True)
        elif opcode == 4:
            file = unit.leb()
        elif opcode == 8:
            pc += (255 - opcode_base) // line_range * least_instruction
        elif opcode == 9:
            pc += unit.number(2)
        else:
            for _ in range(operands[opcode - 1]):
                unit.leb()
        if emit:
            if before is not None and before[0] <= address < pc:
                return files[before[1]], before[2]
            before = (pc, file, line)
        if ends:
            pc, file, line, before = 0, 1, 1, None
    return None
