"""How a client says its priority, patience, tenant and cache salt, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.scheduling import MAX_TIMEOUT_MS, SchedulingParams
from cb_backend.front_end.wire.sampling_json import read_params


def scheduling(values: dict[str, Any]) -> SchedulingParams:
    return read_params(values, 500)[1]


def test_defaults() -> None:
    found = scheduling({"max_tokens": 3})
    assert (found.priority, found.timeout_ms, found.queue_timeout_ms, found.cache_salt) == (0, None, None, "")


def test_all_of_them_beside_sampling_parameters() -> None:
    values = {"priority": -3, "timeout_ms": 1500, "queue_timeout_ms": "250", "cache_salt": "team a", "tenant": "a",
              "max_tokens": 7}  # fmt: skip
    sampling, found = read_params(values, 500)
    assert sampling.max_tokens == 7
    assert found == SchedulingParams(
        priority=-3, timeout_ms=1500, queue_timeout_ms=250, cache_salt="team a", tenant="a"
    )


@pytest.mark.parametrize("name", ["priority", "timeout_ms", "queue_timeout_ms", "cache_salt", "tenant"])
def test_null_is_the_default(name: str) -> None:
    assert scheduling({name: None}) == SchedulingParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", "high"),
        ("priority", 2**64),
        ("priority", 1.5),
        ("priority", True),
        ("priority", -101),
        ("timeout_ms", 0),
        ("timeout_ms", -1),
        ("timeout_ms", "soon"),
        ("timeout_ms", 2**40),
        ("queue_timeout_ms", 0),
        ("cache_salt", 5),
        ("cache_salt", "x" * 257),
        ("cache_salt", "\ud800"),  # cannot be sent on as UTF-8
        ("tenant", 5),
        ("tenant", "x" * 257),
        ("tenant", "a\udfff"),
    ],
)
def test_o11_what_cannot_be_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        scheduling({name: value})


def test_a_misspelt_name_is_told_the_right_one() -> None:
    with pytest.raises(InvalidRequestError, match="did you mean 'queue_timeout_ms'"):
        scheduling({"queue_timeout": 5})


@pytest.mark.parametrize(
    ("own", "timeout_us", "expected"),
    [(None, 0, None), (None, 1, 1), (None, 1000, 1), (None, 1001, 2), (5, 0, 5), (5, 7000, 5), (5, 3000, 3),
     (None, 2**64 - 1, MAX_TIMEOUT_MS)],
)  # fmt: skip
def test_the_servers_own_timeout_counts_where_it_is_shorter(
    own: int | None, timeout_us: int, expected: int | None
) -> None:
    found = SchedulingParams(priority=3, timeout_ms=own).within(timeout_us)
    assert found == SchedulingParams(priority=3, timeout_ms=expected)
    found.check()
