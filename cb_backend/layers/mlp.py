"""Feed-forward blocks: what stands between a layer's attention and the next layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from cb_backend.layers.linear import Linear
from cb_backend.layers.norm import Junction
from cb_backend.layers.placement import Placement
from cb_backend.layers.step_metadata import StepMetadata


class Block(Protocol):
    """A feed-forward block of any kind."""

    def after(self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata) -> tuple[Tensor, Tensor]:
        """(the block's output for what leaves the junction, the residual stream), each [num_tokens, hidden_size]."""
        ...

    def placements(self) -> Iterator[Placement]: ...


class MLP:
    """The gated block: down(silu(gate(x)) * up(x)). Gate and up projections are one fused weight, gate first."""

    def __init__(self, gate_up_proj: Linear, down_proj: Linear) -> None:
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj

    def after(self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata) -> tuple[Tensor, Tensor]:
        activated, total = self.gate_up_proj.gated_after(junction, x, residual, step)
        return self.down_proj(activated, step), total

    def __call__(self, x: Tensor, step: StepMetadata) -> Tensor:
        """[num_tokens, hidden_size], normed, -> the same size."""
        return self.down_proj(self.gate_up_proj.gated(x, step), step)

    def placements(self) -> Iterator[Placement]:
        yield from self.gate_up_proj.placements()
        yield from self.down_proj.placements()


class GeluMLP(MLP):
    """down(gelu(gate(x)) * up(x)), with the approximation of gelu by tanh."""

    def after(self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata) -> tuple[Tensor, Tensor]:
        activated, total = self.gate_up_proj.gelu_gated_after(junction, x, residual, step)
        return self.down_proj(activated, step), total

    def __call__(self, x: Tensor, step: StepMetadata) -> Tensor:
        return self.down_proj(self.gate_up_proj.gelu_gated(x, step), step)
