"""A model over two GPUs gives what one gives, whichever way they add up. Needs two that this process sees."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cb_backend import LLM, SamplingParams
from cb_backend.engine.runner.ranks import RankedRunner
from cb_backend.parallel.peer_group import PeerGroup
from tests.llm.conftest import ARGUMENTS
from tests.llm.test_llm import GREEDY, PROMPTS
from tests.llm.test_ranks import RULES, figures, params, pids, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

EXACT = {**ARGUMENTS, "dtype": "float32"}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
NAMES = [name for name in RULES if name != "structured" or importlib.util.find_spec("llguidance")]
WAYS = {"peers": False, "nccl": True}  # disable_custom_all_reduce


@pytest.fixture(scope="module")
def one(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), **EXACT) as loaded:
        yield loaded


def two(checkpoint: Path, **settings: Any) -> LLM:
    return LLM(str(checkpoint), tensor_parallel_size=2, **{**EXACT, **settings})


def group_of(llm: LLM) -> object:
    runner = llm._engine.runner
    assert isinstance(runner, RankedRunner)
    return runner.runner.model.group


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_two_gpus_answer_as_one(way: str, is_eager: bool, checkpoint: Path, one: LLM) -> None:
    settings = {"disable_custom_all_reduce": WAYS[way], "enforce_eager": is_eager}
    with two(checkpoint, **settings) as ranked:
        assert isinstance(group_of(ranked), PeerGroup) is (way == "peers")
        for name in NAMES:
            assert tokens(ranked, params(name)) == tokens(one, params(name)), name
        for mine, other in zip(figures(one), figures(ranked), strict=True):
            assert other == pytest.approx(mine, abs=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_under_pressure_two_gpus_answer_as_one(way: str, checkpoint: Path, one: LLM) -> None:
    """Preemption, swapped blocks, chunks of prompts."""
    settings = {
        "num_gpu_blocks_override": 10, "swap_space": 0.01, "max_num_batched_tokens": 8, "admission_reserve": -10,
        "disable_custom_all_reduce": WAYS[way],
    }  # fmt: skip
    long = SamplingParams(temperature=0, max_tokens=50)
    with two(checkpoint, **settings) as pressed:
        assert tokens(pressed, long) == tokens(one, long)
        assert pressed._engine.stats().num_preemptions > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_rank_goes_on_where_it_was(way: str, checkpoint: Path, one: LLM) -> None:
    with two(checkpoint, disable_custom_all_reduce=WAYS[way]) as ranked:
        (pid,) = pids(ranked).values()
        os.kill(pid, signal.SIGSTOP)
        waker = os.fork()
        if not waker:
            time.sleep(5)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        got = tokens(ranked)
        os.waitpid(waker, 0)
        assert got == tokens(one)


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_rank_ends_its_prompts_with_a_reason(way: str, checkpoint: Path) -> None:
    """Rank 0's device may wait for what will not come; answers before that are right."""
    with two(checkpoint, disable_custom_all_reduce=WAYS[way]) as killed:
        expected = tokens(killed, LONG)[0]
        (pid,) = pids(killed).values()
        stream = killed.stream(PROMPTS[0], LONG)
        got = list(next(stream).output.token_ids)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Exception, match=rf"rank 1 \(process {pid}\) has ended by signal 9 \(SIGKILL\)"):
            got.extend(token for chunk in stream for token in chunk.output.token_ids)
        assert got == expected[: len(got)]
        (again,) = killed.generate(PROMPTS[0], GREEDY)
        assert "SIGKILL" in str(again.error)
