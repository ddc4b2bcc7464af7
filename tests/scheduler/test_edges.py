"""Sizes that just fit, requests that just fail, and what a preempted one is known to have."""

from __future__ import annotations

import pytest

from cb_backend.contracts.errors import InvalidRequestError
from tests.fakes.engine import FakeEngine
from tests.scheduler.test_swap import growing_pair


def test_a_prompt_that_leaves_the_cache_room_for_one_token_fits_and_one_more_does_not() -> None:
    engine = FakeEngine(num_blocks=5, max_model_len=1000, enable_prefix_caching=False)
    room = engine.scheduler._num_cache_tokens
    engine.add(1, room - 1, max_tokens=1)
    engine.run()
    assert len(engine.tokens[1]) == 1
    with pytest.raises(InvalidRequestError, match=f"has {room} tokens, but the whole KV cache holds {room} "):
        engine.add(2, room)


def test_a_request_whose_deadline_cannot_be_watched_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()

    def fails(request: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(engine.scheduler._deadlines, "add", fails)
        with pytest.raises(MemoryError):
            engine.add(1, 5, max_tokens=2)
    assert not engine.scheduler.has_unfinished()
    engine.add(1, 5, max_tokens=2)
    engine.run()
    assert engine.tokens[1] == [10, 11]


def test_what_is_swapped_out_are_the_tokens_before_the_last_that_was_sampled() -> None:
    """The last one's keys and values are computed when it comes back."""
    engine, second = growing_pair(num_host_blocks=100)
    while not second.num_preemptions:
        engine.step()
    assert engine.scheduler._swap.num_tokens(second) == len(second.token_ids) - 1


@pytest.mark.parametrize("length", [97, 98, 99, 100])
def test_as_many_blocks_are_kept_as_those_tokens_fill(length: int) -> None:
    """Of a request that gives way to another, wherever in a block it is."""
    engine = FakeEngine(num_blocks=60, num_host_blocks=100, enable_prefix_caching=False)
    engine.add(1, 100, max_tokens=40)
    second = engine.add(2, length, max_tokens=40)
    for _ in range(60):
        engine.step()
        copied = [plan.copies.out for plan in engine.plans if plan.copies.out]
        if copied:
            break
    assert second.num_preemptions == 1
    assert [len(copies) for copies in copied] == [-(-(len(second.token_ids) - 1) // 4)]
    engine.run()
    assert engine.tokens[2] == list(range(10, 50))
