"""best_of and prompt_logprobs on the wire: what is accepted, what is computed for it, what is refused."""

from __future__ import annotations

import pytest

from cb_backend.errors import InvalidRequestError
from cb_backend.sampling_params import MAX_N, SamplingParams
from tests.front_end.test_protocol import VOCAB_SIZE, flag, params, parse, refusal


def test_l3_best_of_makes_more_answers_than_it_gives() -> None:
    """Case L3: the choice needs every answer's cumulative log-probability, whether or not the client wants it."""
    got = parse('{"n": 2, "best_of": "4", "seed": 7}')
    assert (got.params.num_answers, got.params.n, got.params.logprobs, got.num_logprobs) == (4, 2, 0, None)
    answers = [got.params.of_answer(index) for index in range(4)]
    assert [(answer.n, answer.num_answers, answer.seed) for answer in answers] == [(1, 1, 7 + i) for i in range(4)]
    for answer in answers:
        answer.check(VOCAB_SIZE)
    assert parse('{"n": 2, "best_of": 2}').params.logprobs is None
    assert params({"n": 3}).num_answers == 3
    assert params({"best_of": None}).num_answers == 1


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"n": 3, "best_of": 2}, "best_of (2) is less than n (3)"),
        ({"best_of": MAX_N + 1}, "best_of must be between 1 and 64, got 65"),
        ({"best_of": 0}, "best_of must be between 1 and 64, got 0"),
        ({"best_of": 2.5}, "best_of must be an integer, got 2.5"),
        ({"best_of": 2, "temperature": 0}, "best_of is 2, but at temperature 0 all answers are the same"),
        ({"n": 2, "temperature": 0}, "n is 2, but at temperature 0 all answers are the same"),
    ],
)
def test_x1_wrong_values_of_best_of(values: dict[str, object], reason: str) -> None:
    assert reason in refusal(values)


def test_what_is_chosen_at_the_end_cannot_be_streamed() -> None:
    with pytest.raises(InvalidRequestError, match=r"best_of \(2\) is greater than n \(1\)"):
        parse('{"n": 1, "best_of": 2}', stream=flag(True))
    assert parse('{"n": 2, "best_of": 2}', stream=flag(True)).is_stream


def test_prompt_logprobs_are_the_first_answers_alone() -> None:
    got = params({"prompt_logprobs": "3", "n": 2})
    assert [got.of_answer(index).prompt_logprobs for index in range(2)] == [3, None]
    assert params({"prompt_logprobs": None, "seed": 1}) == SamplingParams(seed=1)


@pytest.mark.parametrize(
    ("value", "reason"),
    [(-1, "prompt_logprobs must be between 0 and 20, got -1"), (21, "between 0 and 20, got 21"), ("x", "an integer")],
)
def test_f6_wrong_values_of_prompt_logprobs(value: object, reason: str) -> None:
    assert reason in refusal({"prompt_logprobs": value})
