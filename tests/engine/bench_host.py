"""Host time of an engine step without a device: `python -m tests.engine.bench_host`. Prints, asserts nothing.

The real loop of the engine process, scheduler, slot runner and socket to its front ends, on a CPU; only the captured
graphs and the kernels that join slots and book tokens are left out: launching them does nothing here. So what is
measured is the host's part of a step, but for what the driver takes for a launch, a copy and an event.

    python -m tests.engine.bench_host --rows 256 --front-ends 4
    python -m tests.engine.bench_host --against /path/to/another/checkout     # by turns with this one, 50 steps each

Times are CPU time of the loop's thread: what other processes take of the machine is not in them, but they slow it down
all the same. So on a machine that others use as well only the ratio of two checkouts in one run means something, and
the counts: what Python executes in a step is the same on any machine.

`steady`: every row decodes, a sixteenth of them crosses a block border in each step. `turnover`: requests of 128 to 384
tokens, each followed by a new one, so that nearly every step has one that joins and one that ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
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
from cb_backend.engine.engine_process import EngineProcess
from cb_backend.engine.front_end_link import FrontEndLink
from cb_backend.engine.garbage import GarbageSchedule
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
TURNS_AT_ONCE = 50
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


def serve(scenario: str, num_rows: int, num_front_ends: int) -> None:
    """What runs apart: does what a line of the input names, so often, and prints the result."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, GarbageSchedule():
        loop = Loop(folder, scenario, num_rows, num_front_ends)
        for line in sys.stdin:
            what, number = line.split()
            print(json.dumps(getattr(loop, what)(int(number))), flush=True)
        loop.close()


class Apart:
    """A process that runs the loop of one checkout's package, by that checkout's own copy of this file."""

    def __init__(self, checkout: str, arguments: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": checkout, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, f"{checkout}/tests/engine/bench_host.py", "--serve", *arguments]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: str, number: int) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, number, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def compare(checkouts: list[str], arguments: list[str], num_turns: int) -> None:
    """Run all of them by turns, and print."""
    processes = {checkout: Apart(checkout, arguments) for checkout in checkouts}
    times: dict[str, list[float]] = {checkout: [] for checkout in checkouts}
    for _ in range(0, num_turns, TURNS_AT_ONCE):
        for checkout, process in processes.items():
            times[checkout] += process.ask("turns", TURNS_AT_ONCE)
    if len(checkouts) == 2:
        base, here = (np.percentile(times[checkout], [10, 50]) for checkout in checkouts)
        print("  this checkout's share of the other's time: 10th percentile {:.3f}, median {:.3f}".format(*here / base))
    for checkout, process in processes.items():
        tenth, median = 1e6 * np.percentile(times[checkout], [10, 50])
        instructions, c_calls = process.ask("count", 50)
        phases = process.ask("phases", 500)
        parts = ", ".join(f"{name} {us:.0f}" for name, us in sorted(phases.items(), key=lambda item: -item[1]))
        print(f"  {checkout}: median {median:.1f} us, 10th percentile {tenth:.1f}")
        print(f"    a step executes {instructions:.0f} instructions of Python and {c_calls:.0f} calls of C functions")
        print(f"    with a stopwatch around each part: {sum(phases.values()):.0f} us = {parts}", flush=True)
        process.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", nargs="+", default=["steady", "turnover"], choices=("steady", "turnover"))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--turns", type=int, default=2000)
    parser.add_argument("--against", help="another checkout, run by turns with this one")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.scenario[0], args.rows, args.front_ends)
        return
    here = str(Path(__file__).resolve().parents[2])
    for scenario in args.scenario:
        print(f"{scenario}, {args.rows} rows, {args.front_ends} front ends, run-ahead 4:", flush=True)
        sizes = ["--rows", str(args.rows), "--front-ends", str(args.front_ends)]
        checkouts = [args.against, here] if args.against else [here]
        compare(checkouts, ["--scenario", scenario, *sizes], args.turns)


if __name__ == "__main__":
    main()
