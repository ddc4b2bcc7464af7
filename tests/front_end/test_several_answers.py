"""n, best_of and prompt_logprobs on the wire: what is accepted, what is computed for it, what is refused."""

from __future__ import annotations

import pytest

from cb_backend.contracts.request_params import RequestParams
from tests.front_end.parsing import params, refusal


@pytest.mark.parametrize(
    ("values", "shown"),
    [({"n": 2, "best_of": "4"}, "'4'"), ({"best_of": 2}, "2"), ({"best_of": 0}, "0"), ({"best_of": True}, "True")],
)
def test_l3_best_of_is_refused_with_the_way_to_go(values: dict[str, object], shown: str) -> None:
    """Case L3."""
    assert refusal(values) == (
        f"best_of is not supported (got {shown}); use n and choose, by the output cumulative_logprob"
    )


@pytest.mark.parametrize("value", [None, 1, "1"])
def test_best_of_passes_where_it_asks_for_nothing(value: object) -> None:
    assert params({"best_of": value}) == RequestParams()


def test_several_answers_want_a_temperature() -> None:
    assert "n is 2, but at temperature 0 all answers are the same" in refusal({"n": 2, "temperature": 0})


def test_prompt_logprobs_are_the_first_answers_alone() -> None:
    got = params({"prompt_logprobs": "3", "n": 2})
    assert [rules.prompt_logprobs for rules in got.token_rules()] == [3, None]
    assert params({"prompt_logprobs": None, "seed": 1}) == RequestParams(seed=1)


@pytest.mark.parametrize(
    ("value", "reason"),
    [(-1, "prompt_logprobs must be between 0 and 20, got -1"), (21, "between 0 and 20, got 21"), ("x", "an integer")],
)
def test_f6_wrong_values_of_prompt_logprobs(value: object, reason: str) -> None:
    assert reason in refusal({"prompt_logprobs": value})
