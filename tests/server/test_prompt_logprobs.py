"""prompt_logprobs and n on a real server. pytest tests/server/test_prompt_logprobs.py"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tritonclient.utils import InferenceServerException

from tests.server.conftest import RunningServer
from tests.server.test_wire import DRAWN, GREEDY, ask
from tests.server.tiny_checkpoint import Reference

pytestmark = pytest.mark.server


def check_figures(reference: Reference, prompt: str, told: str, num_top: int) -> None:
    """Compare every figure of a prompt with transformers'."""
    ids = reference.tokenizer.encode(prompt).ids
    entries: list[Any] = json.loads(told)
    assert entries[0] is None
    with torch.inference_mode():
        logits = reference.model(torch.tensor([ids])).logits[0, :-1]
    for token, entry, row in zip(ids[1:], entries[1:], logits.log_softmax(-1), strict=True):
        assert next(iter(entry)) == str(token)
        assert {int(key) for key in entry} == {token, *row.topk(num_top).indices.tolist()}
        for key, figure in entry.items():
            assert figure["logprob"] == pytest.approx(float(row[int(key)]), abs=1e-3)
            assert figure["rank"] == int((row > row[int(key)]).sum()) + 1
        assert entry[str(token)]["decoded_token"] == reference.tokenizer.decode([token])


@pytest.mark.parametrize("stream", [False, True])
def test_f1_prompt_logprobs(server: RunningServer, reference: Reference, stream: bool) -> None:
    """Case F1: twice, the second time with the prompt in the cache; longer than one step's chunk, and with n."""
    prompt = "the quick brown fox jumps over the lazy dog " * 3
    plain = ask(server, prompt, GREEDY, stream)
    for sampling in (GREEDY, GREEDY, {**DRAWN, "n": 3}):
        responses = ask(server, prompt, {**sampling, "prompt_logprobs": 2}, stream)
        told = [response["prompt_logprobs"] for response in responses if "prompt_logprobs" in response]
        assert "prompt_logprobs" in responses[0]
        assert [len(element) for element in told] == [1]
        check_figures(reference, prompt, told[0][0], 2)
        if sampling is GREEDY:
            texts = ["".join(response["text_output"][0] for response in part) for part in (plain, responses)]
            assert texts[0] == texts[1]
    assert all("prompt_logprobs" not in response for response in plain)
    server.wait_idle()


def test_f6_prompt_logprobs_of_one_token_and_out_of_range(server: RunningServer) -> None:
    (alone,) = ask(server, "x", {**GREEDY, "prompt_logprobs": 0})
    assert alone["prompt_logprobs"] == ["[null]"]
    with pytest.raises(InferenceServerException, match="prompt_logprobs must be between 0 and 20, got 21"):
        ask(server, "x", {**GREEDY, "prompt_logprobs": 21})
    with pytest.raises(InferenceServerException, match="figures; at most 131072 are allowed"):
        ask(server, "x" * 8000, {**GREEDY, "prompt_logprobs": 20})


def test_l3_best_of_is_refused_and_n_tells_what_to_choose_by(server: RunningServer) -> None:
    """Case L3: every output of n answers has an element an answer, in the order of the seeds."""
    with pytest.raises(InferenceServerException, match=r"best_of is not supported \(got 4\); use n and choose"):
        ask(server, "fox", {**DRAWN, "n": 2, "best_of": 4})
    singles = [ask(server, "fox", {**DRAWN, "seed": 50 + i, "logprobs": 0})[0] for i in range(2)]
    (response,) = ask(server, "fox", {**DRAWN, "seed": 50, "n": 2, "logprobs": 0})
    assert response["text_output"] == [single["text_output"][0] for single in singles]
    assert response["cumulative_logprob"] == pytest.approx([s["cumulative_logprob"][0] for s in singles], abs=1e-3)
    for name in ("finish_reason", "num_output_tokens", "logprobs"):
        assert len(response[name]) == 2
    assert response["num_input_tokens"] == singles[0]["num_input_tokens"]
    server.wait_idle()


def test_x3_a_wrong_priority_with_n_leaves_nothing_registered(server: RunningServer) -> None:
    """Case X3: priority 2^64 with n: refused before any answer is at the engine."""
    for sampling in ({**DRAWN, "n": 2}, {**DRAWN, "n": 3}):
        with pytest.raises(InferenceServerException, match="priority must be between -100 and 100"):
            ask(server, "fox", {**sampling, "priority": 2**64})
    assert server.num_active_requests() == 0
    (response,) = ask(server, "fox", {**DRAWN, "n": 2, "priority": 3})
    assert len(response["text_output"]) == 2
    server.wait_idle()
