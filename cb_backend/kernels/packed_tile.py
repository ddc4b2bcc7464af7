"""One tile of a product with a packed weight: what every kernel with such weights calls for each 128 columns.

Elements become the inputs' own type in registers, by one shift and mask and one multiply-add for two of them, and go to
the tensor cores as a register operand. Integers stay exact integers there and their scale is applied to the sums;
floats of 4 bits are multiplied by their scale before, which is exact in bfloat16. Layouts: `packed`.
"""

from __future__ import annotations

from cb_backend.kernels.launch import jit, tl


@jit()
def _plain_part(words, factor, q: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr):
    """Part q of the words by plain arithmetic; factor: an integer's offset, or an fp4 number's scale * 2**126."""
    if KIND == "int4":
        value = ((words >> (4 * q)) & 15).to(tl.float32) - factor.to(tl.float32)
    elif KIND == "int8":
        value = ((words >> (8 * q)) & 255).to(tl.float32) - factor.to(tl.float32)
    elif KIND == "fp8":
        bits = (words >> (8 * q)) & 255
        exponent, mantissa = (bits >> 3) & 15, (bits & 7).to(tl.float32)
        size = tl.where(exponent == 0, mantissa * 0.125, 1.0 + mantissa * 0.125)
        value = size * tl.exp2((tl.maximum(exponent, 1) - 7).to(tl.float32))
        value = tl.where(bits >= 128, -value, value)
    else:
        bits = (words >> (4 * q)) & 15
        exponent, mantissa = (bits >> 1) & 3, (bits & 1).to(tl.float32)
        size = tl.where(exponent == 0, mantissa * 0.5, 1.0 + mantissa * 0.5)
        value = size * tl.exp2((tl.maximum(exponent, 1) - 1).to(tl.float32))
        value = tl.where(bits >= 8, -value, value) * (factor.to(tl.float32) * 1.1754943508222875e-38)
    return value.to(dtype)


@jit()
def four_parts(words, f0, f1, f2, f3, KIND: tl.constexpr, dtype: tl.constexpr, HAS_ASSEMBLY: tl.constexpr):
    """The four elements of each word of 4-bit numbers, as dtype, in the order of their parts.

    words: int16 [rows, 32]. f0 to f3, one a part, of dtype: the integers' offset (8, or a zero point), or the scale of
    fp4 (times 2**126), broadcast to the words' shape.
    """
    if HAS_ASSEMBLY and KIND == "int4" and dtype == tl.bfloat16:
        # 0x4300 | v is 128 + v; the offset is taken off together with the 128.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, one; mov.b32 one, 0x3f803f80;
            lop3.b32 t, $4, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $0, t, one, $5;
            shr.u32 t, $4, 4; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $1, t, one, $6;
            shr.u32 t, $4, 8; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $2, t, one, $7;
            shr.u32 t, $4, 12; lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 $3, t, one, $8;
            }""",
            "=r,=r,=r,=r,r,r,r,r,r", [words, -128.0 - f0, -128.0 - f1, -128.0 - f2, -128.0 - f3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif HAS_ASSEMBLY and KIND == "int4" and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, one; mov.b32 one, 0x3c003c00;
            lop3.b32 t, $4, 0x000f000f, 0x64006400, 0xea; fma.rn.f16x2 $0, t, one, $5;
            shr.u32 t, $4, 4; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; fma.rn.f16x2 $1, t, one, $6;
            shr.u32 t, $4, 8; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; fma.rn.f16x2 $2, t, one, $7;
            shr.u32 t, $4, 12; lop3.b32 t, t, 0x000f000f, 0x64006400, 0xea; fma.rn.f16x2 $3, t, one, $8;
            }""",
            "=r,=r,=r,=r,r,r,r,r,r", [words, -1024.0 - f0, -1024.0 - f1, -1024.0 - f2, -1024.0 - f3],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif HAS_ASSEMBLY and KIND == "fp4" and dtype == tl.bfloat16:
        # Exponent and mantissa where bfloat16 has its lowest: the number times 2**-126. Adding -0 keeps a zero's sign.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, s, none; mov.b32 none, 0x80008000;
            shl.b32 t, $4, 6; and.b32 t, t, 0x01c001c0; shl.b32 s, $4, 12; lop3.b32 t, s, 0x80008000, t, 0xea;
            fma.rn.bf16x2 $0, t, $5, none;
            shl.b32 t, $4, 2; and.b32 t, t, 0x01c001c0; shl.b32 s, $4, 8; lop3.b32 t, s, 0x80008000, t, 0xea;
            fma.rn.bf16x2 $1, t, $6, none;
            shr.u32 t, $4, 2; and.b32 t, t, 0x01c001c0; shl.b32 s, $4, 4; lop3.b32 t, s, 0x80008000, t, 0xea;
            fma.rn.bf16x2 $2, t, $7, none;
            shr.u32 t, $4, 6; and.b32 t, t, 0x01c001c0; lop3.b32 t, $4, 0x80008000, t, 0xea;
            fma.rn.bf16x2 $3, t, $8, none;
            }""",
            "=r,=r,=r,=r,r,r,r,r,r", [words, f0, f1, f2, f3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (
            _plain_part(words, f0, 0, KIND, dtype), _plain_part(words, f1, 1, KIND, dtype),
            _plain_part(words, f2, 2, KIND, dtype), _plain_part(words, f3, 3, KIND, dtype),
        )  # fmt: skip


@jit()
def two_parts(words, f0, f1, KIND: tl.constexpr, dtype: tl.constexpr, HAS_ASSEMBLY: tl.constexpr):
    """The two elements of each word of 8-bit numbers, as dtype; as `four_parts`. fp8 ignores f0 and f1."""
    if HAS_ASSEMBLY and KIND == "int8" and dtype == tl.bfloat16:
        # 0x4300 | low 7 bits is 128 + them; bit 7 turns the 256 that is taken off into 128. What is left is v - 128.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, u, v, one; mov.b32 one, 0x3f803f80;
            lop3.b32 t, $2, 0x007f007f, 0x43004300, 0xea; and.b32 u, $2, 0x00800080; xor.b32 u, u, 0xc380c380;
            fma.rn.bf16x2 t, t, one, u; fma.rn.bf16x2 $0, t, one, $3;
            shr.u32 v, $2, 8; lop3.b32 t, v, 0x007f007f, 0x43004300, 0xea; and.b32 u, v, 0x00800080;
            xor.b32 u, u, 0xc380c380;
            fma.rn.bf16x2 t, t, one, u; fma.rn.bf16x2 $1, t, one, $4;
            }""",
            "=r,=r,r,r,r", [words, 128.0 - f0, 128.0 - f1], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif HAS_ASSEMBLY and KIND == "int8" and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, one; mov.b32 one, 0x3c003c00;
            lop3.b32 t, $2, 0x00ff00ff, 0x64006400, 0xea; fma.rn.f16x2 $0, t, one, $3;
            shr.u32 t, $2, 8; lop3.b32 t, t, 0x00ff00ff, 0x64006400, 0xea; fma.rn.f16x2 $1, t, one, $4;
            }""",
            "=r,=r,r,r,r", [words, -1024.0 - f0, -1024.0 - f1], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif HAS_ASSEMBLY and KIND == "fp8" and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, s, none, up; mov.b32 none, 0x80008000; mov.b32 up, 0x7b807b80;
            shl.b32 t, $2, 4; and.b32 t, t, 0x07f007f0; shl.b32 s, $2, 8; lop3.b32 t, s, 0x80008000, t, 0xea;
            fma.rn.bf16x2 $0, t, up, none;
            shr.u32 t, $2, 4; and.b32 t, t, 0x07f007f0; lop3.b32 t, $2, 0x80008000, t, 0xea;
            fma.rn.bf16x2 $1, t, up, none;
            }""",
            "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif HAS_ASSEMBLY and KIND == "fp8" and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t, s, none, up; mov.b32 none, 0x80008000; mov.b32 up, 0x5c005c00;
            shl.b32 t, $2, 7; and.b32 t, t, 0x3f803f80; shl.b32 s, $2, 8; lop3.b32 t, s, 0x80008000, t, 0xea;
            fma.rn.f16x2 $0, t, up, none;
            shr.u32 t, $2, 1; and.b32 t, t, 0x3f803f80; lop3.b32 t, $2, 0x80008000, t, 0xea;
            fma.rn.f16x2 $1, t, up, none;
            }""",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return _plain_part(words, f0, 0, KIND, dtype), _plain_part(words, f1, 1, KIND, dtype)


@jit()
def load_group(pointer, stride, rows, number, GROUPS: tl.constexpr):
    """What a 128-column block's groups have for each of its rows, as four values a row: `by_part` of `tile_product`.

    number: the block's first group. With fewer groups than four, each stands where the parts of a word want it.
    """
    first = _load_raw(pointer + number * stride, rows)
    if GROUPS <= 1:
        return first, first, first, first
    elif GROUPS == 2:
        second = _load_raw(pointer + (number + 1) * stride, rows)
        return first, first, second, second
    else:
        return (
            first, _load_raw(pointer + (number + 1) * stride, rows), _load_raw(pointer + (number + 2) * stride, rows),
            _load_raw(pointer + (number + 3) * stride, rows),
        )  # fmt: skip


@jit()
def _load_raw(pointer, rows):
    """The 32 bits around each row's number; `each_number` takes it out.

    NOTE: a loop carries what it loads for its next round. A number of 8 or 16 bits is moved into a part of a register
    for that, and the move waits for the load, so every round would have a whole latency of memory in it.
    """
    per_word: tl.constexpr = 32 // pointer.dtype.element_ty.primitive_bitwidth
    return tl.load(pointer.to(tl.pointer_type(tl.int32), bitcast=True) + rows // per_word)


@jit()
def each_number(raw, rows, dtype: tl.constexpr):
    """Numbers of dtype (a scale's, or uint8 of zero points) out of what `load_group` loaded for each of the rows."""
    if dtype.primitive_bitwidth == 32:
        return raw.to(dtype, bitcast=True)
    elif dtype.primitive_bitwidth == 16:
        return (raw >> (rows % 2 * 16)).to(tl.int16).to(dtype, bitcast=True)
    else:
        return (raw >> (rows % 4 * 8)) & 0xFF


@jit()
def each_of_four(raw, rows, dtype: tl.constexpr):
    return (
        each_number(raw[0], rows, dtype), each_number(raw[1], rows, dtype), each_number(raw[2], rows, dtype),
        each_number(raw[3], rows, dtype),
    )  # fmt: skip


@jit()
def _columns(each, words, dtype: tl.constexpr):
    """A value a row, in the words' shape, which it may have already."""
    if len(each.shape) == 2:
        return each.to(dtype)
    else:
        return tl.broadcast_to(each.to(dtype)[:, None], words.shape)


@jit()
def _joined(parts, first: tl.constexpr, RUN: tl.constexpr, WORDS: tl.constexpr):
    """Parts `first` to `first + RUN` beside each other, [rows, RUN * WORDS]: registers are renamed, nothing moves."""
    if RUN == 1:
        return parts[first]
    elif RUN == 2:
        both = tl.permute(tl.join(parts[first], parts[first + 1]), (0, 2, 1))
        return tl.reshape(both, [both.shape[0], 2 * WORDS])
    else:
        four = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
        return tl.reshape(tl.permute(four, (0, 2, 3, 1)), [four.shape[0], 4 * WORDS])


@jit()
def _awaited(acc, HAS_ASSEMBLY: tl.constexpr):
    """acc, complete. Products with a register operand that are still under way when the loop goes on are made one by
    one: the assembler cannot tell that the next operands' registers are free."""
    if HAS_ASSEMBLY:
        return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return acc


@jit()
def tile_product(
    acc,  # fp32 [BLOCK_N, BLOCK_M]: the sums so far
    x_ptr,  # [BLOCK_M, 1]: each input row's element at the block's first column
    is_row,  # [BLOCK_M, 1]
    columns_left,  # of in_size from that column on; not looked at where IS_EVEN
    words,  # int16 [BLOCK_N, 32 or 64]
    scales,  # by_part: four of [BLOCK_N]; not looked at where there is one group for all of in_size
    zeros,  # the same, where HAS_ZEROS
    second_scales,  # by_part of the upper halves of parts: where a part has two groups (fp4 of 16)
    KIND: tl.constexpr,
    WORDS: tl.constexpr,  # 32, of 4-bit numbers, or 64
    GROUPS: tl.constexpr,  # of the block's 128 columns: 0 (the caller scales the whole sum), 1, 2, 4 or 8
    IS_SCALED_AFTER: tl.constexpr,  # integers and fp8 with scales of groups: to the sums; else to the elements
    RUN: tl.constexpr,  # parts of a word that share a scale
    JOIN: tl.constexpr,  # parts, of those of a run, that are one product: each is waited for
    HAS_ZEROS: tl.constexpr,
    IS_EVEN: tl.constexpr,  # in_size is a multiple of 128
    HAS_ASSEMBLY: tl.constexpr,
):
    """acc + W x^T over one block of 128 columns of BLOCK_N rows of W."""
    dtype = x_ptr.dtype.element_ty
    c = tl.arange(0, WORDS)[None, :]
    if KIND == "fp4":
        f0, f1, f2, f3 = (
            _columns(scales[0], words, tl.bfloat16), _columns(scales[1], words, tl.bfloat16),
            _columns(scales[2], words, tl.bfloat16), _columns(scales[3], words, tl.bfloat16),
        )  # fmt: skip
        if GROUPS == 8:
            f0 = tl.where(c < WORDS // 2, f0, _columns(second_scales[0], words, tl.bfloat16))
            f1 = tl.where(c < WORDS // 2, f1, _columns(second_scales[1], words, tl.bfloat16))
            f2 = tl.where(c < WORDS // 2, f2, _columns(second_scales[2], words, tl.bfloat16))
            f3 = tl.where(c < WORDS // 2, f3, _columns(second_scales[3], words, tl.bfloat16))
    elif HAS_ZEROS:
        f0, f1, f2, f3 = (
            _columns(zeros[0], words, dtype), _columns(zeros[1], words, dtype), _columns(zeros[2], words, dtype),
            _columns(zeros[3], words, dtype),
        )  # fmt: skip
    else:
        f0 = tl.full(words.shape, 8.0 if KIND == "int4" else 128.0, dtype)
        f1, f2, f3 = f0, f0, f0
    if WORDS == 32:
        parts = four_parts(words, f0, f1, f2, f3, KIND, dtype, HAS_ASSEMBLY)
        if not IS_SCALED_AFTER and KIND != "fp4" and GROUPS > 0:
            parts = (
                parts[0] * _columns(scales[0], words, dtype), parts[1] * _columns(scales[1], words, dtype),
                parts[2] * _columns(scales[2], words, dtype), parts[3] * _columns(scales[3], words, dtype),
            )  # fmt: skip
    else:
        parts = two_parts(words, f0, f2, KIND, dtype, HAS_ASSEMBLY)
        if not IS_SCALED_AFTER and GROUPS > 0:
            parts = (parts[0] * _columns(scales[0], words, dtype), parts[1] * _columns(scales[2], words, dtype))
    total = acc
    if IS_SCALED_AFTER:
        total = tl.zeros(acc.shape, tl.float32)
    k = tl.arange(0, JOIN * WORDS)[None, :]
    for first in tl.static_range(0, 128 // WORDS, JOIN):
        start = first * WORDS
        if IS_EVEN:
            x = tl.load(x_ptr + start + k, mask=is_row, other=0.0)
        else:
            x = tl.load(x_ptr + start + k, mask=is_row & (start + k < columns_left), other=0.0)
        total = tl.dot(_joined(parts, first, JOIN, WORDS), tl.trans(x), total, input_precision="ieee")
        if IS_SCALED_AFTER and (first + JOIN) % RUN == 0:
            # Sums of integers get their scale afterwards: once for each run of parts of a group.
            acc += total * scales[first * (WORDS // 32)].to(tl.float32)[:, None]
            if first + JOIN < 128 // WORDS:
                total = tl.zeros(acc.shape, tl.float32)
    return acc if IS_SCALED_AFTER else _awaited(total, HAS_ASSEMBLY)
