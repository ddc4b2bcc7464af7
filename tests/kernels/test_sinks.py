"""Sinks: a score of each head that takes part in attention's softmax and brings no value; kernels and twins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from cb_backend.kernels.decode_attention import decode_attention, decode_attention_torch
from cb_backend.kernels.prefill_attention import prefill_attention, prefill_attention_torch

from .paged import Paged, Shapes, make_paged

FP8_SCALES = {"is_fp8": True, "key_scale": 0.125, "value_scale": 0.1}
SINKS = (-50.0, 0.0, 3.0, 40.0)  # next to none, among the scores, the largest, and all there is
CASES = [
    Shapes(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(1, 37, 300)),
    Shapes(num_heads=4, num_kv_heads=1, head_dim=20, block_size=32, seq_lens=(5, 260), window=7),
    Shapes(num_heads=4, num_kv_heads=4, head_dim=64, block_size=16, seq_lens=(130,), dtype=torch.float16, **FP8_SCALES),
]


def attend_with_sinks(shapes: Shapes, q: Tensor, paged: Paged, row: int, position: int, sinks: Tensor) -> Tensor:
    """One query [num_heads, head_dim] in float64: what the weights of the keys leave goes nowhere."""
    first = max(0, position - shapes.window + 1) if shapes.window else 0
    outputs = []
    for head in range(shapes.num_heads):
        of_kv = head // (shapes.num_heads // shapes.num_kv_heads)
        k, v = paged.keys[row][first : position + 1, of_kv], paged.values[row][first : position + 1, of_kv]
        scores = k @ q[head].double().cpu() * shapes.scale
        weights = torch.softmax(torch.cat((scores, sinks[head].double().cpu().view(1))), dim=0)
        outputs.append(weights[:-1] @ v)
    return torch.stack(outputs)


@dataclass(frozen=True)
class Given:
    paged: Paged
    sinks: Tensor
    arguments: dict[str, Any]


def given(shapes: Shapes, device: torch.device) -> Given:
    sinks = torch.tensor(SINKS).to(shapes.dtype).to(device)
    return Given(make_paged(shapes, device), sinks, {"value_scale": shapes.value_scale, "sinks": sinks})


@pytest.mark.parametrize("shapes", CASES)
def test_decode(shapes: Shapes, device: torch.device) -> None:
    """Rows in one split and in several: the sink counts once."""
    each = given(shapes, device)
    paged = each.paged
    q = torch.randn(len(shapes.seq_lens), shapes.num_heads, shapes.head_dim).to(shapes.dtype).to(device)
    wanted = torch.stack(
        [
            attend_with_sinks(shapes, q[row], paged, row, length - 1, each.sinks)
            for row, length in enumerate(shapes.seq_lens)
        ]
    )
    arguments = (q, paged.kv_cache, paged.block_tables, paged.slots, paged.seq_lens, shapes.query_scale, shapes.window)
    for function in (decode_attention, decode_attention_torch):
        found = function(*arguments, **each.arguments)
        assert (found.cpu().double() - wanted).abs().max() < shapes.tolerance


def test_rows_of_padding_give_zeros(device: torch.device) -> None:
    shapes = Shapes(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(0, 20))
    each = given(shapes, device)
    paged = each.paged
    q = torch.randn(2, 4, 64, device=device)
    for function in (decode_attention, decode_attention_torch):
        found = function(
            q, paged.kv_cache, paged.block_tables, paged.slots, paged.seq_lens, shapes.query_scale, **each.arguments
        )
        assert not found[0].any()
        assert found[1].isfinite().all()


@pytest.mark.parametrize("shapes", CASES)
def test_prefill(shapes: Shapes, device: torch.device) -> None:
    each = given(shapes, device)
    paged = each.paged
    counts = [min(length, 40) for length in shapes.seq_lens]  # the last tokens of each row
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)
    q = torch.randn(sum(counts), shapes.num_heads, shapes.head_dim).to(shapes.dtype).to(device)
    wanted = [
        attend_with_sinks(shapes, q[int(starts[row]) + at], paged, row, length - counts[row] + at, each.sinks)
        for row, length in enumerate(shapes.seq_lens)
        for at in range(counts[row])
    ]
    for function in (prefill_attention, prefill_attention_torch):
        found = function(
            q, paged.kv_cache, paged.block_tables, paged.slots, starts, paged.seq_lens, shapes.query_scale,
            shapes.window, max_query_len=max(counts), **each.arguments,
        )  # fmt: skip
        assert (found.cpu().double() - torch.stack(wanted)).abs().max() < shapes.tolerance
