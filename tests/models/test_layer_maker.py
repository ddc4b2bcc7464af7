"""Layers as they are made: which format a module has, and what of a checkpoint's tensors a device of a group takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from cb_backend.contracts.errors import ConfigError
from cb_backend.layers.attention import halves_apart
from cb_backend.layers.fp8_linear import Fp8Linear
from cb_backend.layers.layer_maker import LayerMaker
from cb_backend.layers.layer_spec import AttentionSpec, MLPSpec, NormSpec
from cb_backend.layers.linear import Linear
from cb_backend.layers.mlp import MLP
from cb_backend.layers.norm import Junction
from cb_backend.layers.ops import resolve_ops
from cb_backend.layers.placement import Placement, Shard
from cb_backend.layers.projection import Projection, Split
from cb_backend.layers.separate_linear import SeparateLinear, part_of
from cb_backend.layers.weight_format import Fp8Format, ModuleFormats, PlainFormat
from cb_backend.parallel.group import Group, NoGroup

CPU = torch.device("cpu")
STEP: Any = None  # these layers do not look at it


class OneOf(NoGroup):
    """A device of a group, whose sums the test makes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def reduce_add_norm(self, x: Tensor, residual: Tensor, junction: Junction) -> tuple[Tensor, Tensor]:
        return junction.add(x, residual)


def maker(formats: ModuleFormats | None = None, group: Group | None = None) -> LayerMaker:
    return LayerMaker(
        ops=resolve_ops("torch"),
        dtype=torch.float32,
        device=CPU,
        group=group or NoGroup(),
        format_of=formats or ModuleFormats(PlainFormat()),
    )


def fill(placements: Iterable[Placement], checkpoint: dict[str, Tensor]) -> None:
    for placement in placements:
        tensor = checkpoint[placement.name]
        assert placement.shape == tuple(tensor.shape)
        placement.target.copy_(placement.prepare(tensor))


def test_a_module_has_the_format_of_its_name() -> None:
    formats = ModuleFormats(Fp8Format(), [(r"model\.layers\.0\..*", PlainFormat()), (r".*\.down_proj", PlainFormat())])
    first, second = (maker(formats).mlp(f"model.layers.{i}.mlp", 8, MLPSpec(intermediate_size=6)) for i in (0, 1))
    assert isinstance(first, MLP)
    assert isinstance(second, MLP)
    assert [type(each) for each in (first.gate_up_proj, first.down_proj)] == [Linear, Linear]
    assert [type(each) for each in (second.gate_up_proj, second.down_proj)] == [Fp8Linear, Linear]


def test_the_first_exception_that_matches_the_whole_name_decides() -> None:
    formats = ModuleFormats(PlainFormat(), [("a", PlainFormat()), ("a|ab", Fp8Format())])
    assert [formats(module).name for module in ("a", "ab", "abc")] == ["plain", "fp8", "plain"]


def test_projections_of_one_weight_cannot_differ_in_format() -> None:
    formats = ModuleFormats(Fp8Format(), [(r".*\.gate_proj", PlainFormat())])
    with pytest.raises(ConfigError, match=r"m\.gate_proj is plain, m\.up_proj is fp8: supported is one format"):
        maker(formats).mlp("m", 8, MLPSpec(intermediate_size=6))


@pytest.mark.parametrize("stored_as", [None, "qkv_proj"])
@pytest.mark.parametrize("size", [1, 2])
def test_devices_of_a_group_have_the_whole_together(size: int, stored_as: str | None) -> None:
    """Row by row of each part: what the devices compute, side by side, is the whole product."""
    torch.manual_seed(0)
    parts = {"q_proj": 8, "k_proj": 4}
    weight, bias = torch.randn(12, 6), torch.randn(12)
    if stored_as:
        checkpoint = {f"a.{stored_as}.weight": weight, f"a.{stored_as}.bias": bias}
    else:
        checkpoint = {"a.q_proj.weight": weight[:8], "a.k_proj.weight": weight[8:]}
        checkpoint |= {"a.q_proj.bias": bias[:8], "a.k_proj.bias": bias[8:]}
    x = torch.randn(3, 6)
    products = []
    projection = Projection(name="a", in_size=6, parts=parts, has_bias=True, split=Split.ROWS, stored_as=stored_as)
    for rank in range(size):
        linear = maker(group=OneOf(rank, size)).linear(projection)
        fill(linear.placements(), checkpoint)
        products.append(linear(x, STEP).split([8 // size, 4 // size], dim=1))
    whole = torch.cat([torch.cat(each, dim=1) for each in zip(*products, strict=True)], dim=1)
    torch.testing.assert_close(whole, x @ weight.T + bias)


def test_partial_sums_have_the_bias_once() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(5, 8), torch.randn(5), torch.randn(3, 8)
    total = torch.zeros(3, 5)
    projection = Projection(name="a", in_size=8, parts={"o_proj": 5}, has_bias=True, split=Split.COLUMNS)
    for rank, columns in enumerate(x.chunk(2, dim=1)):
        linear = maker(group=OneOf(rank, 2)).linear(projection)
        fill(linear.placements(), {"a.o_proj.weight": weight, "a.o_proj.bias": bias})
        total += linear(columns, STEP)
    torch.testing.assert_close(total, x @ weight.T + bias)


def test_parts_in_formats_of_their_own_are_gated_as_one() -> None:
    """By themselves too, as a shared expert asks for it, and not only behind an addition."""
    make, ops = maker(), resolve_ops("torch")
    projection = Projection(name="a", in_size=8, parts={"gate": 6, "up": 6}, is_gated=True)
    parts = {name: make.linear(part_of(projection, name)) for name in projection.parts}
    for part in parts.values():
        part.weight.normal_()
    linear = SeparateLinear(projection, parts, ops, NoGroup(), dtype=torch.float32, device=CPU)
    x = torch.randn(3, 8)
    gate, up = (x @ part.weight.T for part in parts.values())
    torch.testing.assert_close(linear.gated(x, STEP), torch.nn.functional.silu(gate) * up)


def test_partial_sums_are_written_where_the_group_wants_them() -> None:
    """What the others do not add up is not, nor what is nobody's but this device's."""
    room, asked = torch.empty(9, 5), list[int]()

    class Roomy(OneOf):
        def partial_out(self, num_rows: int) -> Tensor:
            asked.append(num_rows)
            return room[:num_rows]

    x = torch.randn(3, 8)
    for size, split, is_there in ((2, Split.COLUMNS, True), (2, Split.ROWS, False), (1, Split.COLUMNS, False)):
        out_size = 5 if split is Split.COLUMNS else 10
        linear = maker(group=Roomy(0, size)).linear(
            Projection(name="a", in_size=8 * size if split is Split.COLUMNS else 8, parts={"p": out_size}, split=split)
        )
        linear.weight.normal_()
        product = linear(x, STEP)
        assert (product.data_ptr() == room.data_ptr()) is is_there
        torch.testing.assert_close(product, x @ linear.weight.T)
    assert asked == [3]


def test_what_a_group_cannot_share_out_is_named() -> None:
    projection = Projection(name="a", in_size=7, parts={"o_proj": 5}, split=Split.COLUMNS)
    with pytest.raises(ConfigError, match="a: 7 features cannot be shared out among 2 devices"):
        maker(group=OneOf(0, 2)).linear(projection)


def test_a_group_is_asked_where_a_product_follows_an_addition() -> None:
    """And nothing is fused with what the devices have yet to add."""
    torch.manual_seed(0)
    asked: list[str] = []

    class Asked(OneOf):
        def reduce_add_norm(self, x: Tensor, residual: Tensor, junction: Junction) -> tuple[Tensor, Tensor]:
            asked.append(junction.norms[0].name)
            return junction.add(2 * x, residual)

    x, residual = torch.randn(2, 3, 8)
    for formats in (ModuleFormats(PlainFormat()), ModuleFormats(Fp8Format())):
        make = maker(formats, Asked(0, 2))
        junction = make.junction(NormSpec(eps=1e-5), 8, leaving="n", joining=None)
        junction.norms[0].weight.uniform_(0.5, 1.5)
        linear = make.linear(Projection(name="a", in_size=8, parts={"gate": 8, "up": 8}, split=Split.ROWS))
        for placement in linear.placements():
            placement.target.copy_(torch.randn(4, 8))
        normed, total = junction.add(2 * x, residual)
        for after in (linear.after, linear.gated_after):
            found, its_total = after(junction, x, residual, STEP)
            assert torch.equal(its_total, total)
            wanted = linear(normed, STEP)
            is_gated = found.shape[1] == 4
            torch.testing.assert_close(found, resolve_ops("torch").silu_mul(wanted) if is_gated else wanted)
    assert asked == ["n"] * 4


def test_a_placement_takes_its_shard_and_transforms_it() -> None:
    target = torch.zeros(2, 3)
    placement = Placement("t", target, Shard(0, 1, 2, 4), lambda rows: rows + 1)
    tensor = torch.arange(12.0).view(4, 3)
    assert placement.shape == (4, 3)
    target.copy_(placement.prepare(tensor))
    assert torch.equal(target, tensor[1:3] + 1)


@pytest.mark.parametrize(("is_rounded", "scale"), [(True, 55.5), (False, 55.42)])
def test_the_scale_of_embeddings_is_rounded_first_where_the_family_does(is_rounded: bool, scale: float) -> None:
    """55.42 is 55.5 in bfloat16, and 9 * 55.42 rounds to another number than 9 * 55.5."""
    make = dataclasses.replace(maker(), dtype=torch.bfloat16)
    embedding = make.embedding("e", 4, 2, scale=55.42, is_scale_rounded=is_rounded)
    embedding.weight.fill_(9.0)
    found = embedding(torch.tensor([1], dtype=torch.int32))
    assert torch.equal(found, torch.full((1, 2), 9 * scale).to(torch.bfloat16))
    assert torch.tensor(9 * 55.5).to(torch.bfloat16) != torch.tensor(9 * 55.42).to(torch.bfloat16)
    assert (embedding.weight == 9).all()


def test_rows_of_interleaved_heads_come_half_their_number_apart() -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=6, rotary_dim=4, scale=1.0, is_interleaved=True)
    rows = torch.arange(12).unsqueeze(1)
    wanted = [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert halves_apart(spec)(rows).flatten().tolist() == wanted
    assert halves_apart(spec)(rows[:, 0]).tolist() == wanted  # of a bias, or of scales
