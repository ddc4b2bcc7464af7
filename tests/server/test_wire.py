"""The wire contract on a real server: outputs beside the text, answer by answer. pytest tests/server/test_wire.py"""

from __future__ import annotations

import json
import queue
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpc

from tests.server.conftest import RunningServer
from tests.server.tiny_checkpoint import Reference

pytestmark = pytest.mark.server

DTYPES = {np.dtype(bool): "BOOL", np.dtype(object): "BYTES", np.dtype(np.int32): "INT32"}
RETURNS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")


def ask(
    server: RunningServer, text: str | None, sampling: dict[str, Any], stream: bool = False, **inputs: Any
) -> list[dict[str, Any]]:
    """Every response of one request with all its outputs as arrays; strings decoded. Errors are raised."""
    values: dict[str, Any] = {f"return_{name}": True for name in RETURNS}
    values |= {"stream": stream, "exclude_input_in_output": True, "sampling_parameters": json.dumps(sampling)}
    if text is not None:
        values["text_input"] = text
    values |= inputs
    tensors = []
    for name, value in values.items():
        encoded = value.encode() if isinstance(value, str) else value
        array = np.atleast_1d(np.array(encoded, dtype=object if isinstance(encoded, bytes) else None))
        tensors.append(grpc.InferInput(name, list(array.shape), DTYPES[array.dtype]))
        tensors[-1].set_data_from_numpy(array)
    arrived: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    responses = []
    with grpc.InferenceServerClient(server.url) as connection:
        connection.start_stream(lambda result, error: arrived.put((result, error)))
        connection.async_stream_infer("llm", tensors, enable_empty_final_response=True)
        is_final = False
        while not is_final:
            result, error = arrived.get(timeout=60)
            if error is not None:
                raise error
            is_final = result.get_response().parameters["triton_final_response"].bool_param
            names = [output.name for output in result.get_response().outputs]
            responses.append({name: _plain(result.as_numpy(name)) for name in names})
        connection.stop_stream()
    return responses


def _plain(array: np.ndarray) -> list[Any]:
    return [value.decode() if isinstance(value, bytes) else value for value in array.reshape(-1).tolist()]


def merged_logprobs(responses: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [entry for response in responses for entry in json.loads(response["logprobs"][index])]


def check_figures(reference: Reference, prompt: str, entries: list[dict[str, Any]], num_top: int) -> list[int]:
    """Compare every figure with transformers'; returns the chosen ids."""
    prompt_ids = reference.tokenizer.encode(prompt).ids
    chosen = [int(next(iter(entry))) for entry in entries]
    with torch.inference_mode():
        logits = reference.model(torch.tensor([prompt_ids + chosen])).logits[0, len(prompt_ids) - 1 : -1]
    for entry, token_id, row in zip(entries, chosen, logits.log_softmax(-1), strict=True):
        top = row.topk(num_top).indices.tolist()
        assert {int(key) for key in entry} == {token_id, *top}
        for key, figure in entry.items():
            assert figure["logprob"] == pytest.approx(float(row[int(key)]), abs=1e-3)
            assert figure["rank"] == int((row > row[int(key)]).sum()) + 1
    return chosen


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: RunningServer, reference: Reference, stream: bool) -> None:
    sampling = {"max_tokens": 12, "temperature": 0.8, "seed": 3, "logprobs": "4", "ignore_eos": True}
    responses = ask(server, "the quick", sampling, stream)
    assert (len(responses) > 1) == stream
    entries = merged_logprobs(responses)
    assert len(entries) == 12 == sum(response["num_output_tokens"][0] for response in responses)
    for response in responses:
        assert len(json.loads(response["logprobs"][0])) == response["num_output_tokens"][0]
    chosen = check_figures(reference, "the quick", entries, 4)
    text = "".join(response["text_output"][0] for response in responses)
    assert text == reference.tokenizer.decode(chosen)
    total = sum(entry[str(token_id)]["logprob"] for token_id, entry in zip(chosen, entries, strict=True))
    assert responses[-1]["cumulative_logprob"][0] == pytest.approx(total, rel=1e-5)
    sums = [response["cumulative_logprob"][0] for response in responses]
    assert sums == sorted(sums, reverse=True)


def test_sum_without_the_parameter(server: RunningServer) -> None:
    sampling = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    (plain,) = ask(server, "fox", sampling)
    (asked,) = ask(server, "fox", {**sampling, "logprobs": 0})
    assert plain["logprobs"] == ["null"]
    assert plain["cumulative_logprob"] == asked["cumulative_logprob"]
    assert plain["cumulative_logprob"][0] < 0
    assert [len(entry) for entry in json.loads(asked["logprobs"][0])] == [1] * 5


def test_a_stop_string_cuts_everything_at_one_token(server: RunningServer) -> None:
    sampling = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    (whole,) = ask(server, "the quick", sampling)
    stop = whole["text_output"][0][5:7]
    (cut,) = ask(server, "the quick", {**sampling, "stop": stop})
    assert cut["text_output"][0] == whole["text_output"][0].partition(stop)[0]
    assert cut["finish_reason"] == ["stop"]
    num_tokens = cut["num_output_tokens"][0]
    assert num_tokens < 24
    assert json.loads(cut["logprobs"][0]) == json.loads(whole["logprobs"][0])[:num_tokens]
