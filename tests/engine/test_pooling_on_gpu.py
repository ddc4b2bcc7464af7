"""On a GPU: vectors and scores out of captured steps are those of the twins, run eagerly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cb_backend.engine.llm_engine import create_engine
from tests.engine.drive import config, run
from tests.engine.test_pooling_captured import ARRIVALS, BOTH, KINDS, LAST, PROMPTS, STREAM
from tests.server.tiny_checkpoint import write_tiny_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SMALL = {
    "device": "cuda", "block_size": 4, "max_model_len": 128, "max_num_batched_tokens": 64, "max_num_seqs": 8,
    "num_gpu_blocks_override": 200,
}  # fmt: skip


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"run_ahead": 0}, {"run_ahead": 4}])
def test_the_numbers_are_the_twins(settings: dict[str, object], tmp_path: Path) -> None:
    folder = str(write_tiny_checkpoint(tmp_path))
    expected = run(create_engine(config(folder, **BOTH)), PROMPTS, KINDS)
    got = run(create_engine(config(folder, **{**BOTH, **SMALL, **settings})), PROMPTS, KINDS, arrivals=ARRIVALS)
    assert got.pooled.keys() == expected.pooled.keys()
    for index, values in expected.pooled.items():
        assert got.pooled[index] == pytest.approx(values, abs=2e-4, rel=2e-4)
    for index, rules in enumerate(KINDS):
        if rules is STREAM:
            assert len(got.token_ids[index]) == len(expected.token_ids[index])


def test_a_model_that_only_embeds(tmp_path: Path) -> None:
    folder = str(write_tiny_checkpoint(tmp_path))
    expected = run(create_engine(config(folder, runner="pooling")), PROMPTS, LAST)
    got = run(create_engine(config(folder, runner="pooling", **SMALL)), PROMPTS, LAST, arrivals=ARRIVALS)
    for index, values in expected.pooled.items():
        assert got.pooled[index] == pytest.approx(values, abs=2e-4, rel=2e-4)
