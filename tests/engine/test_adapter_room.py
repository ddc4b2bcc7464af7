"""More adapters are wanted than have room on the host, and nobody waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import UnavailableError
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.request import Request
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.adapter_line import RoomLine
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.scheduler.order import MAX_OVERTAKEN
from tests.engine.adapter_reader import Reader, source
from tests.fakes.engine import info_of
from tests.fakes.hash_rule import HashModel
from tests.fakes.runners import HashRunner

PAST_ALL_STEPS = 3000


class AdaptedHashRunner(HashRunner):
    adapters: Reader


class Crowd:
    """An engine in which every popular adapter has always two requests that wait or run."""

    def __init__(self, popular: str, num_slots: int, max_cpu_loras: int | None, **settings: float) -> None:
        config = EngineConfig(
            model="fake", block_size=4, enable_lora=True, max_num_seqs=5, max_loras=num_slots,
            max_cpu_loras=max_cpu_loras, **settings,
        )  # fmt: skip
        info = info_of(config, 64, 256, (0,))
        runner = AdaptedHashRunner(HashModel(1000), 65, 4)
        runner.adapters = self.reader = Reader({f"/adapters/{name}": name.encode() * 16 for name in "abcdefghij"})
        fields = {name: getattr(info, name) for name in info.__struct_fields__}
        self.engine = LLMEngine(config, runner, ModelInfo(**{**fields, "num_adapter_slots": num_slots}))
        self.popular = popular
        self.priority = 0  # of the popular
        self.num_added = 0
        self.requests: dict[int, Request] = {}  # those that have not ended

    def add(self, name: str, priority: int = 0) -> Request:
        number = self.num_added = self.num_added + 1
        request = self.engine.make_request(
            number,
            np.asarray([5, 6, 7 + number % 50], np.int32),
            TokenRules(max_tokens=3 + number % 4, ignore_eos=True, seed=0),
            SchedulingParams(priority=priority),
            source(name) if name else None,
        )
        self.engine.add_request(request)
        self.requests[number] = request
        return request

    @property
    def line(self) -> RoomLine:
        assert self.engine.adapters is not None
        return self.engine.adapters.line

    def names(self) -> list[str]:
        return [each.adapter_source.name for each in self.requests.values() if each.adapter_source]

    def turn(self) -> None:
        """New requests in place of those that have ended, and a step."""
        for name in self.popular:
            for _ in range(2 - self.names().count(name)):
                self.add(name, self.priority)
        assert self.engine.release_held() == []
        if self.engine.step() is None:
            time.sleep(0.0005)  # a thread reads
        scheduler = self.engine.scheduler
        gone = [each for each in self.requests if each not in scheduler._queue and each not in scheduler._table.by_id]
        for request_id in gone:
            del self.requests[request_id]

    def turns_until(self, condition: Callable[[], bool], what: str) -> None:
        for _ in range(PAST_ALL_STEPS):
            if condition():
                return
            self.turn()
        pytest.fail(f"not after {PAST_ALL_STEPS} steps: {what}")

    def count_passing(self, late: Request) -> int:
        """How many that came later are given their adapters until there is room for this one's."""
        store, passing = self.engine.adapters, set()
        assert store is not None
        assert late.adapter_source is not None
        before = {*self.requests}

        def has_room() -> bool:
            if late.adapter or late.adapter_source in store._reading:
                return True
            passing.update(number for number, other in self.requests.items() if number not in before and other.adapter)
            return False

        self.turns_until(has_room, f"room for {late.adapter_source.name}")
        return len(passing)


def crowded(popular: str, num_slots: int, max_cpu_loras: int | None, **settings: float) -> Crowd:
    """One in which nobody has room for another adapter."""
    crowd = Crowd(popular, num_slots, max_cpu_loras, **settings)
    for _ in range(60):
        crowd.turn()
    return crowd


@pytest.mark.parametrize(
    ("popular", "num_slots", "max_cpu_loras"), [("ab", 2, 2), ("abcd", 1, None), ("abc", 2, 3), ("a", 1, 1)]
)
def test_who_waits_for_room_is_passed_no_more_often_than_who_waits_in_the_queue(
    popular: str, num_slots: int, max_cpu_loras: int | None
) -> None:
    crowd = crowded(popular, num_slots, max_cpu_loras)
    late = crowd.add("e")
    assert crowd.count_passing(late) <= MAX_OVERTAKEN
    crowd.turns_until(lambda: late.request_id not in crowd.requests, "an answer with e")
    crowd.engine.scheduler.check_integrity()
    crowd.engine.close()


def test_several_that_wait_for_room_have_it_in_their_order() -> None:
    """Each of them is passed no more often than if it were alone."""
    crowd = crowded("abcd", 1, None)
    late = [crowd.add(name) for name in "efg"]
    read = len(crowd.reader.read_paths)
    crowd.turns_until(lambda: not any(each.request_id in crowd.requests for each in late), "answers with e, f and g")
    paths = [path for path in crowd.reader.read_paths[read:] if path[-1] in "efg"]
    assert paths == ["/adapters/e", "/adapters/f", "/adapters/g"]
    crowd.engine.close()


def test_who_has_no_adapter_waits_for_nobodys() -> None:
    crowd = crowded("abcd", 1, None)
    late = crowd.add("e")
    crowd.turns_until(lambda: crowd.line._barrier is not None, "somebody who has been passed often enough")
    plain = crowd.add("")
    assert not late.adapter
    crowd.turn()
    assert plain.request_id not in crowd.engine._held
    crowd.turns_until(lambda: plain.request_id not in crowd.requests, "an answer without an adapter")
    crowd.engine.close()


def test_the_more_urgent_wait_for_nobody_less_urgent() -> None:
    crowd = crowded("abcd", 1, None, priority_aging_s=0.0)
    crowd.priority = -1
    late = crowd.add("e")
    for _ in range(600):
        crowd.turn()
    assert not late.adapter, "with strict priorities it may wait for ever, as in the queue"
    crowd.priority = 0
    crowd.turns_until(lambda: late.request_id not in crowd.requests, "an answer with e")
    crowd.engine.close()


def test_who_leaves_while_he_waits_for_room_holds_up_nobody() -> None:
    crowd = crowded("abcd", 1, None)
    late = crowd.add("e")
    crowd.turns_until(lambda: crowd.line._barrier is not None, "somebody who has been passed often enough")
    assert crowd.engine.cancel(late.request_id)
    for _ in range(2):
        crowd.turn()
    assert crowd.line._barrier is None
    assert not [each for each in crowd.requests.values() if not each.adapter]
    crowd.engine.close()


def test_who_is_refused_does_not_stand_before_others() -> None:
    """A full queue refuses after the store was asked; a line of those who are gone would keep room from all others."""
    crowd = crowded("abcd", 1, None)
    late = crowd.add("e")
    waiting = [*crowd.line._line]
    crowd.engine.scheduler._queue._max_size = 0
    with pytest.raises(UnavailableError, match="queue is full"):
        crowd.add("f", priority=-5)
    assert crowd.line._line == waiting
    crowd.engine.scheduler._queue._max_size = 4096
    crowd.turns_until(lambda: late.request_id not in crowd.requests, "an answer with e")
    crowd.engine.close()
