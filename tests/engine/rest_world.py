"""Models on a card, with a clock that is told: the card's memory is a number, engines' processes are too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.rest import NoRoomError, RestAnswer, WeightsGoneError
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.engine.card_turns import CardTurns
from cb_backend.engine.rest import Rest
from tests.fakes.engine import FakeEngine

STEP_S = 0.1


class Card:
    """Of a size, in anything."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0

    def free_bytes(self) -> int:
        return self.size - self.used


class FakeSleeper:
    """Takes `size` of a card, is prepared after some parts, and awake some looks after it was woken."""

    def __init__(self, card: Card, size: int, parts: int = 2, looks: int = 2) -> None:
        self.card, self.size, self.parts, self.looks = card, size, parts, looks
        self.held_bytes = 0
        self.needed_bytes = size
        self.weights = ""
        self.has_weights = True
        self.on_wake: Callable[[], None] = lambda: None
        self.updates: list[Path] = []
        self.broken: set[str] = set()
        self.on_update: Callable[[], None] = lambda: None
        self._looks_left = 0
        self._take()

    def _take(self) -> None:
        if self.card.used + self.size > self.card.size:
            raise NoRoomError("no room")
        self.card.used += self.size
        self.held_bytes = self.size

    def prepare(self) -> bool:
        assert self.held_bytes
        self.parts = max(self.parts - 1, 0)
        return self.parts == 0

    def sleep(self, tell: Callable[[], None] = lambda: None) -> None:
        assert self.parts == 0
        self.card.used -= self.held_bytes
        self.held_bytes = 0
        self.has_weights = False

    def check_wake(self) -> None:
        if "gone" in self.broken:
            raise WeightsGoneError("model.safetensors has changed since")

    def wake(self, tell: Callable[[], None], is_filled: bool = True) -> None:
        assert not self.held_bytes
        if is_filled:
            self.check_wake()
        self._take()
        try:
            self.on_wake()
        except NoRoomError:
            self.sleep()
            raise
        self.has_weights = is_filled
        self._looks_left = self.looks

    @property
    def is_awake(self) -> bool:
        self._looks_left -= 1
        return self._looks_left <= 0

    def check_update(self, folder: Path) -> None:
        if folder.name == "other" or "folder" in self.broken:
            raise ConfigError("of another specification")

    def update(self, folder: Path, tell: Callable[[], None]) -> bytes:
        assert self.held_bytes, "an update of a model that is not there"
        if "update" in self.broken:
            raise OSError("the file ends early")
        self.updates.append(folder)
        self.has_weights, self.weights = True, str(folder)
        self.on_update()
        return folder.name.encode()

    def undo_update(self, tell: Callable[[], None]) -> None:
        if "undo" in self.broken:
            raise OSError("the old file is gone")
        self.has_weights = True


class Processes:
    """Numbers that stand for processes, each of which is alive until it is not."""

    def __init__(self) -> None:
        self._alive: set[int] = set()
        self._next = 1

    def begin(self) -> int:
        self._alive.add(self._next)
        self._next += 1
        return self._next - 1

    def end(self, pid: int) -> None:
        self._alive.remove(pid)

    def start_time(self, pid: int) -> int | None:
        return 1000 + pid if pid in self._alive else None


class World:
    """Models on one card, and the clock."""

    def __init__(self, folder: Path, processes: Processes, size: int = 10) -> None:
        self.folder = folder
        self.processes = processes
        self.card = Card(size)
        self.now = 100.0
        self.models: list[Model] = []

    def add(self, size: int, **options: float) -> Model:
        """It has its memory at once."""
        turns = CardTurns(self.folder, self.card.free_bytes, lambda: self.now, self.processes.begin())
        model = Model(self, size, turns, **options)
        self.models.append(model)
        return model

    def kill(self, model: Model) -> None:
        """Its memory is free, and its process gone, from one moment to the next."""
        self.models.remove(model)
        self.processes.end(model.turns._pid)
        self.card.used -= model.sleeper.held_bytes

    def turn(self, number: int = 1) -> None:
        for _ in range(number):
            self.now += STEP_S
            for model in list(self.models):
                model.turn()
            assert self.card.used <= self.card.size

    def until(self, condition: Callable[[], bool], most: int = 2000) -> None:
        for _ in range(most):
            if condition():
                return
            self.turn()
        raise AssertionError(f"it does not come: {[(model.rest.state, model.rest.stats()) for model in self.models]}")


class Model:
    def __init__(self, world: World, size: int, turns: CardTurns, **options: float) -> None:
        self.engine = FakeEngine(num_blocks=40, max_num_seqs=4)
        self.sleeper = FakeSleeper(world.card, size)
        self.sleeps: list[tuple[float, float]] = []
        self.failed: dict[int, str] = {}
        clock = lambda: world.now  # noqa: E731
        self.turns = turns
        options = {"idle_sleep_s": 0.0, "turn_s": 2.0, **options}
        self.rest = Rest(
            self.sleeper,
            self.engine.scheduler,
            self.turns,
            self,
            fail=self.fail,
            clock=clock,
            **options,  # type: ignore[arg-type]
        )
        self.answers: list[RestAnswer] = []
        self._next_id = 0

    def slept(self, begin: float, end: float) -> None:
        self.sleeps.append((begin, end))

    def fail(self, request_ids: Sequence[int], reason: str) -> None:
        for request_id in request_ids:
            assert self.engine.scheduler.cancel(request_id)
            self.failed[request_id] = reason

    def ask(self, tokens: int = 8, max_tokens: int = 5, salt: str = "") -> int:
        self._next_id += 1
        scheduling = SchedulingParams(cache_salt=salt)
        self.engine.add(self._next_id, [7] * tokens, max_tokens=max_tokens, scheduling=scheduling)
        return self._next_id

    def turn(self) -> None:
        if self.rest.turn() and self.engine.scheduler.has_unfinished():
            assert self.sleeper.held_bytes, "a step without memory"
            assert self.sleeper.has_weights, "a step without weights"
            self.engine.step()

    def has_ended(self, request_id: int) -> bool:
        return request_id in self.engine.reasons
