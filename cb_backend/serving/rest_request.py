"""The request parameter `rest`: a client has the model sleep or wake, or asks which it is. The answer is one text.

A request with it generates nothing and has no prompt. It is refused where the model may not sleep.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.errors import CbError, ErrorCode, InvalidRequestError, UnavailableError
from cb_backend.contracts.rest import AWAKE, RestAnswer
from cb_backend.front_end.engines.engine_client import EngineClient
from cb_backend.front_end.engines.engine_observer import set_rest
from cb_backend.serving.live_request import LiveRequest
from cb_backend.serving.ready_answer import send_ready

PARAMETER, ACTIONS = "rest", ("sleep", "wake", "state")
TIMEOUT_S = 600.0
MAX_WAITING = 16  # requests that wait for engines to sleep or wake; each has a thread and a socket
_PROMPTS = ("text_input", "input_ids", "messages")

_places = threading.BoundedSemaphore(MAX_WAITING)


def asked_of_rest(parameters: str, inputs: Mapping[str, NDArray[Any]], may_sleep: bool) -> str | None:
    """What a request asks for, by its parameters as JSON; None: it is a request like any other.

    Raises `InvalidRequestError` for what means nothing.
    """
    if f'"{PARAMETER}"' not in parameters:
        return None
    try:
        action = json.loads(parameters).get(PARAMETER)
    except (ValueError, RecursionError, AttributeError):
        return None  # is told by whoever reads the parameters
    if action is None:
        return None
    if action not in ACTIONS:
        raise InvalidRequestError(f"parameter 'rest' is {action!r:.64}; use one of {', '.join(ACTIONS)}")
    if any(any(np.asarray(inputs[name]).reshape(-1)) for name in _PROMPTS if name in inputs):
        raise InvalidRequestError("parameter 'rest' goes with an empty 'text_input': nothing is generated")
    if not may_sleep:
        raise InvalidRequestError(
            "parameter 'rest' needs idle_sleep_s in the model's model.json (0: only when told to)"
        )
    return str(action)


def answer_rest(live: LiveRequest, action: str, engines: Sequence[EngineClient]) -> None:
    """End the request once every engine is so. Returns at once: a thread waits for them.

    Raises `UnavailableError` where too many wait already.
    """
    if action == "state":
        send_ready(live, text_output=_state_of(engines))
    elif not _places.acquire(blocking=False):
        raise UnavailableError(f"{MAX_WAITING} requests wait for the model to {action} already; send it again later")
    else:
        threading.Thread(target=_tell_all, args=(live, action, engines), name="rest", daemon=True).start()


def _tell_all(live: LiveRequest, action: str, engines: Sequence[EngineClient]) -> None:
    try:
        answers = []
        for engine in engines:
            answers.append(_tell(engine, action, live))
            if live.is_ended:  # its client has gone, and what has not begun is called off
                return
        problem = next((answer.problem for answer in answers if answer.problem), "")
        if problem:
            raise UnavailableError(problem)
        send_ready(live, text_output=answers[0].state)
    except CbError as error:
        live.end(error.code, str(error))
    except Exception as error:
        live.end(ErrorCode.INTERNAL, f"the engine could not be told: {error}")
    finally:
        _places.release()


def _tell(engine: EngineClient, action: str, live: LiveRequest) -> RestAnswer:
    if engine.life is None or not engine.is_ready:
        raise UnavailableError("the engine is starting; send the request again")
    return set_rest(engine.life, action == "sleep", TIMEOUT_S, lambda: not live.is_ended)


def _state_of(engines: Sequence[EngineClient]) -> str:
    """Of the first that is not awake."""
    states = [engine.stats.rest.state for engine in engines if engine.stats is not None and engine.stats.rest]
    return next((state for state in states if state != AWAKE), AWAKE)
