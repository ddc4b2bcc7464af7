"""How the tensors of a quantised module are named, and which reader makes stored elements of them.

One class a way of storing; what a checkpoint's configuration says decides between them (`quantization`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.kernels.packed import StoredWeight
from cb_backend.models import stored_weights
from cb_backend.models.gguf_blocks import BLOCK_KINDS, GROUP, read_blocks

GGUF_BLOCKS = "weight_blocks"  # of a converted module: the file's own rows
Shapes = Mapping[str, tuple[int, ...]]
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

    def tensors(self, out_size: int, in_size: int) -> Shapes:
        groups = _groups(in_size, self.group, "AWQ")
        if out_size % 8:
            raise ConfigError(f"AWQ: {out_size} outputs of a matrix are not a multiple of 8")
        return {
            "qweight": (in_size, out_size // 8),
            "qzeros": (groups, out_size // 8),
            "scales": (groups, out_size),
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
    has_group_order: bool = False  # g_idx is not one group after the other

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

    def tensors(self, out_size: int, in_size: int) -> Shapes:
        groups, per_word = _groups(in_size, self.group, "GPTQ"), 32 // self.bits
        if out_size % per_word or in_size % per_word:
            raise ConfigError(f"GPTQ: a matrix of {out_size} x {in_size} is not a multiple of {per_word}")
        return {
            "qweight": (in_size // per_word, out_size),
            "qzeros": (groups, out_size // per_word),
            "scales": (groups, out_size),
            "g_idx": (in_size,),
        }

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        return stored_weights.read_gptq(
            tensors["qweight"], tensors["qzeros"], tensors["scales"], tensors["g_idx"],
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

    def tensors(self, out_size: int, in_size: int) -> Shapes:
        groups, per_word = _groups(in_size, self.group, "compressed-tensors"), 32 // self.bits
        shapes: dict[str, tuple[int, ...]] = {
            "weight_packed": (out_size, -(-in_size // per_word)),
            "weight_scale": (out_size, groups),
            "weight_shape": (2,),
        }
        if not self.is_symmetric:
            rows = -(-out_size // per_word) if self.are_zeros_packed else out_size
            shapes["weight_zero_point"] = (rows, groups)
        if self.has_group_order:
            shapes["weight_g_idx"] = (in_size,)
        return shapes

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        return stored_weights.read_pack_quantized(**tensors, bits=self.bits)


@dataclass(frozen=True, slots=True)
class IntQuantizedReader(_Reader):
    """compressed-tensors `int-quantized`: int8 with a scale a row, served with inputs of 16 bits."""

    kind: str = "int8"
    group: int = -1
    name: str = "int-quantized int8"

    def tensors(self, out_size: int, in_size: int) -> Shapes:
        return {"weight": (out_size, in_size), "weight_scale": (out_size, 1)}

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

    def tensors(self, out_size: int, in_size: int) -> Shapes:
        scales = (-(-out_size // self.block[0]), -(-in_size // self.block[1]))
        return {"weight": (out_size, in_size), self.scale_name: scales}

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

    def tensors(self, out_size: int, in_size: int) -> Shapes:
        if in_size % 16:
            raise ConfigError(f"nvfp4: {in_size} inputs of a matrix are not a multiple of 16")
        values, scales = (out_size, in_size // 2), (out_size, in_size // 16)
        if self.is_modelopt:
            return {"weight": values, "weight_scale": scales, "weight_scale_2": ()}
        return {"weight_packed": values, "weight_scale": scales, "weight_global_scale": (1,)}

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

    def tensors(self, out_size: int, in_size: int) -> Shapes:
        raise ConfigError("mxfp4 of quant_method 'mxfp4' is supported in experts that are stored together only")

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        return stored_weights.read_mxfp4(tensors["blocks"], tensors["scales"])


@dataclass(frozen=True, slots=True)
class Mxfp4Reader(_Reader):
    """fp4 with a power of two as the scale of 32 elements: compressed-tensors `mxfp4-pack-quantized`."""

    kind: str = "fp4"
    group: int = 32
    name: str = "mxfp4"

    def tensors(self, out_size: int, in_size: int) -> Shapes:
        if in_size % 32:
            raise ConfigError(f"mxfp4: {in_size} inputs of a matrix are not a multiple of 32")
        return {"weight_packed": (out_size, in_size // 2), "weight_scale": (out_size, in_size // 32)}

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

    def tensors(self, out_size: int, in_size: int) -> Shapes:
        block = BLOCK_KINDS[self.blocks]
        if in_size % block.num_elements:
            raise ConfigError(f"{self.name}: {in_size} inputs of a matrix are not whole blocks of {block.num_elements}")
        return {GGUF_BLOCKS: (out_size, block.row_bytes(in_size))}

    def read(self, tensors: Mapping[str, Tensor]) -> StoredWeight:
        return read_blocks(self.blocks, tensors[GGUF_BLOCKS])
