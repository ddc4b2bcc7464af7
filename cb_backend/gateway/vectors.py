"""`/v1/embeddings` in OpenAI's form, and `/v1/rerank` in the form that Jina's and vLLM's servers share.

A text is a request to the server, and so is a query with all its documents. Numbers come as float32 and go on as they
are: as base64 without being looked at.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from cb_backend.gateway.adapters import Chosen
from cb_backend.gateway.bodies import Body, write_json
from cb_backend.gateway.errors import ApiError, bad_request
from cb_backend.gateway.triton import Reply, Triton

MAX_INPUTS = 2048  # texts of one body, as OpenAI has it
_AT_ONCE = 64  # of them that are at the server; a connection carries about a hundred requests
_WITHOUT_EFFECT = ("user", "input_type")
_OF_POOLING = ("normalize", "pooling")  # fields of a body that go into the input `pooling`

Choose = Callable[[str], Awaitable[Chosen]]


class Vectors:
    """The two endpoints. `choose` finds the model that a body names."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    async def embeddings(self, body: Body, triton: Triton, request_id: str) -> dict[str, Any]:
        """An embedding for each text or list of token ids of `input`. Raises `ApiError`."""
        name, chosen = await self._model(body)
        inputs = [_prompt(value) for value in _texts(body)]
        dimensions = body.take("dimensions", int)
        encoding = body.take("encoding_format", str) or "float"
        if encoding not in ("float", "base64"):
            raise bad_request(f"'encoding_format' must be float or base64, not {encoding!r}", "encoding_format")
        parameters = _parameters(body, chosen)
        make = _own_form if "pooling" in chosen.model.inputs else _vllm_form
        if make is _vllm_form and "embedding_request" not in chosen.model.inputs:
            raise bad_request(f"the model {name!r} has no input for embeddings", "model")
        replies = await ask_all(
            triton, chosen.model.name, [make(prompt, dimensions, parameters) for prompt in inputs], request_id
        )
        data = [
            {"object": "embedding", "index": index, "embedding": _shown(_numbers(reply), encoding)}
            for index, reply in enumerate(replies)
        ]
        return {"object": "list", "data": data, "model": name, "usage": _usage(replies)}

    async def rerank(self, body: Body, triton: Triton, request_id: str) -> dict[str, Any]:
        """The documents of a query with their scores, the best first. Raises `ApiError`."""
        name, chosen = await self._model(body)
        if "text_pair" not in chosen.model.inputs:
            raise bad_request(f"the model {name!r} has no input 'text_pair', so it cannot rerank", "model")
        query, documents = body.need("query", str), _documents(body)
        top_n = body.take("top_n", int)
        if top_n is not None and top_n < 1:
            raise bad_request(f"'top_n' is {top_n}; it must be at least 1", "top_n")
        shows_documents = body.take("return_documents", bool) is not False
        pooling: dict[str, Any] = {"task": "score"}
        if (activation := body.take("activation", bool)) is not None:
            pooling["activation"] = activation
        asked = {"text_input": query, "text_pair": documents, "pooling": write_json(pooling)}
        reply = await triton.ask(chosen.model.name, {**asked, **_common(_parameters(body, chosen))}, request_id)
        scores = struct.unpack(f"<{len(documents)}f", reply.numbers)
        order = sorted(range(len(documents)), key=lambda index: -scores[index])[:top_n]
        results = [
            {"index": index, "relevance_score": scores[index]}
            | ({"document": {"text": documents[index]}} if shows_documents else {})
            for index in order
        ]
        return {"id": request_id, "model": name, "usage": _usage([reply]), "results": results}

    async def _model(self, body: Body) -> tuple[str, Chosen]:
        name = body.need("model", str)
        return name, await self._choose(name)


async def ask_all(triton: Triton, model: str, all_inputs: Sequence[dict[str, Any]], request_id: str) -> list[Reply]:
    """The one response of each, in their order; the first that fails ends the others. Raises `ApiError`."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def ask(number: int, inputs: dict[str, Any]) -> Reply:
        if len(all_inputs) == 1:
            return await triton.ask(model, inputs, request_id)
        async with places:
            try:
                return await triton.ask(model, inputs, f"{request_id}-{number}")
            except ApiError as error:
                if error.status != 400:
                    raise
                raise bad_request(f"input[{number}]: {error.message}", "input") from None

    tasks = [asyncio.create_task(ask(number, inputs)) for number, inputs in enumerate(all_inputs)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _texts(body: Body) -> list[Any]:
    """`input` as a list: one text or one list of token ids is a list of one."""
    value = body.left.pop("input", None)
    if value is None:
        raise bad_request("'input' is missing", "input")
    many = value if isinstance(value, list) and not (value and type(value[0]) is int) else [value]
    if not 1 <= len(many) <= MAX_INPUTS:
        raise bad_request(f"'input' has {len(many)} entries; 1 to {MAX_INPUTS} are possible", "input")
    return many


def _prompt(value: Any) -> str | list[int]:
    is_ids = isinstance(value, list) and value and all(type(each) is int and 0 <= each < 2**31 for each in value)
    if not isinstance(value, str) and not is_ids:
        raise bad_request("'input' must be a text, a list of token ids (0 to 2^31 - 1), or a list of these", "input")
    return value


def _documents(body: Body) -> list[str]:
    """Texts, or objects with a `text` each."""
    given = body.need("documents", list)
    if not 1 <= len(given) <= MAX_INPUTS:
        raise bad_request(f"'documents' has {len(given)} entries; 1 to {MAX_INPUTS} are possible", "documents")
    texts = [each.get("text") if isinstance(each, dict) else each for each in given]
    documents = [text for text in texts if isinstance(text, str)]
    if len(documents) < len(given):
        raise bad_request("each of 'documents' must be a text, or an object with a 'text'", "documents")
    return documents


def _parameters(body: Body, chosen: Chosen) -> dict[str, Any]:
    """What else the body says goes to the model under its own name, which refuses what it does not know."""
    body.drop(*_WITHOUT_EFFECT)
    if chosen.adapter:
        body.refuse("lora_name", "the model's name names one", (chosen.adapter,))
        body.left["lora_name"] = chosen.adapter
    return body.left


def _common(parameters: dict[str, Any]) -> dict[str, Any]:
    given = {"sampling_parameters": write_json(parameters)} if parameters else {}
    return {"return_num_input_tokens": True, **given}


def _own_form(prompt: str | list[int], dimensions: int | None, parameters: dict[str, Any]) -> dict[str, Any]:
    pooling: dict[str, Any] = {"task": "embed"} | ({} if dimensions is None else {"dimensions": dimensions})
    for name in _OF_POOLING:
        if name in parameters:
            pooling[name] = parameters[name]
    rest = {name: value for name, value in parameters.items() if name not in _OF_POOLING}
    tensor = "text_input" if isinstance(prompt, str) else "input_ids"
    return {tensor: prompt, "pooling": write_json(pooling), **_common(rest)}


def _vllm_form(prompt: str | list[int], dimensions: int | None, parameters: dict[str, Any]) -> dict[str, Any]:
    """For vLLM's backend."""
    pooling_params = {} if dimensions is None else {"dimensions": [dimensions]}
    asked = write_json({"input": prompt, "pooling_params": pooling_params})
    return {"text_input": "", "embedding_request": asked, **_common(parameters)}


def _numbers(reply: Reply) -> bytes:
    """float32, little-endian."""
    if reply.numbers or not reply.texts:
        return reply.numbers
    values = json.loads(reply.texts[0])
    return struct.pack(f"<{len(values)}f", *values)


def _shown(numbers: bytes, encoding: str) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(numbers).decode()
    return list(struct.unpack(f"<{len(numbers) // 4}f", numbers))


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    num_tokens = sum(reply.num_input_tokens or 0 for reply in replies)
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
