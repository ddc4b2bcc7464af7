"""Which layers of a model launch the same kernels: one of each kind is enough to have them compiled and loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cb_backend.layers.fp8_linear import Fp8Linear
from cb_backend.layers.linear import Linear
from cb_backend.layers.lora_linear import LoraLinear
from cb_backend.layers.mlp import MLP, GeluMLP
from cb_backend.layers.packed_linear import PackedLinear
from cb_backend.layers.packed_pieces import Piece

if TYPE_CHECKING:
    from cb_backend.models.decoder import DecoderLayer


def distinct_layers(layers: Sequence[DecoderLayer]) -> tuple[int, ...]:
    """Indices: the first layer, which has no residual stream yet, and the first of each kind among the others."""
    first = {_kind(layer): index for index, layer in reversed([*enumerate(layers)][1:])}
    return (0, *sorted(first.values()))


def _kind(layer: DecoderLayer) -> object:
    """What the launches of a layer depend on, but for the values in its tensors. What is not known here is a kind of
    its own.
    """
    attention, block = layer.self_attn, layer.mlp
    if not isinstance(block, MLP) or type(block) not in (MLP, GeluMLP):
        return id(layer)
    linears = (attention.qkv_proj, attention.o_proj, block.gate_up_proj, block.down_proj)
    return (layer.spec, type(block), *map(_product, linears))


def _product(linear: Linear) -> object:
    if isinstance(linear, LoraLinear):
        return (linear.site.slices, linear.site.a.shape, _product(linear.base))
    if type(linear) in (Linear, Fp8Linear):
        return (type(linear), linear.weight.shape, linear.weight.dtype, linear.bias is None)
    if type(linear) is not PackedLinear:
        return id(linear)
    packed = [piece for piece in linear.pieces if isinstance(piece, Piece)]
    if len(packed) < len(linear.pieces):
        return id(linear)
    pieces = [(piece.rows.start, piece.rows.stop, piece.order is None, piece.weight) for piece in packed]
    return (
        linear.bias is None,
        *(
            (start, stop, is_ordered, weight.kind, weight.group, weight.size, weight.is_gated, weight.zeros is None,
             weight.scales.dtype, weight.global_scale == 1.0)
            for start, stop, is_ordered, weight in pieces
        ),
    )  # fmt: skip
