"""A model over two processes gives what one gives. How they end: `test_ranks_end`. pytest tests/llm/test_ranks.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from cb_backend import LLM, SamplingParams
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.pooling import PoolingRules
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import create_engine
from cb_backend.engine.workers import Workers
from cb_backend.support.process_watch import process_start_time
from tests.engine.drive import run
from tests.engine.test_pooling import classifier_folder
from tests.llm.conftest import ARGUMENTS
from tests.llm.test_llm import GREEDY, PROMPTS, is_idle
from tests.models.tiny_checkpoints import random_tokens, write_checkpoint
from tests.server.tiny_adapters import write_adapter

RULES = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 7, "temperature": 0.9, "top_k": 40},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "stop": {"temperature": 0, "stop_token_ids": list(range(0, 300, 7)), "min_tokens": 3},
    "logprobs": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    "structured": {"temperature": 0, "structured_outputs": {"regex": "[a-f]{3,9}"}},
}


def pids(llm: LLM) -> dict[int, int]:
    return llm._engine.runner.workers.pids


def is_gone(pid: int) -> bool:
    return process_start_time(pid) is None


@pytest.fixture(scope="module")
def ranked(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint), tensor_parallel_size=2, **ARGUMENTS) as loaded:
        yield loaded


def params(name: str) -> SamplingParams:
    return SamplingParams(max_tokens=12, **RULES[name])


def tokens(llm: LLM, wanted: SamplingParams = GREEDY) -> list[list[int]]:
    results = llm.generate(PROMPTS, wanted)
    assert [result.error for result in results] == [None] * len(PROMPTS)
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.parametrize("name", sorted(RULES))
def test_two_ranks_answer_as_one(name: str, llm: LLM, ranked: LLM) -> None:
    """More prompts than slots; prefixes that the cache has."""
    assert tokens(ranked, params(name)) == tokens(llm, params(name))
    assert is_idle(ranked)


def figures(llm: LLM) -> list[dict[int, float]]:
    """Log-probabilities of every position, prompt and answer, one prompt after the other."""
    of_positions = []
    for result in llm.generate(PROMPTS, params("logprobs")):
        given = [*(result.prompt_logprobs or [None])[1:], *(result.outputs[0].logprobs or [None])]
        of_positions += [{token: each["logprob"] for token, each in of_one.items()} for of_one in given if of_one]
    return of_positions


def test_figures_of_two_ranks_are_those_of_one(llm: LLM, ranked: LLM) -> None:
    one, two = figures(llm), figures(ranked)
    assert len(one) == len(two) > 12 * len(PROMPTS)
    for mine, other in zip(one, two, strict=True):
        assert other == pytest.approx(mine, abs=1e-4)


def test_the_same_again_has_the_same_bits(ranked: LLM) -> None:
    first, second = (ranked.generate(PROMPTS, params("logprobs")) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert one.outputs[0].logprobs == two.outputs[0].logprobs


LAST, MEAN, CLASSES = PoolingRules(), PoolingRules(pooling="mean"), PoolingRules(readout="classifier")
SCORE = PoolingRules(readout="head", token_ids=(11, 5))
STREAM = TokenRules(seed=0, temperature=0.0, max_tokens=6, ignore_eos=True)
TEXTS = [random_tokens(length, seed=length) for length in (1, 9, 37, 24, 50, 17, 30, 12)]


@pytest.mark.parametrize(
    ("settings", "rules"),
    [
        ({"runner": "both", "classifier_from_token": ("a", "b")}, [LAST, SCORE, None, MEAN, SCORE, LAST, None, MEAN]),
        ({"max_model_len": 100}, [CLASSES] * 8),
    ],
    ids=["beside streams", "without a head"],
)
def test_vectors_of_two_ranks_are_those_of_one(
    settings: dict[str, Any], rules: list[PoolingRules | None], checkpoint: Path, tmp_path: Path
) -> None:
    """In chunks, and once more with what the cache has; scores are by the head, of which each rank has its rows."""
    folder = checkpoint if None in rules else classifier_folder("qwen3", tmp_path)
    asked = [STREAM if each is None else TokenRules(seed=0, pooling=each) for each in rules]
    found = []
    for num_ranks in (1, 2):
        small = {**ARGUMENTS, "max_num_batched_tokens": 16, "block_size": 4, "device": "cpu"}
        engine = create_engine(EngineConfig(model=str(folder), tensor_parallel_size=num_ranks, **{**small, **settings}))
        try:
            runs = [run(engine, TEXTS, asked, arrivals=[0, 0, 1, 1, 2, 5, 6, 6]) for _ in range(2)]
            assert engine.stats().num_cached_prompt_tokens > 0
            found.append(runs)
        finally:
            engine.close()
    for one, two in zip(*found, strict=True):
        assert two.token_ids == one.token_ids
        assert two.pooled.keys() == one.pooled.keys() == {place for place, each in enumerate(rules) if each is not None}
        for place, values in one.pooled.items():
            torch.testing.assert_close(torch.tensor(two.pooled[place]), torch.tensor(values), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss-full"])
def test_two_ranks_with_experts_of_their_own_answer_as_one(name: str, tmp_path: Path) -> None:
    """In chunks, beside each other, greedy and seeded."""
    folder = write_checkpoint(name, tmp_path)
    seeded = TokenRules(seed=3, temperature=0.8, top_k=20, max_tokens=12, ignore_eos=True)
    asked = [msgspec.structs.replace(STREAM, max_tokens=12), seeded] * 4
    found = []
    for spread in ({}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}):
        small = {**ARGUMENTS, "max_model_len": 100, "max_num_batched_tokens": 16, "device": "cpu"}
        engine = create_engine(EngineConfig(model=str(folder), **small, **spread))
        try:
            found.append(run(engine, TEXTS, asked, arrivals=[0, 0, 1, 1, 2, 5, 6, 6]).token_ids)
        finally:
            engine.close()
    assert found[1] == found[0]
    assert all(len(tokens) == 12 for tokens in found[0].values())


def test_a_stream_that_is_left_ends_on_all_ranks(ranked: LLM) -> None:
    stream = ranked.stream(PROMPTS, SamplingParams(temperature=0, max_tokens=100))
    for _ in range(5):
        next(stream)
    stream.close()
    before = tokens(ranked)
    assert tokens(ranked) == before
    assert is_idle(ranked)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 10, "run_ahead": 2, "max_num_batched_tokens": 8, "admission_reserve": -10},
        {"num_gpu_blocks_override": 10, "swap_space": 0.01, "admission_reserve": -10, "enable_prefix_caching": False},
    ],
)
def test_under_pressure_two_ranks_answer_as_one(settings: dict[str, Any], checkpoint: Path, llm: LLM) -> None:
    """Preemption, swapped blocks, chunks of prompts, steps launched ahead."""
    long = SamplingParams(temperature=0, max_tokens=50)
    with LLM(str(checkpoint), tensor_parallel_size=2, **ARGUMENTS, **settings) as pressed:
        assert tokens(pressed, long) == tokens(llm, long)
        assert pressed._engine.stats().num_preemptions > 0


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = tmp_path_factory.mktemp("adapters")
    ranks = {"doll": 1, "sheep": 3, "wolf": 8}
    return {
        name: str(write_adapter(made / name, checkpoint, seed, rank=rank))
        for seed, (name, rank) in enumerate(ranks.items())
    }


def test_with_adapters_two_ranks_answer_as_one(checkpoint: Path, adapters: dict[str, str], tmp_path: Path) -> None:
    """Beside rows without one, two and two in a batch, in chunks of prompts, preempted, in places that change hands."""
    names = ["doll", None, "sheep", "wolf", "doll", "wolf", "gone", "sheep"]
    wanted = [SamplingParams(temperature=0, max_tokens=34, ignore_eos=True, lora_name=name) for name in names]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(names))]
    settings: dict[str, Any] = {
        "adapters": {**adapters, "gone": str(tmp_path / "gone")}, "max_loras": 2, "max_lora_rank": 8, "run_ahead": 2,
        "max_num_batched_tokens": 8, "num_gpu_blocks_override": 8, "admission_reserve": -10,
    }  # fmt: skip
    answers, errors = [], []
    for size in (1, 2):
        with LLM(str(checkpoint), tensor_parallel_size=size, **settings, **ARGUMENTS) as adapted:
            for _ in range(size):  # the second time with what is cached, in host memory and in places
                results = adapted.generate(prompts, wanted)
                answers.append([result.outputs[0].token_ids for result in results if result.error is None])
                errors.append([str(result.error) for result in results if result.error is not None])
            assert is_idle(adapted)
            stats = adapted._engine.stats()
            assert stats.num_preemptions > 0
            assert stats.adapters is not None
            assert stats.adapters.num_resident == 2
            assert stats.adapters.num_loads > 2, "places change hands"
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == len(names) - 1
    assert len({tuple(tokens) for tokens in answers[0]}) > len(PROMPTS) - 1, "adapters change answers"
    assert all(len(each) == 1 and "'gone'" in each[0] for each in errors)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"tensor_parallel_size": 9}, "tensor_parallel_size is 9; it must be between 1 and 8"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be between 1 and 8"),
        ({"tensor_parallel_size": 2, "worker_cls": "a:b"}, "worker_cls is 'a:b', which runs on one device"),
    ],
)
def test_what_cannot_be_is_said(arguments: dict[str, Any], reason: str, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(str(checkpoint), **arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        (
            "llama-gqa",
            {"tensor_parallel_size": 3},
            "query heads .* cannot be shared out among 3 devices; this model can be on 1, ",
        ),
        (
            "mixtral",
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "5 experts cannot be spread over 2 devices whole",
        ),
        (
            "llama-gqa",
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "the model has no experts; remove it",
        ),
    ],
    ids=["heads", "experts", "no experts"],
)
def test_what_cannot_be_shared_out_is_said_before_there_are_others(
    name: str, arguments: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Workers, "start", lambda _: pytest.fail("they are started"))
    with pytest.raises(ConfigError, match=reason):
        LLM(str(write_checkpoint(name, tmp_path)), **arguments, **ARGUMENTS)


def test_a_checkpoint_is_converted_before_there_are_others(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would write all of it, on the same disk at the same time."""
    done = []

    def resolve(model: str) -> Path:
        done.append("resolved")
        return checkpoint

    def start(_: Workers) -> None:
        done.append("started")
        raise ConfigError("that is enough")

    monkeypatch.setattr("cb_backend.engine.runner.ranks.resolve_checkpoint", resolve)
    monkeypatch.setattr(Workers, "start", start)
    with pytest.raises(ConfigError, match="that is enough"):
        LLM("model.gguf", tensor_parallel_size=2, **ARGUMENTS)
    assert done == ["resolved", "started"]
