"""What excuses the exit code of a server's stop, line by line: pytest tests/server/test_kept_models.py"""

from __future__ import annotations

import pytest

from tests.server.kept_models import KeptModels

LOADED = "I1129 10:20:57.408654 7 model_lifecycle.cc:839] \"successfully loaded 'llm'\""
NOT_LOADED = "E1129 10:20:57.408654 7 model_lifecycle.cc:642] \"failed to load 'llm' version 1: Internal: X\""
OUT_OF_TIME = (
    'E1129 10:20:59 7 main.cc:535] "failed to stop server: Internal - Exit timeout expired. Exiting immediately."'
)
WITH_INFERENCES = 'I1129 10:20:59 7 server.cc:321] "Timeout 0: Found 1 model versions that have in-flight inferences"'


def at_the_end(num_models: int, num_requests: int = 0) -> str:
    found = f"Found {num_models} live models and {num_requests} in-flight non-inference requests"
    return f'I1129 10:20:59.092633 7 server.cc:345] "Timeout 0: {found}"'


@pytest.mark.parametrize(
    ("lines", "cancelled", "is_excused"),
    [
        ([LOADED, NOT_LOADED, at_the_end(1), OUT_OF_TIME], set(), True),
        ([LOADED, NOT_LOADED, NOT_LOADED, at_the_end(2), OUT_OF_TIME], set(), True),
        ([LOADED, at_the_end(1), OUT_OF_TIME], {"llm"}, True),
        ([LOADED, NOT_LOADED, at_the_end(2), OUT_OF_TIME], {"llm"}, True),
        ([LOADED, at_the_end(1), OUT_OF_TIME], set(), False),  # nothing that makes it keep one
        ([NOT_LOADED, LOADED, at_the_end(1), OUT_OF_TIME], set(), False),  # failed over nothing
        ([LOADED, NOT_LOADED, at_the_end(2), OUT_OF_TIME], set(), False),  # one too many
        ([LOADED, at_the_end(2), OUT_OF_TIME], {"llm"}, False),
        ([LOADED, at_the_end(1, 1), OUT_OF_TIME], {"llm"}, False),  # a request too
        ([LOADED, at_the_end(0, 0), OUT_OF_TIME], {"llm"}, False),  # no model
        ([LOADED, WITH_INFERENCES, OUT_OF_TIME], {"llm"}, False),  # requests that have not ended
        ([LOADED, at_the_end(1)], {"llm"}, False),  # another reason for its end
    ],
)
def test_excused_is_what_the_faults_explain(lines: list[str], cancelled: set[str], is_excused: bool) -> None:
    kept = KeptModels((2, 51))
    kept.cancelled |= cancelled
    for line in lines:
        kept.read(line)
    assert kept.excuse(1) is is_excused
    assert not any(kept.excuse(code) for code in (0, -6, -9, -11, 2))


def test_a_release_without_the_fault_of_cancelled_streams() -> None:
    for version, is_excused in (((2, 51), True), ((2, 52), False), (None, False)):
        kept = KeptModels(version)
        kept.cancelled.add("llm")
        for line in (LOADED, at_the_end(1), OUT_OF_TIME):
            kept.read(line)
        assert kept.excuse(1) is is_excused
