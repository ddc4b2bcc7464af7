"""A mixture of experts: a router, and feed-forward blocks of which each token goes through the best few.

What the experts make of a token stays in parts, one an expert; the addition and norm that follow add them up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from cb_backend.kernels.expert_plan import ExpertPlan
from cb_backend.kernels.route import Routing
from cb_backend.layers.group import Group
from cb_backend.layers.layer_spec import MoESpec
from cb_backend.layers.linear import Linear
from cb_backend.layers.norm import Junction
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.placement import Placement
from cb_backend.layers.step_metadata import StepMetadata


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


class MoE:
    """The block: in the place of an MLP, with parts for a result."""

    def __init__(self, spec: MoESpec, router: Linear, experts: Experts, ops: ModelOps, group: Group) -> None:
        self.router, self.experts = router, experts
        self.ops, self.group = ops, group
        self.routing = Routing(spec.top_k, spec.scoring, spec.renormalise, spec.scale)
        self.num_parts = spec.top_k

    def after(self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata) -> tuple[Tensor, Tensor]:
        """([num_tokens, num_parts, hidden_size], whose sum is the block's output; the residual stream)."""
        normed, total = self.group.reduce_add_norm(x, residual, junction)
        num_tokens, hidden_size = normed.shape
        parts = torch.empty(num_tokens, self.num_parts, hidden_size, dtype=normed.dtype, device=normed.device)
        logits = self.router(normed, step)
        weights, plan = self.ops.route_experts(logits, step.slot_mapping, parts, self.routing, bits=self.experts.bits)
        self.experts(normed, weights, plan, parts)
        return parts, total

    def placements(self) -> Iterator[Placement]:
        yield from self.router.placements()
        yield from self.experts.placements()


class PlainExperts:
    """Weights in the model's dtype: gate above up [num_experts, 2 * intermediate_size, hidden_size], and down."""

    bits = 16

    def __init__(
        self, name: str, hidden_size: int, spec: MoESpec, ops: ModelOps, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.name = name  # of the module in the checkpoint
        self.spec = spec
        self.ops = ops
        size = spec.intermediate_size
        self.gate_up = torch.empty(spec.num_experts, 2 * size, hidden_size, dtype=dtype, device=device)
        self.down = torch.empty(spec.num_experts, hidden_size, size, dtype=dtype, device=device)

    def __call__(self, x: Tensor, weights: Tensor, plan: ExpertPlan, parts: Tensor) -> None:
        activated = self.ops.grouped_gate_up(x, self.gate_up, plan, self.spec.top_k, self.spec.activation)
        self.ops.grouped_down(activated, self.down, plan, weights, parts)

    def placements(self) -> Iterator[Placement]:
        names, size = self.spec.names, self.spec.intermediate_size
        for expert in range(self.spec.num_experts):
            name = f"{self.name}.{expert}"
            yield Placement(f"{name}.{names.gate}.weight", self.gate_up[expert, :size])
            yield Placement(f"{name}.{names.up}.weight", self.gate_up[expert, size:])
            yield Placement(f"{name}.{names.down}.weight", self.down[expert])
