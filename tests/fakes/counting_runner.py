"""A model runner for tests of the processes around the engine: each sampled token is its predecessor plus one.

With the byte tokenizer of `write_byte_tokenizer` a prompt that ends in "a" is answered "bcd...". Environment variables
set its pace and its start; special tokens in a prompt make it fail. Not a fake of the engine: the real scheduler and
the real loop drive it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.step import NO_TOKEN, MaskSource, RowStatus, StepPlan, StepResult, Want

VOCAB_SIZE = 261
FAILING_STEP_TOKEN = 256  # a prompt with it makes its whole step raise
FAILING_ROW_TOKEN = 257  # a prompt with it makes its row fail
KILLING_TOKEN = 258  # a prompt with it makes the process exit at once
EOS_TOKEN = 259
HANGING_TOKEN = 260  # a prompt with it makes its step never end


def step_result(plan: StepPlan, token_ids: NDArray[np.int32], is_failed: NDArray[np.bool_]) -> StepResult:
    """Of a step without drafts: one token for each row that wants one, unless it failed. Arrays [num_rows]."""
    status = np.where(is_failed, RowStatus.NOT_FINITE, RowStatus.OK).astype(np.uint8)
    num_new = ((plan.wants == Want.TOKENS) & ~is_failed).astype(np.uint8)
    return StepResult(plan.step_id, token_ids.astype(np.int32)[:, None], num_new, status)


class CountingRunner:
    def __init__(self, num_slots: int, first: int = 0, count: int = 256) -> None:
        """Counts through `count` tokens from `first` on, then again."""
        self._first, self._count = first, count
        self._last = np.zeros(num_slots, np.int32)
        self._is_failing = np.zeros(num_slots, bool)
        self._step_s = float(os.environ.get("CB_TEST_STEP_S", "0"))
        self._hurry = Path(os.environ.get("CB_TEST_HURRY", ""))  # while this file exists, steps take no time

    def execute(self, plan: StepPlan, masks: MaskSource) -> CountingRunner._Pending:
        if self._step_s and not self._hurry.is_file():
            time.sleep(self._step_s)
        for row in plan.joined:
            self._last[row.slot] = row.token_ids[-1]
            self._is_failing[row.slot] = FAILING_ROW_TOKEN in row.token_ids
            if KILLING_TOKEN in row.token_ids:
                os._exit(9)
            if HANGING_TOKEN in row.token_ids:
                time.sleep(3600)
            if FAILING_STEP_TOKEN in row.token_ids:
                raise RuntimeError("the step was told to fail")
        following = self._first + (self._last[plan.slots] + 1 - self._first) % self._count
        is_wanted = plan.wants == Want.TOKENS
        is_failed = self._is_failing[plan.slots] & is_wanted
        self._last[plan.slots[is_wanted]] = following[is_wanted]
        return self._Pending(step_result(plan, np.where(is_wanted, following, NO_TOKEN), is_failed))

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        return b""

    def close(self) -> None:
        pass

    class _Pending:
        def __init__(self, output: StepResult) -> None:
            self._output = output

        def result(self) -> StepResult:
            return self._output


def create_runner(config: EngineConfig) -> tuple[CountingRunner, ModelInfo]:
    gate = Path(os.environ.get("CB_TEST_GATE", ""))
    while gate.is_file():  # the start waits until somebody removes it
        time.sleep(0.02)
    if config.model == "no-such-model":
        raise ConfigError("the checkpoint 'no-such-model' does not exist; set model to a folder that does")
    obstacle = os.environ.get("CB_TEST_OBSTACLE")
    if obstacle is not None and Path(obstacle).exists():
        raise ConfigError("another process has taken the device's memory; end it")
    if config.model == "dies-at-start":
        os._exit(7)
    info = ModelInfo(
        model=config.model,
        tokenizer_dir=config.model,
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len or 4096,
        eos_token_ids=(EOS_TOKEN,),
        block_size=config.block_size,
        num_blocks=config.num_gpu_blocks_override or 1024,
        max_num_seqs=config.max_num_seqs,
        dtype="float32",
        device="cpu",
    )
    return CountingRunner(config.max_num_seqs), info


def create_letters_runner(config: EngineConfig) -> tuple[CountingRunner, ModelInfo]:
    """Answers "a" with "bcd...zab...": text of which every token can be shown at once."""
    _, info = create_runner(config)
    return CountingRunner(config.max_num_seqs, ord("a"), 26), info


def write_byte_tokenizer(folder: Path) -> None:
    """A tokenizer whose ids 0 to 255 are the bytes, and a `</s>`."""
    folder.mkdir(parents=True, exist_ok=True)
    characters = byte_characters()
    tokenizer = Tokenizer(BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<fail-step>", "<fail-row>", "<kill>", "</s>", "<hang>"]
    tokenizer.add_special_tokens(names)
    assert [tokenizer.token_to_id(name) for name in names] == [256, 257, 258, 259, 260]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level tokenizers (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in characters)
    characters.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    return [characters[byte] for byte in range(256)]
