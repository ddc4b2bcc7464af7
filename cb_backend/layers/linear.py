"""Matrix products with weights: plain and fused projections, the embedding, the head.

Weights are plain tensors, allocated empty on the model's device. Every layer lists where the tensors of a checkpoint go
(`placements`), to a fused weight those of its parts; loading is then one copy a placement, and nothing here knows
files.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from cb_backend.kernels.lora_plan import AdapterPlan
from cb_backend.layers.norm import Junction
from cb_backend.layers.op_signatures import ModelOps
from cb_backend.layers.placement import Elsewhere, Fillable, Placement
from cb_backend.layers.projection import Part, Projection, Split
from cb_backend.layers.step_metadata import StepMetadata
from cb_backend.parallel.group import Group


class Linear:
    """y = x W^T + b in the model's dtype. What is fused with the product is decided here."""

    def __init__(
        self,
        projection: Projection,
        ops: ModelOps,
        group: Group,
        *,
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: torch.dtype | None = None,  # None: dtype
    ) -> None:
        self.ops = ops
        self.group = group
        self.projection = projection
        out_size, in_size = projection.sizes(group.rank, group.size)
        self.weight = self._new_weight((out_size, in_size), weight_dtype or dtype, device)
        # Of partial sums one has the bias.
        has_bias = projection.has_bias and (projection.split is not Split.COLUMNS or group.rank == 0)
        self.bias = torch.empty(out_size, dtype=dtype, device=device) if has_bias else None
        if group.size > 1:  # what pads a share stays so
            self.weight.zero_()
            if self.bias is not None:
                self.bias.zero_()

    def _new_weight(self, size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """[out_size, in_size]"""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, x: Tensor, step: StepMetadata) -> Tensor:
        """[num_tokens, in_size] -> [num_tokens, out_size]."""
        return self.ops.linear(x, self.weight, self.bias)

    def with_shrunk(self, x: Tensor, a: Tensor, step: StepMetadata, plan: AdapterPlan) -> tuple[Tensor, Tensor]:
        """(the product, what adapters shrink x to), side by side."""
        return self.ops.linear_shrink(x, self.weight, self.bias, None, a, plan)

    def _shrunk_first(self, x: Tensor, a: Tensor, step: StepMetadata, plan: AdapterPlan) -> tuple[Tensor, Tensor]:
        """`with_shrunk` of products that let nothing run beside them."""
        shrunk = self.ops.lora_shrink(x, a, plan)  # in this order: the product may fetch its weights meanwhile
        return self(x, step), shrunk

    def into(self, x: Tensor, out: Tensor | None) -> Tensor:
        """The product of a projection of one part, whatever the step; in `out` where given."""
        return self.ops.linear(x, self.weight, self.bias, out)

    def after(self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata) -> tuple[Tensor, Tensor]:
        """(the product of what leaves the junction, the residual stream); x and residual [num_tokens, in_size]."""
        norm_weight = junction.plain_weight
        if norm_weight is not None and self.group.size == 1:
            return self.ops.add_norm_linear(x, residual, norm_weight, junction.eps, self.weight, self.bias)
        normed, total = self.group.reduce_add_norm(x, residual, junction)
        return self(normed, step), total

    def gated_after(self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata) -> tuple[Tensor, Tensor]:
        """(silu(first half) * second half of that product, the residual stream), the first of half its size."""
        normed, total = self.group.reduce_add_norm(x, residual, junction)
        return self.gated(normed, step), total

    def gated(self, x: Tensor, step: StepMetadata) -> Tensor:
        """silu(first half) * second half of the product, of half its size."""
        if self.bias is None:
            return self.ops.linear_silu_mul(x, self.weight)
        return self.ops.silu_mul(self(x, step))

    def gelu_gated_after(
        self, junction: Junction, x: Tensor, residual: Tensor, step: StepMetadata
    ) -> tuple[Tensor, Tensor]:
        """As `gated_after`, with gelu in its approximation by tanh."""
        product, total = self.after(junction, x, residual, step)
        return self.ops.gelu_mul(product), total

    def gelu_gated(self, x: Tensor, step: StepMetadata) -> Tensor:
        """As `gated`, with that gelu."""
        return self.ops.gelu_mul(self(x, step))

    def placements(self) -> Iterator[Placement]:
        for part in self.projection.places(self.group.rank, self.group.size):
            yield from self._placements_of(part)
            if self.bias is not None:
                yield Placement(f"{part.name}.bias", self.bias[part.rows], part.bias_shard, part.transform)
            elif self.projection.has_bias:
                yield Placement(f"{part.name}.bias", Elsewhere((part.share.size,), self.weight.device))

    def _placements_of(self, part: Part) -> Iterator[Placement]:
        """Where the part's weight goes."""
        yield Placement(f"{part.name}.weight", self._weight_of(part), part.weight_shard, part.transform)

    def _weight_of(self, part: Part) -> Fillable:
        return self.weight[part.rows, part.columns]


class PartialLinear(Linear):
    """Of partial sums, which ranks add up next: they are written where that finds them."""

    def __call__(self, x: Tensor, step: StepMetadata) -> Tensor:
        return self.ops.linear(x, self.weight, self.bias, self.group.partial_out(x.shape[0]))

    def with_shrunk(self, x: Tensor, a: Tensor, step: StepMetadata, plan: AdapterPlan) -> tuple[Tensor, Tensor]:
        return self.ops.linear_shrink(x, self.weight, self.bias, self.group.partial_out(x.shape[0]), a, plan)


class Embedding:
    """Token ids to vectors."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_rows: int | None = None,
    ) -> None:
        """num_rows: with those that pad the vocabulary for a head of several devices; None: there are none."""
        self.name = name  # of the module in the checkpoint
        self.vocab_size = vocab_size
        self.weight = torch.empty(num_rows or vocab_size, hidden_size, dtype=dtype, device=device)
        if num_rows is not None:
            self.weight[vocab_size:].zero_()

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens] int -> [num_tokens, hidden_size]."""
        # NOTE: a plain launch. Kernels of the layers read before they wait what is older than it: `launch.can_overlap`.
        return functional.embedding(token_ids, self.weight)

    def placements(self) -> Iterator[Placement]:
        yield Placement(f"{self.name}.weight", self.weight[: self.vocab_size])


class ScaledEmbedding(Embedding):
    """Vectors times a number, which is rounded to their type first or is not."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float,
        is_scale_rounded: bool,
        dtype: torch.dtype,
        device: torch.device,
        num_rows: int | None = None,
    ) -> None:
        super().__init__(name, vocab_size, hidden_size, dtype=dtype, device=device, num_rows=num_rows)
        self.scale = float(torch.tensor(scale, dtype=dtype)) if is_scale_rounded else scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        return super().__call__(token_ids).mul_(self.scale)  # a plain launch as well
