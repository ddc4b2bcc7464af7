"""Metrics of sleep: what somebody sees who reads them while they are told."""

from __future__ import annotations

from cb_backend.contracts.rest import ASLEEP, AWAKE, RestStats
from cb_backend.serving.rest_metrics import publish_rest_state


class Exporter:
    """What a reader would find after each message, newest last."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = [{}]

    def set(self, name: str, description: str, value: float) -> None:
        assert description
        self.seen.append({**self.seen[-1], name: value})


def test_who_sees_an_engine_asleep_sees_its_memory_given_back() -> None:
    """Between any two messages on the way to sleep."""
    exporter = Exporter()
    for state, held_bytes in ((AWAKE, 35), (ASLEEP, 0)):
        publish_rest_state(exporter, [RestStats(state=state, held_bytes=held_bytes)])  # type: ignore[arg-type]
        assert exporter.seen[-1]["cb_model_memory_bytes"] == held_bytes
        assert exporter.seen[-1]["cb_engines_asleep"] == (state == ASLEEP)
    assert all(seen["cb_model_memory_bytes"] == 0 for seen in exporter.seen if seen.get("cb_engines_asleep"))
