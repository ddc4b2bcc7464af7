"""One HTTP request as requests to the server: what is sent, and whose answer each of the replies belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from cb_backend.gateway.bodies import write_json
from cb_backend.gateway.triton import Reply, Triton

MAX_UNREAD = 256  # replies; beyond it the server waits


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in one of its forms, as the tensor that carries it."""

    tensor: str  # text_input, messages or input_ids
    value: str | list[int]


def make_inputs(
    prompt: Prompt, sampling: dict[str, Any], *, is_stream: bool, has_logprobs: bool, has_usage: bool = True
) -> dict[str, str | bool | list[int]]:
    """The tensors of one request to the server. `has_usage`: each response counts its tokens, which costs time."""
    inputs: dict[str, str | bool | list[int]] = {
        prompt.tensor: prompt.value,
        "stream": is_stream,
        "sampling_parameters": write_json(sampling),
        "exclude_input_in_output": True,
        "return_finish_reason": True,
    }
    if has_usage:
        inputs |= {"return_num_input_tokens": True, "return_num_output_tokens": True}
    if has_logprobs:
        inputs["return_logprobs"] = True
    return inputs


async def replies(
    triton: Triton, model: str, all_inputs: list[dict[str, Any]], request_id: str
) -> AsyncIterator[list[tuple[int, Reply]]]:
    """What has come since the last time, each reply with the number of its request, until all have ended.

    Closing the iterator cancels every request that is open. Raises `ApiError` for the first that fails.
    """
    if len(all_inputs) == 1:  # the usual case, without a queue and a task between
        stream = triton.stream(model, all_inputs[0], request_id)
        try:
            async for reply in stream:
                yield [(0, reply)]
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator
        return
    queue: asyncio.Queue[tuple[int, Reply | BaseException | None]] = asyncio.Queue(MAX_UNREAD)

    async def read(number: int, inputs: dict[str, Any]) -> None:
        stream = triton.stream(model, inputs, f"{request_id}-{number}")
        try:
            async for reply in stream:
                await queue.put((number, reply))
            await queue.put((number, None))
        except Exception as error:  # it is raised where the replies are read
            await queue.put((number, error))
        finally:
            await stream.aclose()  # type: ignore[attr-defined]  # an async generator

    readers = [asyncio.create_task(read(number, inputs)) for number, inputs in enumerate(all_inputs)]
    num_open = len(readers)
    try:
        while num_open:
            batch = []
            for number, item in await _take_all(queue):
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    batch.append((number, item))
            if batch:
                yield batch
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _take_all(queue: asyncio.Queue[Any]) -> list[Any]:
    items = [await queue.get()]
    while not queue.empty():
        items.append(queue.get_nowait())
    return items
