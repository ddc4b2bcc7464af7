"""Latency arithmetic against values worked out by hand: pytest tests/study/test_latencies.py"""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.study.latencies import batch_histogram, latencies, summary


def entries(*pairs: tuple[int, float]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([pair[0] for pair in pairs], np.int64), np.array([pair[1] for pair in pairs], np.float64)


def test_two_requests_that_take_turns() -> None:
    ids, times = entries((0, 1.0), (1, 1.0), (0, 1.5), (1, 1.75), (0, 3.0))
    found = latencies([0.0, 0.5], ids, times)
    assert found.ttft.tolist() == [1.0, 0.5]
    assert found.e2e.tolist() == [3.0, 1.25]
    assert found.tpot.tolist() == [1.0, 0.75]  # (3 - 1) / 2 and (1.75 - 1) / 1
    assert found.token_gaps.tolist() == [0.5, 1.5, 0.75]
    assert found.chunk_gaps.tolist() == [0.5, 1.5, 0.75]


def test_a_chunk_is_one_gap_or_as_many_as_its_tokens() -> None:
    # Two tokens at once first, three at once 0.9 s later, one 0.1 s after those.
    ids, times = entries((0, 1.0), (0, 1.0), (0, 1.9), (0, 1.9), (0, 1.9), (0, 2.0))
    found = latencies([0.0], ids, times)
    assert found.chunk_gaps == pytest.approx([0.9, 0.1])
    assert found.token_gaps == pytest.approx([0.3, 0.3, 0.3, 0.1])
    assert found.tpot == pytest.approx([0.2])  # (2.0 - 1.0) / 5


def test_a_single_token_has_no_tpot_and_no_gap() -> None:
    found = latencies([0.25], *entries((0, 1.0)))
    assert (found.ttft.tolist(), found.e2e.tolist()) == ([0.75], [0.75])
    assert len(found.tpot) == len(found.token_gaps) == len(found.chunk_gaps) == 0


def test_neighbours_at_the_same_time_are_not_one_chunk() -> None:
    ids, times = entries((0, 1.0), (1, 1.0), (2, 1.0), (0, 2.0), (1, 2.0), (2, 2.0))
    found = latencies([0.0, 0.0, 0.0], ids, times)
    assert found.chunk_gaps.tolist() == [1.0, 1.0, 1.0]


def test_a_request_without_a_token_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"without a token: \[1\]"):
        latencies([0.0, 0.0, 0.0], *entries((0, 1.0), (2, 1.0)))


def test_percentiles() -> None:
    # Of 1 to 11 the p-th percentile is 1 + p / 10, by linear interpolation over ten gaps.
    found = summary(np.arange(1.0, 12.0), scale=1.0)
    assert found == {"mean": 6.0, "min": 1.0, "p50": 6.0, "p90": 10.0, "p99": 10.9, "max": 11.0}
    assert summary(np.array([0.002, 0.004])) == {
        "mean": 3.0, "min": 2.0, "p50": 3.0, "p90": 3.8, "p99": 3.98, "max": 4.0
    }  # fmt: skip
    assert summary(np.array([])) is None


def test_histogram() -> None:
    assert batch_histogram([1, 2, 3, 4, 5, 8, 9, 256]) == {"1": 1, "2": 1, "3-4": 2, "5-8": 2, "9-16": 1, "129-256": 1}
    assert batch_histogram([]) == {}
