"""SmolLM2-135M-Instruct on a GPU against transformers: equal in float32, in bfloat16 different at near-ties only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from cb_backend.cli.benchmarks.accuracy import PROMPTS
from cb_backend.cli.demo_model import demo_model_dir
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import create_engine
from tests.engine.drive import config, run

NUM_TOKENS = 48
GREEDY = TokenRules(max_tokens=NUM_TOKENS, temperature=0.0, seed=0, ignore_eos=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not demo_model_dir().is_dir(), reason="needs the demo's checkpoint: `make demo` fetches it"),
]


def answers(dtype: str, prompts: list[list[int]], **settings: object) -> list[list[int]]:
    """Greedy answers of the engine, all in one batch that they join one after the other."""
    given = {"device": "cuda", "dtype": dtype, "kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 32, **settings}
    engine = create_engine(config(str(demo_model_dir()), **given))
    got = run(engine, prompts, GREEDY, arrivals=[2 * index for index in range(len(prompts))])
    engine.close()
    return [got.token_ids[index] for index in range(len(prompts))]


def peer_logits(prompts: list[list[int]], outputs: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """transformers' logits for each token of the answers. Each [NUM_TOKENS, vocab_size], float32, on the host."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model_dir(), dtype=dtype).cuda().eval()
    logits = []
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            found = model(torch.tensor([prompt + output[:-1]], device="cuda")).logits[0, len(prompt) - 1 :]
        logits.append(found.float().cpu())
    return logits


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(Path(demo_model_dir()) / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


@pytest.mark.parametrize("settings", [{}, {"run_ahead": 0, "enforce_eager": True}, {"max_num_batched_tokens": 32}])
def test_float32_is_transformers_own(prompts: list[list[int]], settings: dict[str, object]) -> None:
    got = answers("float32", prompts, **settings)
    for output, logits in zip(got, peer_logits(prompts, got, torch.float32), strict=True):
        assert output == logits.argmax(dim=1).tolist()


def test_bfloat16_differs_at_near_ties_only(prompts: list[list[int]]) -> None:
    """A token that is not the likeliest in float32 lacks no more than rounding to bfloat16 moves two logits there."""
    got = answers("bfloat16", prompts)
    exact, rounded = (peer_logits(prompts, got, dtype) for dtype in (torch.float32, torch.bfloat16))
    num_same = 0
    for output, mine, theirs in zip(got, exact, rounded, strict=True):
        chosen = mine[torch.arange(NUM_TOKENS), torch.tensor(output)]
        lacking = (mine.amax(dim=1) - chosen).numpy()
        noise = (mine - theirs).abs().amax(dim=1).numpy()
        assert np.all(lacking <= 2 * noise), (lacking.max(), noise[lacking.argmax()])
        num_same += int((lacking == 0).sum())
    assert num_same >= 0.95 * NUM_TOKENS * len(prompts)
