"""Structured output on a GPU: the tokens are those of the reference runner on the CPU, in float32.

Masks are made on the host while graphs are replayed and steps launched ahead; a late mask, or one of another row, would
let a token through that the grammar forbids.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cb_backend.engine.llm_engine import create_engine
from tests.engine.drive import config
from tests.engine.structured import ALL_PARAMS, PROMPTS, Texts, check_texts, engine_for, run_to_end

SETTINGS = {
    "max_model_len": 512, "max_num_batched_tokens": 24, "max_num_seqs": 8, "num_gpu_blocks_override": 400,
    "block_size": 4, "device": "cuda",
}  # fmt: skip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    "settings",
    [{"enforce_eager": True}, {"run_ahead": 0}, {"run_ahead": 4}, {"run_ahead": 1, "num_gpu_blocks_override": 25}],
    ids=["eager", "graphs", "run-ahead", "preempted"],
)
def test_same_tokens_as_on_the_cpu(folder: Path, texts: Texts, settings: dict[str, object]) -> None:
    reference = engine_for(folder, "reference")
    expected = run_to_end(reference, PROMPTS, ALL_PARAMS)
    engine = create_engine(config(str(folder), **{**SETTINGS, **settings}))
    got = run_to_end(engine, PROMPTS, ALL_PARAMS, arrivals=[index // 2 for index in range(len(PROMPTS))])
    check_texts(texts, [got.token_ids[index] for index in range(len(PROMPTS))])
    assert got.token_ids == expected.token_ids
    assert got.reasons == expected.reasons
    assert (engine.stats().num_preemptions > 0) == ("num_gpu_blocks_override" in settings)
