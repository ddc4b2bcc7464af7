"""Models some of whose layers see a window only: what launched steps read stays theirs, and what is found is right."""

from __future__ import annotations

import pytest

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.request import make_request_id
from cb_backend.contracts.request_params import RequestParams
from cb_backend.engine.scheduler import admission
from tests.fakes.engine import FakeEngine
from tests.simulation.scenario import Arrival, Scenario
from tests.simulation.world import World


def run_and_look(engine: FakeEngine) -> None:
    """To the end; whatever a launched step reads or writes is somebody's until its result is read."""
    while engine.scheduler.has_unfinished():
        engine.step()
        for _, pending in engine.in_flight:
            touched = pending.read_blocks | pending.written_blocks
            free = [block for block in touched if not engine.kv.pool.ref_cnt(block)]
            assert not free, f"blocks {free} are free, and step {pending.run} is on its way with them"


@pytest.mark.parametrize("windows", [(0, 4), (0, 0, 8), (6,), (0, *[5] * 6)])
@pytest.mark.parametrize("run_ahead", [1, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_the_last_chunk_keeps_what_it_reads_while_it_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch, windows: tuple[int, ...], run_ahead: int, whole: bool
) -> None:
    """`whole`: as if preempted too often, with room for the whole length, given back from while it decodes."""
    monkeypatch.setattr(admission, "is_protected", lambda _: whole)
    engine = FakeEngine(num_blocks=200, windows=windows, run_ahead=run_ahead, max_num_batched_tokens=16)
    for number in (1, 2):
        engine.add(number, 41, max_tokens=30)
    run_and_look(engine)
    assert engine.tokens == {number: [10 + index for index in range(30)] for number in (1, 2)}
    assert engine.kv.num_free_blocks == 200


@pytest.mark.parametrize("whole", [False, True])
def test_what_has_fallen_out_of_the_window_goes_back_while_it_decodes(
    monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr(admission, "is_protected", lambda _: whole)
    engine = FakeEngine(num_blocks=100, windows=(0, 8), run_ahead=1, max_num_batched_tokens=16)
    request = engine.add(1, 40, max_tokens=60)
    while len(engine.tokens[1]) < 50:
        engine.step()
    held = [block for block in request.block_table[1::2] if block]
    assert len(held) <= 4, "of 90 tokens the window of 8 and what is on its way are held"
    engine.run()


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("num_groups", [2, 7])
def test_a_hit_is_right_where_the_window_ends_with_the_prompt(num_groups: int, off: int, block_size: int) -> None:
    """The window is the prompt, one token less, one more: who comes again finds it, and reads what the first wrote."""
    prompt = tuple(range(33))
    window = len(prompt) + off
    params = RequestParams(max_tokens=20, min_tokens=20)
    arrivals = [
        Arrival(make_request_id(0, number), 40 * number, (*prompt, *[90] * extra), params)
        for number, extra in enumerate((0, 0, 1, 5))
    ]
    config = EngineConfig(
        model="fake", block_size=block_size, max_num_seqs=4, max_num_batched_tokens=16, run_ahead=2,
        watchdog_timeout_s=0.0,
    )  # fmt: skip
    scenario = Scenario(
        seed=1, config=config, num_blocks=1 + 200 * num_groups, max_model_len=200, vocab_size=1000, stop_chance=0.0,
        is_delayed=True, num_host_blocks=0, step_s=0.01, arrivals=tuple(arrivals),
        windows=(0, *[window] * (num_groups - 1)),
    )  # fmt: skip
    found = World(scenario).run()
    assert found["ended: length"] == 4
    # The last token is computed in any case; of whoever has more, all full blocks of the prompt are found.
    assert found["prefix hit tokens"] >= (32 // block_size + 2 * (33 // block_size)) * block_size
