"""A chat with a model of a Triton server: what has been said, and the next answer as it comes.

A request is the one that the OpenAI gateway would make of the same messages, read by the same parsers. Neither a
terminal nor its commands are known here.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cb_backend.gateway.answers import Usage
from cb_backend.gateway.bodies import Body
from cb_backend.gateway.readings import Readings
from cb_backend.gateway.requests import read_chat
from cb_backend.gateway.settings import Settings
from cb_backend.gateway.triton import Model, Triton

Show = Callable[[str, bool], None]  # more text, and whether it is reasoning


@dataclass(slots=True)
class Answer:
    """One that has come, or what has come of one that was ended: then `finish_reason` is empty."""

    text: str = ""
    finish_reason: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    first_s: float = 0.0  # until the first piece
    seconds: float = 0.0  # from there to the last

    @property
    def figures(self) -> str:
        rate = (self.num_tokens - 1) / self.seconds if self.num_tokens > 1 and self.seconds else 0.0
        speed = f", {rate:.1f} tokens/s" if rate else ""
        first = f"first after {self.first_s:.2f} s"
        return f"{self.num_prompt_tokens} prompt tokens, {self.num_tokens} tokens, {first}{speed}"


@dataclass(slots=True)
class Conversation:
    """`messages` in OpenAI's form, without the system's. `sampling`: parameters of the answers, by name."""

    system: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def body(self) -> dict[str, Any]:
        """Of a chat completion."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        return {**self.sampling, "messages": [*system, *self.messages], **options}

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def take(self, answer: Answer) -> None:
        """Keep an answer, or forget the question if nothing has come of one."""
        if answer.text:
            self.messages.append({"role": "assistant", "content": answer.text})
        else:
            self.take_back()

    def take_back(self) -> str:
        """Forget the last question and its answer. Returns the question; empty where there is none."""
        while self.messages and self.messages[-1]["role"] != "user":
            self.messages.pop()
        return str(self.messages.pop()["content"]) if self.messages else ""


class ChatServer:
    """The server that is chatted with. Belongs to one event loop."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._triton = Triton(url)
        self._readings = Readings(Settings(url), self._triton)

    async def models(self) -> list[str]:
        """Names of those that take chats. Raises `ApiError`."""
        return sorted(name for name, model in (await self._triton.models()).items() if model.takes_chat)

    async def close(self) -> None:
        await self._triton.close()

    async def answer(self, name: str, conversation: Conversation, show: Show, answer: Answer) -> None:
        """Fill `answer` while it comes; being cancelled ends it at the engine too. Raises `ApiError`."""
        model: Model = await self._triton.model(name)
        body = Body(conversation.body())
        generation = read_chat(body, model, await self._readings.of(model, body))
        (choice,), usage = generation.choices, Usage()
        began = time.monotonic()
        stream = self._triton.stream(name, generation.inputs[0], f"chat-{uuid.uuid4().hex}")
        try:
            async for reply in stream:
                usage.add(0, reply)
                for text, reason in zip(reply.texts, reply.finish_reasons, strict=False):
                    for chunk in choice.push(text, reason, ""):
                        _take_chunk(chunk, show, answer, began)
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator
            shown = usage.shown()
            answer.num_prompt_tokens, answer.num_tokens = shown["prompt_tokens"], shown["completion_tokens"]


def _take_chunk(chunk: dict[str, Any], show: Show, answer: Answer, began: float) -> None:
    now = time.monotonic()
    delta = chunk["delta"]
    text = delta.get("content") or delta.get("reasoning_content") or ""
    if text:
        answer.first_s = answer.first_s or now - began
        answer.seconds = now - began - answer.first_s
        show(text, "reasoning_content" in delta)
    answer.text += delta.get("content") or ""
    answer.finish_reason = chunk.get("finish_reason") or answer.finish_reason
