"""A mixture of experts: a router, and feed-forward blocks of which each token goes through the best few.

What the experts make of a token stays in parts, one an expert; the addition and norm that follow add them up. What all
tokens share is one part more. Where experts are spread over devices, each routes all tokens and has what its own
experts make of them; the sum over the devices is the block's output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cb_backend.kernels.route import Routing
from cb_backend.layers.experts import Experts
from cb_backend.layers.layer_spec import MoESpec
from cb_backend.layers.linear import Linear
from cb_backend.layers.mlp import MLP
from cb_backend.layers.norm import Junction
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.placement import Placement
from cb_backend.layers.step_metadata import StepMetadata
from cb_backend.parallel.group import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEParts:
    """What the block is made of."""

    router: Linear  # logits of the experts, and behind them, where there is one, the shared block's gate
    experts: Experts
    shared: MLP | None = None
    score_bias: Placement | None = None  # of a float32 tensor [num_experts]


class MoE:
    """The block: in the place of an MLP, with parts for a result."""

    def __init__(self, spec: MoESpec, parts: MoEParts, ops: ModelOps, group: Group) -> None:
        self.router, self.experts, self.shared = parts.router, parts.experts, parts.shared
        self.ops, self.group, self.spec = ops, group, spec
        held = parts.experts.held
        self.routing = Routing(
            spec.top_k, spec.scoring, spec.renormalise, spec.scale, spec.num_groups, spec.top_groups,
            held.experts.start, held.experts.size if held.is_spread(spec) else None,
        )  # fmt: skip
        self.num_parts = spec.top_k + (parts.shared is not None)
        self._bias_place = parts.score_bias
        bias = None if parts.score_bias is None else parts.score_bias.target
        assert bias is None or isinstance(bias, Tensor)
        self.score_bias = bias

    def after(self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata) -> tuple[Tensor, Tensor]:
        """([num_tokens, num_parts, hidden_size], whose sum is the block's output; the residual stream)."""
        normed, total = self.group.reduce_add_norm(x, residual, junction)
        num_tokens, hidden_size = normed.shape
        parts = torch.empty(num_tokens, self.num_parts, hidden_size, dtype=normed.dtype, device=normed.device)
        logits = self.router(normed.float() if self.spec.is_routed_in_float32 else normed, step)
        weights, plan = self.ops.route_experts(
            logits[:, : self.spec.num_experts],
            step.slot_mapping[0],  # padding is padding in every group
            parts,
            self.routing,
            self.score_bias,
            self.experts.bits,
        )
        self.experts(normed, weights, plan, parts)
        if self.shared is not None:
            gate = logits[:, self.spec.num_experts] if self.spec.has_shared_gate else None
            self.ops.gate_rows(self.shared(normed, step), gate, parts[:, -1])
        return parts, total

    def placements(self) -> Iterator[Placement]:
        yield from self.router.placements()
        yield from self.experts.placements()
        if self.shared is not None:
            yield from self.shared.placements()
        if self._bias_place is not None:
            yield self._bias_place
