"""Running streams beside a queue of prompts that never ends: the time between tokens stays below `max_itl_ms`.

The real engine on a made-up GPU whose host needs longer to launch a large step than the device to run it
(`tests.fakes.launching_device`). Times are virtual.
"""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.contracts.pooling import PoolingRules
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.study.simulator import VirtualClock
from tests.fakes.launching_device import GRAPH_S, READ_S, STEP_S, TOKEN_S, launching_engine

NUM_STREAMS, ANSWER, NUM_WAITING = 32, 150, 8
EMBED = TokenRules(seed=0, pooling=PoolingRules())
GENERATE = TokenRules(seed=0, max_tokens=1, ignore_eos=True)


class Served:
    """Streams that all begin together, and prompts beside; one pass after the other on the same engine."""

    def __init__(self, engine: LLMEngine, clock: VirtualClock, rules: TokenRules, num_tokens: int) -> None:
        self._engine, self._clock, self._rules, self._num_tokens = engine, clock, rules, num_tokens
        self._next_id = 0

    def _add(self, num_tokens: int, rules: TokenRules) -> int:
        self._next_id += 1
        prompt = np.full(num_tokens, self._next_id % 1000, np.int32)
        self._engine.add_request(self._engine.make_request(self._next_id, prompt, rules))
        return self._next_id

    def run(self) -> tuple[np.ndarray, float]:
        """(milliseconds between the streams' tokens, prompt tokens a second beside them)."""
        rules = TokenRules(seed=0, max_tokens=ANSWER, ignore_eos=True)
        streams = {self._add(128, rules) for _ in range(NUM_STREAMS)}
        last: dict[int, float] = {}
        gaps, num_prompts, began = [], 0, 0.0
        while streams:
            if last and self._engine.scheduler.num_waiting < NUM_WAITING:
                for _ in range(NUM_WAITING * 512 // self._num_tokens):
                    self._add(self._num_tokens, self._rules)
            output = self._engine.step()
            assert output is not None
            ends = zip(output.request_ids.tolist(), output.finish_reasons.tolist(), strict=True)
            for request_id, reason in ends:
                if request_id not in streams:
                    num_prompts += 1
                    continue
                began = began or self._clock.now
                gaps += [self._clock.now - last[request_id]] if request_id in last else []
                last[request_id] = self._clock.now
                if reason:
                    streams.discard(request_id)
        seconds = self._clock.now - began
        while self._engine.has_unfinished():
            self._engine.step()
        return 1e3 * np.array(gaps), num_prompts * self._num_tokens / seconds


def served(
    limit_ms: float | None, launch_ms: float, rules: TokenRules, num_tokens: int, run_ahead: int, first_ms: float = 0.0
) -> Served:
    clock = VirtualClock()
    engine = launching_engine(clock, launch_ms, first_ms, max_itl_ms=limit_ms, run_ahead=run_ahead)
    return Served(engine, clock, rules, num_tokens)


@pytest.mark.parametrize("run_ahead", [0, 4])
@pytest.mark.parametrize(
    ("limit_ms", "launch_ms", "rules", "num_tokens"),
    [
        (20.0, 25.0, EMBED, 512),
        (20.0, 25.0, GENERATE, 512),
        (20.0, 18.0, EMBED, 512),  # some launches take longer, some do not
        (20.0, 10.6, EMBED, 512),
        (8.0, 10.6, GENERATE, 512),
        (8.0, 10.6, EMBED, 64),  # a small step has no room for so many prompts
    ],
)
def test_streams_keep_to_the_limit_once_times_are_learned(
    limit_ms: float, launch_ms: float, rules: TokenRules, num_tokens: int, run_ahead: int
) -> None:
    serving = served(limit_ms, launch_ms, rules, num_tokens, run_ahead)
    for _ in range(2):
        serving.run()
    gaps, tokens_s = serving.run()
    assert np.percentile(gaps, 99) < limit_ms
    # Small steps alone, which the limit leaves room for, give so much; 32 rows decode in each.
    in_small = min(2048, 16 * num_tokens)
    host_s = 0.0 if run_ahead else GRAPH_S + READ_S
    assert tokens_s > 0.8 * in_small / (STEP_S + TOKEN_S * (in_small + NUM_STREAMS) + host_s)


def test_a_slow_first_step_keeps_no_stream_waiting_and_large_steps_no_longer_than_need_be() -> None:
    serving = served(20.0, 10.6, EMBED, 512, 4, first_ms=100)
    serving.run()
    gaps, _ = serving.run()
    assert np.percentile(gaps, 99) < 20.0
    assert np.percentile(gaps, 90) > 10.6, "they have come back"


def test_a_limit_that_launches_do_not_reach_costs_no_prompt() -> None:
    """What is computed beside streams is what is computed without a limit, or more."""
    limited, unlimited = (served(limit_ms, 10.6, EMBED, 512, 4) for limit_ms in (20.0, None))
    for serving in (limited, unlimited):
        serving.run()
    assert limited.run()[1] > 0.95 * unlimited.run()[1]
