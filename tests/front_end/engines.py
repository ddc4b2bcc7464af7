"""Real engine processes for tests, with the counting runner in place of a model, and a sink to hear their answers."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from cb_backend.contracts.config import EngineConfig, engine_config_from_dict
from cb_backend.contracts.errors import ErrorCode
from cb_backend.contracts.messages import AddRequest, token_ids_to_bytes
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.front_end.engines.supervisor import EngineSupervisor
from tests.waiting import WAIT_S


class Sink:
    """Collects what one request hears."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.finish_reason = 0
        self.scheduled_at = 0.0
        self.error: tuple[ErrorCode, str] | None = None
        self.num_ends = 0
        self._has_token = threading.Event()
        self._has_ended = threading.Event()

    def on_tokens(self, token_ids: tuple[int, ...], finish_reason: int) -> None:
        self.token_ids += token_ids
        self._has_token.set()
        if finish_reason:
            self.finish_reason = finish_reason
            self._end()

    def on_scheduled(self, scheduled_at: float) -> None:
        self.scheduled_at = scheduled_at

    def on_error(self, code: ErrorCode, message: str) -> None:
        self.error = (code, message)
        self._end()

    def _end(self) -> None:
        self.num_ends += 1
        self._has_ended.set()

    def wait_for_token(self) -> None:
        assert self._has_token.wait(WAIT_S), "no token came"

    def wait(self) -> Sink:
        assert self._has_ended.wait(WAIT_S), "the request did not end"
        return self


def counting_config(**arguments: Any) -> EngineConfig:
    return engine_config_from_dict(
        {"model": "counting", "worker_cls": "tests.fakes.counting_runner:create_runner", **arguments}
    )


def make_supervisor(
    config: EngineConfig, base: Path, server_pid: int | None = None, name: str = "llm"
) -> EngineSupervisor:
    return EngineSupervisor(config, server_pid or os.getpid(), name, "1", base)


def submit(
    supervisor: EngineSupervisor,
    prompt: list[int],
    max_tokens: int,
    sink: Sink | None = None,
    scheduling: SchedulingParams | None = None,
) -> tuple[int, Sink]:
    sink = sink or Sink()
    request_id = supervisor.client.new_request_id()
    params = TokenRules(max_tokens=max_tokens, seed=0)
    request = AddRequest(request_id, token_ids_to_bytes(prompt), params, scheduling or SchedulingParams())
    supervisor.client.submit(request, sink)
    return request_id, sink


def answer(supervisor: EngineSupervisor, prompt: list[int], max_tokens: int) -> list[int]:
    _, sink = submit(supervisor, prompt, max_tokens)
    assert sink.wait().error is None, sink.error
    return sink.token_ids


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
