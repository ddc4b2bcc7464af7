"""Swapped KV blocks on the real runners: the copies are exact, so tokens are those of each request alone."""

from __future__ import annotations

import dataclasses
import math
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.step import Copies, StepPlan
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.kv_cache import swap
from cb_backend.kv_cache.swap import BlockSwapper, num_swap_blocks, pinned_bytes
from cb_backend.parallel.group import NoGroup
from cb_backend.parallel.torch_group import TorchGroup
from tests.engine.drive import config, run, with_reference_runner
from tests.fakes.storage import empty_storage
from tests.models.tiny_checkpoints import write_checkpoint
from tests.parallel.ranks import on_ranks

PARAMS = TokenRules(max_tokens=30, temperature=0.8, seed=7, ignore_eos=True)


@pytest.mark.parametrize("run_ahead", [0, 4])
@pytest.mark.parametrize("kind", ["reference", "slots"])
def test_tokens_after_a_swap_are_those_of_the_request_alone(tmp_path: Path, kind: str, run_ahead: int) -> None:
    settings = config(
        str(write_checkpoint("llama-gqa", tmp_path)),
        block_size=4, num_gpu_blocks_override=68, max_model_len=128, max_num_seqs=4, enable_prefix_caching=False,
        swap_space=0.01, run_ahead=run_ahead,
    )  # fmt: skip
    engine = with_reference_runner(settings)
    swapper = engine.runner.swapper  # type: ignore[attr-defined]
    assert swapper is not None
    assert engine.info.num_host_blocks == swapper.num_blocks > 100
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 97, 82 + index).tolist() for index in range(3)]
    expected = []
    for prompt in prompts:
        alone = LLMEngine(dataclasses.replace(settings, run_ahead=0), engine.runner, engine.info)
        expected.append(run(alone, [prompt], PARAMS).token_ids[0])
    engine = create_engine(settings) if kind == "slots" else LLMEngine(settings, engine.runner, engine.info)
    got = run(engine, prompts, PARAMS)
    stats = engine.stats()
    assert stats.num_swapped_out == stats.num_swapped_in >= 1
    assert [got.token_ids[index] for index in range(3)] == expected


ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.mark.parametrize("piece_bytes", [1 << 30, 5000, 3072, 1])  # 4, 3, 2 blocks in one piece, each in its own
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_blocks_go_out_before_others_come_in(device: str, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap, "PIECE_BYTES", piece_bytes)
    storage = empty_storage(6, num_layers=2, num_kv_heads=3, block_size=4, head_dim=8, device=device)
    storage.data.copy_(torch.randn(storage.data.shape))
    before = storage.data.clone()
    swapper = BlockSwapper(storage, 4)
    none = np.zeros(0, np.int32)

    def plan(out: tuple[tuple[int, int], ...], back: tuple[tuple[int, int], ...]) -> StepPlan:
        return StepPlan(1, none, none, none, none.astype(np.uint8), 0, copies=Copies(out, back))

    swapper.apply(plan(((1, 0), (2, 3)), ()))
    swapper.apply(plan(((4, 1),), ((4, 3), (5, 0))))  # block 4 leaves and is filled at once
    swapper.apply(plan((), ((1, 1),)))
    for block, source in ((4, 2), (5, 1), (1, 4), (2, 2), (3, 3), (0, 0)):
        torch.testing.assert_close(storage.data[:, block], before[:, source], rtol=0, atol=0)


def test_swap_space_is_counted_in_gib() -> None:
    assert num_swap_blocks(0.5, 1 << 20) == 512
    assert num_swap_blocks(0.0, 1 << 20) == 0


def test_pinned_memory_is_counted_as_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """In powers of two; so 5 GiB in one piece would take 8, and a host that has 6 could not know why it died."""
    assert [pinned_bytes(size) for size in (1, 2, 3, 4096, 5 << 30)] == [1, 2, 4, 4096, 8 << 30]
    block_bytes = 3 << 20  # 341 of them are one MiB less than a GiB
    num_blocks = (5 << 30) // block_bytes
    taken: list[int] = []

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        taken.append(pinned_bytes(math.prod(shape)))
        return torch.zeros((), dtype=dtype).expand(shape)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(swap, "free_memory", lambda _: (6 << 30, 6 << 30))
    blocks = swap._HostBlocks(num_blocks, (block_bytes,), NoGroup(), is_pinned=True)
    assert blocks[num_blocks - 1].shape == (block_bytes,)
    assert 5 << 30 <= sum(taken) <= 6 << 30
    monkeypatch.setattr(swap, "free_memory", lambda _: (5 << 30, 6 << 30))
    with pytest.raises(ConfigError, match=r"asks for 5.00 GiB, 5.00 GiB are free \(pinned, it takes 5.\d\d GiB\);"):
        swap._HostBlocks(num_blocks, (block_bytes,), NoGroup(), is_pinned=True)


def test_more_swap_space_than_the_host_has_is_refused_with_both_figures() -> None:
    storage = empty_storage(6, num_layers=2, num_kv_heads=3, block_size=4, head_dim=8)
    with pytest.raises(ConfigError, match=r"asks for 1536.00 GiB, \d+\.\d\d GiB are free; lower swap_space"):
        BlockSwapper(storage, 1 << 30)


@pytest.mark.parametrize(("free_gib", "is_refused"), [(6, False), (5, True)])
def test_ranks_together_take_no_more_of_the_host_than_there_is(
    free_gib: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sees all of what is free; none takes its own before the others have looked."""
    seen, taken = threading.Barrier(3), []

    def free(_: torch.device) -> tuple[int, int]:
        if taken:
            return 0, 8 << 30
        seen.wait(30)
        return free_gib << 30, 8 << 30

    def empty(shape: tuple[int, ...], **_: object) -> torch.Tensor:
        taken.append(math.prod(shape))
        return torch.zeros((), dtype=torch.uint8).expand(shape)

    def work(group: TorchGroup) -> str:
        try:
            swap._HostBlocks(4, (1 << 29,), group, is_pinned=False)
        except ConfigError as error:
            return str(error)
        return ""

    monkeypatch.setattr(swap, "free_memory", free)
    monkeypatch.setattr(swap.torch, "empty", empty)
    told = on_ranks(3, work)
    assert sum(taken) == (0 if is_refused else 6 << 30)
    assert all(is_refused == ("asks for 2.00 GiB for each of 3 devices, 5.00 GiB are free" in each) for each in told)
