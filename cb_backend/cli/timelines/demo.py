"""The same requests under in-flight and under static batching, as two step logs: a small real run in this process.

A tiny model with random weights does the computing unless another is named; what is shown does not depend on the
words. It does not draw.
"""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from cb_backend.cli.timelines.steps import StepLogFile, from_dump
from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.request import Request
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.engine.scheduler.admission import ContinuousAdmission, PolicyKind
from cb_backend.study.replay import Progress, Say, drive, fresh_engine
from cb_backend.study.static_admission import StaticAdmission

TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
# Policy, name, title.
WAYS: tuple[tuple[PolicyKind, str, str], ...] = (
    (ContinuousAdmission, "in flight", "In-flight batching: a request takes a free slot at the next token"),
    (StaticAdmission, "static batches", "Static batching: nobody joins before the whole batch has ended"),
)
MAX_STEPS = 100_000  # that are drawn


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of the demo."""

    step: int  # before which it arrives
    num_prompt_tokens: int
    num_output_tokens: int


def arrivals(num_requests: int, seed: int = 0) -> list[Arrival]:
    """Lengths as real traffic has them, many short and a few long; half of the requests are there at once, the
    others come during the next 80 steps."""
    draw = random.Random(seed)
    num_first = num_requests // 2
    result = []
    for i in range(num_requests):
        num_output_tokens = min(max(round(draw.lognormvariate(2.9, 0.8)), 3), 120)
        num_prompt_tokens = min(max(round(draw.lognormvariate(3.3, 0.9)), 4), 200)
        step = max(i - num_first, 0) * 80 // max(num_requests - num_first, 1)
        result.append(Arrival(step, num_prompt_tokens, num_output_tokens))
    return result


class StepClock:
    """Counts an engine's steps as if they were seconds; a pause is over at once."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._skipped = 0.0

    def __call__(self) -> float:
        return self._engine.log.num_steps + self._skipped

    def sleep(self, steps: float) -> None:
        self._skipped += steps


def record(engine: LLMEngine, traffic: list[Arrival], title: str, progress: Progress) -> StepLogFile:
    """Run the traffic to its end; returns the engine's log. `progress` gets the requests ended so far, and all."""
    ids = np.random.default_rng(1)
    prompts = [
        ids.integers(1, engine.info.vocab_size, arrival.num_prompt_tokens, dtype=np.int32) for arrival in traffic
    ]

    def make_request(index: int) -> Request:
        length = traffic[index].num_output_tokens
        params = TokenRules(max_tokens=length, temperature=0.0, ignore_eos=True, seed=index)
        return engine.make_request(index + 1, prompts[index], params)

    clock = StepClock(engine)
    drive(engine, make_request, [arrival.step for arrival in traffic], clock(), clock, clock.sleep, progress)
    return from_dump(engine.log.dump(MAX_STEPS), title)


def compare(model: str | None, num_slots: int, num_requests: int, seed: int, say: Say) -> list[StepLogFile]:
    """The logs of in-flight and static batching. Raises `ConfigError` if the model cannot be loaded.

    `say` is told of each run.
    """
    with _model_folder(model) as folder:
        config = engine_config_from_dict(
            {
                "model": folder,
                "load_format": "dummy" if model is None else "auto",
                "dtype": "float32" if model is None else "auto",
                "max_num_seqs": num_slots,
                "max_num_batched_tokens": max(64, 8 * num_slots),  # so that prompts come in chunks
                "num_gpu_blocks_override": max(6 * num_slots, 24),  # scarce, as they are in life
                "enable_prefix_caching": False,  # both runs must compute every prompt
            }
        )
        engine = create_engine(config)
        traffic = arrivals(num_requests, seed)
        logs = []
        for policy, name, title in WAYS:
            way = fresh_engine(engine, time.monotonic, policy)
            logs.append(record(way, traffic, title, say(name)))
        engine.close()
        return logs


@contextmanager
def _model_folder(model: str | None) -> Iterator[str]:
    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY_MODEL))
        yield folder
