"""Products of each expert's rows: kernels and twins against float64, for routings of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cb_backend.kernels.expert_plan import plan_experts, plan_experts_torch
from cb_backend.kernels.grouped_linear import (
    grouped_down,
    grouped_down_torch,
    grouped_gate_up,
    grouped_gate_up_torch,
)
from cb_backend.kernels.launch import overriding

from .test_expert_plan import routings

# (tokens, top_k, experts, hidden, intermediate): odd sizes, sizes of tiles, one row
SHAPES = [(5, 2, 4, 40, 24), (1, 3, 8, 128, 64), (33, 2, 3, 72, 130), (20, 4, 16, 64, 16)]
TOLERANCE = 2e-4
TILES = {"block_n": 32, "block_k": 32, "num_warps": 4, "num_stages": 2}


def make(shape: tuple[int, ...], device: torch.device, has_bias: bool) -> dict[str, Any]:
    num_tokens, top_k, num_experts, hidden, size = shape
    torch.manual_seed(sum(shape))
    biases = {"bias": torch.randn(num_experts, 2 * size), "down_bias": torch.randn(num_experts, hidden)}
    tensors = {
        "x": torch.randn(num_tokens, hidden + 16),
        "gate_up": torch.randn(num_experts, 2 * size, hidden) * hidden**-0.5,
        "down": torch.randn(num_experts, hidden, size) * size**-0.5,
        "weights": torch.rand(num_tokens, top_k),
    }
    given = {name: tensor.to(device) for name, tensor in tensors.items()}
    given["x"] = given["x"][:, :hidden]  # strided rows, which `to` another device would put side by side
    return given | {name: bias.to(device) if has_bias else None for name, bias in biases.items()}


def wanted_parts(ids: Tensor, given: dict[str, Any], activation: str) -> Tensor:
    """[num_tokens, top_k, hidden] in float64, NaN where a pair goes nowhere."""
    number = {name: value.cpu().double() for name, value in given.items() if value is not None}
    num_experts, num_tokens, top_k = number["gate_up"].shape[0], *ids.shape
    out = torch.full((num_tokens, top_k, number["x"].shape[1]), float("nan"), dtype=torch.float64)
    for token in range(num_tokens):
        for place, expert in enumerate(ids[token].tolist()):
            if expert == num_experts:
                continue
            product = number["gate_up"][expert] @ number["x"][token] + (
                number["bias"][expert] if "bias" in number else 0
            )
            gate, up = product.chunk(2)
            if activation == "silu":
                inner = torch.nn.functional.silu(gate) * up
            else:
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            part = number["down"][expert] @ inner + (number["down_bias"][expert] if "bias" in number else 0)
            out[token, place] = part * number["weights"][token, place]
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("activation", "has_bias"), [("silu", False), ("clamped_swiglu", True)])
def test_kernels_and_twins(shape: tuple[int, ...], activation: str, has_bias: bool, device: torch.device) -> None:
    num_tokens, top_k, num_experts, hidden, _ = shape
    given = make(shape, device, has_bias)
    on_cpu = {name: None if value is None else value.cpu() for name, value in given.items()}
    for name, ids in routings(num_tokens, top_k, num_experts).items():
        wanted = wanted_parts(ids, given, activation)
        untouched = wanted.isnan()
        for backend, each in (("kernel", given), ("twin", on_cpu)):
            is_kernel = backend == "kernel"
            plan_of, gate_up, down = (
                (plan_experts, grouped_gate_up, grouped_down)
                if is_kernel
                else (plan_experts_torch, grouped_gate_up_torch, grouped_down_torch)
            )
            own_ids = ids.to(each["x"].device)
            # A part more than there are pairs: a shared expert's, which the product must not touch.
            out = torch.full((num_tokens, top_k + 1, hidden), 5.0, device=each["x"].device)
            with overriding("grouped_gate_up", TILES), overriding("grouped_down", TILES):
                plan = plan_of(own_ids, num_experts)
                inner = gate_up(each["x"], each["gate_up"], plan, top_k, activation, each["bias"])
                result = down(inner, each["down"], plan, each["weights"], out, each["down_bias"])
            assert result is out
            parts = out.cpu().double()
            assert (parts[:, top_k] == 5.0).all(), (name, backend)
            assert (parts[:, :top_k][untouched] == 5.0).all(), (name, backend)
            torch.testing.assert_close(
                parts[:, :top_k][~untouched],
                wanted[~untouched],
                atol=TOLERANCE,
                rtol=TOLERANCE,
                msg=f"{name} {backend}",
            )


@pytest.mark.usefixtures("rows_add_up_alike")
@pytest.mark.parametrize("block_m", [16, 32, 128])
def test_a_row_has_the_same_bits_among_any_neighbours(block_m: int, device: torch.device) -> None:
    """Within one size of blocks: alone, or with others at its experts, in whatever place of a block."""
    num_tokens, top_k, num_experts, hidden, size = 30, 2, 4, 64, 48
    given = make((num_tokens, top_k, num_experts, hidden, size), device, has_bias=False)
    ids = torch.rand(num_tokens, num_experts).topk(top_k)[1].int().to(device)

    def parts(rows: slice | list[int]) -> Tensor:
        out = torch.zeros(len(ids[rows]), top_k, hidden, device=device)
        with (
            overriding("plan_experts", {"block_m": block_m}),
            overriding("grouped_gate_up", TILES),
            overriding("grouped_down", TILES),
        ):
            plan = plan_experts(ids[rows], num_experts)
            inner = grouped_gate_up(given["x"][rows], given["gate_up"], plan, top_k)
            return grouped_down(inner, given["down"], plan, given["weights"][rows].contiguous(), out)

    together = parts(slice(None))
    for row in (0, 11, 29):
        assert torch.equal(parts([row])[0], together[row])
    assert torch.equal(parts([5, 29, 11])[1:], together[[29, 11]])


def test_no_tokens(device: torch.device) -> None:
    given = make((0, 2, 4, 16, 8), device, has_bias=False)
    plan = plan_experts(torch.zeros(0, 2, dtype=torch.int32, device=device), 4)
    inner = grouped_gate_up(given["x"], given["gate_up"], plan, 2)
    out = torch.zeros(0, 2, 16, device=device)
    assert grouped_down(inner, given["down"], plan, given["weights"], out).shape == (0, 2, 16)
