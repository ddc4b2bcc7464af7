"""The same worlds again and again, each time with another call failing: the n-th at one fault point, for every n.

The worlds are small and rich: preemption, swap, cache hits, timeouts and cancels all happen, so every point is reached.
"""

from __future__ import annotations

from dataclasses import replace

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.request import make_request_id
from cb_backend.contracts.request_params import RequestParams
from cb_backend.contracts.scheduling import SchedulingParams
from tests.simulation.scenario import Arrival, Fault, Scenario
from tests.simulation.world import World


def rich_scenario(index: int) -> Scenario:
    """World number `index` of twelve: without and with run-ahead, prefix cache, chunks."""
    config = EngineConfig(
        model="fake", block_size=4, max_num_seqs=4, max_num_batched_tokens=16, run_ahead=(0, 2, 4)[index % 3],
        enable_prefix_caching=index % 2 == 0, admission_reserve=-10.0, watchdog_timeout_s=0.0, swap_space=1.0,
        enable_chunked_prefill=index // 6 % 2 == 0,
    )  # fmt: skip
    arrivals = []
    for number in range(8):
        prompt = (1, 2, 3, 4, 5, 6, 7, 8, *([9, 10 + number] if number % 2 else [11] * 4))
        arrivals.append(
            Arrival(
                request_id=make_request_id(number % 3, number),
                at_step=0 if number < 5 else 6,
                prompt=prompt,
                params=RequestParams(max_tokens=24, stop=("ab",) if number == 2 else (), seed=1),
                scheduling=SchedulingParams(
                    priority=-1 if number == 6 else 0, timeout_ms=200 if number == 4 else None, tenant="ab"[number % 2]
                ),
                cancel_in={3: "decoding", 5: "waiting"}.get(number),
            )
        )
    return Scenario(
        seed=index, config=config, num_blocks=18, max_model_len=60, vocab_size=128, stop_chance=0.0,
        is_delayed=index % 2 == 1, num_host_blocks=16, step_s=0.01, arrivals=tuple(arrivals),
    )  # fmt: skip


def points_failing(point: str, index: int, most: int) -> tuple[int, dict[str, str]]:
    """Fail `point` at its n-th time in world `index`, n = 1, 2, ...: number of runs, and what broke by "point #n"."""
    broken = {}
    for n in range(1, most + 1):
        scenario = replace(rich_scenario(index), faults=(Fault(point, n),))
        world = World(scenario)
        try:
            world.run()
        except Exception as error:
            broken[f"{point} #{n} in world {index}"] = f"{type(error).__name__}: {error}"
        if not world.fired:
            return n, broken
    return most, broken
