"""Random workloads on random engines, each the same for the same seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from cb_backend.config import EngineConfig
from cb_backend.request import Request
from cb_backend.sampling_params import SamplingParams
from cb_backend.scheduling_params import SchedulingParams


@dataclass(frozen=True)
class Arrival:
    """One request: when it comes, what it asks, and what befalls it."""

    request_id: int
    at_step: int
    prompt: tuple[int, ...]
    params: SamplingParams
    scheduling: SchedulingParams
    salt: bytes
    fails_at: int | None  # its row fails once this many tokens are known
    cancel_at: int | None  # step of a cancel, before, while or after it runs

    def make_request(self, max_model_len: int) -> Request:
        return Request(
            request_id=self.request_id,
            token_ids=np.array(self.prompt, np.int32),
            num_prompt_tokens=len(self.prompt),
            params=self.params,
            stop_token_ids=self.params.stop_token_ids,
            max_total_tokens=min(len(self.prompt) + self.params.max_tokens, max_model_len),
            cache_salt=self.salt,
            scheduling=self.scheduling,
        )


@dataclass(frozen=True)
class Scenario:
    seed: int
    config: EngineConfig
    num_blocks: int  # null block included
    max_model_len: int
    vocab_size: int
    stop_chance: float
    run_ahead: int
    is_delayed: bool
    num_host_blocks: int
    step_s: float  # time that passes from round to round
    arrivals: tuple[Arrival, ...]

    @property
    def num_cache_tokens(self) -> int:
        return (self.num_blocks - 1) * self.config.block_size


def make_scenario(seed: int) -> Scenario:
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 4, 16))
    num_blocks = 1 + rng.choice((4, rng.randint(4, 20), rng.randint(10, 60), rng.randint(50, 200)))
    num_cache_tokens = (num_blocks - 1) * block_size
    max_model_len = rng.choice((num_cache_tokens, max(3, num_cache_tokens // 2), 40, 120, num_cache_tokens * 2))
    run_ahead = rng.randint(0, 4)
    is_chunking, max_itl_ms = rng.random() < 0.7, rng.choice((None, 0.001, 20.0))
    config = EngineConfig(
        model="fake",
        block_size=block_size,
        max_num_seqs=rng.choice((1, 2, 4, 8, 16)),
        max_num_batched_tokens=rng.choice((1, 2, 7, 16, 64, 512)),
        max_queue_size=rng.choice((3, 10, 1000, 1000)),
        enable_chunked_prefill=is_chunking,
        enable_prefix_caching=rng.random() < 0.7,
        scheduling_policy="static" if rng.random() < 0.1 else "fcfs",
        run_ahead=run_ahead,
        max_itl_ms=max_itl_ms if is_chunking else None,
        admission_reserve=rng.choice((-10.0, -10.0, 0.5)),
        max_queue_tokens=rng.choice((1 << 24, 1 << 24, 200)),
        priority_aging_s=rng.choice((0.0, 0.05, 10.0)),
        queue_timeout_ms=rng.choice((None, None, 10_000)),
        timeout_ms=rng.choice((None, None, 20_000)),
    )
    vocab_size = rng.choice((2, 3, 10, 1000))
    longest = min(max_model_len, num_cache_tokens, 100)
    texts = [[rng.randrange(vocab_size) for _ in range(longest + 2)] for _ in range(2)]
    priorities = rng.choice(((0,), (0,), (-1, 0, 1), (0, 0, 0, -3), (-100, 5)))
    num_requests = rng.randint(1, 20)
    arrivals = tuple(
        _make_arrival(rng, i, texts, longest, vocab_size, block_size, priorities) for i in range(num_requests)
    )
    return Scenario(
        seed=seed,
        config=config,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        stop_chance=rng.choice((0.0, 0.02, 0.2)),
        run_ahead=run_ahead,
        is_delayed=rng.random() < 0.5,
        num_host_blocks=rng.choice((0, 3, 64)),
        step_s=rng.choice((0.0, 0.01, 1.0)),
        arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival.at_step)),
    )


def _make_arrival(
    rng: random.Random,
    index: int,
    texts: list[list[int]],
    longest: int,
    vocab_size: int,
    block_size: int,
    priorities: tuple[int, ...],
) -> Arrival:
    text = rng.choice(texts)
    at_border = rng.randint(0, longest // block_size) * block_size + rng.choice((-1, 0, 0, 1))
    few = rng.randint(1, max(1, longest // 8))
    num_prompt = rng.choice((rng.randint(1, longest), few, few, few, at_border, longest))
    num_prompt = min(max(num_prompt, 1), longest + 1)
    shared = rng.randint(0, num_prompt)
    prompt = (*text[:shared], *(rng.randrange(vocab_size) for _ in range(num_prompt - shared)))
    max_tokens = rng.choice((1, rng.randint(1, 8), rng.randint(1, 40), rng.randint(1, 40), longest + 5))
    stop_ids = tuple(rng.sample(range(vocab_size), k=rng.choice((0, 1, min(2, vocab_size - 1)))))
    at_step = rng.choice((0, rng.randint(0, 30)))
    return Arrival(
        request_id=(rng.randint(0, 3) << 40) | index,
        at_step=at_step,
        prompt=prompt,
        params=SamplingParams(
            max_tokens=max_tokens, min_tokens=rng.choice((0, 0, rng.randint(0, max_tokens))), stop_token_ids=stop_ids
        ),
        scheduling=SchedulingParams(
            priority=rng.choice(priorities),
            timeout_ms=rng.choice((None, None, None, 100, 5000)),
            queue_timeout_ms=rng.choice((None, None, None, 50, 3000)),
        ),
        salt=rng.choice((b"", b"", b"tenant")),
        fails_at=rng.randint(1, num_prompt + max_tokens) if rng.random() < 0.08 else None,
        cancel_at=at_step + rng.randint(0, 25) if rng.random() < 0.2 else None,
    )
