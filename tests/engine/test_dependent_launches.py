"""On a GPU: kernels that start before the one before them ends compute the same bits as kernels that wait for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import create_engine
from cb_backend.kernels import launch
from tests.engine.drive import config, run
from tests.engine.test_equal_to_transformers import prompts_for
from tests.models.tiny_checkpoints import write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a CUDA device with dependent launches",
    ),
]
# Our products for every shape, split, with prefetches: the tuned table knows none of the tiny checkpoints'.
PRODUCTS = {
    "vector": 1, "block_n": 16, "block_k": 32, "splits": 2, "num_warps": 4, "num_stages": 3, "prefetch": 32,
}  # fmt: skip
FOLDED = {**PRODUCTS, "fold": 8}
WITH_NORM = {**FOLDED, "norm": 1}
SPLITTING = {"block_n": 16, "num_warps": 4, "num_stages": 2, "ctas_per_sm": 2, "min_split": 16}


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """The switch is read once a process: it is read again here."""
    caches = (launch.can_overlap, launch.dependent_options)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
@pytest.mark.parametrize(("num_requests", "products"), [(1, PRODUCTS), (1, FOLDED), (1, WITH_NORM), (7, PRODUCTS)])
def test_every_bit_is_the_same(
    name: str, num_requests: int, products: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(name, tmp_path)
    params = [TokenRules(max_tokens=40, temperature=0.8, seed=seed, ignore_eos=True) for seed in range(7)]
    results = []
    for switch in ("0", "1"):
        monkeypatch.setenv("CB_BACKEND_DEPENDENT_LAUNCHES", switch)
        launch.can_overlap.cache_clear()
        launch.dependent_options.cache_clear()
        assert launch.can_overlap(torch.device("cuda", 0)) == (switch == "1")
        with ExitStack() as stack:
            for op, parameters in (
                ("linear", products), ("linear_silu_mul", products), ("decode_attention", SPLITTING)
            ):  # fmt: skip
                stack.enter_context(launch.overriding(op, parameters))
            engine = create_engine(
                config(
                    str(folder),
                    device="cuda",
                    dtype="bfloat16",
                    max_num_batched_tokens=64,
                    max_num_seqs=8,
                    num_gpu_blocks_override=200,
                    block_size=16,
                )
            )
            prompts = prompts_for(engine.info.vocab_size)[:num_requests]
            got = run(engine, prompts, params[:num_requests])
        torch.cuda.synchronize()
        results.append((got.token_ids, engine.runner.storage.data[:, 1:].clone()))  # without the null block
        engine.close()
    (plain_tokens, plain_cache), (tokens, cache) = results
    assert tokens == plain_tokens
    assert plain_cache.count_nonzero() > 0
    assert torch.equal(cache, plain_cache)
