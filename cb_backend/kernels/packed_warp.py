"""What a warp multiplies in products of few rows with packed weights, as PTX: 128 columns of some rows of a weight.

The tensor cores' operands lie where loads put them. Of a matrix of 16 rows and 16 columns a lane has, in each of two
rows, four columns; which four is free, as long as the inputs' are the same. So a lane's columns are the 8 of each
quarter of the block whose elements are the same 16 bytes of a row, and nothing is moved between lanes. Integers stay
exact integers and a group's scale goes to its sum; floats of 4 bits are multiplied by their scale, which is exact.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

HALVES = {"int4": 1, "fp4": 1, "int8": 2, "fp8": 2}  # of a row's 128 elements, each 64 bytes


def _unpacked(kind: str, part: int, word: str, factor: str, target: str) -> str:
    """Two bf16 numbers of the elements of a 32-bit word that belong to one part of the block.

    factor: minus the integers' offset and 128, or fp4's scale; fp8 and int8 have none.
    """
    if kind == "int4":  # 0x4300 | v is 128 + v
        shifted = f"shr.u32 t, {word}, {4 * part}; " if part else ""
        source = "t" if part else word
        raised = f"{shifted}lop3.b32 t, {source}, 0x000f000f, 0x43004300, 0xea; "
        return f"{raised}fma.rn.bf16x2 {target}, t, one, {factor};"
    if kind == "fp4":  # exponent and mantissa where bf16 has its lowest
        size = f"shl.b32 t, {word}, {6 - 4 * part};" if part < 2 else f"shr.u32 t, {word}, {4 * part - 6};"
        sign = f"shl.b32 u, {word}, {12 - 4 * part}; " if part < 3 else f"mov.b32 u, {word}; "
        joined = f"{size} and.b32 t, t, 0x01c001c0; {sign}lop3.b32 t, u, 0x80008000, t, 0xea; "
        return f"{joined}fma.rn.bf16x2 {target}, t, {factor}, none;"
    is_low = part < 2  # of 8-bit numbers: the first two parts are in the words' lower bytes
    if kind == "fp8":
        size = f"shl.b32 t, {word}, 4;" if is_low else f"shr.u32 t, {word}, 4;"
        sign = f"shl.b32 u, {word}, 8;" if is_low else f"mov.b32 u, {word};"
        joined = f"{size} and.b32 t, t, 0x07f007f0; {sign} lop3.b32 t, u, 0x80008000, t, 0xea; "
        return f"{joined}fma.rn.bf16x2 {target}, t, up, none;"
    byte = f"mov.b32 v, {word};" if is_low else f"shr.u32 v, {word}, 8;"
    # 0x4300 | low 7 bits is 128 + them; bit 7 turns the 256 that is taken off into 128.
    joined = f"{byte} lop3.b32 t, v, 0x007f007f, 0x43004300, 0xea; and.b32 u, v, 0x00800080; xor.b32 u, u, 0xc380c380; "
    return f"{joined}fma.rn.bf16x2 {target}, t, one, u;"


class _Operands(NamedTuple):
    """Names of the text's operands, in its order: each once for every element that a lane has, row by row."""

    out: list[str]  # sums
    acc: list[str]
    words: list[list[str]]  # 16 bytes a row; of 8-bit numbers two
    scales: list[list[str]]  # the 32 bits around each part's scale
    zeros: list[list[str]]  # the same of zero points, where there are any
    address: str  # of the lane's first input
    step: str  # bytes from an input to the next
    left: str  # inputs after the first; negative where that is past the last
    constraints: str


def _operands(kind: str, tiles: int, pairs: int, has_zeros: bool) -> _Operands:
    size, halves, numbers = 4 * pairs * tiles, HALVES[kind], 8 if has_zeros else 4
    counts = [size, size, *[2 * pairs * min(2 * tiles, 4)] * halves, *[size] * (numbers + 3)]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    names = [[f"${start + e}" for e in range(count)] for start, count in zip(starts, counts, strict=True)]
    letters = ["=f", "f", *["l" if tiles == 1 else "r"] * halves, *["r"] * numbers, "l", "r", "r"]
    constraints = ",".join(letter for letter, count in zip(letters, counts, strict=True) for _ in range(count))
    by_group = names[2 + halves : -3]
    address, step, left = (each[0] for each in names[-3:])
    return _Operands(
        names[0], names[1], names[2 : 2 + halves], by_group[:4], by_group[4:], address, step, left, constraints
    )


@functools.cache
def product_text(kind: str, tiles: int, pairs: int, group: int, has_zeros: bool, is_scale_32: bool) -> tuple[str, str]:
    """PTX and constraints of a warp's product: 16 * pairs rows of the weight, 128 columns, 8 * tiles inputs.

    A lane's elements are those of 2 * tiles inputs in each of 2 * pairs rows; operands: `_Operands`.
    group: how many of a block's 128 columns share a scale.
    """
    given, per_row, rows = _operands(kind, tiles, pairs, has_zeros), 2 * tiles, 2 * pairs
    size = per_row * rows
    lines = [
        ".reg .b32 t, u, v, lane, two, four, a0, a1, a2, a3, one, none, up; .reg .b64 at;",
        "mov.b32 one, 0x3f803f80; mov.b32 none, 0x80008000; mov.b32 up, 0x7b807b80;",  # of bf16: 1, -0 and 2**120
        # By how much a row's 16 bits are shifted to become the upper ones, and its 8 bits to become the lowest.
        "mov.u32 lane, %laneid; shl.b32 two, lane, 2; and.b32 two, two, 16; xor.b32 two, two, 16;",
        "shl.b32 four, lane, 1; and.b32 four, four, 24;",
        *(f".reg .f32 c{e}; mov.f32 c{e}, 0f00000000;" for e in range(size)),
    ]
    words = given.words
    if tiles == 1:  # operands of 64 bits
        words = [[f"w{h}_{j}" for j in range(4 * rows)] for h in range(len(given.words))]
        for pieces, wide in zip(words, given.words, strict=True):
            lines.append(f".reg .b32 {', '.join(pieces)};")
            lines += [f"mov.b64 {{{pieces[2 * e]}, {pieces[2 * e + 1]}}}, {wide[e]};" for e in range(2 * rows)]
    for part in range(4):
        lines += _inputs(part, tiles, given)
        if part * 32 % group == 0:
            lines += _numbers(kind, part, rows, per_row, given, is_scale_32)
        lines += _multiplied(kind, part, tiles, pairs, words[part % len(words)])
        if kind != "fp4" and (part + 1) * 32 % min(group, 128) == 0:
            before = given.acc if part * 32 < group else given.out
            for e in range(size):
                f = f"f{e // per_row}"
                lines.append(f"fma.rn.f32 {given.out[e]}, c{e}, {f}, {before[e]}; mov.f32 c{e}, 0f00000000;")
    if kind == "fp4":
        lines += [f"add.f32 {given.out[e]}, c{e}, {given.acc[e]};" for e in range(size)]
    return "{\n" + "\n".join(lines) + "\n}", given.constraints


def _multiplied(kind: str, part: int, tiles: int, pairs: int, words: list[str]) -> list[str]:
    """A part's 32 columns: two products of 16 for each 16 rows of the weight and each 8 inputs."""
    lines, per_row = [], 2 * tiles
    for half in range(2):
        for pair in range(pairs):
            for a in range(4):
                row = 2 * pair + a % 2
                lines.append(_unpacked(kind, part, words[4 * row + 2 * half + a // 2], f"o{row}", f"a{a}"))
            for t in range(tiles):
                first = 2 * pair * per_row + 2 * t
                c = ", ".join(f"c{e}" for e in (first, first + 1, first + per_row, first + per_row + 1))
                b = ", ".join(f"x{part}_{t}_{2 * half + j}" for j in range(2))
                operands = f"{{{c}}}, {{a0, a1, a2, a3}}, {{{b}}}, {{{c}}}"
                lines.append(f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {operands};")
    return lines


def _inputs(part: int, tiles: int, given: _Operands) -> list[str]:
    """A lane's 8 columns of each input of a part, as 4 registers; past the last input it is the last again."""
    lines = []
    for t in range(tiles):
        names = ", ".join(f"x{part}_{t}_{j}" for j in range(4))
        lines += [
            f".reg .b32 {names}; min.s32 t, {given.left}, {2 * t};",
            f"mad.wide.s32 at, t, {given.step}, {given.address};",
            f"ld.global.v4.b32 {{{names}}}, [at+{64 * part}];",
        ]
    return lines


def _numbers(kind: str, part: int, rows: int, per_row: int, given: _Operands, is_scale_32: bool) -> list[str]:
    """The group's numbers of each row: f, what its sums are multiplied by, and o, what `_unpacked` calls factor."""
    lines = []
    for row in range(rows):
        scale = given.scales[part][per_row * row]
        if part == 0:
            lines.append(f".reg .f32 f{row}; .reg .b32 o{row};")
        if is_scale_32:
            lines.append(f"mov.b32 f{row}, {scale};")
        else:
            lines.append(f"shl.b32 t, {scale}, two; and.b32 t, t, 0xffff0000; mov.b32 f{row}, t;")
            if kind == "fp4":
                lines.append(f"prmt.b32 o{row}, t, t, 0x3232;")
        if given.zeros:
            zero = given.zeros[part][per_row * row]
            lines.append(
                f"shr.u32 t, {zero}, four; and.b32 t, t, 15; or.b32 t, t, 0xc300; prmt.b32 o{row}, t, t, 0x1010;"
            )
        elif kind == "int4" and part == 0:
            lines.append(f"mov.b32 o{row}, 0xc308c308;")
    return lines
