"""Embeddings and rerank of the gateway, asked by the official `openai` client, before a real server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from tests.gateway.conftest import running_gateway
from tests.server.conftest import RunningServer, running_server
from tests.server.tiny_checkpoint import Reference, write_tiny_checkpoint

pytestmark = pytest.mark.server

TEXTS = ["the quick brown fox", "seven wizards", "Grüße aus Köln"]
DOCUMENTS = ["the lazy dog", "toxic brew", "x", "for the evil queen"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("vectors") / "tiny")


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(
        checkpoint, tmp_path_factory.mktemp("models"), front_ends=1, runner="both", classifier_from_token=["n", "y"]
    ) as running:
        yield running


@pytest.fixture(scope="module")
def address(server: RunningServer) -> Iterator[str]:
    with running_gateway(server.url) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def expected(reference: Reference, ids: list[int], dimensions: int | None = None) -> Any:
    with torch.inference_mode():
        vector = reference.model.model(torch.tensor([ids])).last_hidden_state[0, -1, :dimensions].double().numpy()
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_embeddings_of_texts_and_of_token_ids(client: openai.OpenAI, reference: Reference, encoding: Any) -> None:
    ids = [reference.tokenizer.encode(text).ids for text in TEXTS]
    for value, wanted in ((TEXTS, ids), (TEXTS[0], ids[:1]), (ids, ids), (ids[1], ids[1:2])):
        answer = client.embeddings.create(model="llm", input=value, encoding_format=encoding)
        assert [each.index for each in answer.data] == list(range(len(wanted)))
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, wanted))
        for found, own in zip(answer.data, wanted, strict=True):
            vector: Any = found.embedding
            if encoding == "base64":
                vector = np.frombuffer(base64.b64decode(vector), "<f4").tolist()
            assert vector == pytest.approx(expected(reference, own), abs=1e-5)


def test_dimensions_and_the_clients_default(client: openai.OpenAI, reference: Reference) -> None:
    """Who names no encoding is sent base64 by the client's own wish, and never sees it."""
    ids = reference.tokenizer.encode(TEXTS[0]).ids
    answer = client.embeddings.create(model="llm", input=TEXTS[0], dimensions=16)
    assert answer.data[0].embedding == pytest.approx(expected(reference, ids, 16), abs=1e-5)
    for dimensions in (0, 65):
        with pytest.raises(openai.BadRequestError, match=f"dimensions must be between 1 and 64, got {dimensions}"):
            client.embeddings.create(model="llm", input="a", dimensions=dimensions)


def test_many_texts_in_one_body(client: openai.OpenAI) -> None:
    texts = [f"text number {index}" for index in range(150)]
    answer = client.embeddings.create(model="llm", input=texts)
    assert len(answer.data) == 150
    again = client.embeddings.create(model="llm", input=texts[77])
    assert answer.data[77].embedding == pytest.approx(again.data[0].embedding, abs=1e-6)


@pytest.mark.parametrize(("values", "told"), [
    ({"input": []}, "'input' has 0 entries"),
    ({"input": ["a"] * 2049}, "'input' has 2049 entries; 1 to 2048 are possible"),
    ({"input": [["a"]]}, "'input' must be a text, a list of token ids"),
    ({"input": [[]]}, "'input' must be a text, a list of token ids"),
    ({"input": [-1]}, "'input' must be a text, a list of token ids"),
    ({"input": [100000]}, "token id 100000 in 'input_ids' is outside the vocabulary"),
    ({"input": "a", "encoding_format": "int8"}, "'encoding_format' must be float or base64"),
    ({"input": "a", "temperature": 1}, "'temperature' does not go with embeddings and scores"),
    ({"input": "a", "pooling": "cls"}, "pooling must be last or mean"),
    ({}, "'input' is missing"),
])  # fmt: skip
def test_bodies_that_cannot_be_embedded(address: str, values: dict[str, Any], told: str) -> None:
    response = httpx.post(f"{address}/v1/embeddings", json={"model": "llm", **values}, timeout=60)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]


def test_rerank(address: str, reference: Reference) -> None:
    no, yes = (reference.tokenizer.encode(text).ids[0] for text in "ny")
    pairs = [reference.tokenizer.encode(TEXTS[0], document).ids for document in DOCUMENTS]
    with torch.inference_mode():
        rows = [reference.model(torch.tensor([ids])).logits[0, -1, [no, yes]].double() for ids in pairs]
    scores = [float(row.softmax(0)[1]) for row in rows]
    order = sorted(range(4), key=lambda index: -scores[index])
    body = {"model": "llm", "query": TEXTS[0], "documents": DOCUMENTS}
    for path in ("/v1/rerank", "/rerank"):
        answer = httpx.post(f"{address}{path}", json=body, timeout=60).json()
        assert [result["index"] for result in answer["results"]] == order
        assert [result["document"]["text"] for result in answer["results"]] == [DOCUMENTS[index] for index in order]
        assert [result["relevance_score"] for result in answer["results"]] == pytest.approx(
            [scores[index] for index in order], abs=1e-5
        )
        assert answer["usage"]["total_tokens"] == sum(map(len, pairs))
    few = {**body, "documents": [{"text": text} for text in DOCUMENTS], "top_n": 2, "return_documents": False}
    answer = httpx.post(f"{address}/v1/rerank", json=few, timeout=60).json()
    assert [set(result) for result in answer["results"]] == [{"index", "relevance_score"}] * 2
    assert [result["index"] for result in answer["results"]] == order[:2]


@pytest.mark.parametrize(("values", "told"), [
    ({"query": "a"}, "'documents' is missing"),
    ({"documents": ["a"]}, "'query' is missing"),
    ({"query": "a", "documents": []}, "'documents' has 0 entries"),
    ({"query": "a", "documents": [1]}, "each of 'documents' must be a text"),
    ({"query": "a", "documents": ["b"], "top_n": 0}, "'top_n' is 0; it must be at least 1"),
    ({"query": "a", "documents": ["b"], "max_chunks": 3}, "'max_chunks' does not go with embeddings and scores"),
    ({"query": "a", "documents": ["b" * 20000, "c"]}, "text_pair[0]: "),
])  # fmt: skip
def test_bodies_that_cannot_be_reranked(address: str, values: dict[str, Any], told: str) -> None:
    response = httpx.post(f"{address}/v1/rerank", json={"model": "llm", **values}, timeout=60)
    assert response.status_code == 400, json.dumps(response.json())
    assert told in response.json()["error"]["message"]


def test_a_model_that_only_generates(gateway: str) -> None:
    body = {"model": "llm", "input": "a", "query": "a", "documents": ["b"]}
    for path, task in (("/v1/embeddings", "embed"), ("/v1/rerank", "score")):
        own = {
            name: body[name] for name in (("model", "input") if task == "embed" else ("model", "query", "documents"))
        }
        response = httpx.post(f"{gateway}{path}", json=own, timeout=60)
        assert response.status_code == 400
        assert f"Model llm does not support '{task}' request; it serves generate" in response.json()["error"]["message"]
