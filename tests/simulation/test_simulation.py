"""A thousand random scenarios hold every invariant, and really contain the situations they are meant to contain."""

from __future__ import annotations

import zlib
from collections import Counter

import pytest

from tests.simulation.scenario import make_scenario
from tests.simulation.world import World

NUM_SCENARIOS = 1000
NUM_PARTS = 10

# Least occurrences over all scenarios: less would mean that the scenarios no longer test what they claim.
LEAST = {
    "requests": 5000,
    "ended: stop": 1000,
    "ended: length": 1000,
    "failed": 100,
    "cancelled: waiting": 200,
    "cancelled: running": 100,
    "timed out: waiting": 500,
    "timed out: running": 200,
    "refused: too long": 500,
    "refused: queue full": 200,
    "preemptions": 150,
    "overtaken": 300,
    "swapped out blocks": 100,
    "swapped in blocks": 50,
    "resumed": 150,
    "evicted blocks": 5000,
    "prefix hit tokens": 5000,
    "deferred frees": 1000,
    "stalled": 1000,
    "chunks": 10_000,
    "whole prompts beyond the budget": 300,
}

_totals: Counter[str] = Counter()


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_scenarios(part: int) -> None:
    for seed in range(part, NUM_SCENARIOS, NUM_PARTS):
        try:
            _totals.update(World(make_scenario(seed)).run())
        except Exception as error:
            raise AssertionError(
                f"seed {seed}: {error} (python -m tests.simulation.run --start {seed} --seeds 1)"
            ) from error
    _totals["parts"] += 1


def test_m4_scenarios_with_a_four_bit_hash() -> None:
    """Nearly every lookup meets another block's digest; the outputs must not notice."""
    contents: set[bytes] = set()

    def four_bit_hash(parent_digest: bytes, token_bytes: bytes) -> bytes:
        contents.add(parent_digest + token_bytes)
        return bytes([zlib.crc32(parent_digest + token_bytes) % 16])

    num_hit_tokens = num_collisions = 0
    for seed in range(5000, 5100):
        contents.clear()
        num_hit_tokens += World(make_scenario(seed), four_bit_hash).run()["prefix hit tokens"]
        num_collisions += max(0, len(contents) - 16)
    assert num_collisions > 300, "digests must have collided"
    assert num_hit_tokens >= 30, "some hits must be left"


def test_scenarios_contain_what_they_should() -> None:
    if _totals["parts"] < NUM_PARTS:
        pytest.skip("counts the scenarios of all the parts above; run the whole file")
    missing = {name: (_totals[name], least) for name, least in LEAST.items() if _totals[name] < least}
    assert not missing, f"too rare (found, wanted): {missing}"
