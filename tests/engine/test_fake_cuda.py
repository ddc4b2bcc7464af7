"""The way from a plan to its result as it is on a GPU: pinned memory, events, captured steps. On a device that is none.

What it computes is the twins' work and equal to the reference runner's. What is proved besides: nothing on the way
waits for the device, and no memory is written or read before a copy of it is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cb_backend.contracts.structured_output import StructuredOutput
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.engine.runner.host_memory import HostMemory
from cb_backend.engine.runner.logits_rules import NO_TOKEN_LEFT
from cb_backend.engine.runner.slot_runner import SlotRunner
from tests.engine.drive import Run, config, with_reference_runner
from tests.engine.fake_cuda import FakeCuda
from tests.engine.fake_device import fake_device
from tests.engine.structured import params, prompts, run_to_end
from tests.engine.test_no_token_left import DEAD_ENDS, PLAIN
from tests.engine.test_slot_runner import APART

SMALL = {
    "block_size": 4, "max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 4,
    "num_gpu_blocks_override": 200, "attention_backend": "torch",
}  # fmt: skip
WORDS = StructuredOutput(kind="choice", text='["abcde", "xyz"]')
PLAIN_PARAMS = TokenRules(max_tokens=24, temperature=0.8, seed=0, ignore_eos=True)
REQUESTS = [
    *APART,  # rules and log-probabilities
    *(msgspec.structs.replace(APART[index], prompt_logprobs=index) for index in range(3)),
    *(TokenRules(**{**PLAIN, **rules}) for rules, _ in DEAD_ENDS.values()),
    params(WORDS, seed=1),
    params(WORDS, seed=2, min_tokens=2),
    params(StructuredOutput(kind="regex", text="[a-f]{5,9}")),
    *(msgspec.structs.replace(PLAIN_PARAMS, seed=seed) for seed in range(4)),
]
PROMPTS = prompts(len(REQUESTS))
ARRIVALS = [index // 2 for index in range(len(REQUESTS))]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_device(monkeypatch) as fake:
        yield fake


@pytest.fixture(scope="module")
def expected(folder: Path) -> Run:
    """Of the reference runner on the CPU."""
    return run_to_end(with_reference_runner(config(str(folder), **SMALL)), PROMPTS, REQUESTS)


def gpu_engine(folder: Path, **settings: Any) -> LLMEngine:
    engine = create_engine(config(str(folder), **{**SMALL, "device": "cuda", **settings}))
    assert isinstance(engine.runner, SlotRunner)
    assert engine.runner.storage.data.is_cuda
    return engine


@pytest.mark.parametrize(
    "settings",
    [{"enforce_eager": True}, {}],
    ids=["eager", "graphs"],
)
def test_nothing_waits_and_no_copy_is_overtaken(
    settings: dict[str, Any], folder: Path, expected: Run, fake: FakeCuda
) -> None:
    engine = gpu_engine(folder, **settings)
    fake.waits.clear()  # a start may wait
    got = run_to_end(engine, PROMPTS, REQUESTS, arrivals=ARRIVALS)
    assert fake.waits == []
    assert fake.mistakes == []
    assert got.token_ids == expected.token_ids
    assert got.reasons == expected.reasons
    assert got.failures == expected.failures
    assert list(got.failures.values()) == [NO_TOKEN_LEFT] * len(DEAD_ENDS)
    assert ranks(got.logprobs) == ranks(expected.logprobs)
    assert ranks(got.prompt_logprobs) == ranks(expected.prompt_logprobs)
    if "enforce_eager" in settings:
        assert fake.graphs == []
    else:
        assert sum(graph.num_replays > 0 for graph in fake.graphs) >= 3


def test_blocks_are_swapped_without_waiting(folder: Path, fake: FakeCuda) -> None:
    settings = {"max_num_batched_tokens": 128, "enable_prefix_caching": False}
    engine = gpu_engine(folder, **settings, num_gpu_blocks_override=68, swap_space=0.01)
    long = [[(7 * index + place) % 300 + 3 for place in range(82 + index)] for index in range(3)]
    fake.waits.clear()
    got = run_to_end(engine, long, [msgspec.structs.replace(PLAIN_PARAMS, max_tokens=30)] * 3)
    assert (fake.waits, fake.mistakes) == ([], [])
    stats = engine.stats()
    assert stats.num_swapped_out == stats.num_swapped_in >= 1
    roomy = create_engine(config(str(folder), **{**SMALL, **settings}))
    assert (
        got.token_ids == run_to_end(roomy, long, [msgspec.structs.replace(PLAIN_PARAMS, max_tokens=30)] * 3).token_ids
    )


def ranks(figures: dict[int, list[Any]]) -> dict[int, list[int]]:
    return {index: [figure.rank for figure in row] for index, row in figures.items()}


@pytest.mark.parametrize(
    ("ring", "mistake"),
    [("step", "copied memory that changed before"), ("result", "writes what has not been read")],
)
def test_host_memory_used_again_too_soon_is_noticed(
    ring: str, mistake: str, folder: Path, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the tests above prove what they say."""
    next_of = getattr(HostMemory, ring)

    def always_the_first(memory: HostMemory, *where: Any) -> Any:
        """`where`: a shape and the step's id, or the step's id and a number of rows."""
        return next_of(memory, *((where[0], 0) if ring == "step" else (0, where[1])))

    monkeypatch.setattr(HostMemory, ring, always_the_first)
    run_to_end(gpu_engine(folder), PROMPTS[:2], REQUESTS[-2:])
    assert any(mistake in each for each in fake.mistakes)


def test_the_fake_device_is_as_strict_as_it_says(fake: FakeCuda) -> None:
    cuda = torch.device("cuda")
    host = torch.arange(4, dtype=torch.int32).pin_memory()
    on_device = host.to(cuda, non_blocking=True)
    assert on_device.is_cuda
    assert not host.is_cuda
    back = torch.empty(4, dtype=torch.int32, pin_memory=True)
    back.copy_(on_device + 1, non_blocking=True)
    assert back.tolist() != [1, 2, 3, 4]
    done = torch.cuda.Event()
    done.record()
    host[0] = 7  # the copy may still read it
    done.synchronize()
    assert back.tolist() == [1, 2, 3, 4]
    assert fake.waits == []
    assert len(fake.mistakes) == 1
    with pytest.raises(RuntimeError, match="tensors of the host"):
        on_device + host
    with pytest.raises(TypeError):
        on_device.numpy()
    assert on_device[torch.tensor([1, 0])].is_cuda
    assert int(on_device[1]) == 1
    assert host[:2].to(cuda).tolist() == [7, 1]
    assert [wait.removeprefix("a test ") for wait in fake.waits] == [
        "__getitem__", "__int__", "a copy", "tolist",
    ]  # fmt: skip
