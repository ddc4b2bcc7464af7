"""What a warp does with the PTX of `packed_few_rows`: the few instructions that it uses, for 32 lanes at once.

Triton's interpreter runs no assembly, so this stands in for a GPU where there is none.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

LANES = 32


def _floats(pair: np.ndarray) -> np.ndarray:
    """Two bf16 numbers of each register, lower one first, as float64."""
    low, high = (pair << np.uint32(16)).view(np.float32), (pair & np.uint32(0xFFFF0000)).view(np.float32)
    return np.stack([low, high], -1).astype(np.float64)


def _bf16(value: np.ndarray) -> np.ndarray:
    """Bits of float64 numbers rounded to bf16, subnormal ones too."""
    bits = value.astype(np.float32).view(np.uint32)
    return (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)


def _look_up(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    result = np.zeros_like(a)
    for entry in range(8):
        if table >> entry & 1:
            result |= (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)
    return result


class Warp:
    """Registers of 32 lanes, by name; operands of the text ($0, $1, ...) are registers too."""

    def __init__(self, registers: dict[str, np.ndarray]) -> None:
        self.registers = registers

    def _read(self, name: str) -> np.ndarray:
        if name in self.registers:
            return self.registers[name]
        if name.startswith("0f"):
            return np.full(LANES, int(name[2:], 16), np.uint32).view(np.float32)
        return np.full(LANES, int(name, 0), np.uint32)

    def run(self, text: str) -> None:
        for name, operands, predicate in _instructions(text):
            active = np.ones(LANES, bool) if predicate is None else self.registers[predicate]
            self._step(name, operands, active)

    def _step(self, name: str, operands: list[Any], active: np.ndarray) -> None:
        target, *sources = operands
        if name == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32":
            self._multiply(*operands)
            return
        if name in ("ld.global.v4.b32", "ld.global.nc.b32"):
            base, offset = sources[0]
            for j, register in enumerate(target if isinstance(target, list) else [target]):
                at = self._read(base) + offset + 4 * j
                assert not (at[active] % 4).any()
                self.registers[register] = self.registers.get(register, np.zeros(LANES, np.uint32)).copy()
                self.registers[register][active] = read_memory(at[active])
            return
        if isinstance(target, list):  # mov.b64 {low, high}, both
            both = self._read(sources[0]).view(np.uint64)
            for j, register in enumerate(target):
                self.registers[register] = (both >> np.uint64(32 * j)).astype(np.uint32)
            return
        self.registers[target] = self._value(name, [self._read(each) for each in sources])

    def _value(self, name: str, a: list[np.ndarray]) -> np.ndarray:
        if name.startswith("mov"):
            value = a[0].view(np.float32) if name == "mov.f32" else a[0].view(np.uint32)
        elif name == "shr.u32":
            value = a[0] >> a[1].view(np.uint32)
        elif name == "shl.b32":
            value = a[0].view(np.uint32) << a[1].view(np.uint32)
        elif name in ("and.b32", "xor.b32", "or.b32"):
            value = {"and": np.bitwise_and, "xor": np.bitwise_xor, "or": np.bitwise_or}[name[:-4]](a[0], a[1])
        elif name == "lop3.b32":
            value = _look_up(a[0], a[1], a[2], int(a[3][0]))
        elif name == "prmt.b32":
            both = a[0].astype(np.uint64) | a[1].astype(np.uint64) << np.uint64(32)
            value = np.zeros(LANES, np.uint32)
            for j in range(4):
                byte = both >> np.uint64(8 * (int(a[2][0]) >> 4 * j & 7)) & np.uint64(255)
                value |= byte.astype(np.uint32) << np.uint32(8 * j)
        elif name == "fma.rn.bf16x2":
            bits = _bf16(_floats(a[0]) * _floats(a[1]) + _floats(a[2]))
            value = bits[:, 0] | bits[:, 1] << np.uint32(16)
        elif name == "add.f32":
            value = a[0].view(np.float32) + a[1].view(np.float32)
        elif name == "fma.rn.f32":
            first, second, third = (each.view(np.float32).astype(np.float64) for each in a)
            value = (first * second + third).astype(np.float32)
        elif name == "min.s32":
            value = np.minimum(a[0].view(np.int32), a[1].view(np.int32)).view(np.uint32)
        elif name == "mad.wide.s32":
            value = a[0].view(np.int32).astype(np.int64) * a[1].view(np.int32) + a[2]
        elif name in ("setp.gt.s32", "setp.ne.s32"):
            compare = np.greater if name == "setp.gt.s32" else np.not_equal
            value = compare(a[0].view(np.int32), a[1].view(np.int32))
        else:
            raise NotImplementedError(name)
        return value

    def _multiply(self, out: list[str], a: list[str], b: list[str], c: list[str]) -> None:
        """16 x 16 by 16 x 8; lane 4 g + t has row g and columns 2t, 2t + 1 of each quarter."""
        quarters = [_floats(self._read(each)).reshape(8, 8) for each in a]
        matrix = np.block([[quarters[0], quarters[2]], [quarters[1], quarters[3]]])
        inputs = np.concatenate([_floats(self._read(each)).reshape(8, 8) for each in b], axis=1)  # [n, k]
        product = (matrix @ inputs.T).reshape(2, 8, 4, 2)
        for j, (register, before) in enumerate(zip(out, c, strict=True)):
            part = product[j // 2, :, :, j % 2].reshape(LANES)
            self.registers[register] = (part + self._read(before).view(np.float32)).astype(np.float32)


def run_elementwise(text: str, operands: list[np.ndarray], pack: int, count: int) -> list[np.ndarray]:
    """Bits of the text's `count` results of 32, for tensors [rows, columns] dealt to lanes as `packed_few_rows` says.

    A lane's `pack` elements are of several rows, which are as many rows apart as all warps have lanes' rows.
    """
    rows, columns = np.broadcast_shapes(*(each.shape for each in operands))
    columns = max(columns, 8)  # of a tensor [rows, 1] a lane holds its one element twice
    of_a_row = columns // 4
    repeats = max(pack // of_a_row, 1)
    warps = rows // (8 * repeats)
    dealt = [
        np.broadcast_to(each, (rows, columns)).reshape(repeats, warps, 8, 4, of_a_row).transpose(1, 0, 4, 2, 3)
        for each in operands
    ]
    result = np.empty((warps, count, repeats, of_a_row, LANES), np.uint32)
    for warp in range(warps):
        dealt_here = [np.ascontiguousarray(each[warp].reshape(-1, LANES)) for each in dealt]
        found: list[list[np.ndarray]] = [[] for _ in range(count)]
        for first in range(0, repeats * of_a_row, pack):
            operands_here = [register for each in dealt_here for register in _registers(each[first : first + pack])]
            registers = {f"${pack * count + number}": register for number, register in enumerate(operands_here)}
            lanes = Warp({"%laneid": np.arange(LANES, dtype=np.uint32), **registers})
            lanes.run(text)
            for which, each in enumerate(found):
                each += [lanes.registers[f"${which * pack + e}"].view(np.uint32) for e in range(pack)]
        result[warp] = np.stack([np.stack(each).reshape(repeats, of_a_row, LANES) for each in found])
    by_result = result.reshape(warps, count, repeats, of_a_row, 8, 4).transpose(1, 2, 0, 4, 5, 3)
    return list(by_result.reshape(count, rows, columns))


def _registers(elements: np.ndarray) -> Iterator[np.ndarray]:
    """Elements [n, lanes] as operands; two of 16 bits are one."""
    if elements.dtype.itemsize == 2:
        halves = elements.view(np.uint16).astype(np.uint32)
        elements = halves[0::2] | halves[1::2] << np.uint32(16)
    elif elements.dtype == np.int32:
        elements = elements.view(np.uint32)
    yield from (each.copy() for each in elements)


def run_assembly(patch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter run the assembly of `packed_few_rows` from here on."""

    class Call(NamedTuple):
        results: list[Any]

        def get_result(self, index: int) -> Any:
            return self.results[index]

    def create(
        self: Any, text: str, constraints: str, values: list[Any], types: list[Any], pure: bool, pack: int
    ) -> Call:
        operands = [value.data for value in values]
        assert sum(each.startswith("=") for each in constraints.split(",")) == pack * len(types)
        results = run_elementwise(text, operands, pack, len(types))
        if types[0].scalar == tl.float32:
            return Call([interpreter.TensorHandle(bits.view(np.float32), tl.float32) for bits in results])
        width = operands[0].shape[1]
        return Call([interpreter.TensorHandle(bits[:, :width].copy().view(np.int32), tl.int32) for bits in results])

    patch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create)


def read_memory(addresses: np.ndarray) -> np.ndarray:
    """The process's own."""
    return np.array([ctypes.c_uint32.from_address(int(each)).value for each in addresses], np.uint32)


def _instructions(text: str) -> Iterator[tuple[str, list[Any], str | None]]:
    for line in _statements(text):
        predicate, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
        name, _, operands = rest.strip().partition(" ")
        if name.startswith(".reg"):
            continue
        yield name, [*_operands(operands)], predicate[1:] or None


def _statements(text: str) -> Iterator[str]:
    inner = text.strip()
    assert inner[0] == "{"
    assert inner[-1] == "}"
    for statement in inner[1:-1].split(";"):
        if statement.strip():
            yield " ".join(statement.split())


def _operands(text: str) -> Iterator[Any]:
    for each in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", text):
        if each[0] == "{":
            yield [name.strip() for name in each[1:-1].split(",")]
        elif each[0] == "[":
            base, _, offset = each[1:-1].partition("+")
            yield base, int(offset or "0")
        else:
            yield each
