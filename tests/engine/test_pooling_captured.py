"""Pooling requests on the way of a GPU (captured steps, pinned memory, events), on a device that is none.

Numbers are those of the CPU, nothing waits, and whoever does not ask gets the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cb_backend.contracts.pooling import PoolingRules
from cb_backend.contracts.request import FinishReason
from cb_backend.contracts.token_rules import TokenRules
from tests.engine.drive import Run, engine_for, run
from tests.engine.fake_cuda import FakeCuda
from tests.engine.fake_device import fake_device
from tests.engine.test_fake_cuda import gpu_engine
from tests.models.tiny_checkpoints import random_tokens

LAST = TokenRules(seed=0, pooling=PoolingRules())
MEAN = TokenRules(seed=0, pooling=PoolingRules(pooling="mean"))
HEAD = TokenRules(seed=0, pooling=PoolingRules(readout="head", token_ids=(11, 5)))
STREAM = TokenRules(seed=0, temperature=0.0, max_tokens=12, ignore_eos=True)
KINDS = [LAST, STREAM, MEAN, HEAD, STREAM, LAST, MEAN, HEAD, LAST, STREAM, LAST, LAST]
PROMPTS = [random_tokens(3 + 5 * index, seed=index) for index in range(len(KINDS))]
ARRIVALS = [index // 2 for index in range(len(KINDS))]
BOTH = {"runner": "both", "classifier_from_token": ("a", "b")}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_device(monkeypatch) as fake:
        yield fake


def assert_same(got: Run, expected: Run) -> None:
    assert got.token_ids == expected.token_ids
    assert got.pooled.keys() == expected.pooled.keys()
    for index, values in expected.pooled.items():
        assert got.pooled[index] == pytest.approx(values, abs=1e-5)


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {}], ids=["eager", "graphs"])
def test_beside_streams_nothing_waits(settings: dict[str, bool], folder: Path, fake: FakeCuda) -> None:
    expected = run(engine_for(folder, "reference", **BOTH), PROMPTS, KINDS)
    engine = gpu_engine(folder, **BOTH, **settings)
    fake.waits.clear()  # a start may wait
    got = run(engine, PROMPTS, KINDS, arrivals=ARRIVALS)
    assert fake.waits == []
    assert fake.mistakes == []
    assert_same(got, expected)


def test_a_model_that_does_not_generate_captures_steps_of_prompts_alone(folder: Path, fake: FakeCuda) -> None:
    prompts = [prompt for prompt, rules in zip(PROMPTS, KINDS, strict=True) if rules is LAST]
    expected = run(engine_for(folder, "reference", runner="both"), prompts, LAST)
    engine = gpu_engine(folder, runner="pooling")
    runner = engine.runner
    assert runner.graphs.shapes
    assert all(shape.num_prefill and not shape.num_decode for shape in runner.graphs.shapes)
    assert runner.logits.numel() == 0, "there is nobody to sample for"
    got = run(engine, prompts, LAST, arrivals=[0, 0, 1, 2, 5])
    assert fake.mistakes == []
    assert_same(got, expected)
    assert set(got.reasons.values()) == {FinishReason.STOP}


def test_many_short_texts_at_once_are_one_launch(folder: Path, fake: FakeCuda) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 32}
    texts = [[(7 * text + token) % 90 + 3 for token in range(16)] for text in range(8)]
    expected = run(engine_for(folder, "reference", runner="both", **settings), texts, LAST)
    engine = gpu_engine(folder, runner="pooling", **settings)
    replayed = []
    find = engine.runner.graphs.find
    engine.runner.graphs.find = lambda *sizes: replayed.append((sizes[:3], find(*sizes))) or replayed[-1][1]
    got = run(engine, texts, LAST)
    assert [sizes for sizes, _ in replayed] == [(0, 128, 8)]
    assert replayed[0][1] is not None
    assert_same(got, expected)


def test_x1_who_does_not_ask_gets_the_same_steps(folder: Path, fake: FakeCuda) -> None:
    """The same shapes are captured, and the same tokens come, whether or not the model may be asked for embeddings."""
    streams = [prompt for prompt, rules in zip(PROMPTS, KINDS, strict=True) if rules is STREAM]
    plain, able = gpu_engine(folder), gpu_engine(folder, **BOTH)
    assert able.runner.graphs.shapes == plain.runner.graphs.shapes
    assert run(able, streams, STREAM).token_ids == run(plain, streams, STREAM).token_ids
    assert not able.runner.pooling.is_used
