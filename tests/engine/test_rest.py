"""When a model sleeps, wakes, takes turns on a card and changes its weights: the decisions, with a clock that is told.

The memory of a card is a number here, which no two models may take together beyond its size.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cb_backend.contracts.errors import GaveUpError
from cb_backend.contracts.rest import ASLEEP, AWAKE, FALLING_ASLEEP, UPDATING, WAKING, RestAnswer
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.engine import card_turns
from cb_backend.engine.rest_desk import KeptWeights
from cb_backend.support.fault_points import armed
from tests.engine.rest_world import STEP_S, Model, Processes, World
from tests.fakes.engine import FakeEngine


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


# ---- weights that are gone -------------------------------------------------------------------------------------------


def asleep_without_weights(world: World) -> Model:
    model = world.add(9)
    model.rest.ask_sleep(lambda answer: None)
    world.until(lambda: model.rest.state == ASLEEP)
    model.sleeper.broken = {"gone"}
    return model


def test_requests_of_a_model_whose_weights_are_gone_end_with_the_reason(world: World) -> None:
    model = asleep_without_weights(world)
    requests = [model.ask() for _ in range(3)]
    model.rest.ask_wake(model.answers.append)
    world.turn(3)
    reason = "model.safetensors has changed since"
    assert model.failed == dict.fromkeys(requests, reason)
    assert model.answers == [RestAnswer(ASLEEP, reason)]
    assert (model.rest.state, world.card.used) == (ASLEEP, 0)
    model.sleeper.broken = set()  # they are back
    request = model.ask()
    world.until(lambda: model.has_ended(request))


def test_an_update_wakes_a_model_whose_weights_are_gone_and_serves_who_waits(world: World) -> None:
    model = asleep_without_weights(world)
    request = model.ask()
    model.rest.ask_update(Path("/new"), model.answers.append)
    world.until(lambda: model.has_ended(request))
    assert (model.answers[0].problem, model.sleeper.updates, model.failed) == ("", [Path("/new")], {})


def test_of_a_model_whose_weights_are_gone_only_who_had_begun_ends_for_an_update(world: World) -> None:
    model = world.add(9)
    model.engine = FakeEngine(num_blocks=8, max_num_seqs=1)
    model.rest._scheduler = model.engine.scheduler
    model.engine.add(1, [7] * 4, max_tokens=20, scheduling=SchedulingParams(priority=5))
    world.turn(3)
    model.engine.add(2, [8] * 4, max_tokens=20)
    world.turn(3)
    assert model.engine.scheduler.num_preemptions == 1
    model.engine.scheduler.cancel(2)
    model.engine.scheduler.gate.close()  # as at the end of a turn, before it can go on
    model.rest._is_for_another = True
    model.rest._is_prepared = model.sleeper.prepare() or model.sleeper.prepare()
    model.rest._sleep()
    model.sleeper.broken = {"gone"}
    model.engine.add(3, [9] * 4, max_tokens=5)
    model.rest.ask_update(Path("/new"), model.answers.append)
    world.until(lambda: 3 in model.engine.reasons)
    assert list(model.failed) == [1]
    assert model.answers[0].problem == ""


# ---- orders that are called off --------------------------------------------------------------------------------------


def test_an_update_that_cannot_begin_in_time_is_called_off(world: World) -> None:
    model = world.add(9)
    running, late = model.ask(max_tokens=100), None
    world.turn(2)
    model.rest.ask_update(Path("/new"), model.answers.append, world.now + 3.0)
    assert model.rest.stats().update == "/new"
    world.turn(2)
    late = model.ask()
    assert model.rest.state == UPDATING
    world.until(lambda: bool(model.answers))
    assert "it will not happen any more" in model.answers[0].problem
    assert not model.has_ended(running)
    world.until(lambda: model.has_ended(late) and model.has_ended(running))
    world.turn(20)
    assert (model.sleeper.updates, model.rest.stats().update, model.rest.state) == ([], "", AWAKE)


def test_orders_are_called_off_while_a_model_waits_for_the_card(world: World) -> None:
    model = world.add(9)
    model.rest.ask_sleep(model.answers.append)
    world.until(lambda: model.rest.state == ASLEEP)
    world.card.used = 5  # some other program
    model.rest.ask_wake(model.answers.append, world.now + 1.0)
    model.rest.ask_update(Path("/new"), model.answers.append, world.now + 1.0)
    world.until(lambda: len(model.answers) == 3)
    assert all("another model's turn" in answer.problem for answer in model.answers[1:])
    world.card.used = 0
    world.turn(20)
    assert (model.rest.state, model.sleeper.updates) == (ASLEEP, [])


def test_a_sleep_that_is_called_off_does_not_come_later(world: World) -> None:
    model = world.add(9)
    running = model.ask(max_tokens=60)
    world.turn(2)
    model.rest.ask_sleep(model.answers.append, world.now + 1.0)
    world.until(lambda: model.has_ended(running))
    world.turn(20)
    assert ("held it up" in model.answers[0].problem, model.rest.state) == (True, AWAKE)


def falling_asleep(world: World) -> Model:
    """By an order; there is much to be pinned yet."""
    model = world.add(9)
    model.sleeper.parts = 50
    model.rest.ask_sleep(model.answers.append, world.now + 1.0)
    world.turn()
    assert model.rest.state == FALLING_ASLEEP
    return model


@pytest.mark.parametrize("by", ["whoever gave it", "its deadline", "a wake"])
def test_a_sleep_that_is_called_off_while_it_is_prepared_does_not_come_later(world: World, by: str) -> None:
    model, woken = falling_asleep(world), []
    if by == "whoever gave it":
        model.rest.call_off(model.answers.append)
    elif by == "a wake":
        model.rest.ask_wake(woken.append)
    world.turn(200)
    assert [bool(answer.problem) for answer in model.answers] == [True]
    assert (model.rest.state, model.rest.stats().num_sleeps) == (AWAKE, 0)
    assert woken == ([RestAnswer(AWAKE)] if by == "a wake" else [])


def test_a_sleep_calls_off_a_wake_that_has_not_begun(world: World) -> None:
    model, woken = world.add(9), []
    model.rest.ask_sleep(model.answers.append)
    world.until(lambda: model.rest.state == ASLEEP)
    world.card.used = 5  # some other program
    model.rest.ask_wake(woken.append)
    world.turn(5)
    model.rest.ask_sleep(model.answers.append)
    world.card.used = 0
    world.turn(20)
    assert (model.answers[1], model.rest.state) == (RestAnswer(ASLEEP), ASLEEP)
    assert ["sleep meanwhile" in answer.problem for answer in woken] == [True]


@pytest.mark.parametrize("by", ["whoever gave it", "its deadline"])
def test_a_wake_that_has_begun_is_not_called_off(world: World, by: str) -> None:
    model = world.add(9)
    model.rest.ask_sleep(lambda answer: None)
    world.until(lambda: model.rest.state == ASLEEP)
    model.sleeper.looks = 50
    model.rest.ask_wake(model.answers.append, world.now + 1.0)
    world.turn(3)
    assert model.rest.state == WAKING
    if by == "whoever gave it":
        model.rest.call_off(model.answers.append)
    world.until(lambda: bool(model.answers))
    assert (model.answers[0].problem, model.rest.state) == ("", AWAKE)


def test_who_waits_no_more_calls_off_its_own_orders_and_no_one_elses(world: World) -> None:
    model, other = world.add(9), []
    running = model.ask(max_tokens=60)
    world.turn(2)
    model.rest.ask_sleep(model.answers.append)
    model.rest.ask_update(Path("/new"), model.answers.append)
    model.rest.ask_update(Path("/next"), other.append)
    world.turn(2)
    model.rest.call_off(model.answers.append)
    assert [answer.problem for answer in model.answers] == ["it was called off before it began"] * 2
    assert (other, model.rest.stats().update) == ([], "/next")
    world.until(lambda: model.has_ended(running) and bool(other))
    world.turn(20)
    assert (other[0].problem, model.sleeper.updates) == ("", [Path("/next")])
    assert (model.rest.state, model.rest.stats().num_sleeps) == (AWAKE, 0)


def test_an_update_that_has_begun_is_called_off_by_nobody(world: World) -> None:
    model = asleep_without_weights(world)
    model.sleeper.looks = 50
    model.rest.ask_update(Path("/new"), model.answers.append)
    world.turn(3)
    model.rest.call_off(model.answers.append)
    assert model.answers == []
    world.until(lambda: bool(model.answers))
    assert (model.answers[0].problem, model.sleeper.updates) == ("", [Path("/new")])


def test_an_update_that_has_begun_is_not_called_off(world: World) -> None:
    model = asleep_without_weights(world)
    model.sleeper.looks = 50
    model.rest.ask_update(Path("/new"), model.answers.append, world.now + 1.0)
    world.until(lambda: bool(model.answers))
    assert (model.answers[0].problem, model.sleeper.updates) == ("", [Path("/new")])


def test_the_weights_of_an_update_are_found_by_the_next_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new = tmp_path / "new"
    new.mkdir()
    (new / "model.safetensors").touch()
    KeptWeights(tmp_path).keep(str(new))
    assert KeptWeights(tmp_path).weights() == new
    (new / "model.safetensors").unlink()
    assert KeptWeights(tmp_path).weights() is None
    assert "are gone; those of model.json are served again" in caplog.text
    (new / "model.safetensors").touch()
    assert KeptWeights(tmp_path).weights() is None, "and stay so: nothing changes back unseen"


# ---- other weights ---------------------------------------------------------------------------------------------------


def test_an_update_waits_for_who_has_begun_and_all_others_get_the_new_weights(world: World) -> None:
    model = world.add(9)
    running = [model.ask(max_tokens=20) for _ in range(4)]
    world.turn(2)
    waiting = model.ask(salt="a")
    (request,) = model.engine.scheduler._queue.everyone
    request.cache_salt = bytes(16) + b"of the adapter"

    def at_update() -> None:
        assert all(model.has_ended(request) for request in running)
        assert not model.engine.tokens[waiting], "it has not begun on the old ones"

    model.sleeper.on_update = at_update
    model.rest.ask_update(Path("/new"), model.answers.append)
    world.until(lambda: bool(model.sleeper.updates))
    assert request.cache_salt == bytes(16) + b"new" + b"of the adapter", "and is not of the old ones' prefixes"
    world.until(lambda: model.has_ended(waiting))
    assert (model.answers[0].problem, model.rest.stats().weights) == ("", "/new")


def test_an_update_lets_who_was_preempted_end_on_the_old_weights(world: World) -> None:
    model = world.add(9)
    model.engine = FakeEngine(num_blocks=8, max_num_seqs=4)
    model.rest._scheduler = model.engine.scheduler
    requests = [model.ask(4, max_tokens=20) for _ in range(4)]
    world.until(lambda: model.engine.scheduler.num_preemptions > 0)
    begun = [request for request in requests if model.engine.tokens[request]]
    model.rest.ask_update(Path("/new"), model.answers.append)
    world.until(lambda: bool(model.sleeper.updates))
    assert all(model.has_ended(request) for request in begun)
    assert begun


def test_a_sleeping_model_wakes_for_an_update(world: World) -> None:
    model = world.add(9)
    model.rest.ask_sleep(model.answers.append)
    world.until(lambda: model.rest.state == ASLEEP)
    model.rest.ask_update(Path("/new"), model.answers.append)
    world.until(lambda: len(model.answers) == 2)
    assert (model.answers[1].problem, model.sleeper.updates) == ("", [Path("/new")])


def test_a_folder_that_does_not_do_is_refused_at_once(world: World) -> None:
    model = world.add(9)
    model.rest.ask_update(Path("/other"), model.answers.append)
    assert model.answers == [RestAnswer(AWAKE, "of another specification")]
    assert not model.rest.is_draining


@pytest.mark.parametrize("num_behind", [1, 3])
def test_an_update_waits_for_no_one_whom_others_keep_out(world: World, num_behind: int) -> None:
    """The preempted one is behind more urgent requests, which must not begin."""
    model = world.add(9)
    model.engine = FakeEngine(num_blocks=8, max_num_seqs=1)
    model.rest._scheduler = model.engine.scheduler

    def ask(request_id: int, priority: int) -> None:
        scheduling = SchedulingParams(priority=priority)
        model.engine.add(request_id, [7 + request_id] * 4, max_tokens=20, scheduling=scheduling)

    ask(1, 5)
    world.turn(3)
    ask(2, 0)
    world.turn(3)
    assert model.engine.scheduler.num_preemptions == 1
    for request_id in range(3, 3 + num_behind):
        ask(request_id, 0)
    model.rest.ask_update(Path("/new"), model.answers.append)
    world.until(lambda: bool(model.answers))
    assert {1, 2} <= set(model.engine.reasons), "who had begun ended before"
    assert model.answers[0].problem == ""
    world.until(lambda: len(model.engine.reasons) == 2 + num_behind)


def test_an_update_that_cannot_be_noted_is_an_update(world: World, caplog: pytest.LogCaptureFixture) -> None:
    model = world.add(9)

    def keep(folder: str) -> None:
        raise OSError("no space left")

    model.rest._weights._keep = keep
    model.rest.ask_update(Path("/new"), model.answers.append)
    world.until(lambda: bool(model.answers))
    assert (model.answers[0].problem, model.rest.stats().num_updates) == ("", 1)
    assert "a restarted engine serves the old ones" in caplog.text


def test_an_update_that_fails_leaves_the_old_weights_and_who_waits_for_them(world: World) -> None:
    model = world.add(9)
    model.sleeper.broken = {"update"}
    model.rest.ask_update(Path("/new"), model.answers.append)
    request = model.ask()
    world.until(lambda: model.has_ended(request))
    assert model.answers[0].problem == "the old weights are served on: the file ends early"
    assert model.rest.stats().num_updates == 0


def test_an_update_whose_folder_has_changed_while_it_waited_touches_nothing(world: World) -> None:
    """So nothing is to be undone, which some layers and lost files would not let it."""
    model = world.add(9)
    running = model.ask(max_tokens=30)
    world.turn(2)
    model.rest.ask_update(Path("/new"), model.answers.append)
    model.sleeper.broken = {"folder", "undo"}
    request = model.ask()
    world.until(lambda: model.has_ended(request))
    assert model.answers[0].problem == "the old weights are served on: of another specification"
    assert model.has_ended(running)


def test_an_update_that_cannot_be_undone_ends_the_engine_with_the_reasons(world: World) -> None:
    model = world.add(9)
    model.sleeper.broken = {"update", "undo"}
    model.rest.ask_update(Path("/new"), model.answers.append)
    with pytest.raises(GaveUpError, match=r"the file ends early.*the old file is gone"):
        world.turn(5)


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
