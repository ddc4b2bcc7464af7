"""How the tensors of a quantised module are named, and which reader makes stored elements of them.

One class a way of storing; what a checkpoint's configuration says decides between them (`quantization`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.packed import StoredWeight
from cb_backend.layers.placement import FLOATS
from cb_backend.layers.stored_matrix import StoredAs
from cb_backend.models import stored_weights
from cb_backend.models.gguf_blocks import BLOCK_KINDS, GROUP, read_blocks

GGUF_BLOCKS = "weight_blocks"  # of a converted module: the file's own rows
Stored = Mapping[str, StoredAs]
FP8, INT8, WORDS, BYTES = (torch.float8_e4m3fn,), (torch.int8,), (torch.int32,), (torch.uint8,)
POWERS = (torch.float8_e8m0fnu,)  # of two
_NUMBERS = (torch.int32, torch.int64)  # of groups, of sizes
_WITHOUT_ORDER = "use a quantisation of the model without act-order, or the unquantised one"


def _kind(bits: int) -> str:
    return "int4" if bits == 4 else "int8"


def _told(group: int) -> str:
    return "a scale an output" if group == -1 else f"groups of {group}"


def _groups(in_size: int, group: int, where: str) -> int:
    if group == -1:
        return 1
    if in_size % group:
        raise ConfigError(f"{where}: groups of {group} do not divide the {in_size} inputs of a matrix")
    return in_size // group


class _Reader:
    """What is so of most."""

    __slots__ = ()
    has_shifts = False
    has_zeros = False
    fault_in_experts = ""


@dataclass(frozen=True, slots=True)
class AwqReader(_Reader):
    """AutoAWQ, version gemm."""

    group: int
    kind: str = "int4"
    has_zeros: bool = True

    @property
    def name(self) -> str:
        return f"AWQ int4, {_told(self.group)}"

    def tensors(self, out_size: int, in_size: int) -> Stored:
        groups = _groups(in_size, self.group, "AWQ")
        if out_size % 8:
            raise ConfigError(f"AWQ: {out_size} outputs of a matrix are not a multiple of 8")
        return {
            "qweight": StoredAs((in_size, out_size // 8), WORDS),
            "qzeros": StoredAs((groups, out_size // 8), WORDS),
            "scales": StoredAs((groups, out_size), FLOATS),
        }

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        return stored_weights.read_awq(tensors["qweight"], tensors["qzeros"], tensors["scales"])


@dataclass(frozen=True, slots=True)
class GptqReader(_Reader):
    """AutoGPTQ and GPTQModel."""

    bits: int
    group: int
    is_symmetric: bool
    is_v2: bool
    has_group_order: bool = field(default=False, compare=False)  # g_idx is not one group after the other
    has_group_index: bool = True  # as nearly all files do, whatever the order

    @property
    def kind(self) -> str:
        return _kind(self.bits)

    @property
    def has_zeros(self) -> bool:  # type: ignore[override]
        return not self.is_symmetric

    @property
    def name(self) -> str:
        return f"GPTQ int{self.bits}, {_told(self.group)}"

    @property
    def fault_in_experts(self) -> str:  # type: ignore[override]
        return f"desc_act is true; {_WITHOUT_ORDER}" if self.has_group_order else ""

    def tensors(self, out_size: int, in_size: int) -> Stored:
        groups, per_word = _groups(in_size, self.group, "GPTQ"), 32 // self.bits
        if out_size % per_word or in_size % per_word:
            raise ConfigError(f"GPTQ: a matrix of {out_size} x {in_size} is not a multiple of {per_word}")
        return {
            "qweight": StoredAs((in_size // per_word, out_size), WORDS),
            "qzeros": StoredAs((groups, out_size // per_word), WORDS),
            "scales": StoredAs((groups, out_size), FLOATS),
            **({"g_idx": StoredAs((in_size,), _NUMBERS)} if self.has_group_index else {}),
        }

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        return stored_weights.read_gptq(
            tensors["qweight"], tensors["qzeros"], tensors["scales"], tensors.get("g_idx"),
            bits=self.bits, is_v2=self.is_v2, is_symmetric=self.is_symmetric,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackQuantizedReader(_Reader):
    """compressed-tensors `pack-quantized`: w4a16 and w8a16."""

    bits: int
    group: int
    is_symmetric: bool
    has_group_order: bool
    are_zeros_packed: bool = True  # as most files have them; others an int8 each

    @property
    def kind(self) -> str:
        return _kind(self.bits)

    @property
    def has_zeros(self) -> bool:  # type: ignore[override]
        return not self.is_symmetric

    @property
    def name(self) -> str:
        return f"pack-quantized int{self.bits}, {_told(self.group)}"

    @property
    def fault_in_experts(self) -> str:  # type: ignore[override]
        return f"actorder is not by weight; {_WITHOUT_ORDER}" if self.has_group_order else ""

    def tensors(self, out_size: int, in_size: int) -> Stored:
        groups, per_word = _groups(in_size, self.group, "compressed-tensors"), 32 // self.bits
        stored = {
            "weight_packed": StoredAs((out_size, -(-in_size // per_word)), WORDS),
            "weight_scale": StoredAs((out_size, groups), FLOATS),
            "weight_shape": StoredAs((2,), _NUMBERS),
        }
        if not self.is_symmetric:
            rows = -(-out_size // per_word) if self.are_zeros_packed else out_size
            stored["weight_zero_point"] = StoredAs((rows, groups), WORDS if self.are_zeros_packed else INT8)
        if self.has_group_order:
            stored["weight_g_idx"] = StoredAs((in_size,), _NUMBERS)
        return stored

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        return stored_weights.read_pack_quantized(**tensors, bits=self.bits)


@dataclass(frozen=True, slots=True)
class IntQuantizedReader(_Reader):
    """compressed-tensors `int-quantized`: int8 with a scale a row, served with inputs of 16 bits."""

    kind: str = "int8"
    group: int = -1
    name: str = "int-quantized int8"

    def tensors(self, out_size: int, in_size: int) -> Stored:
        return {"weight": StoredAs((out_size, in_size), INT8), "weight_scale": StoredAs((out_size, 1), FLOATS)}

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        return stored_weights.read_int_quantized(tensors["weight"], tensors["weight_scale"])


@dataclass(frozen=True, slots=True)
class Fp8BlockReader(_Reader):
    """fp8 with a scale a block of the weight."""

    block: tuple[int, int]
    scale_name: str = "weight_scale_inv"  # which it multiplies with whatever the name
    kind: str = "fp8"
    group: int = stored_weights.FP8_BLOCK

    @property
    def name(self) -> str:
        return f"fp8, blocks of {self.block[0]} x {self.block[1]}"

    def tensors(self, out_size: int, in_size: int) -> Stored:
        scales = (-(-out_size // self.block[0]), -(-in_size // self.block[1]))
        return {"weight": StoredAs((out_size, in_size), FP8), self.scale_name: StoredAs(scales, (*FLOATS, *POWERS))}

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        return stored_weights.read_fp8(tensors["weight"], tensors[self.scale_name], self.block)


@dataclass(frozen=True, slots=True)
class Nvfp4Reader(_Reader):
    """fp4 with a scale for 16 elements: compressed-tensors `nvfp4-pack-quantized`, or NVIDIA ModelOpt's names."""

    is_modelopt: bool
    kind: str = "fp4"
    group: int = 16
    fault_in_experts: str = (
        "each matrix has a global scale; use a quantisation of the model in int4, fp8 or mxfp4, or the unquantised one"
    )

    @property
    def name(self) -> str:
        return "nvfp4 of ModelOpt" if self.is_modelopt else "nvfp4"

    def tensors(self, out_size: int, in_size: int) -> Stored:
        if in_size % 16:
            raise ConfigError(f"nvfp4: {in_size} inputs of a matrix are not a multiple of 16")
        values = StoredAs((out_size, in_size // 2), BYTES)
        scales = StoredAs((out_size, in_size // 16), (*FP8, *FLOATS))
        if self.is_modelopt:
            return {"weight": values, "weight_scale": scales, "weight_scale_2": StoredAs((), FLOATS)}
        return {"weight_packed": values, "weight_scale": scales, "weight_global_scale": StoredAs((1,), FLOATS)}

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        values, scales, factor = tensors.values()
        return stored_weights.read_nvfp4(values, scales, factor, is_divisor=not self.is_modelopt)


@dataclass(frozen=True, slots=True)
class Mxfp4BlocksReader(_Reader):
    """The same of experts as gpt-oss has them: elements and scales of all experts in a tensor each."""

    kind: str = "fp4"
    group: int = 32
    has_zeros: bool = False
    name: str = "mxfp4"

    def tensors(self, out_size: int, in_size: int) -> Stored:
        raise ConfigError("mxfp4 of quant_method 'mxfp4' is supported in experts that are stored together only")

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        return stored_weights.read_mxfp4(tensors["blocks"], tensors["scales"])


@dataclass(frozen=True, slots=True)
class Mxfp4Reader(_Reader):
    """fp4 with a power of two as the scale of 32 elements: compressed-tensors `mxfp4-pack-quantized`."""

    kind: str = "fp4"
    group: int = 32
    name: str = "mxfp4"

    def tensors(self, out_size: int, in_size: int) -> Stored:
        if in_size % 32:
            raise ConfigError(f"mxfp4: {in_size} inputs of a matrix are not a multiple of 32")
        values, scales = (
            StoredAs((out_size, in_size // 2), BYTES),
            StoredAs((out_size, in_size // 32), (*BYTES, *POWERS)),
        )
        return {"weight_packed": values, "weight_scale": scales}

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        blocks = tensors["weight_packed"]
        return stored_weights.read_mxfp4(blocks.view(blocks.shape[0], -1, 16), tensors["weight_scale"])


@dataclass(frozen=True, slots=True)
class GgufReader(_Reader):
    """Blocks of a GGUF file, which a conversion has put into a checkpoint folder."""

    blocks: str  # of gguf_blocks.BLOCK_KINDS
    group: int = GROUP

    @property
    def kind(self) -> str:
        return BLOCK_KINDS[self.blocks].kind

    @property
    def has_shifts(self) -> bool:  # type: ignore[override]
        return BLOCK_KINDS[self.blocks].has_shifts

    @property
    def name(self) -> str:
        return f"GGUF {self.blocks}"

    def tensors(self, out_size: int, in_size: int) -> Stored:
        block = BLOCK_KINDS[self.blocks]
        if in_size % block.num_elements:
            raise ConfigError(f"{self.name}: {in_size} inputs of a matrix are not whole blocks of {block.num_elements}")
        return {GGUF_BLOCKS: StoredAs((out_size, block.row_bytes(in_size)), BYTES)}

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        return read_blocks(self.blocks, tensors[GGUF_BLOCKS])
