"""How the answers of each model are read: as the gateway's settings say, else as the model's chat template has it.

The model's front end knows the template and tells the form of calls, and whether a prompt leaves reasoning open: with
the same arguments of the template that the request has, because `enable_thinking` and its like decide that. A model
that does not tell (vllm_backend's) has the parsers that look at the answer's first characters.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from cb_backend.gateway.bodies import Body
from cb_backend.gateway.errors import ApiError
from cb_backend.gateway.parsers import REASONING_NAMES, TOOL_NAMES, Reading
from cb_backend.gateway.settings import Settings
from cb_backend.gateway.triton import Model, Triton, heard

AGE_S = 60.0  # a model may be loaded again with another checkpoint
MAX_KNOWN = 256  # arguments of templates are the clients'
MAX_ARGUMENTS_BYTES = 1024
_PROBE = [{"role": "user", "content": "a"}]


@dataclass(slots=True)
class _Known:
    reading: Reading
    asked_at: float


class Readings:
    """Of all models. Belongs to one event loop."""

    def __init__(self, settings: Settings, triton: Triton) -> None:
        self._settings = settings
        self._triton = triton
        self._known: dict[tuple[str, str], _Known] = {}
        self._refreshing: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def of(self, model: Model, body: Body) -> Reading:
        """For the answers to this chat. Asks the server once, and again beside later requests now and then."""
        chosen = self._settings.reading(model.name)
        if "auto" not in (chosen.tools, chosen.reasoning) or not (model.tells_tokens and model.takes_chat):
            return chosen
        key = (model.name, _template_arguments(body))
        known = self._known.get(key)
        if known is None:
            await self._ask(key)
            known = self._known[key]
        elif time.monotonic() - known.asked_at > AGE_S and key not in self._refreshing:
            task = self._refreshing[key] = asyncio.create_task(self._ask(key))
            task.add_done_callback(lambda _: self._refreshing.pop(key, None))
            task.add_done_callback(heard)  # a server that is away is asked again beside the next request
        return Reading(
            known.reading.tools if chosen.tools == "auto" else chosen.tools,
            known.reading.reasoning if chosen.reasoning == "auto" else chosen.reasoning,
        )

    async def _ask(self, key: tuple[str, str]) -> None:
        model, arguments = key
        inputs = {"messages": json.dumps({**json.loads(arguments), "messages": _PROBE}), "tokenize": "{}"}
        try:
            told = json.loads((await self._triton.ask(model, inputs, "")).tokenized)
        except ApiError as error:  # no template, or one that refuses these arguments: the request will be told
            if error.status >= 500:
                raise
            told = {}
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[key] = _Known(reading_of(told), time.monotonic())


def reading_of(told: dict[str, Any]) -> Reading:
    """Of what a front end says in its output `tokenized`; names that are not known here, a newer one's, say nothing."""
    tools, reasoning = told.get("tool_calls"), told.get("reasoning")
    if reasoning == "think" and told.get("is_reasoning_open") is True:
        reasoning = "think-open"
    return Reading(
        tools if tools in TOOL_NAMES else "auto",
        reasoning if reasoning in REASONING_NAMES else "auto",
    )


def _template_arguments(body: Body) -> str:
    """What a request gives the template beside its messages, in JSON; "{}" where that is wrong or very long."""
    values = body.left.get("chat_template_kwargs")
    arguments = dict(values) if isinstance(values, dict) else {}
    effort = body.left.get("reasoning_effort")
    if isinstance(effort, str):
        arguments["reasoning_effort"] = effort
    arguments.pop("messages", None)
    text = msgspec.json.encode(arguments, order="sorted").decode() if arguments else "{}"
    return text if len(text) <= MAX_ARGUMENTS_BYTES else "{}"
