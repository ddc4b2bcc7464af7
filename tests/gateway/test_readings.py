"""How a model's answers are read follows from what its front end tells, and from the template's arguments."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Mapping
from typing import Any

import pytest

from cb_backend.gateway import readings as module
from cb_backend.gateway.bodies import Body
from cb_backend.gateway.errors import ApiError
from cb_backend.gateway.parsers import Reading
from cb_backend.gateway.readings import Readings, reading_of
from cb_backend.gateway.settings import Settings
from cb_backend.gateway.triton import Model, Reply

MODEL = Model(
    "llm", frozenset({"messages", "sampling_parameters", "tokenize"}), frozenset({"text_output", "tokenized"})
)
OLDER = Model("older", frozenset({"messages", "sampling_parameters"}), frozenset({"text_output"}))


class Told:
    """A server whose template opens reasoning unless `enable_thinking` is false."""

    def __init__(self, error: ApiError | None = None) -> None:
        self.asked: list[dict[str, Any]] = []
        self.error = error
        self.tools = "hermes"

    async def ask(self, model: str, inputs: Mapping[str, Any], request_id: str) -> Reply:
        arguments = json.loads(inputs["messages"])
        assert arguments.pop("messages")
        self.asked.append(arguments)
        if self.error is not None:
            raise self.error
        is_open = arguments.get("enable_thinking") is not False
        about = {"tool_calls": self.tools, "reasoning": "think", "is_reasoning_open": is_open}
        return Reply(["text"], tokenized=json.dumps(about))


def of(readings: Readings, model: Model = MODEL, **values: Any) -> Reading:
    return asyncio.run(readings.of(model, Body(values)))


def make(triton: Told, **settings: Any) -> Readings:
    return Readings(Settings("here:1", **settings), triton)  # type: ignore[arg-type]


def test_the_template_decides_and_is_asked_once() -> None:
    triton = Told()
    readings = make(triton)
    for _ in range(3):
        assert of(readings) == Reading("hermes", "think-open")
    assert triton.asked == [{}]


def test_arguments_of_the_template_count() -> None:
    triton = Told()
    readings = make(triton)
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert of(readings, **off) == Reading("hermes", "think")
    assert of(readings) == Reading("hermes", "think-open")
    assert of(readings, **off, reasoning_effort="low") == Reading("hermes", "think")
    assert triton.asked[-1] == {"enable_thinking": False, "reasoning_effort": "low"}
    of(readings, chat_template_kwargs="no object")
    assert len(triton.asked) == 3


def test_what_is_set_is_not_asked_for() -> None:
    triton = Told()
    both = make(triton, tool_parsers={"": "mistral"}, reasoning_parsers={"llm": "none"})
    assert of(both) == Reading("mistral", "none")
    assert triton.asked == []
    assert of(make(triton, tool_parsers={"llm": "none"})) == Reading("none", "think-open")
    assert of(make(triton, reasoning_parsers={"": "none"})) == Reading("hermes", "none")


def test_models_that_do_not_tell_are_read_as_before() -> None:
    triton = Told()
    assert of(make(triton), OLDER) == Reading("auto", "auto")
    assert triton.asked == []
    assert of(make(Told(ApiError(400, "this model has no chat template")))) == Reading("auto", "auto")


def test_a_server_that_is_away_is_no_answer() -> None:
    triton = Told(ApiError(503, "no Triton server answers"))
    readings = make(triton)
    with pytest.raises(ApiError):
        of(readings)
    triton.error = None
    assert of(readings) == Reading("hermes", "think-open")


def test_a_model_that_was_loaded_again_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = Told()
    readings = make(triton)

    async def ask_twice() -> list[Reading]:
        first = await readings.of(MODEL, Body({}))
        triton.tools = "mistral"
        monkeypatch.setattr(module, "AGE_S", 0.0)
        stale = await readings.of(MODEL, Body({}))  # nobody waits for what is asked beside it
        while readings._refreshing:
            await asyncio.sleep(0)
        monkeypatch.setattr(module, "AGE_S", 60.0)
        return [first, stale, await readings.of(MODEL, Body({}))]

    assert [reading.tools for reading in asyncio.run(ask_twice())] == ["hermes", "hermes", "mistral"]


def test_a_server_that_is_away_beside_a_request_is_asked_beside_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    triton = Told()
    readings = make(triton)

    async def ask_while_it_is_away() -> None:
        await readings.of(MODEL, Body({}))
        monkeypatch.setattr(module, "AGE_S", 0.0)
        triton.error = ApiError(503, "no Triton server answers")
        for _ in range(2):
            assert await readings.of(MODEL, Body({})) == Reading("hermes", "think-open")
            while readings._refreshing:
                await asyncio.sleep(0)

    asyncio.run(ask_while_it_is_away())
    gc.collect()
    assert len(triton.asked) == 3
    assert not caplog.records, "nobody's exception was left behind"


def test_clients_cannot_fill_the_memory() -> None:
    readings = make(Told())
    for number in range(3 * module.MAX_KNOWN):
        of(readings, chat_template_kwargs={"x": number})
    assert len(readings._known) <= module.MAX_KNOWN
    assert of(readings, chat_template_kwargs={"x": "y" * 5000}) == Reading("hermes", "think-open")


def test_names_of_a_newer_front_end_say_nothing() -> None:
    told = {"tool_calls": "xml9", "reasoning": "telepathy", "is_reasoning_open": True}
    assert reading_of(told) == Reading("auto", "auto")
    assert reading_of({}) == Reading("auto", "auto")
