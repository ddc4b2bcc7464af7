"""The weights of a layer's experts, and the products with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from cb_backend.kernels.expert_plan import ExpertPlan
from cb_backend.layers.layer_spec import MoESpec
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.placement import Placement


class Experts(Protocol):
    """All experts of a layer, in some format."""

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
    """Weights in the model's dtype: gate above up [num_experts, 2 * intermediate_size, hidden_size], and down.

    A checkpoint stores them apart, each expert's gate, up and down; stacked, as they are here; or interleaved, with
    input features before output features, and rows of gate and up in turn.
    """

    bits = 16

    def __init__(
        self, name: str, hidden_size: int, spec: MoESpec, ops: ModelOps, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = name  # of the module in the checkpoint that holds them
        self.spec = spec
        self.ops = ops
        count, size = spec.num_experts, spec.intermediate_size
        self.gate_up = torch.empty(count, 2 * size, hidden_size, dtype=dtype, device=device)
        self.down = torch.empty(count, hidden_size, size, dtype=dtype, device=device)
        self.biases = new_biases(spec, hidden_size, dtype, device)

    def __call__(self, x: Tensor, weights: Tensor, plan: ExpertPlan, parts: Tensor) -> None:
        spec, (gate_up_bias, down_bias) = self.spec, self.biases
        inner = self.ops.grouped_gate_up(x, self.gate_up, plan, spec.top_k, spec.activation, gate_up_bias)
        self.ops.grouped_down(inner, self.down, plan, weights, parts, down_bias)

    def placements(self) -> Iterator[Placement]:
        names, size = self.spec.names, self.spec.intermediate_size
        module = f"{self.name}.{names.experts}" if names.experts else self.name
        if self.spec.storage == "stacked":
            yield Placement(f"{module}.{names.gate}.weight", self.gate_up)
            yield Placement(f"{module}.{names.down}.weight", self.down)
        elif self.spec.storage == "interleaved":
            shape = self.gate_up.shape
            turned = torch.Size((shape[0], shape[2], shape[1]))
            rows = Reordered(self.gate_up, turned, lambda weight: halves_of_rows(weight.transpose(1, 2)))
            yield Placement(f"{module}.{names.gate}", rows)
            yield Placement(f"{module}.{names.down}", self.down.transpose(1, 2))
        else:
            for expert in range(self.spec.num_experts):
                name = f"{module}.{expert}"
                yield Placement(f"{name}.{names.gate}.weight", self.gate_up[expert, :size])
                yield Placement(f"{name}.{names.up}.weight", self.gate_up[expert, size:])
                yield Placement(f"{name}.{names.down}.weight", self.down[expert])
        yield from bias_placements(module, self.spec, self.biases)


def new_biases(
    spec: MoESpec, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Of gate above up [num_experts, 2 * intermediate_size], and of down [num_experts, hidden_size]."""
    if not spec.has_bias:
        return None, None
    sizes = (2 * spec.intermediate_size, hidden_size)
    gate_up, down = (torch.empty(spec.num_experts, size, dtype=dtype, device=device) for size in sizes)
    return gate_up, down


def bias_placements(module: str, spec: MoESpec, biases: tuple[Tensor | None, Tensor | None]) -> Iterator[Placement]:
    """As checkpoints with interleaved rows have them; no others have any."""
    gate_up, down = biases
    if gate_up is None or down is None:
        return
    yield Placement(f"{module}.{spec.names.gate}_bias", Reordered(gate_up, gate_up.shape, halves_of_rows))
    yield Placement(f"{module}.{spec.names.down}_bias", down)


def halves_of_rows(rows: Tensor) -> Tensor:
    """[num_experts, 2 * size, ...], gate and up in turn -> all of the gate's before the others."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)


class Reordered:
    """Where a tensor of the checkpoint goes that has another order or shape there."""

    def __init__(self, target: Tensor, shape: torch.Size, change: Callable[[Tensor], Tensor]) -> None:
        self.shape = shape  # in the checkpoint
        self.device, self.nbytes = target.device, target.nbytes
        self._target, self._change = target, change

    def numel(self) -> int:
        return self._target.numel()

    def copy_(self, source: Tensor) -> None:
        self._target.copy_(self._change(source))

    def normal_(self, mean: float, std: float, *, generator: torch.Generator | None = None) -> None:
        self._target.normal_(mean, std, generator=generator)
