"""The line of those who wait for room for their adapters: pytest tests/engine/test_adapter_line.py"""

from __future__ import annotations

from cb_backend.engine.adapter_line import RoomLine, Turn
from cb_backend.engine.scheduler.order import MAX_OVERTAKEN


def waiting(line: RoomLine, *times: float, priority: int = 0) -> list[Turn]:
    turns = [line.new_turn((priority, time)) for time in times]
    for turn in turns:
        line.wait(turn)
    return turns


def pass_often(line: RoomLine, times: int = MAX_OVERTAKEN) -> None:
    for _ in range(times):
        line.pass_others(line.new_turn((9, 9.0)))


def test_of_those_who_arrive_at_once_the_first_is_first() -> None:
    line = RoomLine()
    first, second = waiting(line, 1.0, 1.0)
    assert line.is_first(first)
    assert not line.is_first(second)
    line.leave(first)
    assert line.is_first(second)
    assert not line.is_first(line.new_turn((0, 1.0)))


def test_the_more_urgent_is_before_whoever_waits() -> None:
    line = RoomLine()
    (waits,) = waiting(line, 1.0)
    urgent = line.new_turn((-1, 2.0))
    assert line.is_first(urgent)
    line.pass_others(urgent)
    assert waits.num_overtaken == 0, "it was before it"
    pass_often(line)
    assert line.may_pass(urgent)
    assert line.may_pass(waits)
    assert not line.may_pass(line.new_turn((0, 2.0)))


def test_so_many_pass_and_no_more() -> None:
    line = RoomLine()
    early, late = waiting(line, 1.0, 3.0)
    between = line.new_turn((0, 2.0))
    line.pass_others(between)
    pass_often(line, MAX_OVERTAKEN - 2)
    later = line.new_turn((0, 4.0))
    assert line.may_pass(later)
    line.pass_others(later)
    assert (early.num_overtaken, late.num_overtaken) == (MAX_OVERTAKEN, MAX_OVERTAKEN - 1)
    assert not line.may_pass(later)
    assert not line.may_pass(between)
    line.leave(early)
    assert line.may_pass(later), "the other has not been passed so often"
    pass_often(line, 1)
    assert not line.may_pass(later)
    assert line.may_pass(between)


def test_who_waits_again_is_passed_no_more_often_than_if_he_had_stayed() -> None:
    line = RoomLine()
    (turn,) = waiting(line, 1.0)
    pass_often(line)
    line.leave(turn)
    assert line.may_pass(line.new_turn((0, 2.0)))
    line.wait(turn)
    assert not line.may_pass(line.new_turn((0, 2.0)))


def test_who_does_not_ask_for_a_round_has_left() -> None:
    line = RoomLine()
    gone, stays = waiting(line, 1.0, 2.0)
    pass_often(line)
    line.end_round()
    line.wait(stays)
    assert not line.is_first(stays)
    line.end_round()
    assert line.is_first(stays)
    assert line.may_pass(stays)
    line.wait(stays)
    line.wait(stays)
    line.leave(stays)
    assert line.is_first(line.new_turn((9, 9.0))), "asked twice, it waited once"
    line.leave(gone)
