"""An engine that may sleep, and the client that asks it, for measurements.

The engine is a process of its own, as behind a server. A request that is lost or fails ends the measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.errors import ErrorCode
from cb_backend.contracts.messages import AddRequest, token_ids_to_bytes
from cb_backend.contracts.rest import ASLEEP, RestStats
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.front_end.engines.engine_observer import set_rest
from cb_backend.front_end.engines.runtime_dir import EngineLife
from cb_backend.front_end.engines.supervisor import EngineSupervisor

WAIT_S = 120.0
ANSWER_TOKENS = 12


class Sink:
    """One answer, with the times of its tokens."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()
        self.token_ids: list[int] = []
        self.times: list[float] = []
        self.error = ""
        self.done = threading.Event()

    def on_tokens(self, token_ids: tuple[int, ...], finish_reason: int, attached: Sequence[Any] = ()) -> None:
        self.token_ids += token_ids
        self.times += [time.perf_counter() - self.begin] * len(token_ids)
        if finish_reason:
            self.done.set()

    def on_attached(self, attached: Sequence[Any]) -> None:
        pass

    def on_scheduled(self, scheduled_at: float) -> None:
        pass

    def on_error(self, code: ErrorCode, message: str) -> None:
        self.error = message
        self.done.set()

    def wait(self) -> Sink:
        if not self.done.wait(WAIT_S):
            raise SystemExit("an answer has not come: a request is lost")
        if self.error:
            raise SystemExit(f"a request failed: {self.error}")
        return self


class Model:
    """A running engine and its client."""

    def __init__(self, supervisor: EngineSupervisor) -> None:
        self.client = supervisor.client
        self.member = supervisor.client.members[0]

    def start(self, prompt: Sequence[int], max_tokens: int = ANSWER_TOKENS) -> Sink:
        sink = Sink()
        rules = TokenRules(max_tokens=max_tokens, ignore_eos=True)
        prompt_bytes = token_ids_to_bytes(list(prompt))
        self.client.submit(AddRequest(self.client.new_request_id(), prompt_bytes, rules), sink)
        return sink

    def ask(self, prompt: Sequence[int], max_tokens: int = ANSWER_TOKENS) -> Sink:
        return self.start(prompt, max_tokens).wait()

    @property
    def life(self) -> EngineLife:
        assert self.member.life is not None
        return self.member.life

    @property
    def rest(self) -> RestStats:
        assert self.member.stats is not None
        assert self.member.stats.rest is not None
        return self.member.stats.rest

    def sleep(self) -> float:
        begin = time.perf_counter()
        answer = set_rest(self.life, True, WAIT_S)
        if answer.problem:
            raise SystemExit(answer.problem)
        return time.perf_counter() - begin

    def wait_asleep(self) -> None:
        deadline = time.perf_counter() + WAIT_S
        while self.rest.state != ASLEEP:
            if time.perf_counter() > deadline:
                raise SystemExit(f"it does not fall asleep: {self.rest}")
            time.sleep(0.002)

    def host_bytes(self) -> tuple[int, int]:
        """(resident memory, open files) of the engine's process."""
        assert self.member.life is not None
        process = Path(f"/proc/{self.member.life.pid}")
        pages = int((process / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(list((process / "fd").iterdir()))


@contextlib.contextmanager
def running(args: argparse.Namespace, name: str, base: Path, **changes: object) -> Iterator[Model]:
    arguments = {
        "model": args.model, "load_format": "dummy", "max_model_len": 4096, "max_num_seqs": 64, **args.engine, **changes
    }  # fmt: skip
    supervisor = EngineSupervisor(engine_config_from_dict(arguments), os.getpid(), name, "1", base)
    begin = time.perf_counter()
    try:
        supervisor.start()
        print(f"{name}: started in {time.perf_counter() - begin:.1f} s", flush=True)
        yield Model(supervisor)
    finally:
        supervisor.close()
