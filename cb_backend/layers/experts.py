"""The weights of a layer's experts, and the products with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from cb_backend.kernels.expert_plan import ExpertPlan
from cb_backend.layers.layer_spec import MoESpec
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.placement import Elsewhere, Placement, Shard, shard_of
from cb_backend.parallel.group import Group
from cb_backend.parallel.shares import Share, whole


class Inner(NamedTuple):
    """The features between gate, up and down: how many there are, and which of them a device has."""

    share: Share
    whole: int

    @property
    def is_all(self) -> bool:
        return self.share == whole(self.whole)

    def shard(self, dim: int) -> Shard | None:
        return shard_of(self.share, self.whole, dim)

    def of_halves(self, tensor: Tensor, dim: int) -> Tensor:
        """This device's features of the gate and, behind them, of the other half; padded with zeros."""
        if self.is_all:
            return tensor
        return torch.cat([self.of(half, dim) for half in tensor.chunk(2, dim)], dim)

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """This device's features, padded with zeros."""
        if self.is_all:
            return tensor
        taken = tensor.narrow(dim, self.share.start, self.share.size)
        shape = [*tensor.shape]
        shape[dim] = self.share.room - self.share.size
        return torch.cat((taken, tensor.new_zeros(shape)), dim)


class Held(NamedTuple):
    """What a device has of a layer's experts: a part of each, or some of them whole."""

    experts: Share  # those
    inner: Inner  # of each

    def is_spread(self, spec: MoESpec) -> bool:
        """Whether others of the layer's experts are on other devices."""
        return self.experts.size < spec.num_experts

    def place_of(self, expert: int) -> int | None:
        """Among those of this device; None: it is on another one."""
        return expert - self.experts.start if self.experts.start <= expert < self.experts.stop else None


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A layer's experts in a checkpoint, and what a device has of them."""

    name: str  # of the module that has experts and router
    hidden_size: int
    spec: MoESpec
    held: Held

    @property
    def module(self) -> str:
        """That which holds the experts."""
        names = self.spec.names
        return f"{self.name}.{names.experts}" if names.experts else self.name


class Experts(Protocol):
    """A device's experts of a layer, in some format."""

    held: Held

    @property
    def bits(self) -> int:
        """Of a weight."""
        ...

    def __call__(self, x: Tensor, weights: Tensor, plan: ExpertPlan, parts: Tensor) -> None:
        """Each token's experts, into the first parts of `parts` [num_tokens, num_parts, hidden_size].

        x [num_tokens, hidden_size]; weights and plan as of `route_experts_torch`.
        """
        ...

    def placements(self) -> Iterator[Placement]: ...


class PlainExperts:
    """Weights in the model's dtype: gate above up [num_experts, 2 * intermediate_size, hidden_size], and down; of what
    this device has.

    A checkpoint stores them apart, each expert's gate, up and down; stacked, as they are here; or interleaved, with
    input features before output features, and rows of gate and up in turn.
    """

    bits = 16

    def __init__(
        self, layer: ExpertLayer, ops: ModelOps, group: Group, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = layer.module
        self.spec, self.held = layer.spec, layer.held
        self.ops = ops
        self._layer = layer
        count, size = layer.held.experts.size, layer.held.inner.share.room
        self.gate_up = torch.empty(count, 2 * size, layer.hidden_size, dtype=dtype, device=device)
        self.down = torch.empty(count, layer.hidden_size, size, dtype=dtype, device=device)
        if group.size > 1:  # what pads a share stays so
            self.gate_up.zero_()
            self.down.zero_()
        self.biases = new_biases(layer, group, dtype, device)

    def __call__(self, x: Tensor, weights: Tensor, plan: ExpertPlan, parts: Tensor) -> None:
        spec, (gate_up_bias, down_bias) = self.spec, self.biases
        inner = self.ops.grouped_gate_up(x, self.gate_up, plan, spec.top_k, spec.activation, gate_up_bias)
        self.ops.grouped_down(inner, self.down, plan, weights, parts, down_bias)

    def placements(self) -> Iterator[Placement]:
        names, inner, module = self.spec.names, self.held.inner, self.name
        taken, gate_up, down = inner.share.size, self.gate_up, self.down
        count, _, hidden = gate_up.shape
        own = shard_of(self.held.experts, self.spec.num_experts)  # then they are whole, so no other dimension is cut
        if self.spec.storage == "stacked":
            shape = torch.Size((count, 2 * inner.whole, hidden))
            rows = Reordered(gate_up, shape, lambda weight: inner.of_halves(weight, 1))
            yield Placement(f"{module}.{names.gate}.weight", gate_up if inner.is_all else rows, own)
            yield Placement(f"{module}.{names.down}.weight", down[:, :, :taken], own or inner.shard(2))
        elif self.spec.storage == "interleaved":
            shape = torch.Size((count, hidden, 2 * inner.whole))
            rows = Reordered(gate_up, shape, lambda weight: inner.of_halves(halves_of_rows(weight.transpose(1, 2)), 1))
            yield Placement(f"{module}.{names.gate}", rows, own)
            yield Placement(f"{module}.{names.down}", down.transpose(1, 2)[:, :taken], own or inner.shard(1))
        else:
            for expert in range(self.spec.num_experts):
                place = self.held.place_of(expert)
                of_all = self._placements_of(f"{module}.{expert}", place or 0)
                yield from (each if place is not None else each.elsewhere() for each in of_all)
        yield from bias_placements(self._layer, self.biases)

    def _placements_of(self, name: str, place: int) -> Iterator[Placement]:
        """Of one expert, at its place among those of this device."""
        names, inner = self.spec.names, self.held.inner
        size, taken = inner.share.room, inner.share.size
        gate_up, down = self.gate_up[place], self.down[place]
        yield Placement(f"{name}.{names.gate}.weight", gate_up[:taken], inner.shard(0))
        yield Placement(f"{name}.{names.up}.weight", gate_up[size : size + taken], inner.shard(0))
        yield Placement(f"{name}.{names.down}.weight", down[:, :taken], inner.shard(1))


def new_biases(
    layer: ExpertLayer, group: Group, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Of gate above up [num_experts, 2 * features], and of down [num_experts, hidden_size]: of partial sums, one has
    the latter.
    """
    if not layer.spec.has_bias:
        return None, None
    count, has_down = layer.held.experts.size, group.rank == 0 or layer.held.is_spread(layer.spec)
    gate_up = torch.empty(count, 2 * layer.held.inner.share.room, dtype=dtype, device=device)
    return gate_up, torch.empty(count, layer.hidden_size, dtype=dtype, device=device) if has_down else None


def bias_placements(layer: ExpertLayer, biases: tuple[Tensor | None, Tensor | None]) -> Iterator[Placement]:
    """As checkpoints with interleaved rows have them; no others have any."""
    gate_up, down = biases
    if gate_up is None:
        return
    names, num_experts, experts, inner = layer.spec.names, layer.spec.num_experts, *layer.held
    own = shard_of(experts, num_experts)
    shape = torch.Size((experts.size, 2 * inner.whole))
    rows = Reordered(gate_up, shape, lambda bias: inner.of_halves(halves_of_rows(bias), 1))
    yield Placement(f"{layer.module}.{names.gate}_bias", rows, own)
    elsewhere = Elsewhere((num_experts, layer.hidden_size), gate_up.device)
    yield Placement(f"{layer.module}.{names.down}_bias", elsewhere if down is None else down, own)


def halves_of_rows(rows: Tensor) -> Tensor:
    """[num_experts, 2 * size, ...], gate and up in turn -> all of the gate's before the others."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


class Reordered:
    """Where a tensor of the checkpoint goes that has another order or shape there."""

    def __init__(self, target: Tensor, shape: torch.Size, change: Callable[[Tensor], Tensor]) -> None:
        self.shape = shape  # in the checkpoint
        self.device, self.nbytes = target.device, target.nbytes
        self.format_name = str(target.dtype).removeprefix("torch.")
        self._target, self._change = target, change

    def numel(self) -> int:
        return self._target.numel()

    def copy_(self, source: Tensor) -> None:
        self._target.copy_(self._change(source))

    def normal_(self, mean: float, std: float, *, generator: torch.Generator | None = None) -> None:
        self._target.normal_(mean, std, generator=generator)
