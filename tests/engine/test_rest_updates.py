"""When a model changes its weights, or has lost them: who is served by which, with a clock that is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.contracts.errors import GaveUpError
from cb_backend.contracts.rest import ASLEEP, AWAKE, RestAnswer
from cb_backend.contracts.scheduling import SchedulingParams
from tests.engine.rest_world import Model, World
from tests.engine.test_rest import processes, world
from tests.fakes.engine import FakeEngine

__all__ = ["processes", "world"]  # fixtures


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
