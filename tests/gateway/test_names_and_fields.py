"""What bodies of vectors and of tokens become at the server; in front of one that answers without an engine."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any

import pytest

from cb_backend.gateway.adapters import Chosen
from cb_backend.gateway.bodies import Body
from cb_backend.gateway.errors import ApiError, bad_request
from cb_backend.gateway.tokens import Tokens
from cb_backend.gateway.triton import Model, Reply
from cb_backend.gateway.vectors import Vectors

MODEL = Model(
    "llm",
    frozenset({"text_input", "input_ids", "text_pair", "pooling", "sampling_parameters", "tokenize"}),
    frozenset({"text_output", "tokenized"}),
)
TOLD = {"count": 1, "max_model_len": 8, "tokens": [1], "token_strs": None}


class Server:
    """Gives each text a vector of its number; a text "bad" is refused with `error`."""

    def __init__(self, error: ApiError | None = None) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self._error = error or bad_request("the text has 9 tokens")

    async def models(self) -> dict[str, Model]:
        return {"llm": MODEL}

    async def ask(self, model: str, inputs: Mapping[str, Any], request_id: str) -> Reply:
        assert model == "llm"
        self.asked.append(inputs)
        if inputs.get("text_input") == "bad":
            raise self._error
        number = len(inputs.get("text_pair", [1]))
        return Reply(["a text"], numbers=struct.pack(f"<{number}f", *range(number)), tokenized=json.dumps(TOLD))


async def choose(name: str) -> Chosen:
    model, _, adapter = name.partition("_lora_")
    assert model == "llm"
    return Chosen(MODEL, adapter)


def ask(server: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    vectors, tokens = Vectors(choose), Tokens(choose)
    endpoint = {
        "embeddings": vectors.embeddings,
        "rerank": vectors.rerank,
        "tokenize": tokens.tokenize,
        "detokenize": tokens.detokenize,
    }[path]
    return asyncio.run(endpoint(Body(dict(body)), server, "id"))


@pytest.mark.parametrize(("path", "values", "expected"), [
    ("tokenize", {"prompt": "a"}, TOLD),
    ("tokenize", {"messages": [{"role": "user", "content": "a"}]}, TOLD),
    ("detokenize", {"tokens": [1]}, {"prompt": "a text"}),
])  # fmt: skip
@pytest.mark.parametrize("model", ["llm", "llm_lora_doll", None])
def test_an_adapter_has_its_models_tokens(path: str, values: dict[str, Any], expected: Any, model: str | None) -> None:
    """A name that `/v1/models` lists is a name here too."""
    assert ask(Server(), path, {**values, "model": model} if model else values) == expected


def test_what_a_body_says_beside_the_text_is_never_dropped() -> None:
    """Jina's `task`, say: the model refuses what it does not know, so it has to be told."""
    server = Server()
    body = {"model": "llm", "input": "a", "task": "retrieval.query", "normalize": False, "priority": 1, "user": "u"}
    ask(server, "embeddings", body)
    (asked,) = server.asked
    assert json.loads(asked["pooling"]) == {"task": "embed", "normalize": False}
    assert json.loads(asked["sampling_parameters"]) == {"task": "retrieval.query", "priority": 1}


@pytest.mark.parametrize(("path", "values"), [
    ("embeddings", {"input": "a"}),
    ("rerank", {"query": "a", "documents": ["b", "c"]}),
])  # fmt: skip
def test_two_adapters_in_one_body_are_refused(path: str, values: dict[str, Any]) -> None:
    server = Server()
    with pytest.raises(ApiError, match="'lora_name' is not supported"):
        ask(server, path, {"model": "llm_lora_doll", "lora_name": "sheep", **values})
    for lora in ({}, {"lora_name": "doll"}):
        ask(server, path, {"model": "llm_lora_doll", **lora, **values})
    assert [json.loads(asked["sampling_parameters"])["lora_name"] for asked in server.asked] == ["doll", "doll"]


def test_of_several_texts_an_error_says_which() -> None:
    with pytest.raises(ApiError, match=r"^input\[2\]: the text has 9 tokens$") as raised:
        ask(Server(), "embeddings", {"model": "llm", "input": ["a", "b", "bad", "c"]})
    assert (raised.value.status, raised.value.param) == (400, "input")
    with pytest.raises(ApiError, match=r"^the text has 9 tokens$"):
        ask(Server(), "embeddings", {"model": "llm", "input": "bad"})
    full = ApiError(429, "the queue is full")
    with pytest.raises(ApiError, match=r"^the queue is full$"):
        ask(Server(full), "embeddings", {"model": "llm", "input": ["a", "bad"]})
