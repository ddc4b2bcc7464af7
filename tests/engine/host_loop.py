"""An engine process in mid-service whose kernels and graphs do nothing, its clients, and what a turn of its loop costs.

Times are CPU time of the loop's thread; see `bench_host`, which prints them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import zmq

from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.messages import (
    AddRequest,
    Hello,
    StepOutput,
    decode_engine_message,
    encode,
    token_ids_to_bytes,
)
from cb_backend.contracts.request import make_request_id
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.engine_loop import EngineProcess
from cb_backend.engine.front_end_link import FrontEndLink
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.step_shapes import step_shapes
from tests.fakes.graphs import NoGraph

CHECKPOINT: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "eos_token_id": 2, "bos_token_id": 1, "tie_word_embeddings": True, "torch_dtype": "float32",
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
WARM_UP_TURNS = 150
SHORTEST, LONGEST = 128, 384  # output tokens of a request in turnover


def make_engine(folder: Path, num_rows: int) -> LLMEngine:
    """An engine whose `SlotRunner` replays graphs that compute nothing: every token is 0."""
    (folder / "config.json").write_text(json.dumps(CHECKPOINT))
    arguments = {
        "model": str(folder), "load_format": "dummy", "device": "cpu", "max_num_seqs": num_rows, "run_ahead": 4,
        "num_gpu_blocks_override": num_rows * CHECKPOINT["max_position_embeddings"] // 16 + 1,
    }  # fmt: skip
    config = engine_config_from_dict(arguments)
    engine = create_engine(config)
    plain: Any = engine.runner
    # Slots that nobody joins on the device have no tokens: a step launched kernel by kernel would find them ended.
    ops = dataclasses.replace(
        plain.ops, join_slots=lambda *_: None, commit_tokens=lambda *arguments: arguments[-1].zero_()
    )
    runner = SlotRunner(plain.model, ops, plain.storage, num_rows, engine.info.max_model_len)
    for shape in step_shapes(num_rows, config.max_num_batched_tokens):
        runner.graphs.add(shape, NoGraph(), runner.new_buffers(shape))
    return LLMEngine(config, runner, engine.info)


class Clients:
    """The front ends' ends of the socket: they send requests, and read what comes when nobody measures."""

    def __init__(self, socket_path: str, num_front_ends: int, is_turnover: bool) -> None:
        self._is_turnover = is_turnover
        self._random = np.random.default_rng(0)
        self._num_sent = 0
        self._context = zmq.Context(io_threads=1)
        self._sockets = []
        for front_end in range(num_front_ends):
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"ipc://{socket_path}")
            socket.send(encode(Hello(front_end, os.getpid())))
            self._sockets.append(socket)

    def send_request(self, is_first: bool = False) -> None:
        number = self._num_sent
        self._num_sent += 1
        front_end = number % len(self._sockets)
        length = int(self._random.integers(SHORTEST, LONGEST)) if self._is_turnover else 3900
        if is_first and self._is_turnover:
            length = int(self._random.integers(1, length))  # as if it had begun some time ago
        prompt = self._random.integers(3, 500, 32 + number % 16)
        params = TokenRules(max_tokens=length, temperature=0.6, seed=number)
        request_id = make_request_id(front_end, number)
        self._sockets[front_end].send(encode(AddRequest(request_id, token_ids_to_bytes(prompt), params)))

    def read(self) -> None:
        """Take what has come; every request that has ended is followed by another."""
        for socket in self._sockets:
            while socket.poll(0):
                message = decode_engine_message(socket.recv())
                if isinstance(message, StepOutput):
                    for _ in range(len(message.finish_reasons) - message.finish_reasons.count(0)):
                        self.send_request()

    def close(self) -> None:
        self._context.destroy(linger=0)


class Phases:
    """Self times of calls by name: time within a call that is timed itself counts for that one alone."""

    def __init__(self, process: EngineProcess) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]
        engine, link = process.engine, process.link
        for owner, method, name in (
            (process, "_take_messages", "messages"),
            (process, "_expire", "timeouts"),
            (process, "_step", "loop"),
            (process, "_look_around", "look around"),
            (engine, "step", "loop"),
            (engine.scheduler, "schedule", "schedule"),
            (engine.runner, "execute", "launch"),
            (engine.scheduler, "update_from_output", "take in the result"),
            *((engine.log, method, "step log") for method in ("begin", "launching", "launched", "waiting", "arrived")),
            (engine.log, "completed", "step log"),
            (link, "send_output", "make the messages"),
            (link, "send", "encode and send"),
        ):
            self._time(owner, method, name)

    def _time(self, owner: Any, method: str, name: str) -> None:
        call = getattr(owner, method)

        def timed(*args: Any) -> Any:
            self._inner.append(0.0)
            start = time.thread_time()
            try:
                return call(*args)
            finally:
                took = time.thread_time() - start
                self.seconds[name] = self.seconds.get(name, 0.0) + took - self._inner.pop()
                self._inner[-1] += took

        setattr(owner, method, timed)


class Counts:
    """A context that counts what this thread executes: Python's instructions, and calls of functions written in C."""

    def __init__(self) -> None:
        self.instructions = 0
        self.c_calls = 0

    def __enter__(self) -> Counts:
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.instructions += event == "opcode"
        return self._trace

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        self.c_calls += event == "c_call"


class Loop:
    """An engine process in mid-service, its clients, and what a turn of its loop costs."""

    def __init__(self, folder: str, scenario: str, num_rows: int, num_front_ends: int) -> None:
        engine = make_engine(Path(folder), num_rows)
        link = FrontEndLink(f"{folder}/socket", os.getpid())
        self.clients = Clients(f"{folder}/socket", num_front_ends, scenario == "turnover")
        self.process = EngineProcess(engine, link)
        while len(link.front_ends) < num_front_ends:
            self.process.turn()
        for _ in range(num_rows):
            self.clients.send_request(is_first=True)
        while engine.scheduler.num_running < num_rows:
            self.turns(1)
        self.turns(WARM_UP_TURNS)

    def close(self) -> None:
        self.clients.close()
        self.process.link.close()
        self.process.engine.close()

    def turns(self, number: int) -> list[float]:
        """Seconds of each."""
        times = []
        for _ in range(number):
            began = time.thread_time()
            self.process.turn()
            times.append(time.thread_time() - began)
            self.clients.read()
        return times

    def count(self, number: int) -> tuple[float, float]:
        """Python's instructions and C calls of a turn."""
        counts = Counts()
        for _ in range(number):
            with counts:
                self.process.turn()
            self.clients.read()
        return counts.instructions / number, counts.c_calls / number

    def phases(self, number: int) -> dict[str, float]:
        """Microseconds by phase, means. The stopwatches stay."""
        phases = Phases(self.process)
        self.turns(number)
        return {name: 1e6 * seconds / number for name, seconds in phases.seconds.items()}
