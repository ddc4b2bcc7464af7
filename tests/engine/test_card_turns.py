"""Who may take a card's memory, who makes room, and what becomes of it when somebody dies: by files alone."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

import pytest

from cb_backend.engine import card_turns
from cb_backend.engine.card_turns import HAS, LOADS, RETRY_S, SILENT_S, WANTS, Asked, CardTurns
from cb_backend.support.process_watch import process_start_time


class Card:
    """Memory of a size, a clock, and the parts of engines, whose processes are numbers."""

    def __init__(self, folder: Path, size: int = 10) -> None:
        self.folder = folder
        self.free = size
        self.now = 1.0
        self.dead: set[int] = set()

    def engine(self, pid: int) -> CardTurns:
        return CardTurns(self.folder, lambda: self.free, lambda: self.now, pid)

    def awake(self, pid: int, size: int) -> CardTurns:
        turns = self.engine(pid)
        self.free -= size
        turns.take(size)
        self.tick()
        return turns

    def waiting(self, pid: int, size: int) -> CardTurns:
        turns = self.engine(pid)
        turns.want(size)
        self.tick()
        return turns

    def take(self, turns: CardTurns, size: int) -> bool:
        """As an engine does that wakes."""
        if not turns.try_take():
            return False
        self.free -= size
        turns.take(size)
        self.tick()
        return True

    def leave(self, turns: CardTurns, size: int) -> None:
        self.free += size
        turns.rest()
        self.tick()

    def tick(self, seconds: float = 0.125) -> None:
        self.now += seconds


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card(tmp_path / "card")
    monkeypatch.setattr(card_turns, "process_start_time", lambda pid: None if pid in made.dead else 7)
    return made


def test_the_first_in_line_takes_it_first_and_keeps_its_place(card: Card) -> None:
    holder = card.awake(1, 9)
    first, second = card.waiting(2, 9), card.waiting(3, 9)
    first.want(9)  # again
    assert not first.try_take()
    assert holder.asked == Asked(1.125, is_at_once=False)
    card.leave(holder, 9)
    assert not card.take(second, 9)
    assert card.take(first, 9)
    assert not card.take(second, 9)
    assert first.asked == Asked(1.25, is_at_once=False)


def test_who_fits_passes_one_for_whom_nobody_can_make_room(card: Card) -> None:
    stuck = card.awake(1, 5)
    large, small = card.waiting(2, 9), card.waiting(3, 4)
    assert card.take(small, 4)
    assert small.asked is None, "without it there would be no room either"
    assert large.is_in_line
    card.leave(small, 4)
    small.want(4)
    card.tick()
    assert card.take(small, 4), "again and again"
    card.leave(stuck, 5)
    assert small.asked == Asked(1.125, is_at_once=True), "it is all that is missing now"
    late = card.waiting(4, 1)
    assert not card.take(late, 1), "nobody passes any more"
    card.leave(small, 4)
    assert card.take(large, 9)
    assert card.take(late, 1), "and what is left is anybody's"


def test_nobody_passes_who_keeps_one_waiting_that_has_room(card: Card) -> None:
    holder = card.awake(1, 4)
    first, second = card.waiting(2, 6), card.waiting(3, 3)
    assert not card.take(second, 3)
    assert card.take(first, 6)
    assert holder.asked == Asked(1.25, is_at_once=False)


def test_nobody_makes_room_for_one_that_has_it(card: Card) -> None:
    holder = card.awake(1, 4)
    waiting = card.waiting(2, 6)
    assert holder.asked is None
    assert waiting.try_take()
    card.tick()
    assert holder.asked is None, "while it takes it neither"


def test_what_one_is_about_to_take_is_not_there_for_others(card: Card) -> None:
    first, second, third = card.waiting(1, 6), card.waiting(2, 6), card.waiting(3, 4)
    assert first.try_take()
    assert not second.try_take()
    assert third.try_take(), "but what it leaves is"


@pytest.mark.parametrize("state", [HAS, LOADS, WANTS])
def test_the_turn_of_one_that_died_is_anybodys(card: Card, state: str) -> None:
    dying = card.waiting(1, 9)
    if state != WANTS:
        assert dying.try_take()
    if state == HAS:
        card.free -= 9
        dying.take(9)
    other = card.waiting(2, 8)
    assert not card.take(other, 8)
    card.dead.add(1)
    if state == HAS:
        card.free += 9
    (card.folder / "1-7.new").write_text("[1,")  # it died while it said something
    assert card.take(other, 8)
    assert sorted(path.name for path in card.folder.iterdir()) == ["2-7", "lock"]


def test_one_that_waits_and_does_not_run_is_passed_over(card: Card) -> None:
    stopped, other = card.waiting(1, 5), card.waiting(2, 5)
    assert not other.try_take()
    card.tick(SILENT_S)
    other.want(5)
    assert card.take(other, 5)
    stopped.want(5)
    assert card.take(stopped, 5), "it runs again"


def test_memory_that_looked_free_and_was_not_is_asked_for(card: Card) -> None:
    holder = card.awake(1, 4)
    waiting = card.waiting(2, 6)
    assert waiting.try_take()
    waiting.put_back()
    card.tick()
    assert holder.asked == Asked(1.125, is_at_once=False)
    assert not waiting.try_take(), "not at once"
    card.tick(RETRY_S)
    assert waiting.try_take(), "it may have been another program's for a moment"


def test_nobody_decides_while_another_does(card: Card) -> None:
    waiting = card.waiting(1, 5)
    with (card.folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert not waiting.try_take()
    assert waiting.try_take()


def test_one_that_starts_where_nobody_can_make_room_is_told_by_its_load(card: Card) -> None:
    card.free = 5  # some other program
    asleep, starting = card.waiting(1, 9), card.waiting(2, 9)
    assert not asleep.try_take()
    assert starting.try_start()
    third = card.waiting(3, 9)
    assert not third.try_start(), "one that loads may make room later"


def test_an_engine_that_died_with_the_card_is_not_waited_for(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"])
    dead = CardTurns(tmp_path, lambda: 0, pid=process.pid)
    dead.take(1)
    mine = CardTurns(tmp_path, lambda: 0)
    mine._look()
    assert [turn.state for turn in mine._others] == [HAS]
    process.kill()
    process.wait()
    mine.take_when_free(1, lambda text: None)  # returns, for nobody is left who could make room
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == [str(mine._pid), "lock"]


@pytest.mark.parametrize("text", ["", "{", "[1]", '[1, "has", null, 1, 1.0]', '["a", "wants", "b", 0, 1.0]'])
def test_a_file_of_another_version_is_nobodys_turn(tmp_path: Path, text: str) -> None:
    turns = CardTurns(tmp_path, lambda: 1)
    (tmp_path / f"1-{process_start_time(1)}").write_text(text)
    (tmp_path / "notes").write_text("not ours")
    turns.want(1)
    assert turns.try_take()


def test_who_starts_beside_one_that_loads_waits_until_that_has_its_memory(tmp_path: Path) -> None:
    """Nothing of the first is on the card yet, which looks free."""
    first, second = CardTurns(tmp_path, lambda: 10, pid=1), CardTurns(tmp_path, lambda: 10)
    first.take_when_free(9, lambda text: None)
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        first.rest()

    second.take_when_free(9, tell)
    assert len(told) == 1
