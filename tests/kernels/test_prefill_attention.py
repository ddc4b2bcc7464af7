"""Prefill attention: kernel and twin against attention in float64, one query at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from cb_backend.kernels import prefill_attention as module
from cb_backend.kernels.prefill_attention import prefill_attention, prefill_attention_torch

from .paged import Paged, Shapes, attend, make_paged

FP16, BF16 = torch.float16, torch.bfloat16
FP8_SCALES = {"is_fp8": True, "key_scale": 0.125, "value_scale": 0.1}


@dataclass(frozen=True)
class Case:
    query_lens: tuple[int, ...]  # the last query_len tokens of each row are its queries
    shapes: Shapes
    num_padding: int = 0  # tokens after the last row's


CASES = [
    Case((0, 1, 37, 120, 63), Shapes(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16,
         seq_lens=(0, 1, 37, 300, 63)), num_padding=9),
    Case((5, 0, 130), Shapes(num_heads=6, num_kv_heads=1, head_dim=20, block_size=32, seq_lens=(5, 0, 260), window=7)),
    Case((33, 129, 1), Shapes(num_heads=3, num_kv_heads=3, head_dim=80, block_size=64, seq_lens=(300, 129, 10),
         window=70)),
    Case((40, 0, 130), Shapes(num_heads=14, num_kv_heads=2, head_dim=128, block_size=128, seq_lens=(100, 9, 130),
         window=100, dtype=FP16)),
    Case((91,), Shapes(num_heads=8, num_kv_heads=4, head_dim=32, block_size=5, seq_lens=(91,), dtype=FP16)),
    Case((3,), Shapes(num_heads=2, num_kv_heads=1, head_dim=256, block_size=16, seq_lens=(70,))),
    Case((40, 1, 130), Shapes(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(100, 9, 130),
         **FP8_SCALES), num_padding=3),
    Case((5, 70), Shapes(num_heads=6, num_kv_heads=1, head_dim=20, block_size=64, seq_lens=(5, 260), window=70,
         dtype=FP16, **FP8_SCALES)),
    Case((0, 37, 120), Shapes(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(0, 37, 300),
         softcap=0.7), num_padding=3),
    Case((5, 70), Shapes(num_heads=6, num_kv_heads=1, head_dim=20, block_size=32, seq_lens=(5, 260), window=7,
         softcap=2.0)),
    Case((70,), Shapes(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(100,), softcap=1.5,
         dtype=FP16, **FP8_SCALES)),
]  # fmt: skip
GPU_CASES = [
    Case((700, 1, 64, 130), Shapes(num_heads=16, num_kv_heads=8, head_dim=128, block_size=16,
         seq_lens=(700, 900, 64, 1300), dtype=BF16), num_padding=100),
    Case((300, 17), Shapes(num_heads=32, num_kv_heads=8, head_dim=64, block_size=16, seq_lens=(1000, 17), dtype=BF16)),
    Case((515,), Shapes(num_heads=28, num_kv_heads=4, head_dim=128, block_size=64, seq_lens=(777,), window=200,
         dtype=FP16)),
    Case((129, 128), Shapes(num_heads=8, num_kv_heads=8, head_dim=80, block_size=32, seq_lens=(129, 400), dtype=BF16)),
    Case((200,), Shapes(num_heads=8, num_kv_heads=4, head_dim=256, block_size=16, seq_lens=(333,), dtype=BF16)),
    Case((200,), Shapes(num_heads=8, num_kv_heads=4, head_dim=256, block_size=16, seq_lens=(333,), dtype=BF16,
         softcap=1.0)),
    Case((130, 7), Shapes(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, seq_lens=(200, 7))),
    Case((130,), Shapes(num_heads=8, num_kv_heads=4, head_dim=256, block_size=16, seq_lens=(200,))),
    Case((200, 64), Shapes(num_heads=8, num_kv_heads=4, head_dim=256, block_size=16, seq_lens=(333, 64), dtype=BF16,
         **FP8_SCALES)),
    Case((700, 1, 130), Shapes(num_heads=16, num_kv_heads=8, head_dim=128, block_size=16, seq_lens=(700, 900, 1300),
         dtype=BF16, **FP8_SCALES), num_padding=100),
    Case((300, 17), Shapes(num_heads=32, num_kv_heads=8, head_dim=64, block_size=64, seq_lens=(1000, 17), window=200,
         dtype=FP16, **FP8_SCALES)),
]  # fmt: skip


def make_queries(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """q with NaN in the padding, and query_start_loc."""
    starts = torch.tensor([0, *torch.tensor(case.query_lens).cumsum(0).tolist()], dtype=torch.int32)
    q = torch.randn(int(starts[-1]) + case.num_padding, case.shapes.num_heads, case.shapes.head_dim)
    q[int(starts[-1]) :] = float("nan")
    return q.to(case.shapes.dtype).to(device), starts.to(device)


def expected(case: Case, paged: Paged, q: torch.Tensor) -> torch.Tensor:
    queries, out, token = q.cpu(), torch.zeros(q.shape, dtype=torch.float64), 0
    for row, (query_len, seq_len) in enumerate(zip(case.query_lens, case.shapes.seq_lens, strict=True)):
        for position in range(seq_len - query_len, seq_len):
            out[token] = attend(case.shapes, queries[token], paged.keys[row], paged.values[row], position)
            token += 1
    return out


def check(case: Case, function: object, device: torch.device, seed: int = 0) -> None:
    paged = make_paged(case.shapes, device, seed)
    q, query_start_loc = make_queries(case, device)
    out = torch.full_like(q, float("nan"))
    result = function(  # type: ignore[operator]
        q, paged.kv_cache, paged.block_tables, paged.slots, query_start_loc, paged.seq_lens,
        case.shapes.query_scale, case.shapes.window, max_query_len=max(case.query_lens), out=out,
        value_scale=case.shapes.value_scale, softcap=case.shapes.softcap,
    )  # fmt: skip
    assert result is out
    assert (out.cpu().double() - expected(case, paged, q)).abs().max() < case.shapes.tolerance


@pytest.mark.parametrize("case", CASES)
def test_kernel(case: Case, device: torch.device) -> None:
    check(case, prefill_attention, device)


def test_a_tile_finds_its_request_among_many(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than are looked at together."""
    monkeypatch.setattr(module, "_REQUESTS_AT_ONCE", 2)
    check(max(CASES, key=lambda case: len(case.query_lens)), prefill_attention, device)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256], ids=lambda head_dim: f"scale of {head_dim}")
@pytest.mark.parametrize(
    ("num_heads", "block_size"), [(2, 32), (1, 16)], ids=["tiles of cache blocks", "more queries than keys"]
)
def test_the_first_keys_of_a_tile_may_be_in_no_window_of_its_last_rows(
    num_heads: int, block_size: int, head_dim: int, device: torch.device
) -> None:
    """Whatever the scale of the scores: those of models, whose products are rounded up or down."""
    scale = head_dim**-0.5 / Shapes(num_heads=1, num_kv_heads=1, head_dim=16, block_size=16, seq_lens=()).scale
    shapes = Shapes(num_heads=num_heads, num_kv_heads=1, head_dim=16, block_size=block_size, seq_lens=(90,), window=7,
                    key_scale=scale)  # fmt: skip
    check(Case((70,), shapes), prefill_attention, device)


@pytest.mark.parametrize("case", CASES)
def test_twin(case: Case) -> None:
    check(case, prefill_attention_torch, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES)
@pytest.mark.parametrize("seed", [1, 2])
def test_kernel_on_a_gpu(case: Case, seed: int) -> None:
    check(case, prefill_attention, torch.device("cuda"), seed)
