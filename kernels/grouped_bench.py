"""Products of experts on a GPU: the weights of one layer's experts, rows routed to them, and what a product takes.

Rows go to random experts, as random weights route them: evenly, which reads the most weights. Each number of rows is
timed over several routings, so that few rows do not find their experts in L2.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import relative_error, time_graph
from published_models import spec_of

from cb_backend.kernels.expert_plan import ExpertPlan, plan_experts
from cb_backend.kernels.grouped_linear import (
    grouped_down,
    grouped_down_torch,
    grouped_gate_up,
    grouped_gate_up_torch,
)
from cb_backend.kernels.grouped_packed import (
    grouped_down_packed,
    grouped_down_packed_torch,
    grouped_gate_up_packed,
    grouped_gate_up_packed_torch,
)
from cb_backend.kernels.launch import overriding
from cb_backend.layers.experts import PlainExperts
from cb_backend.layers.layer_maker import LayerMaker
from cb_backend.layers.layer_spec import MoESpec
from cb_backend.layers.ops import resolve_ops
from cb_backend.layers.packed_experts import PackedMixture
from cb_backend.models.quantization import module_formats
from cb_backend.models.weights import fill_dummy
from cb_backend.parallel.group import NoGroup

Parameters = dict[str, int]
ROUTINGS = 8
OPS = ("grouped_gate_up", "grouped_down")


class Weights:
    """Of one layer's experts."""

    def __init__(self, model: str) -> None:
        spec = spec_of(model)
        self.model, self.hidden = model, spec.hidden_size
        self.experts = next(layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoESpec))
        make = LayerMaker(
            ops=resolve_ops("triton"), dtype=torch.bfloat16, device=torch.device("cuda"), group=NoGroup(),
            format_of=spec.formats or module_formats(None),
        )  # fmt: skip
        block = make.moe("model.layers.0.mlp", self.hidden, self.experts)
        fill_dummy(block.placements(), 0)
        assert isinstance(block.experts, PlainExperts | PackedMixture)
        self.block = block.experts

    @property
    def bits(self) -> int:
        return self.block.bits

    @property
    def bytes_per_weight(self) -> float:
        if isinstance(self.block, PlainExperts):
            return 2.0
        weight = self.block.gate_up.weight
        return weight.num_bytes / (len(weight.values) * weight.size[0] * weight.size[1])

    def shape(self, op: str) -> tuple[int, int]:
        """(n, k)"""
        size = self.experts.intermediate_size
        return (size, self.hidden) if op == "grouped_gate_up" else (self.hidden, size)


class Bench:
    """So many rows, routed several times, and how to time a product on them."""

    def __init__(self, weights: Weights, num_rows: int) -> None:
        self.weights, self.num_rows = weights, num_rows
        spec = weights.experts
        self.top_k = spec.top_k
        self.ids = [
            torch.rand(num_rows, spec.num_experts, device="cuda").topk(self.top_k)[1].int() for _ in range(ROUTINGS)
        ]
        self.x = torch.randn(num_rows, weights.hidden, device="cuda").bfloat16()
        self.inner = torch.randn(num_rows * self.top_k, spec.intermediate_size, device="cuda").bfloat16()
        self.row_weights = torch.rand(num_rows, self.top_k, device="cuda")
        self.out = torch.zeros(num_rows, self.top_k, weights.hidden, device="cuda", dtype=torch.bfloat16)

    @property
    def distinct(self) -> float:
        return sum(len(ids.unique()) for ids in self.ids) / len(self.ids)

    def plans(self, block_m: int) -> list[ExpertPlan]:
        with overriding("plan_experts", {"block_m": block_m}):
            return [plan_experts(ids, self.weights.experts.num_experts, self.weights.bits) for ids in self.ids]

    def product(self, op: str, plan: ExpertPlan) -> Tensor:
        block, activation = self.weights.block, self.weights.experts.activation
        gate_up_bias, down_bias = block.biases
        if isinstance(block, PlainExperts):
            if op == "grouped_gate_up":
                return grouped_gate_up(self.x, block.gate_up, plan, self.top_k, activation, gate_up_bias)
            return grouped_down(self.inner, block.down, plan, self.row_weights, self.out, down_bias)
        if op == "grouped_gate_up":
            return grouped_gate_up_packed(self.x, block.gate_up.weight, plan, self.top_k, activation, gate_up_bias)
        return grouped_down_packed(self.inner, block.down.weight, plan, self.row_weights, self.out, down_bias)

    def seconds(self, op: str, plans: list[ExpertPlan], parameters: Parameters) -> float:
        def launch_all() -> int:
            for plan in plans:
                self.product(op, plan)
            return len(plans)

        with overriding(op, parameters):
            return time_graph(launch_all)

    def check(self, plan: ExpertPlan) -> float:
        """The relative error of both products beside the twins'."""
        block, activation = self.weights.block, self.weights.experts.activation
        gate_up_bias, down_bias = block.biases
        out = torch.zeros_like(self.out)
        if isinstance(block, PlainExperts):
            inner = grouped_gate_up_torch(self.x, block.gate_up, plan, self.top_k, activation, gate_up_bias)
            grouped_down_torch(self.inner, block.down, plan, self.row_weights, out, down_bias)
        else:
            packed, second = block.gate_up.weight, block.down.weight
            inner = grouped_gate_up_packed_torch(self.x, packed, plan, self.top_k, activation, gate_up_bias)
            grouped_down_packed_torch(self.inner, second, plan, self.row_weights, out, down_bias)
        return relative_error([self.product(op, plan) for op in OPS], [inner, out])

    def torch_seconds(self, op: str) -> float:
        """`torch._grouped_mm` on rows that lie in the order of experts already, without activation or weights."""
        is_gate_up = op == "grouped_gate_up"
        block = self.weights.block
        if not isinstance(block, PlainExperts):
            return float("nan")
        weight = (block.gate_up if is_gate_up else block.down).transpose(1, 2)
        rows = self.x.repeat_interleave(self.top_k, dim=0) if is_gate_up else self.inner
        counts = [ids.flatten().long().bincount(minlength=weight.shape[0]) for ids in self.ids]
        ends = [count.cumsum(0).int() for count in counts]

        def launch_all() -> int:
            for end in ends:
                torch._grouped_mm(rows, weight, offs=end)
            return len(ends)

        return time_graph(launch_all)
