"""What the overload command says of a history."""

from __future__ import annotations

from typing import Any

from tests.faults.overload import judge

CLIENT = {"loop_lag_p99_ms": 12.0, "machine_cpu_share": 0.97}


def ended(request_id: int, status: str, end_s: float, **fields: Any) -> dict[str, Any]:
    times = {"sent_s": 1.0, "written_s": 1.02, "end_s": end_s}
    return {"id": request_id, "status": status, "error": None, "chunks": [[end_s, 32]], **times, **fields}


def failures(history: list[dict[str, Any]], to_normal_s: float = 0.0, refusal_limit_s: float = 0.1) -> list[str]:
    return [line for line in judge(history, CLIENT, to_normal_s, refusal_limit_s) if line.startswith("!")]


def test_refusals_are_told_with_what_is_the_clients_own() -> None:
    history = [ended(1, "ok", 3.0), ended(2, "refused", 1.05), ended(3, "refused", 1.05)]
    assert judge(history, CLIENT, 0.5, 0.1) == [
        "  3 requests: 1 ok, 2 refused",
        "  refusals took 50.0 ms (p50), 50.0 ms (p99)",
        "  of that the clients took 20.0 ms (p50), 20.0 ms (p99) before a request had left them",
        "  their event loops woke 12.0 ms late (p99), several times a request; the machine was 97% busy",
        "  back to normal after 0.5 s",
    ]


def test_what_is_not_as_it_should_be() -> None:
    refused = ended(2, "refused", 1.05)
    assert failures([ended(1, "ok", 3.0), refused]) == []
    assert failures([ended(1, "ok", 3.0)]) == ["! nothing was refused: this was no overload"]
    assert failures([ended(1, "ok", 3.0, chunks=[[3.0, 31]]), refused])[0].startswith("! request 1 was accepted")
    assert failures([ended(1, "error", 3.0, error="lost"), refused]) == ["! request 1 ended as error: lost"]
    assert failures([refused], refusal_limit_s=0.04) == ["! refusals took longer than 40 ms"]
    assert failures([refused], to_normal_s=11.0) == ["! not back to normal within 10 s"]
    never_left = ended(3, "refused", 1.05, written_s=0.0)
    assert failures([never_left]) == []
