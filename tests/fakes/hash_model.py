"""H on a real engine: `worker_cls` factories of the hash runner. The reference is `HashModel.lone_output`."""

from __future__ import annotations

import time

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.step import MaskSource, StepPlan
from tests.fakes.hash_rule import HashModel
from tests.fakes.plan_follower import FakePending
from tests.fakes.runners import HashRunner

VOCAB_SIZE = 256  # with the byte tokenizer of `counting_runner`, whose special tokens are then never sampled
MODEL = HashModel(VOCAB_SIZE)


class PacedHashRunner(HashRunner):
    """A step takes at least `step_s`, so that a test can act while requests run."""

    def __init__(self, step_s: float, num_blocks: int, block_size: int) -> None:
        super().__init__(MODEL, num_blocks, block_size)
        self.step_s = step_s

    def execute(self, plan: StepPlan, masks: MaskSource) -> FakePending:
        time.sleep(self.step_s)
        return super().execute(plan, masks)


def create_runner(config: EngineConfig) -> tuple[PacedHashRunner, ModelInfo]:
    """Steps of 2 ms. `model` names a folder of `write_byte_tokenizer`."""
    return _create_runner(config, 0.002)


def create_slow_runner(config: EngineConfig) -> tuple[PacedHashRunner, ModelInfo]:
    """Steps of 50 ms."""
    return _create_runner(config, 0.05)


def _create_runner(config: EngineConfig, step_s: float) -> tuple[PacedHashRunner, ModelInfo]:
    num_blocks = config.num_gpu_blocks_override or 1024
    info = ModelInfo(
        model=config.model,
        tokenizer_dir=config.model,
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len or 4096,
        eos_token_ids=(),
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=config.max_num_seqs,
        dtype="float32",
        device="cpu",
    )
    return PacedHashRunner(step_s, num_blocks + 1, config.block_size), info
