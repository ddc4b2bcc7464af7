"""The benchmark of the host's part of a step measures a loop that really serves: rows decode, end and are followed."""

from __future__ import annotations

from pathlib import Path

from tests.engine.host_loop import Loop


def test_the_measured_loop_serves_requests(tmp_path: Path) -> None:
    loop = Loop(str(tmp_path), "turnover", num_rows=4, num_front_ends=2)
    before = loop.process.engine.stats()
    assert len(loop.turns(300)) == 300
    after = loop.process.engine.stats()
    assert after.num_output_tokens - before.num_output_tokens > 4 * 200
    assert after.num_prompt_tokens > before.num_prompt_tokens, "who ends must be followed"
    instructions, c_calls = loop.count(3)
    assert instructions > c_calls > 0
    phases = loop.phases(3)
    assert {"schedule", "launch", "take in the result", "encode and send"} <= phases.keys()
    loop.close()
