"""The responder sends whatever an `Answer` makes of tokens: here one that is no text at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cb_backend.contracts.packed_logprobs import ChunkLogprobs
from cb_backend.contracts.request import FinishReason
from cb_backend.serving.live_request import LiveAnswer, LiveRequest, News
from tests.serving.fake_server import ResponseSender
from tests.serving.response_bench import Bench

LENGTH = int(FinishReason.LENGTH)


class Total:
    """Sums token ids; ends by itself at 100 or more. Only the first answer tells how many there are."""

    def __init__(self, num_answers: int | None = None) -> None:
        self.finish_reason = FinishReason.NONE
        self.num_unsent_tokens = 0
        self._num_answers = num_answers
        self._total = 0

    @property
    def has_unsent(self) -> bool:
        return self.num_unsent_tokens > 0

    def push(self, news: News) -> bool:
        self._total += sum(news.token_ids)
        self.num_unsent_tokens += len(news.token_ids)
        is_ended = self._total >= 100
        if self.finish_reason is FinishReason.NONE:
            self.finish_reason = FinishReason.STOP if is_ended else news.finish_reason
        return is_ended

    def on_prompt(self, chunk: ChunkLogprobs) -> None:
        raise AssertionError("nobody asked for figures of the prompt")

    def tensors(self) -> dict[str, NDArray[Any]]:
        outputs: dict[str, NDArray[Any]] = {"total": np.array([self._total], np.int32)}
        if self._num_answers is not None:
            outputs["num_answers"] = np.array([self._num_answers], np.int32)
        self.num_unsent_tokens = 0
        return outputs


def begin(bench: Bench, num_answers: int, is_stream: bool) -> tuple[LiveRequest, ResponseSender]:
    sender = ResponseSender(0.0)
    live = bench.responder.open(1, sender)
    answers = [LiveAnswer(live, 10 + index, Total(None if index else num_answers)) for index in range(num_answers)]
    live.begin(answers, 3, is_stream=is_stream, may_end_itself=True)
    return live, sender


def test_outputs_of_several_answers_are_joined_and_the_prompts_told_once(bench: Bench) -> None:
    live, sender = begin(bench, num_answers=3, is_stream=False)
    for index, answer in enumerate(live.answers):
        answer.on_tokens((index, 5), LENGTH)
    (response,) = sender.wait().responses
    assert response.tensors["total"].tolist() == [5, 6, 7]
    assert response.tensors["num_answers"].tolist() == [3]
    assert set(response.tensors) == {"total", "num_answers"}
    assert bench.responder.counts()["output_tokens"] == 6
    assert bench.responder.counts()["length"] == 1


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_answer_that_ends_itself_is_cancelled_at_the_engine(bench: Bench, is_stream: bool) -> None:
    live, sender = begin(bench, num_answers=1, is_stream=is_stream)
    live.answers[0].on_tokens((60,), 0)
    live.answers[0].on_tokens((50,), 0)
    assert sender.wait().responses[-1].tensors["total"].tolist() == [110]
    assert bench.cancelled == [10]
    assert sender.final_count == 1
    assert bench.responder.counts()["stop"] == 1


def test_an_answer_that_fails_gives_an_error_and_nothing_stays_open(bench: Bench) -> None:
    live, sender = begin(bench, num_answers=2, is_stream=True)
    live.answers[1].answer.push = None  # type: ignore[assignment, method-assign]
    live.answers[1].on_tokens((1,), 0)
    assert sender.wait().final_count == 1
    assert bench.responder.num_live == 0
    assert set(bench.cancelled) == {10, 11}
