"""Several engines of one model (`data_parallel_size`), real processes. pytest tests/front_end/test_engine_group.py"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError, ErrorCode
from cb_backend.front_end.engines.engine_launch import share_environment, visible_gpus
from cb_backend.front_end.engines.supervisor import EngineSupervisor
from tests.front_end.engines import answer, counting_config, is_running, submit
from tests.front_end.fleet import LONG, Fleet, fleet
from tests.waiting import eventually

__all__ = ["fleet"]  # a fixture


def pids(supervisor: EngineSupervisor) -> list[int]:
    return [member.life.pid for member in supervisor.client.members if member.life is not None]


def loads(supervisor: EngineSupervisor) -> list[int]:
    """Requests in each engine, as it says."""
    known = [member.stats for member in supervisor.client.members if member.stats is not None]
    return [stats.num_running + stats.num_waiting for stats in known]


def two_engines(**arguments: object) -> EngineConfig:
    return counting_config(data_parallel_size=2, **arguments)


def test_one_engines_end_costs_its_own_requests_only(fleet: Fleet) -> None:
    first, second = fleet.add(two_engines()), fleet.add(two_engines())
    assert len(set(pids(first))) == 2
    assert pids(first) == pids(second), "all front ends share both engines"
    sinks = [submit(member, [7], 1000)[1] for member in (first, second) for _ in range(6)]
    eventually(lambda: min(loads(first)) >= 4, "both engines have their share")
    old = pids(first)
    os.kill(old[1], signal.SIGKILL)
    fleet.hurry.touch()
    for sink in sinks:
        sink.wait()
        assert sink.num_ends == 1
    errors = [sink.error for sink in sinks if sink.error is not None]
    assert 4 <= len(errors) <= 8
    assert all(code == ErrorCode.UNAVAILABLE and "send the request again" in text for code, text in errors)
    expected = [(8 + i) % 256 for i in range(1000)]
    assert all(sink.token_ids == expected for sink in sinks if sink.error is None)
    assert first.client.is_ready, "the other engine serves on"
    assert answer(second, [40], 2) == [41, 42]
    for member in (first, second):
        eventually(lambda member=member: all(m.is_ready for m in member.client.members), "the engine is back")
        assert pids(member)[0] == old[0]
        assert pids(member)[1] != old[1]


def test_equal_prefixes_meet_on_one_engine_from_every_front_end(fleet: Fleet) -> None:
    first, second = fleet.add(two_engines()), fleet.add(two_engines())
    prefix = list(range(1, 65))
    for member in (first, second, first, second):
        answer(member, [*prefix, 9], 1)
    eventually(lambda: sum(cached(first)) >= 3 * 64, "three of four found the prefix")
    assert sorted(cached(first)) == [0, 3 * 64], "and none looked elsewhere"


def cached(supervisor: EngineSupervisor) -> list[int]:
    return [m.stats.num_cached_prompt_tokens for m in supervisor.client.members if m.stats is not None]


def test_cancel_and_close_reach_every_engine(fleet: Fleet) -> None:
    member, other = fleet.add(two_engines()), fleet.add(two_engines())
    submitted = [submit(member, [1], LONG) for _ in range(4)]
    for _, sink in submitted:
        sink.wait_for_token()
    assert [m.load for m in member.client.members] == [2, 2]
    member.client.cancel([request_id for request_id, _ in submitted])
    eventually(lambda: loads(other) == [0, 0], "nothing is left in either engine")
    _, open_one = submit(member, [1], LONG)
    engines = pids(member)
    member.close()
    assert open_one.wait().error is not None
    other.close()
    assert not any(map(is_running, engines))


def test_requests_go_to_the_engine_that_is_left(fleet: Fleet) -> None:
    member = fleet.add(two_engines())
    fleet.gate.touch()
    os.kill(pids(member)[0], signal.SIGKILL)
    eventually(lambda: not member.client.members[0].is_ready, "the end is noticed")
    assert [answer(member, [40], 2) for _ in range(4)] == [[41, 42]] * 4
    os.kill(pids(member)[1], signal.SIGKILL)
    eventually(lambda: not member.client.is_ready, "none is left")


def test_each_engine_takes_a_gpu_or_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == ["0", "1", "2"]
    for named, seen in (("", []), ("-1", []), ("3,GPU-ab, 5", ["3", "GPU-ab", "5"]), ("0,-1,2", ["0"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        assert visible_gpus(tmp_path) == seen
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    config = EngineConfig(model="m", data_parallel_size=2)
    assert [share_environment(config, index) for index in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "4"},
        {"CUDA_VISIBLE_DEVICES": "6"},
    ]
    with pytest.raises(ConfigError, match=r"data_parallel_size is 3.* 2 can be seen; lower it"):
        share_environment(EngineConfig(model="m", data_parallel_size=3), 0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    num_cores = len(os.sched_getaffinity(0))
    on_cpu = EngineConfig(model="m", data_parallel_size=2, device="cpu")
    assert share_environment(on_cpu, 1) == {"OMP_NUM_THREADS": str(max(num_cores // 2, 1))}
    assert share_environment(EngineConfig(model="m", device="cpu"), 0) == {}


@pytest.mark.parametrize("size", [0, 65, "many"])
def test_a_number_of_engines_that_cannot_be_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match="data_parallel_size"):
        counting_config(data_parallel_size=size)
