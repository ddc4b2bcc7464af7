"""A projection with adapters: the product of any format, and to rows that go through an adapter what that adds.

The adapter's part is in the model's dtype whatever the weight is stored in. A step without adapters runs just what the
projection runs without them, fused as ever; with them the sum comes before what would be fused with the product. The
activation of gate and up is one launch with the sum instead.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from cb_backend.kernels.lora_plan import AdapterPlan
from cb_backend.layers.adapter_table import AdapterSite
from cb_backend.layers.linear import Linear
from cb_backend.layers.norm import Junction
from cb_backend.layers.placement import Placement
from cb_backend.layers.step_metadata import StepMetadata


class LoraLinear(Linear):
    """Around a `Linear`, whose weights stay its own."""

    def __init__(self, base: Linear, site: AdapterSite) -> None:
        self.base, self.site = base, site
        self.ops, self.group, self.projection = base.ops, base.group, base.projection
        self.weight, self.bias = base.weight, base.bias

    def __call__(self, x: Tensor, step: StepMetadata) -> Tensor:
        if step.adapters is None:
            return self.base(x, step)
        site = self.site
        product, shrunk = self.base.with_shrunk(x, site.a, step, step.adapters)
        self.ops.lora_expand(product, shrunk, site.b, site.scales, site.slices, step.adapters)
        return product

    def after(self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata) -> tuple[Tensor, Tensor]:
        if step.adapters is None:
            return self.base.after(junction, x, residual, step)
        normed, total = self.group.reduce_add_norm(x, residual, junction)
        return self(normed, step), total

    def gated_after(self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata) -> tuple[Tensor, Tensor]:
        if step.adapters is None:
            return self.base.gated_after(junction, x, residual, step)
        normed, total = self.group.reduce_add_norm(x, residual, junction)
        return self.gated(normed, step), total

    def gated(self, x: Tensor, step: StepMetadata) -> Tensor:
        if step.adapters is None:
            return self.base.gated(x, step)
        return self._activated(x, step, step.adapters, is_gelu=False)

    def gelu_gated_after(
        self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata
    ) -> tuple[Tensor, Tensor]:
        if step.adapters is None:
            return self.base.gelu_gated_after(junction, x, residual, step)
        normed, total = self.group.reduce_add_norm(x, residual, junction)
        return self.gelu_gated(normed, step), total

    def gelu_gated(self, x: Tensor, step: StepMetadata) -> Tensor:
        if step.adapters is None:
            return self.base.gelu_gated(x, step)
        return self._activated(x, step, step.adapters, is_gelu=True)

    def _activated(self, x: Tensor, step: StepMetadata, plan: AdapterPlan, *, is_gelu: bool) -> Tensor:
        """What adapters add and the activation in one launch."""
        site = self.site
        product, shrunk = self.base.with_shrunk(x, site.a, step, plan)
        return self.ops.lora_expand_gated(product, shrunk, site.b, site.scales, site.slices, plan, is_gelu)

    def placements(self) -> Iterator[Placement]:
        yield from self.base.placements()
