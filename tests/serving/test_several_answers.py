"""Several answers to one request, and the figures of its prompt, in the responses."""

from __future__ import annotations

import time

import numpy as np
import pytest

from cb_backend.contracts.packed_logprobs import ChunkLogprobs, TokenLogprob, pack
from cb_backend.contracts.request import FinishReason
from cb_backend.contracts.step import PromptLogprobs
from tests.serving.response_bench import Bench

LENGTH = int(FinishReason.LENGTH)


def figure(logprob: float) -> tuple[TokenLogprob]:
    return (TokenLogprob(logprob, {"rank": 1}, [], []),)


def test_n_waits_for_all_and_keeps_the_order_of_the_seeds(bench: Bench) -> None:
    """One ends at its first token, and the first is the last."""
    live, sender = bench.open(is_stream=False, n=3, logprobs=0, start_others=lambda: None)
    a, b, c = live.answers
    b.on_tokens((ord("b"),), LENGTH, figure(-3.0))
    for answer, last, tokens in ((c, "c", [-0.5, -0.75]), (a, "a", [-0.25] * 4)):
        assert sender.final_count == 0
        for logprob in tokens[:-1]:
            answer.on_tokens((ord("x"),), 0, figure(logprob))
        time.sleep(0.02)
        answer.on_tokens((ord(last),), LENGTH, figure(tokens[-1]))
    (response,) = sender.wait().responses
    assert response.tensors["text_output"].tolist() == [b"prompt xxxa", b"prompt b", b"prompt xc"]
    assert response.tensors["cumulative_logprob"].tolist() == [-1.0, -3.0, -1.25]
    assert response.tensors["num_output_tokens"].tolist() == [4, 1, 2]
    assert response.tensors["finish_reason"].tolist() == [b"length"] * 3
    assert bench.responder.counts()["output_tokens"] == 7


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_prompts_figures_come_once_with_the_first_response(bench: Bench, is_stream: bool) -> None:
    live, sender = bench.open(is_stream=is_stream, prompt_logprobs=1)
    for part in chunks():
        live.answers[0].on_attached([part])
    for token in b"ab":
        live.answers[0].on_tokens((token,), 0)
        time.sleep(0.02)
    live.answers[0].on_tokens((ord("c"),), LENGTH)
    sender.wait()
    told = [response for response in sender.responses if "prompt_logprobs" in response.tensors]
    assert told == sender.responses[:1]
    assert told[0].tensors["prompt_logprobs"].tolist()[0].startswith(b'[null, {"')


def chunks() -> list[ChunkLogprobs]:
    """Of the bench's seven tokens, in two pieces."""
    parts = []
    for first, count in ((1, 4), (5, 2)):
        figures, ids = np.full((count, 1), -0.5, np.float32), np.full((count, 1), 97, np.int32)
        packed = pack(PromptLogprobs(np.array([1]), first, figures[:, 0], {"rank": ids[:, 0]}, ids, figures))
        assert isinstance(packed, ChunkLogprobs)
        parts.append(packed)
    return parts
