"""Silence counts only while somebody listens. pytest tests/front_end/test_silence.py"""

from __future__ import annotations

from cb_backend.support.silence import SilenceClock


def test_silence_counts_what_was_listened_to() -> None:
    now = 100.0
    clock = SilenceClock(lambda: now)
    for _ in range(6):
        now += 0.5
        clock.look()
    assert clock.seconds == 3.0
    now += 3600.0  # this process was stopped, or its machine slept
    assert clock.look() == 4.0
    clock.heard()
    assert clock.seconds == 0.0
    now += 0.25
    assert clock.look() == 0.25
