"""Orders to sleep, to wake and to change weights that are called off: which do not happen, and which still do."""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.contracts.rest import ASLEEP, AWAKE, FALLING_ASLEEP, UPDATING, WAKING, RestAnswer
from cb_backend.engine.rest_desk import KeptWeights
from tests.engine.rest_world import Model, World
from tests.engine.test_rest import processes, world
from tests.engine.test_rest_updates import asleep_without_weights

__all__ = ["processes", "world"]  # fixtures


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
    assert KeptWeights(tmp_path).weights(lambda folder: "") == new
    assert f"remove {tmp_path / 'weights'}" in KeptWeights(tmp_path).how_to_start_without()
    assert KeptWeights(tmp_path).weights(lambda folder: "half of it") is None
    told = f"the weights of {new}, which an update had brought, cannot be loaded any more: half of it"
    assert f"{told}. Those of model.json are served instead" in caplog.text
    assert KeptWeights(tmp_path).weights(lambda folder: "") is None, "and stay so: nothing changes back unseen"
    assert KeptWeights(tmp_path).lost == told, "later engines tell it too"
    KeptWeights(tmp_path).keep(str(new))
    assert KeptWeights(tmp_path).lost == ""
