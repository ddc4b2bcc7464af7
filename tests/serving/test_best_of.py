"""The n best of best_of answers: chosen when all have ended, by the highest cumulative log-probability."""

from __future__ import annotations

import time

import numpy as np
import pytest

from cb_backend.outputs import PromptLogprobs
from cb_backend.packed_logprobs import ChunkLogprobs, TokenLogprob, pack
from cb_backend.request import FinishReason
from tests.serving.response_bench import Bench

LENGTH = int(FinishReason.LENGTH)


def figure(logprob: float) -> tuple[TokenLogprob]:
    return (TokenLogprob(logprob, 1, [], []),)


def test_l3_best_of_waits_for_all_and_gives_the_best(bench: Bench) -> None:
    """Case L3: best_of 4, n 2; one ends at its first token. A long answer is not better for having more tokens."""
    live, sender = bench.open(is_stream=False, n=2, best_of=4, logprobs=0, start_others=lambda: None)
    a, b, c, d = live.answers
    a.on_tokens((ord("a"),), LENGTH, figure(-3.0))
    for answer, last, tokens in ((b, "b", [-0.5, -0.75]), (c, "c", [-0.25] * 8), (d, "d", [-0.75])):
        assert sender.final_count == 0
        for logprob in tokens[:-1]:
            answer.on_tokens((ord("x"),), 0, figure(logprob))
        time.sleep(0.02)
        answer.on_tokens((ord(last),), LENGTH, figure(tokens[-1]))
    (response,) = sender.wait().responses
    assert response.tensors["text_output"].tolist() == [b"prompt d", b"prompt xb"]
    assert response.tensors["cumulative_logprob"].tolist() == [-0.75, -1.25]
    assert response.tensors["num_output_tokens"].tolist() == [1, 2]
    assert response.tensors["finish_reason"].tolist() == [b"length", b"length"]
    assert bench.responder.counts()["output_tokens"] == 3


def test_equal_scores_keep_the_order_of_the_seeds(bench: Bench) -> None:
    live, sender = bench.open(is_stream=False, n=2, best_of=3, logprobs=0, start_others=lambda: None)
    for answer, text in zip(live.answers, "abc", strict=True):
        answer.on_tokens((ord(text),), LENGTH, figure(-1.0))
    assert sender.wait().responses[0].tensors["text_output"].tolist() == [b"prompt a", b"prompt b"]


def test_best_of_equal_to_n_is_n(bench: Bench) -> None:
    live, sender = bench.open(n=2, best_of=2, start_others=lambda: None)
    live.answers[1].on_tokens((ord("b"),), LENGTH)
    live.answers[0].on_tokens((ord("a"),), LENGTH)
    sender.wait()
    assert sender.responses[-1].tensors["finish_reason"].tolist() == [b"length"] * 2


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
        packed = pack(PromptLogprobs(np.array([1]), first, figures[:, 0], ids[:, 0], ids, figures))
        assert isinstance(packed, ChunkLogprobs)
        parts.append(packed)
    return parts
