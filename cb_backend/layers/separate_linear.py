"""A projection whose parts are stored in different formats: a product each, beside one another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from cb_backend.kernels.lora_plan import AdapterPlan
from cb_backend.layers.linear import Linear
from cb_backend.layers.norm import Junction
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.placement import Placement
from cb_backend.layers.projection import Projection
from cb_backend.layers.step_metadata import StepMetadata
from cb_backend.parallel.group import Group


class SeparateLinear(Linear):
    """`Linear` of the parts' own projections. What would be fused with the one product is not."""

    def __init__(
        self,
        projection: Projection,
        parts: Mapping[str, Linear],
        ops: ModelOps,
        group: Group,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """parts: by their names, in the projection's order."""
        super().__init__(replace(projection, has_bias=False), ops, group, dtype=dtype, device=device)
        self.parts = parts

    def _new_weight(self, size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(0, dtype=dtype, device=device)  # the parts hold it

    def __call__(self, x: Tensor, step: StepMetadata) -> Tensor:
        return torch.cat([part(x, step) for part in self.parts.values()], dim=1)

    def with_shrunk(self, x: Tensor, a: Tensor, step: StepMetadata, plan: AdapterPlan) -> tuple[Tensor, Tensor]:
        return self._shrunk_first(x, a, step, plan)

    def after(self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata) -> tuple[Tensor, Tensor]:
        normed, total = self.group.reduce_add_norm(x, residual, junction)
        return self(normed, step), total

    def gated(self, x: Tensor, step: StepMetadata) -> Tensor:
        return self.ops.silu_mul(self(x, step))

    def placements(self) -> Iterator[Placement]:
        for part in self.parts.values():
            yield from part.placements()


def part_of(projection: Projection, name: str) -> Projection:
    """One part as a projection of its own."""
    transforms = {name: projection.transforms[name]} if name in projection.transforms else {}
    return replace(projection, parts={name: projection.parts[name]}, transforms=transforms, is_gated=False)
