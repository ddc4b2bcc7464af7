"""Models of any sizes on one card, requests, orders and deaths in random orders: nothing is lost, nobody starves.

A world is drawn from its seed. `python -m tests.engine.test_rest_worlds FIRST LAST` runs more of them.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cb_backend.contracts.rest import AWAKE, NoRoomError, RestAnswer
from cb_backend.engine import card_turns
from cb_backend.engine.card_turns import CardTurns
from tests.engine.rest_world import Model, Processes, World

TURNS = 600
# In line for the card: of the four others each may take its turn of 20 and end what runs (30 tokens, a step a turn),
# or load for 20; and once more on those who have passed.
MOST_IN_LINE = 300


class DiedError(Exception):
    """An engine dies between two lines of its code."""


class Place:
    """One model of the card, whatever becomes of its engines."""

    def __init__(self, world: World, draw: random.Random, size: int, seen: Counter[str]) -> None:
        self.world, self.draw, self.size, self.seen = world, draw, size, seen
        self.model: Model | None = None
        self.turns: CardTurns | None = None  # of an engine that starts
        self.left = 0  # turns that its load takes
        self.rate = draw.choice([0.01, 0.03, 0.3])  # requests a turn; of the most there is always one
        self.open: set[int] = set()  # requests
        self.orders: list[list[RestAnswer]] = []
        self.in_line = self.longest = 0  # turns
        self.pid = 0

    def turn(self) -> None:
        if self.model is None:
            self._start()
            return
        if self.draw.random() < 0.003:
            self.die(self.model.rest.state)
            return
        self._be_asked(self.model)
        try:
            self.model.turn()
        except DiedError:
            self.die("taking")
            return
        for request in self.open & set(self.model.engine.reasons):
            assert self.model.engine.tokens[request], "it ended without a token"
            self.open.remove(request)
        assert not self.model.failed
        self.in_line = self.in_line + 1 if self.model.turns.is_in_line else 0
        self.longest = max(self.longest, self.in_line)
        assert self.in_line < MOST_IN_LINE, "somebody starves"

    def _be_asked(self, model: Model) -> None:
        draw = self.draw
        if draw.random() < self.rate:
            self.open.add(model.ask(draw.randrange(1, 12), draw.randrange(1, 30)))
        if self.open and draw.random() < 0.003:
            request = draw.choice(sorted(self.open))
            assert model.engine.scheduler.cancel(request)
            self.open.remove(request)
        if draw.random() < 0.004:
            answers: list[RestAnswer] = []
            rest, deadline = model.rest, None if draw.random() < 0.5 else self.world.now + 10 * draw.random()
            ask: Callable[[Any], None] = draw.choice(
                [
                    lambda answer: rest.ask_sleep(answer, deadline),
                    lambda answer: rest.ask_wake(answer, deadline),
                    lambda answer: rest.ask_update(Path(f"/{draw.randrange(9)}"), answer, deadline),
                ]
            )
            ask(answers.append)
            self.orders.append(answers)

    def _start(self) -> None:
        if self.turns is None:
            self.pid = self.world.processes.begin()
            self.turns = CardTurns(self.world.folder, self.world.card.free_bytes, lambda: self.world.now, self.pid)
        if not self.left:
            self.turns.want(self.size)
            self.left = self.draw.randrange(1, 20) if self.turns.try_start() else 0
        if self.draw.random() < 0.002:
            self.world.processes.end(self.pid)
            self.seen["starting"] += 1
            self.turns, self.left = None, 0
            return
        if self.left == 1:
            self.model = Model(self.world, self.size, self.turns, turn_s=2.0, idle_sleep_s=self.draw.choice([0.0, 1.0]))
            self.model.sleeper.on_wake = self._on_wake
            self.turns = None
        self.left = max(self.left - 1, 0)

    def _on_wake(self) -> None:
        if self.draw.random() < 0.02:
            raise DiedError
        if self.draw.random() < 0.02:
            raise NoRoomError("another program had it for a moment")

    def die(self, when: str) -> None:
        """Its clients hear of it; nobody else has lost anything."""
        assert self.model is not None
        self.world.processes.end(self.pid)
        self.world.card.used -= self.model.sleeper.held_bytes
        self.seen[when] += 1
        self.model = None
        self.open, self.orders, self.in_line = set(), [], 0


def check_world(seed: int, folder: Path, processes: Processes) -> Counter[str]:
    draw = random.Random(seed)
    world, seen = World(folder, processes), Counter[str]()
    places = [Place(world, draw, draw.randrange(1, 11), seen) for _ in range(draw.randrange(2, 6))]
    for index in range(TURNS):
        world.now += 0.1
        for place in draw.sample(places, len(places)):
            place.turn()
        assert 0 <= world.card.used <= world.card.size, index
    for place in places:
        place.rate = 0.0
    for _ in range(10 * TURNS):  # everybody comes to an end
        if not any(place.open for place in places):
            break
        world.now += 0.1
        for place in places:
            place.turn()
    assert not any(place.open for place in places), "somebody is lost"
    seen["longest"] = max(place.longest for place in places)
    for place in places:
        if place.model is not None:
            place.model.engine.scheduler.check_integrity()
            assert all(len(answers) <= 1 for answers in place.orders), "an order is answered once"
    return seen


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    found = Processes()
    monkeypatch.setattr(card_turns, "process_start_time", found.start_time)
    return found


@pytest.mark.parametrize("first", [0, 2])
def test_worlds(first: int, tmp_path: Path, processes: Processes) -> None:
    seen = sum((check_world(seed, tmp_path / str(seed), processes) for seed in range(first, first + 2)), Counter[str]())
    assert seen[AWAKE], seen


def main() -> None:
    first, last = map(int, sys.argv[1:])
    seen, processes = Counter[str](), Processes()
    card_turns.process_start_time = processes.start_time
    for seed in range(first, last):
        with tempfile.TemporaryDirectory() as folder:
            try:
                seen += check_world(seed, Path(folder), processes)
            except BaseException:
                print(f"seed {seed}")
                raise
    print(f"worlds {first} to {last}: nothing lost; engines died {dict(seen)}")


if __name__ == "__main__":
    main()
