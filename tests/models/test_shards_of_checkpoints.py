"""What each device of a group takes of a checkpoint, without any group: together they have all of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cb_backend.kernels.grouped_packed import PackedExperts
from cb_backend.kernels.packed import dequantise_packed_torch
from cb_backend.layers.fp8_linear import Fp8Linear
from cb_backend.layers.linear import Linear
from cb_backend.layers.mlp import MLP
from cb_backend.layers.moe import MoE
from cb_backend.layers.ops import resolve_ops
from cb_backend.layers.packed_experts import PackedMixture
from cb_backend.layers.packed_linear import PackedLinear
from cb_backend.layers.packed_pieces import PlainPiece
from cb_backend.layers.placement import Placement
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.registry import load_model, read_model_config
from cb_backend.parallel.group import NoGroup
from tests.models.quantised_models import FORMATS, pair
from tests.models.test_experts import WITH_EXPERTS
from tests.models.test_packed_experts import OF_EXPERTS as FORMATS_OF_EXPERTS
from tests.models.test_packed_experts import as_mxfp4, in_fp8_by_channels
from tests.models.tiny_checkpoints import CONFIGS, write_checkpoint

SPLIT = re.compile(r".*\.(q_proj|o_proj|gate_proj|up_proj|gate_up_proj|down_proj|w1|w2|w3)\.weight")
OF_EXPERTS = re.compile(r"\.experts\.|\.(input|output)_linear\.")
SPREAD = [name for name in WITH_EXPERTS if name not in ("mixtral", "granitemoe")]  # which have 5


class OneOf(NoGroup):
    """A device that is never asked to compute with the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def load(folder: Path, rank: int, size: int, **options: Any) -> DecoderForCausalLM:
    spec, device, group = read_model_config(folder), torch.device("cpu"), OneOf(rank, size)
    return load_model(
        folder, spec, ops=resolve_ops("torch"), dtype=torch.float32, device=device, group=group, **options
    )


def entries(placement: Placement) -> Tensor:
    """Which of the checkpoint's tensor a placement takes: ones there, zeros elsewhere."""
    found = torch.zeros(placement.shape, dtype=torch.int32)
    if placement.is_read:
        (found if placement.shard is None else placement.shard.of(found)).fill_(1)
    return found


@pytest.mark.parametrize(
    ("name", "size", "spreads"),
    [(name, 4, False) for name in sorted(CONFIGS)] + [(name, 2, True) for name in SPREAD],
)
def test_ranks_have_all_of_a_checkpoint_together(name: str, size: int, spreads: bool, tmp_path: Path) -> None:
    """Every number is on some rank, as the checkpoint has it; on several only what each needs whole."""
    folder = write_checkpoint(name, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    taken: dict[str, Tensor] = {}
    for rank in range(size):
        own: dict[str, Tensor] = {}
        for placement in load(folder, rank, size, spreads_experts=spreads).placements():
            target, tensor = placement.target, tensors[placement.name]
            assert placement.shape == tuple(tensor.shape)
            if isinstance(target, Tensor) and placement.is_read:
                assert torch.equal(target, placement.prepare(tensor.float()))
            own[placement.name] = own.get(placement.name, 0) + entries(placement)
        for tensor_name, counts in own.items():
            assert counts.max() <= 1, f"{tensor_name} is taken twice"
            taken[tensor_name] = taken.get(tensor_name, 0) + counts
    assert taken.keys() >= {each for each in tensors if "inv_freq" not in each and each != "lm_head.weight"}
    for tensor_name, counts in taken.items():
        assert counts.min() >= 1, f"{tensor_name} is not all taken"
        if SPLIT.fullmatch(tensor_name) or (spreads and OF_EXPERTS.search(tensor_name)):
            assert counts.max() == 1, f"{tensor_name} is on several ranks"


def as_published(folder: Path) -> Path:
    """gpt-oss with experts in mxfp4."""
    return as_mxfp4(write_checkpoint("gpt-oss-mxfp4", folder / "plain"))


def in_fp8(folder: Path) -> Path:
    """Matrices and scales in the files."""
    return in_fp8_by_channels(write_checkpoint("qwen3-moe-window", folder / "plain"))


@pytest.mark.parametrize(
    ("make", "quantization"),
    [
        *(
            (lambda folder, name=name: pair(folder, "qwen3-moe", *FORMATS[name])[1], None)
            for name in FORMATS_OF_EXPERTS
        ),
        *((lambda folder, name=name: write_checkpoint(name, folder), "fp8") for name in ("granitemoe-tied", "gpt-oss")),
        (as_published, None),
        (in_fp8, None),
    ],
    ids=[*FORMATS_OF_EXPERTS, "stacked to fp8", "interleaved to fp8", "gpt-oss as published", "fp8 channel"],
)
def test_spread_experts_are_those_of_one_device(
    make: Callable[[Path], Path], quantization: str | None, tmp_path: Path
) -> None:
    """Bit for bit, in every format; and no device reads what it does not keep."""
    folder = make(tmp_path)

    def experts(rank: int, size: int) -> tuple[list[PackedExperts], int, int]:
        """(both products' of all layers, bytes kept, bytes read)"""
        read: list[int] = []
        model = load(
            folder, rank, size, spreads_experts=True, quantization=quantization,
            progress=lambda _, num_bytes: read.append(num_bytes),
        )  # fmt: skip
        blocks = [layer.mlp.experts for layer in model.layers if isinstance(layer.mlp, MoE)]
        kept = sum(each.target.nbytes for each in model.placements() if OF_EXPERTS.search(each.name))
        return [stack.weight for each in blocks for stack in (each.gate_up, each.down)], kept, read[-1]

    whole, all_kept, all_read = experts(0, 1)
    ranks = [experts(rank, 2) for rank in range(2)]
    assert whole
    for index, one in enumerate(whole):
        for name in ("values", "scales", "zeros"):
            wanted, parts = getattr(one, name), [getattr(own[index], name) for own, *_ in ranks]
            assert wanted is None if parts[0] is None else torch.equal(torch.cat(parts), wanted)
    tensors = load_file(folder / "model.safetensors")
    others = sum(tensor.nbytes for name, tensor in tensors.items() if not OF_EXPERTS.search(name))
    assert sum(read for *_, read in ranks) <= all_read + others, "experts are read once"
    assert [kept for _, kept, _ in ranks] == [all_kept // 2] * 2


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    ("make", "quantization"),
    [
        (in_fp8, None),
        *((lambda folder, name=name: write_checkpoint(name, folder), "fp8") for name in ("qwen3", "qwen3-moe-window")),
    ],
    ids=["experts in files", "dense", "experts"],
)
def test_a_device_whose_share_is_nothing_has_zeros_in_fp8(
    make: Callable[[Path], Path], quantization: str | None, load_format: str, tmp_path: Path
) -> None:
    """Of 40 features in sixteens the last of four devices has none, of whatever is quantised as it comes."""
    model = load(make(tmp_path), 3, 4, quantization=quantization, load_format=load_format)
    for layer in model.layers:
        if isinstance(layer.mlp, MoE):
            experts = layer.mlp.experts
            assert isinstance(experts, PackedMixture)
            assert experts.held.inner.share.size == 0
            scales = [experts.gate_up.weight.scales, experts.down.weight.scales]
        else:
            assert isinstance(layer.mlp, MLP)
            products = layer.mlp.gate_up_proj, layer.mlp.down_proj
            assert products[1].projection.columns_of(3, 4).size == 0
            scales = [product.weight_scales for product in products if isinstance(product, Fp8Linear)]
        assert [bool(each.any()) for each in scales] == [False, False]


def numbers_of(linear: Linear) -> Tensor:
    """[out_size, in_size] float32, with what pads it."""
    if not isinstance(linear, PackedLinear):
        return linear.weight.float()
    found = []
    for piece in linear.pieces:
        if isinstance(piece, PlainPiece):
            found.append(piece.weight.float())
            continue
        numbers = dequantise_packed_torch(piece.weight)
        if piece.order is not None:
            numbers = torch.empty_like(numbers).index_copy_(1, piece.order, numbers)
        found.append(numbers)
    return torch.cat(found)


def linears_of(model: DecoderForCausalLM) -> list[Linear]:
    found: list[Linear] = []
    for layer in model.layers:
        assert isinstance(layer.mlp, MLP)
        attention = layer.self_attn
        found += [attention.qkv_proj, attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj]
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_ranks_have_the_numbers_of_every_format(name: str, size: int, tmp_path: Path) -> None:
    """Of one device's matrix, bit for bit, and zeros where a share is padded."""
    _, folder = pair(tmp_path, "llama", *FORMATS[name])
    whole = linears_of(load(folder, 0, 1))
    seen = [torch.zeros_like(numbers_of(linear)) for linear in whole]
    for rank in range(size):
        for linear, one, counts in zip(linears_of(load(folder, rank, size)), whole, seen, strict=True):
            numbers, wanted = numbers_of(linear), numbers_of(one)
            projection = linear.projection
            columns = projection.columns_of(rank, size)
            padding = torch.ones_like(numbers)
            for part, of_one in zip(projection.places(rank, size), projection.places(0, 1), strict=True):
                start = of_one.rows.start + part.share.start
                its_rows = slice(start, start + part.share.size), slice(columns.start, columns.stop)
                assert torch.equal(numbers[part.rows, part.columns], wanted[its_rows])
                padding[part.rows, part.columns] = 0
                counts[its_rows] += 1
            assert not (numbers * padding)[:, : columns.size].any()
    for counts in seen:
        assert counts.min() >= 1
