"""When a model sleeps, wakes and takes turns on a card: the decisions, with a clock that is told.

The memory of a card is a number here, which no two models may take together beyond its size.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cb_backend.contracts.rest import ASLEEP, AWAKE, FALLING_ASLEEP, UPDATING, RestAnswer
from cb_backend.engine import card_turns
from cb_backend.support.fault_points import armed
from tests.engine.rest_world import STEP_S, Model, Processes, World


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    found = Processes()
    monkeypatch.setattr(card_turns, "process_start_time", found.start_time)
    return found


@pytest.fixture
def world(tmp_path: Path, processes: Processes) -> World:
    return World(tmp_path / "card", processes)


def test_a_model_sleeps_after_so_long_without_a_request_and_not_before(world: World) -> None:
    model = world.add(9, idle_sleep_s=3.0)
    request = model.ask()
    world.until(lambda: model.has_ended(request))
    end = world.now
    world.until(lambda: model.rest.state == ASLEEP)
    assert 3.0 <= world.now - end <= 3.0 + 3 * STEP_S
    assert world.card.used == 0
    request = model.ask()
    world.until(lambda: model.has_ended(request))
    assert (model.rest.stats().num_sleeps, model.rest.stats().num_wakes) == (1, 1)
    assert len(model.sleeps) == 1, "the timeline hears of it"
    assert model.engine.tokens[request] == [10, 11, 12, 13, 14]


def test_a_model_with_zero_seconds_sleeps_only_when_it_is_told_to(world: World) -> None:
    model = world.add(9)
    world.turn(500)
    assert model.rest.state == AWAKE
    model.rest.ask_sleep(model.answers.append)
    world.until(lambda: bool(model.answers))
    assert (model.answers, model.rest.state) == ([RestAnswer(ASLEEP)], ASLEEP)


def test_a_request_that_comes_while_it_falls_asleep_keeps_it_awake(world: World) -> None:
    model = world.add(9, idle_sleep_s=1.0)
    model.sleeper.parts = 50  # as if much were to be pinned yet
    model.rest._is_prepared = False
    world.turn(5)
    model.rest._idle_since = -1e9
    world.until(lambda: model.rest.state == FALLING_ASLEEP)
    request = model.ask()
    world.until(lambda: model.has_ended(request))
    assert model.rest.stats().num_sleeps == 0


def test_who_runs_goes_on_before_a_model_that_was_told_to_sleeps(world: World) -> None:
    model = world.add(9)
    request = model.ask(max_tokens=30)
    world.turn(3)
    model.rest.ask_sleep(model.answers.append)
    world.until(lambda: model.rest.state == ASLEEP)
    assert model.has_ended(request)


def test_a_wake_that_is_asked_for_is_answered_awake_and_calls_off_a_sleep(world: World) -> None:
    model = world.add(9)
    model.rest.ask_sleep(model.answers.append)
    world.until(lambda: model.rest.state == ASLEEP)
    model.rest.ask_wake(model.answers.append)
    world.until(lambda: len(model.answers) == 2)
    assert model.answers[1].state == AWAKE
    model.ask(max_tokens=30)
    world.turn(2)
    model.rest.ask_sleep(model.answers.append)
    model.rest.ask_wake(model.answers.append)
    world.turn(200)
    assert ("wake meanwhile" in model.answers[2].problem, model.answers[3].state) == (True, AWAKE)
    assert model.rest.state == AWAKE


def test_two_models_that_exceed_the_card_take_turns_and_lose_nobody(world: World) -> None:
    one = world.add(9)
    one.rest.ask_sleep(one.answers.append)
    world.until(lambda: one.rest.state == ASLEEP)
    models, draw = [one, world.add(9)], random.Random(3)
    asked: list[tuple[Model, int]] = []
    for _ in range(3000):
        for model in models:
            if draw.random() < 0.05:
                request = model.ask(draw.randrange(1, 20), draw.randrange(1, 30))
                asked += [(model, request)]
        world.turn()
    world.until(lambda: all(model.has_ended(request) for model, request in asked))
    wakes = [model.rest.stats().num_wakes for model in models]
    assert all(number >= 10 for number in wakes), wakes
    for model in models:
        model.engine.scheduler.check_integrity()


def test_a_busy_model_gives_its_turn_up_and_its_newcomers_wait(world: World) -> None:
    one = world.add(9)
    one.rest.ask_sleep(one.answers.append)
    world.until(lambda: one.rest.state == ASLEEP)
    two = world.add(9, turn_s=5.0)
    first = two.ask(max_tokens=200)
    world.turn(2)
    request = one.ask()
    begin = world.now
    world.until(lambda: two.rest.state == FALLING_ASLEEP)
    assert world.now - begin >= 5.0 - 5 * STEP_S, "its turn lasts so long"
    late = two.ask()
    world.until(lambda: one.has_ended(request))
    assert two.has_ended(first)
    assert not two.has_ended(late)
    world.until(lambda: two.has_ended(late))


def test_models_that_fit_together_leave_each_other_alone(world: World) -> None:
    models = [world.add(4, idle_sleep_s=2.0), world.add(5)]
    for _ in range(20):
        requests = [(model, model.ask()) for model in models]
        world.until(lambda requests=requests: all(model.has_ended(request) for model, request in requests))
        world.turn(50)
    assert models[0].rest.stats().num_sleeps >= 10
    assert models[1].rest.stats().num_sleeps == 0


def test_who_waits_for_memory_that_nobody_here_has_goes_on_when_it_is_free(world: World) -> None:
    model = world.add(9)
    model.rest.ask_sleep(model.answers.append)
    world.until(lambda: model.rest.state == ASLEEP)
    world.card.used = 5  # some other program
    request = model.ask()
    world.turn(100)
    assert (model.rest.state, model.has_ended(request)) == (ASLEEP, False)
    assert model.engine.scheduler.cancel(request), "who waits can leave"
    request = model.ask()
    world.card.used = 0
    world.until(lambda: model.has_ended(request))


def test_who_makes_room_for_one_that_has_gone_serves_on(world: World) -> None:
    one = world.add(9)
    one.rest.ask_sleep(one.answers.append)
    world.until(lambda: one.rest.state == ASLEEP)
    two = world.add(9)
    running = two.ask(max_tokens=200)
    one.ask()
    world.until(lambda: two.rest.state == FALLING_ASLEEP)
    late = two.ask()
    world.kill(one)
    world.until(lambda: two.has_ended(late))
    assert not two.has_ended(running)
    assert two.rest.stats().num_sleeps == 0


def test_a_model_that_fits_is_served_while_another_waits_for_a_busy_one(world: World) -> None:
    """Nobody can make room for the large one: what is free is for those whom it is enough for."""
    large, small, busy = world.add(9), None, None
    large.rest.ask_sleep(large.answers.append)
    world.until(lambda: large.rest.state == ASLEEP)
    busy, small = world.add(5), world.add(4, idle_sleep_s=1.0)
    endless = busy.ask(max_tokens=150)
    waiting = large.ask()
    for _ in range(3):
        world.until(lambda: small.rest.state == ASLEEP)
        request = small.ask()
        world.until(lambda request=request: small.has_ended(request))  # type: ignore[misc]
    assert not large.has_ended(waiting)
    assert not busy.has_ended(endless)
    world.until(lambda: large.has_ended(waiting))
    assert busy.has_ended(endless)


@pytest.mark.parametrize("point", ["rest.sleep", "rest.wake"])
def test_what_goes_wrong_in_sleep_and_wake_is_raised(world: World, point: str) -> None:
    model = world.add(9)
    model.rest.ask_sleep(model.answers.append)

    def fail(name: str) -> None:
        if name == point:
            raise OSError(name)

    def sleep_and_wake() -> None:
        world.until(lambda: model.rest.state == ASLEEP)
        model.ask()
        world.turn(10)

    with armed(fail), pytest.raises(OSError, match=point):
        sleep_and_wake()


def test_the_loop_waits_as_long_as_its_state_allows(world: World) -> None:
    model = world.add(9, idle_sleep_s=1.0)
    assert model.rest.idle_poll_ms(500) == 1, "there is something to prepare"
    world.turn(3)
    assert model.rest.idle_poll_ms(500) == 50
    world.until(lambda: model.rest.state == ASLEEP)
    assert (model.rest.idle_poll_ms(500), model.rest.poll_ms) == (500, 0)
    model.rest.ask_update(Path("/new"), model.answers.append)
    assert model.rest.idle_poll_ms(500) == 0
    model.rest.state = UPDATING
    assert model.rest.idle_poll_ms(500) == 0
