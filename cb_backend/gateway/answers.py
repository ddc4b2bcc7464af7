"""Answers as OpenAI writes them: whole ones and the chunks of a stream, of chats and of completions."""

from __future__ import annotations

import uuid
from typing import Any

from cb_backend.gateway.events import CallArguments, CallStart, Content, Event, Parser, Reasoning, joined
from cb_backend.gateway.logprobs import chat_logprobs, completion_logprobs
from cb_backend.gateway.triton import Reply

RUNNING = "None"


class Usage:
    """Tokens of one HTTP request, all its prompts and answers together."""

    def __init__(self) -> None:
        self._num_prompt_tokens: dict[int, int] = {}  # by the server's request; a stream repeats it
        self._num_answer_tokens = 0

    def add(self, number: int, reply: Reply) -> None:
        """Of request `number`."""
        if reply.num_input_tokens is not None:
            self._num_prompt_tokens[number] = reply.num_input_tokens
        self._num_answer_tokens += sum(reply.num_output_tokens)

    def shown(self) -> dict[str, int]:
        num_prompt_tokens = sum(self._num_prompt_tokens.values())
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_answer_tokens,
            "total_tokens": num_prompt_tokens + self._num_answer_tokens,
        }


class ChatChoice:
    """One of a chat's answers. `num_logprobs` None: they are not wanted."""

    def __init__(self, index: int, parser: Parser, num_logprobs: int | None) -> None:
        self._index = index
        self._parser = parser
        self._num_logprobs = num_logprobs
        self._calls: list[dict[str, Any]] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._finish_reason: str | None = None

    def begin(self) -> dict[str, Any]:
        """The first chunk's choice."""
        return self._chunk({"role": "assistant", "content": ""})

    def push(self, text: str, finish_reason: str, logprobs: str) -> list[dict[str, Any]]:
        """Choices of chunks for what is new. The last has the reason why the answer ended, if it has."""
        if self._finish_reason is not None:
            return []
        is_over = finish_reason not in ("", RUNNING)
        events = self._parser.push(text)
        if is_over:
            events = [*events, *self._parser.finish()]
        own = chat_logprobs(logprobs, self._num_logprobs) if self._num_logprobs is not None else None
        if own is not None:
            self._logprobs += own["content"]
        # Parsers may say something a character: a chunk each would be several times the tokens.
        chunks = [self._chunk(self._delta(event)) for event in joined(events)]
        if own is not None:
            if not chunks:
                chunks = [self._chunk({})]
            chunks[0]["logprobs"] = own
        if is_over:
            if finish_reason == "stop":
                chunks += [self._chunk(self._more_arguments(event)) for event in self._missing_arguments()]
            self._finish_reason = "tool_calls" if self._calls and finish_reason == "stop" else finish_reason
            chunks.append({**self._chunk({}), "finish_reason": self._finish_reason})
        return chunks

    def _chunk(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _delta(self, event: Event) -> dict[str, Any]:
        """Of a chunk; and the same kept for the whole answer."""
        if isinstance(event, Content):
            self._content.append(event.text)
            return {"content": event.text}
        if isinstance(event, Reasoning):
            self._reasoning.append(event.text)
            return {"reasoning_content": event.text}
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            call: dict[str, Any] = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
            self._calls.append(call)
            return {"tool_calls": [{"index": event.number, **call, "function": dict(function)}]}
        return self._more_arguments(event)

    def _more_arguments(self, event: CallArguments) -> dict[str, Any]:
        self._calls[event.number]["function"]["arguments"] += event.text
        return {"tool_calls": [{"index": event.number, "function": {"arguments": event.text}}]}

    def _missing_arguments(self) -> list[CallArguments]:
        """Of calls that have none: clients read them as JSON."""
        empty = (index for index, call in enumerate(self._calls) if not call["function"]["arguments"].strip())
        return [CallArguments(index, "{}") for index in empty]

    def whole(self) -> dict[str, Any]:
        text = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not self._calls else None}
        message["refusal"] = None
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        logprobs = {"content": self._logprobs, "refusal": None} if self._num_logprobs is not None else None
        return {
            "index": self._index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._finish_reason or "stop",
        }


class CompletionChoice:
    """One of a completion's answers. `before` is the prompt where it is to be repeated."""

    def __init__(self, index: int, before: str, num_logprobs: int | None) -> None:
        self._index = index
        self._before = before
        self._num_logprobs = num_logprobs
        self._text: list[str] = []
        self._length = len(before)
        self._logprobs: dict[str, list[Any]] | None = None
        self._finish_reason: str | None = None

    def begin(self) -> dict[str, Any] | None:
        """The first chunk's choice, where there is something to say before the first token."""
        return self._chunk(self._before, None, None) if self._before else None

    def push(self, text: str, finish_reason: str, logprobs: str) -> list[dict[str, Any]]:
        if self._finish_reason is not None:
            return []
        shown = None
        if self._num_logprobs is not None:
            shown = completion_logprobs(logprobs, self._num_logprobs, self._length)
            self._keep(shown)
        self._text.append(text)
        self._length += len(text)
        if finish_reason not in ("", RUNNING):
            self._finish_reason = finish_reason
        elif not text and shown is None:
            return []
        return [self._chunk(text, shown, self._finish_reason)]

    def _chunk(self, text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _keep(self, shown: dict[str, list[Any]] | None) -> None:
        if shown is None:
            return
        if self._logprobs is None:
            self._logprobs = {name: [] for name in shown}
        for name, values in shown.items():
            self._logprobs[name] += values

    def whole(self) -> dict[str, Any]:
        text = self._before + "".join(self._text)
        return self._chunk(text, self._logprobs, self._finish_reason or "stop")
