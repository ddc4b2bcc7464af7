"""Decode attention: kernel and twin against attention in float64, one row at a time."""

from __future__ import annotations

import pytest
import torch

from cb_backend.kernels import decode_attention_torch as module
from cb_backend.kernels import decode_plan
from cb_backend.kernels.decode_attention import decode_attention, decode_attention_torch
from cb_backend.kernels.decode_plan import (
    PLAN_HEADER,
    PLAN_ITEM,
    decode_parameters,
    max_items,
    plan_decode,
    tile_alignment,
)
from cb_backend.kernels.launch import overriding

from .paged import Paged, Shapes, attend, make_paged

FP16, BF16 = torch.float16, torch.bfloat16
FP8_SCALES = {"is_fp8": True, "key_scale": 0.125, "value_scale": 0.1}
CASES = [
    Shapes(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(0, 1, 37, 300, 63, 64, 65)),
    Shapes(num_heads=6, num_kv_heads=1, head_dim=20, block_size=32, seq_lens=(5, 0, 260), window=7),
    Shapes(num_heads=3, num_kv_heads=3, head_dim=80, block_size=64, seq_lens=(300, 129, 10), window=70),
    Shapes(num_heads=14, num_kv_heads=2, head_dim=128, block_size=128, seq_lens=(100, 9, 130), window=100, dtype=FP16),
    Shapes(num_heads=8, num_kv_heads=4, head_dim=32, block_size=5, seq_lens=(91,), dtype=FP16),
    Shapes(num_heads=20, num_kv_heads=1, head_dim=16, block_size=16, seq_lens=(1500, 2)),
    Shapes(num_heads=2, num_kv_heads=1, head_dim=256, block_size=16, seq_lens=(0, 40)),
    Shapes(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(0, 37, 300), **FP8_SCALES),
    Shapes(
        num_heads=3, num_kv_heads=3, head_dim=80, block_size=64, seq_lens=(129, 10), window=70, dtype=FP16, **FP8_SCALES
    ),
    Shapes(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(0, 1, 300), softcap=0.7),
    Shapes(
        num_heads=2, num_kv_heads=1, head_dim=256, block_size=16, seq_lens=(40, 3), window=9, softcap=2.0, dtype=FP16
    ),
    Shapes(
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        block_size=16,
        seq_lens=(37, 300),
        softcap=1.5,
        dtype=FP16,
        **FP8_SCALES,
    ),
]
GPU_CASES = [
    # Launch parameters are chosen by the number of rows: a case for each power of two from 16 on.
    *(
        Shapes(num_heads=32, num_kv_heads=8, head_dim=head_dim, block_size=16, seq_lens=(511, 1, 130) * n, dtype=BF16)
        for head_dim in (64, 128)
        for n in (5, 10, 20, 40, 80, 130)
    ),
    Shapes(num_heads=16, num_kv_heads=8, head_dim=128, block_size=16, seq_lens=(5000, 1, 0, 777, 64), dtype=BF16),
    Shapes(num_heads=32, num_kv_heads=8, head_dim=64, block_size=16, seq_lens=(511, 512, 513) * 30, dtype=BF16),
    Shapes(num_heads=32, num_kv_heads=8, head_dim=128, block_size=64, seq_lens=(2000, 31, 6000), dtype=BF16),
    Shapes(num_heads=28, num_kv_heads=4, head_dim=128, block_size=32, seq_lens=(900,), window=300, dtype=FP16),
    Shapes(num_heads=32, num_kv_heads=32, head_dim=80, block_size=16, seq_lens=(333, 4000), dtype=BF16),
    Shapes(num_heads=8, num_kv_heads=4, head_dim=256, block_size=16, seq_lens=(1025, 12), dtype=BF16),
    Shapes(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, seq_lens=(513, 7)),
    Shapes(num_heads=8, num_kv_heads=4, head_dim=256, block_size=16, seq_lens=(1025, 12), softcap=1.0, dtype=BF16),
    Shapes(num_heads=8, num_kv_heads=4, head_dim=256, block_size=16, seq_lens=(1025, 12), dtype=BF16, **FP8_SCALES),
    Shapes(
        num_heads=32, num_kv_heads=8, head_dim=64, block_size=16, seq_lens=(512, 513) * 30, dtype=BF16, **FP8_SCALES
    ),
    Shapes(num_heads=32, num_kv_heads=8, head_dim=128, block_size=64, seq_lens=(0, 31, 6000), dtype=BF16, **FP8_SCALES),
    Shapes(
        num_heads=20, num_kv_heads=4, head_dim=96, block_size=16, seq_lens=(900,), window=300, dtype=FP16, **FP8_SCALES
    ),
]


def expected(shapes: Shapes, paged: Paged, q: torch.Tensor) -> torch.Tensor:
    rows = []
    for row, length in enumerate(shapes.seq_lens):
        keys, values = paged.keys[row], paged.values[row]
        rows.append(attend(shapes, q[row].cpu(), keys, values, length - 1) if length else torch.zeros(q.shape[1:]))
    return torch.stack([row.double() for row in rows])


def check_kernel(shapes: Shapes, device: torch.device, seed: int = 0) -> None:
    paged = make_paged(shapes, device, seed)
    q = torch.randn(len(shapes.seq_lens), shapes.num_heads, shapes.head_dim).to(shapes.dtype).to(device)
    arguments = (q, paged.kv_cache, paged.block_tables, paged.slots, paged.seq_lens, shapes.query_scale, shapes.window)
    plans: dict[int, torch.Tensor] = {}
    wanted = expected(shapes, paged, q)
    for _ in range(2):  # the second layer of a step finds the plan's counters as the first did
        out = torch.full_like(q, float("nan"))
        assert (
            decode_attention(*arguments, out=out, plans=plans, value_scale=shapes.value_scale, softcap=shapes.softcap)
            is out
        )
        assert (out.cpu().double() - wanted).abs().max() < shapes.tolerance
    assert list(plans) == [shapes.window]


@pytest.mark.parametrize("shapes", CASES)
def test_kernel(shapes: Shapes, device: torch.device) -> None:
    check_kernel(shapes, device)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5])
def test_a_plan_and_its_kernel_agree_on_the_parameters_for_so_many_rows(
    num_rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of another size than the plan's would leave tokens out, or attend to some twice."""

    def parameters(op: str, device: torch.device, *, block_d: int, kv_bytes: int, m: int) -> dict[str, int]:
        assert (op, block_d, kv_bytes) == ("decode_attention", 64, 4)
        tiles = {1: 64, 2: 16, 4: 128, 8: 32}
        return {"block_n": tiles[m], "num_warps": 2, "num_stages": 2, "ctas_per_sm": m, "min_split": tiles[m]}

    monkeypatch.setattr(decode_plan, "launch_parameters", parameters)
    monkeypatch.setattr(decode_plan, "num_multiprocessors", lambda device: 8)
    check_kernel(Shapes(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(300,) * num_rows), device)


@pytest.mark.parametrize("merged", [1, 8, 16])
def test_how_many_parts_are_read_together_changes_no_bit(merged: int, device: torch.device) -> None:
    shapes = Shapes(num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, seq_lens=(300, 0, 37, 1200))
    paged = make_paged(shapes, device, 0)
    q = torch.randn(len(shapes.seq_lens), shapes.num_heads, shapes.head_dim).to(device)
    outs = []
    for parts in (4, merged):
        tile = {"block_n": 16, "num_warps": 2, "num_stages": 2, "ctas_per_sm": 4, "min_split": 16, "merged": parts}
        with overriding("decode_attention", tile):
            outs.append(decode_attention(q, paged.kv_cache, paged.block_tables, paged.slots, paged.seq_lens, 0.1))
    assert torch.equal(*outs)


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", GPU_CASES)
@pytest.mark.parametrize("seed", [1, 2])
def test_kernel_on_a_gpu(shapes: Shapes, seed: int) -> None:
    check_kernel(shapes, torch.device("cuda"), seed)


@pytest.mark.gpu
def test_a_captured_launch_serves_other_lengths() -> None:
    """One graph, replayed after the lengths changed, and again after rows became padding."""
    device = torch.device("cuda")
    shapes = next(shapes for shapes in GPU_CASES if len(shapes.seq_lens) == 5)
    paged = make_paged(shapes, device)
    q = torch.randn(len(shapes.seq_lens), shapes.num_heads, shapes.head_dim, device=device).to(shapes.dtype)
    seq_lens, out = paged.seq_lens.clone(), torch.empty_like(q)

    def run() -> None:
        decode_attention(q, paged.kv_cache, paged.block_tables, paged.slots, seq_lens, shapes.scale, out=out, plans={})

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for lengths in (shapes.seq_lens, (3, 0, 0, 770, 64), (4999, 1, 0, 1, 0)):
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        wanted = decode_attention_torch(
            q, paged.kv_cache, paged.block_tables, paged.slots, seq_lens, shapes.scale
        )  # held against float64 by test_twin
        assert (out.float() - wanted.float()).abs().max() < shapes.tolerance


@pytest.mark.parametrize("shapes", CASES)
@pytest.mark.parametrize("padded_tokens", [16384, 120], ids=["one group", "groups"])
def test_twin(shapes: Shapes, padded_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PADDED_TOKENS", padded_tokens)
    paged = make_paged(shapes, torch.device("cpu"))
    q = torch.randn(len(shapes.seq_lens), shapes.num_heads, shapes.head_dim).to(shapes.dtype)
    out = decode_attention_torch(
        q, paged.kv_cache, paged.block_tables, paged.slots, paged.seq_lens, shapes.query_scale, shapes.window,
        value_scale=shapes.value_scale, softcap=shapes.softcap,
    )  # fmt: skip
    assert (out.double() - expected(shapes, paged, q)).abs().max() < shapes.tolerance


@pytest.mark.parametrize(
    ("seq_lens", "window", "block_size"),
    [
        ((0,), 0, 16), ((1, 7000, 0, 300), 0, 16), ((5, 900), 130, 64), ((64,) * 40, 0, 16), ((100_000,), 0, 64),
        (tuple(range(0, 3000, 30)), 0, 16), ((7,) * 513, 0, 16),
    ],
)  # fmt: skip
def test_plan_covers_every_token_once(
    seq_lens: tuple[int, ...], window: int, block_size: int, device: torch.device
) -> None:
    kv_cache = torch.empty(1, 2, 2, block_size, 128, dtype=BF16, device=device)
    lengths = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    plan = plan_decode(lengths, kv_cache, window).tolist()
    num_items = plan[0]
    parameters = decode_parameters(len(seq_lens), kv_cache)
    block_n = parameters["block_n"]
    align = tile_alignment(block_n, block_size)
    assert num_items <= max_items(len(seq_lens), kv_cache, parameters)
    covered: dict[int, list[int]] = {row: [] for row in range(len(seq_lens))}
    for item in range(num_items):
        row, split, num_splits, tokens = plan[PLAN_HEADER + item * PLAN_ITEM :][:PLAN_ITEM]
        assert split == len(covered[row])  # a row's items follow each other in order
        assert tokens % block_n == 0
        covered[row].append(num_splits * 1_000_000 + tokens)
    for row, length in enumerate(seq_lens):
        first = max(0, length - window) // align * align if window else 0
        num_splits, tokens = divmod(covered[row][0], 1_000_000)
        assert covered[row] == [covered[row][0]] * num_splits
        assert (num_splits - 1) * tokens < max(length - first, 1) <= num_splits * tokens


def test_plan_begins_with_the_longest_rows(device: torch.device) -> None:
    """The last programs to start are short ones, so that no long row keeps a card waiting at the end."""
    torch.manual_seed(0)
    lengths = torch.randint(0, 3000, (100,), dtype=torch.int32)
    plan = plan_decode(lengths.to(device), torch.empty(1, 2, 2, 16, 128, dtype=BF16, device=device)).tolist()
    rows = [plan[PLAN_HEADER + item * PLAN_ITEM] for item in range(plan[0])]
    in_order = [int(lengths[row]) for row in rows]
    assert in_order == sorted(in_order, reverse=True)
    assert sorted(set(rows)) == list(range(100))


@pytest.mark.parametrize(("num_rows", "length", "most_items"), [(32, 512, 32), (64, 640, 64), (1, 2048, 32)])
def test_plan_does_not_cut_rows_that_fill_the_card(
    num_rows: int, length: int, most_items: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card for 264 programs, 8 KV heads: rows are cut only while that gives idle multiprocessors work."""
    monkeypatch.setattr(decode_plan, "num_multiprocessors", lambda device: 132)
    parameters = {"block_n": 64, "ctas_per_sm": 2, "min_split": 64}
    monkeypatch.setattr(decode_plan, "decode_parameters", lambda num_rows, kv_cache: parameters)
    lengths = torch.full((num_rows,), length, dtype=torch.int32, device=device)
    plan = plan_decode(lengths, torch.empty(1, 2, 8, 16, 128, device=device)).tolist()
    assert plan[0] <= most_items
    assert plan[0] * 8 > 132
