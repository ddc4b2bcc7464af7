"""Embeddings and scores on a real server, by both wires. pytest tests/server/test_pooling.py"""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from cb_backend.cli.paths import checkout_path
from tests.server.conftest import RunningServer, running_server
from tests.server.tiny_checkpoint import Reference
from tests.waiting import WAIT_S

pytestmark = pytest.mark.server

TEXT = "the quick brown fox jumps over the lazy dog"
DOCUMENTS = ["seven wizards", "make toxic brew for the evil queen", "Grüße aus Köln", "x"]


@pytest.fixture(scope="module")
def both(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model that generates, embeds and scores."""
    folder = tmp_path_factory.mktemp("pooling")
    with running_server(checkpoint, folder, runner="both", classifier_from_token=["n", "y"]) as running:
        yield running


def ask(server: RunningServer, **inputs: Any) -> dict[str, Any]:
    """The outputs of one request's only response; texts, lists of texts and flags as tensors."""
    tensors = []
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        kind = {bool: "BOOL", int: "INT32", str: "BYTES"}[type(values[0])]
        array = np.array([v.encode() if kind == "BYTES" else v for v in values])
        dtype = {"BOOL": np.bool_, "INT32": np.int32, "BYTES": np.object_}[kind]
        tensor = grpc.InferInput(name, [len(values)], kind)
        tensor.set_data_from_numpy(array.astype(dtype))
        tensors.append(tensor)
    came: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(server.url) as client:
        client.start_stream(lambda result, error: came.put(error or result))
        client.async_stream_infer("llm", tensors, enable_empty_final_response=True)
        result = came.get(timeout=WAIT_S)
        client.stop_stream()
    if isinstance(result, InferenceServerException):
        raise result
    response = result.get_response()
    assert response.parameters["triton_final_response"].bool_param
    return {output.name: result.as_numpy(output.name) for output in response.outputs}


def states(reference: Reference, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        hidden: torch.Tensor = reference.model.model(torch.tensor([ids])).last_hidden_state[0]
    return hidden.double().numpy()


def unit(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return vector / np.linalg.norm(vector)


def test_embeddings_are_those_of_transformers(both: RunningServer, reference: Reference) -> None:
    ids = reference.tokenizer.encode(TEXT).ids
    hidden = states(reference, ids)
    cases: list[tuple[dict[str, Any], Any]] = [
        ({}, unit(hidden[-1])),
        ({"task": "embed", "pooling": "mean"}, unit(hidden.mean(0))),
        ({"dimensions": 16}, unit(hidden[-1, :16])),
        ({"normalize": False, "pooling": "mean", "dimensions": 9}, hidden.mean(0)[:9]),
    ]
    for asked, expected in cases:
        for prompt in ({"text_input": TEXT}, {"input_ids": ids}):
            answer = ask(both, pooling=json.dumps(asked), return_num_input_tokens=True, **prompt)
            assert set(answer) == {"embedding", "num_input_tokens"}
            assert answer["embedding"].dtype == np.float32
            assert answer["embedding"] == pytest.approx(expected, abs=1e-5)
            assert answer["num_input_tokens"].tolist() == [len(ids)]


def test_vllm_backends_embedding_request(both: RunningServer, reference: Reference) -> None:
    ids = reference.tokenizer.encode(TEXT).ids
    for value, dimensions in ((TEXT, None), (ids, None), (TEXT, 8)):
        params = {} if dimensions is None else {"dimensions": [dimensions]}
        asked = json.dumps({"input": value, "pooling_params": params})
        flags = {"return_num_input_tokens": True, "return_num_output_tokens": True}
        answer = ask(both, text_input="", embedding_request=asked, **flags)
        assert set(answer) == {"text_output", "num_input_tokens", "num_output_tokens"}
        expected = unit(states(reference, ids)[-1, :dimensions])
        assert json.loads(answer["text_output"][0]) == pytest.approx(expected, abs=1e-5)
        assert (answer["num_input_tokens"].tolist(), answer["num_output_tokens"].tolist()) == ([len(ids)], [0])


def test_scores_of_a_querys_documents(both: RunningServer, reference: Reference) -> None:
    no, yes = (reference.tokenizer.encode(text).ids[0] for text in "ny")
    pairs = [reference.tokenizer.encode(TEXT, document).ids for document in DOCUMENTS]
    with torch.inference_mode():
        logits = [reference.model(torch.tensor([ids])).logits[0, -1].double() for ids in pairs]
    answer = ask(both, text_input=TEXT, text_pair=DOCUMENTS, pooling='{"task": "score"}', return_num_input_tokens=True)
    assert answer["scores"] == pytest.approx([float(row[[no, yes]].softmax(0)[1]) for row in logits], abs=1e-5)
    assert answer["num_input_tokens"].tolist() == [sum(map(len, pairs))]
    raw = ask(both, text_input=TEXT, text_pair=DOCUMENTS, pooling='{"task": "score", "activation": false}')
    assert raw["scores"] == pytest.approx([float(row[yes] - row[no]) for row in logits], abs=1e-4)


def test_over_http_and_beside_text(both: RunningServer) -> None:
    status, body = both.post("/v2/models/llm/generate", {"text_input": TEXT, "pooling": "{}"})
    assert status == 200, body
    assert json.loads(body)["embedding"] == pytest.approx(
        ask(both, text_input=TEXT, pooling="{}")["embedding"].tolist()
    )
    assert both.client.generate(TEXT, max_tokens=4, temperature=0)
    both.wait_idle()


def test_a_model_that_only_generates_says_so(server: RunningServer) -> None:
    told = "Error generating stream: Model llm does not support 'embed' request"
    with pytest.raises(InferenceServerException, match=told):
        ask(server, text_input="", embedding_request='{"input": "hi", "pooling_params": {}}')
    with pytest.raises(InferenceServerException, match=told):
        ask(server, text_input="hi", pooling="{}")
    with pytest.raises(InferenceServerException, match="does not support 'score' request; it serves generate"):
        ask(server, text_input="hi", pooling='{"task": "score"}')


# ---- search: an example around it ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def searching(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    def add_search(repository: Path) -> None:
        shutil.copytree(checkout_path("model_repository/search"), repository / "search")

    folder = tmp_path_factory.mktemp("search")
    with running_server(
        checkpoint, folder, prepare=add_search, runner="both", classifier_from_token=["n", "y"]
    ) as running:
        yield running


def test_search_retrieves_reranks_and_answers(searching: RunningServer, reference: Reference) -> None:
    lines = checkout_path("model_repository/search/1/documents.txt").read_text().splitlines()
    encode = reference.tokenizer.encode

    def embedded(text: str) -> np.ndarray[Any, Any]:
        return unit(states(reference, encode(text).ids)[-1])

    def score(question: str, document: str) -> float:
        no, yes = (encode(text).ids[0] for text in "ny")
        with torch.inference_mode():
            row = reference.model(torch.tensor([encode(question, document).ids])).logits[0, -1].double()
        return float(row[[no, yes]].softmax(0)[1])

    for question in ("Which animal jumps?", "What is the capital of France?"):
        near = sorted(lines, key=lambda line: -float(embedded(line) @ embedded(question)))[:3]
        best = sorted(near, key=lambda line: -score(question, line))
        status, text = searching.post("/v2/models/search/generate", {"question": question})
        assert status == 200, text
        answer = json.loads(text)
        assert answer["documents"] == best
        assert answer["scores"] == pytest.approx([score(question, line) for line in best], abs=1e-5)
        prompt = f"Document: {best[0]}\nQuestion: {question}\nAnswer:"
        assert answer["text_output"] == reference.greedy_text(prompt, 64)
    searching.wait_idle()
