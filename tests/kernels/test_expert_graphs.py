"""On a GPU: a captured graph of routing, plan and products serves whatever routing the logits of a replay ask for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from cb_backend.kernels.expert_plan import plan_experts_torch
from cb_backend.kernels.grouped_linear import (
    grouped_down,
    grouped_down_torch,
    grouped_gate_up,
    grouped_gate_up_torch,
)
from cb_backend.kernels.grouped_packed import (
    PackedExperts,
    grouped_down_packed,
    grouped_down_packed_torch,
    grouped_gate_up_packed,
    grouped_gate_up_packed_torch,
)
from cb_backend.kernels.route import Routing, route_torch
from cb_backend.kernels.route_experts import route_experts

from .test_grouped_packed import packed_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_EXPERTS, HIDDEN, SIZE = 32, 2880, 1440
ROUTING = Routing(4, renormalise=True)


@dataclasses.dataclass
class Layer:
    """Weights of either kind, and both products by kernels or by twins."""

    gate_up: Tensor | PackedExperts
    down: Tensor | PackedExperts

    @property
    def bits(self) -> int:
        return 16 if isinstance(self.gate_up, Tensor) else self.gate_up.bits

    def run(self, x: Tensor, logits: Tensor, slots: Tensor, parts: Tensor) -> None:
        weights, plan = route_experts(logits, slots, parts, ROUTING, None, self.bits)
        if isinstance(self.gate_up, Tensor) and isinstance(self.down, Tensor):
            grouped_down(grouped_gate_up(x, self.gate_up, plan, 4), self.down, plan, weights, parts)
        elif isinstance(self.gate_up, PackedExperts) and isinstance(self.down, PackedExperts):
            inner = grouped_gate_up_packed(x, self.gate_up, plan, 4)
            grouped_down_packed(inner, self.down, plan, weights, parts)

    def wanted(self, x: Tensor, logits: Tensor, slots: Tensor) -> Tensor:
        parts = torch.zeros(len(x), 4, HIDDEN, dtype=x.dtype, device=x.device)
        ids, weights = route_torch(logits, slots, parts, ROUTING)
        plan = plan_experts_torch(ids, NUM_EXPERTS, self.bits)
        if isinstance(self.gate_up, Tensor) and isinstance(self.down, Tensor):
            inner = grouped_gate_up_torch(x, self.gate_up, plan, 4)
            return grouped_down_torch(inner, self.down, plan, weights, parts)
        assert isinstance(self.gate_up, PackedExperts)
        assert isinstance(self.down, PackedExperts)
        inner = grouped_gate_up_packed_torch(x, self.gate_up, plan, 4)
        return grouped_down_packed_torch(inner, self.down, plan, weights, parts)


def layer(kind: str) -> Layer:
    device = torch.device("cuda")
    torch.manual_seed(1)
    if kind == "bfloat16":
        gate_up = torch.randn(NUM_EXPERTS, 2 * SIZE, HIDDEN, device=device) * HIDDEN**-0.5
        down = torch.randn(NUM_EXPERTS, HIDDEN, SIZE, device=device) * SIZE**-0.5
        return Layer(gate_up.bfloat16(), down.bfloat16())
    group = 32 if kind == "fp4" else 128
    return Layer(
        packed_experts(kind, group, False, (NUM_EXPERTS, 2 * SIZE, HIDDEN), device, is_gated=True),
        packed_experts(kind, group, False, (NUM_EXPERTS, HIDDEN, SIZE), device, is_gated=False),
    )


def logits_of(case: str, num_rows: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    logits = torch.randn(num_rows, NUM_EXPERTS, device="cuda")
    if case == "one for all":
        logits[:, [3, 7, 8, 31]] += 20.0
    elif case == "few":
        logits[:, 5:] -= 20.0
    return logits.bfloat16()


@pytest.mark.parametrize("kind", ["bfloat16", "fp4", "int4"])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 64, 300])
def test_a_captured_graph_follows_the_routing(kind: str, num_rows: int) -> None:
    """Even, all to the same experts, few of them, and rows of padding, in one graph."""
    experts = layer(kind)
    x = torch.randn(num_rows, HIDDEN, device="cuda").bfloat16()
    logits, slots = logits_of("even", num_rows, 0), torch.ones(num_rows, dtype=torch.int32, device="cuda")
    parts = torch.zeros(num_rows, 4, HIDDEN, dtype=x.dtype, device="cuda")
    experts.run(x, logits, slots, parts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts.run(x, logits, slots, parts)
    for seed, case in enumerate(("even", "one for all", "few", "even", "padding", "one for all", "all padding")):
        logits.copy_(logits_of(case, num_rows, seed))
        slots.fill_(0 if case == "all padding" else 1)
        if case == "padding":
            slots[num_rows // 2 :] = 0
        parts.fill_(float("nan"))
        for _ in range(3):  # a replay after another, whose kernels may overlap
            graph.replay()
        wanted = experts.wanted(x, logits, slots)
        error = (parts.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-6)
        assert float(error) < 2e-2, f"{case}: {float(error)}"


def test_routings_that_change_change_what_comes_out() -> None:
    """What the test above rests on: the cases do not all give the same."""
    experts, x = layer("fp4"), torch.randn(8, HIDDEN, device="cuda").bfloat16()
    slots = torch.ones(8, dtype=torch.int32, device="cuda")
    even, same = (experts.wanted(x, logits_of(case, 8, 0), slots) for case in ("even", "one for all"))
    assert float((even.float() - same.float()).norm() / even.float().norm()) > 0.5
