"""A model of a real server that sleeps, wakes, changes its weights, loses them and dies, while clients ask all the
time.

    python -m tests.faults.rest_soak --sleeps 200 [--weights host] [--kills 0.02]

It goes on until the model has slept so often, by order or by itself; a request wakes it, an order, an update. Every
answer must be that of the weights that were served while it was asked for, and come once; an error is right only where
an engine has died or files were changed meanwhile. At the end processes hold what they held after a tenth of it. Exit
code 0: nothing lost, nothing wrong, nothing kept.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from cb_backend.contracts.errors import UnavailableError
from cb_backend.contracts.rest import ASLEEP, AWAKE, RestAnswer
from cb_backend.front_end.engines.engine_observer import running_engines, set_rest, update_weights
from cb_backend.front_end.engines.runtime_dir import EngineLife
from tests.faults.processes import Held, held_by
from tests.models.noisy_copy import noisy_copy
from tests.server.conftest import RunningServer, running_server
from tests.server.raw_stream import RawStream
from tests.server.tiny_checkpoint import Reference, write_tiny_checkpoint
from tests.waiting import eventually

ITEMS = [("the quick brown fox", 12), ("seven wizards " * 20, 6), ("fox", 30), ("a", 1), ("jumps over " * 5, 20)]
NUM_CLIENTS = 3
ORDER_S, SLEEP_S = 60.0, 5.0  # a sleep waits for a moment without requests
MOST_GROWTH_MB = 16.0  # of one process, beyond what allocators keep by chance


@dataclass
class Phase:
    """What may be served from its begin to that of the next."""

    begin: float
    weights: set[str]
    may_fail: bool = False


@dataclass
class Timeline:
    """Appended to by one thread, read by all."""

    phases: list[Phase] = field(default_factory=list)

    def now(self, *weights: str, may_fail: bool = False) -> None:
        self.phases.append(Phase(time.monotonic(), set(weights), may_fail))

    def between(self, begin: float, end: float) -> tuple[set[str], bool]:
        """What an answer may be of, and whether an error may have come instead."""
        ends = [phase.begin for phase in self.phases[1:]] + [float("inf")]
        seen = [phase for phase, until in zip(self.phases, ends, strict=False) if phase.begin <= end and until >= begin]
        return set().union(*(phase.weights for phase in seen)), any(phase.may_fail for phase in seen)


class Clients:
    """Ask all the time, but where they are told to leave the model a moment to sleep in."""

    def __init__(self, server: RunningServer, expected: dict[str, list[str]], timeline: Timeline) -> None:
        self.server, self.expected, self.timeline = server, expected, timeline
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.is_over, self.may_ask = threading.Event(), threading.Event()
        self.may_ask.set()

    def run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self.is_over.is_set():
            try:
                self._one(draw)
            except Exception as error:
                self.problems.append(f"lost: {error}")
            time.sleep(draw.choice([0.0, 0.05, 0.3]))
            self.may_ask.wait()

    def _one(self, draw: random.Random) -> None:
        item, begin = draw.randrange(len(ITEMS)), time.monotonic()
        prompt, max_tokens = ITEMS[item]
        stream = RawStream(self.server.url, prompt, {"max_tokens": max_tokens, "temperature": 0})
        if draw.random() < 0.15:
            time.sleep(draw.random() * 0.1)
            stream.close(cancel=True)
            self.server.kept.cancelled.add("llm")
            self.counts["cancelled"] += 1
            return
        stream.wait().close()
        self.judge(item, stream, begin)

    def judge(self, item: int, stream: RawStream, begin: float) -> None:
        weights, may_fail = self.timeline.between(begin, time.monotonic())
        if stream.num_finals != 1:
            self.problems.append(f"{stream.num_finals} ends of one answer")
        if stream.errors:
            self.counts["errors"] += 1
            time.sleep(0.5)  # as a client does
            if not may_fail:
                self.problems.append(f"an error that nothing explains: {stream.errors[0]}")
        elif stream.text in {self.expected[name][item] for name in weights}:
            self.counts["right"] += 1
        else:
            of = [name for name, texts in self.expected.items() if texts[item] == stream.text]
            self.problems.append(
                f"an answer of {of or 'no weights'} where {sorted(weights)} are served: {stream.text!r}"
            )


class Driver:
    """Gives the orders, one at a time."""

    def __init__(
        self, server: RunningServer, folders: dict[str, Path], clients: Clients, draw: random.Random, kills: float
    ) -> None:
        self.server, self.folders, self.clients, self.draw, self.kills = server, folders, clients, draw, kills
        self.weights = "one"
        self.done: Counter[str] = Counter()
        self.timeline = clients.timeline
        self.timeline.now(self.weights)

    def life(self) -> EngineLife:
        (found,) = (life for life in running_engines() if life.pid in self.server.engine_pids())
        return found

    def cycle(self) -> None:
        draw = self.draw
        if draw.random() < 0.8:
            self.clients.may_ask.clear()  # they come again while it falls asleep, or before, or once it sleeps
            again = threading.Timer(draw.choice([0.0, 0.3, 1.0, SLEEP_S]), self.clients.may_ask.set)
            again.start()
            self._order("sleep", lambda: set_rest(self.life(), True, draw.choice([0.2, SLEEP_S, SLEEP_S])))
            again.cancel()
            self.clients.may_ask.set()
        kind = draw.random()
        if kind < self.kills:
            self._die()
        elif kind < self.kills + 0.05:
            self._change_files()
        elif kind < 0.4:
            self._update(draw.choice(list(self.folders)), draw.choice([0.05, ORDER_S, ORDER_S]))
        elif kind < 0.6:
            self._order("wake", lambda: set_rest(self.life(), False, ORDER_S))
        else:
            time.sleep(draw.random() * 0.4)
        self.canary()

    def canary(self) -> None:
        item, begin = self.draw.randrange(len(ITEMS)), time.monotonic()
        stream = RawStream(self.server.url, ITEMS[item][0], {"max_tokens": ITEMS[item][1], "temperature": 0}).wait()
        stream.close()
        self.clients.judge(item, stream, begin)

    def _order(self, name: str, give: Callable[[], RestAnswer]) -> RestAnswer:
        answer = give()
        self.done[f"{name}, called off" if answer.problem else name] += 1
        if answer.problem and "held it up" not in answer.problem:
            self.clients.problems.append(f"{name}: {answer.problem}")
        return answer

    def _update(self, name: str, timeout_s: float, *others: str) -> None:
        """`others`: what may be served until then."""
        self.timeline.now(self.weights, name, *others)
        answer = self._order("update", lambda: update_weights(self.life(), str(self.folders[name]), timeout_s))
        if not answer.problem:
            self.weights = name
        self.timeline.now(self.weights)

    def _die(self) -> None:
        """At any moment: while an order is carried out, or not."""
        life, name = self.life(), self.draw.choice(list(self.folders))
        self.timeline.now(self.weights, name, may_fail=True)
        threading.Timer(self.draw.random() * 0.1, os.kill, (life.pid, signal.SIGKILL)).start()
        for give in (
            lambda: set_rest(life, True, SLEEP_S),
            lambda: update_weights(life, str(self.folders[name]), ORDER_S),
        ):
            try:
                give()
            except UnavailableError:
                break
        eventually(lambda: life.pid not in self.server.engine_pids(), "it has died")
        eventually(self._is_served, "it is served again")
        self.done["death"] += 1
        self._update(self.draw.choice(list(self.folders)), ORDER_S, name)

    def _is_served(self) -> bool:
        stream = RawStream(self.server.url, "fox", {"max_tokens": 1}).wait()
        stream.close()
        return not stream.errors

    def _change_files(self) -> None:
        """Asleep out of files it does not wake, until an update says that it shall."""
        self.timeline.now(self.weights, may_fail=True)
        if set_rest(self.life(), True, SLEEP_S).state not in (ASLEEP, AWAKE):
            self.clients.problems.append("it neither slept nor stayed awake")
        os.utime(self.folders[self.weights] / "model.safetensors")
        time.sleep(self.draw.random() * 0.3)
        self.done["files changed"] += 1
        answer = update_weights(self.life(), str(self.folders[self.weights]), ORDER_S)
        if answer.problem:
            self.clients.problems.append(f"update after a change: {answer.problem}")
        self.timeline.now(self.weights)

    def held(self) -> dict[str, Held]:
        pids = {"server": self.server.process.pid, f"engine {self.life().pid}": self.life().pid}
        found = {name: held_by(pid) for name, pid in pids.items()}
        return {name: held for name, held in found.items() if held is not None}


def soak(args: argparse.Namespace, base: Path) -> int:
    checkpoint = write_tiny_checkpoint(base / "one")
    folders = {"one": checkpoint, "two": noisy_copy(checkpoint, base / "two", 0.3)}
    expected = {name: [Reference(folder).greedy_text(*item) for item in ITEMS] for name, folder in folders.items()}
    options = {"idle_sleep_s": args.idle_sleep_s, "sleep_weights": args.weights, "swap_space": 0.01}
    with running_server(checkpoint, base / "server", **options) as server:
        clients = Clients(server, expected, Timeline())
        driver = Driver(server, folders, clients, random.Random(args.seed), args.kills)
        begin, early, told = time.monotonic(), {}, 20
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            running = [pool.submit(clients.run, args.seed + index) for index in range(NUM_CLIENTS)]
            try:
                slept, end = 0.0, begin + 60 * args.minutes
                while slept < args.sleeps and time.monotonic() < end:
                    driver.cycle()
                    slept = server.gauge("cb_sleeps_total", "llm") or 0.0
                    if slept >= args.sleeps / 10 and not set(driver.held()) <= set(early):
                        early = driver.held()  # again where the engine is another
                    if slept >= told:
                        print(f"{slept:.0f} sleeps, {time.monotonic() - begin:.0f} s: {dict(driver.done)}", flush=True)
                        told += 20
            finally:
                clients.is_over.set()
                clients.may_ask.set()
        for each in running:
            each.result()
        server.wait_idle()
        late = driver.held()
        for name, held in late.items():
            if name in early:
                growth = held.memory_mb - early[name].memory_mb
                print(
                    f"{name}: {growth:+.1f} MB, {held.num_files - early[name].num_files:+d} files, "
                    f"{held.num_threads - early[name].num_threads:+d} threads"
                )
                if growth > MOST_GROWTH_MB or held.num_files > early[name].num_files + 8:
                    clients.problems.append(f"{name} keeps something")
        counts = {name: server.gauge(f"cb_{name}_total", "llm") for name in ("sleeps", "wakes", "weight_updates")}
        print(f"{slept:.0f} sleeps in {time.monotonic() - begin:.0f} s: {dict(driver.done)}; {counts}")
        print(f"requests: {dict(clients.counts)}; problems: {len(clients.problems)}")
        for problem in clients.problems[:20]:
            print(f"! {problem}")
    return int(bool(clients.problems))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sleeps", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=60.0, help="after which it ends, however often it has slept")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--weights", choices=("files", "host"), default="files", help="where they are asleep")
    parser.add_argument("--idle-sleep-s", type=float, default=0.1)
    parser.add_argument("--kills", type=float, default=0.02, help="share of the cycles in which the engine dies")
    args = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="rest-"))
    try:
        return soak(args, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
