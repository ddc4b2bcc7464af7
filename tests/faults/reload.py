"""Reloads models of a real server under load, again and again, and judges what its clients and its metrics saw.

    python -m tests.faults.reload --times 100 --streams 16

Loads over loads, with a changed and a broken `model.json`; unloads and loads of `llm` and of `llm_trtllm`, which shares
its engine; the changed and the broken file, which may stay broken, again on a server that polls its repository. Every
stream must end with its answer or an error, the server must be the same process at the end, and what its metrics count
must only grow. Prints a table; exit code 0: all of that was so.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import shutil
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cb_backend.cli.paths import checkout_path
from tests.faults.checker import Verdict
from tests.faults.injections import RESTART, window
from tests.faults.run import Setting
from tests.faults.world import World, make_plan, world
from tests.server.conftest import RunningServer
from tests.server.metrics_text import Snapshot
from tests.server.tiny_checkpoint import Reference, write_tiny_checkpoint

CODES = RESTART | {"NOT_READY"}
LOAD_S = 120.0
BY_HAND = ("--model-control-mode=explicit", "--load-model=llm", "--load-model=llm_trtllm")
BY_POLLING = ("--model-control-mode=poll", "--repository-poll-secs=1")
SHARE_OF_POLLING = 5  # of so many reloads one is found by polling
NUM_TRIES = 3  # to mend a broken file
LIES_S = 3.0  # a broken file under a server that looks every second


class SecondFront:
    """One client of `llm_trtllm`, over HTTP, from its making to `stop`."""

    def __init__(self, server: RunningServer) -> None:
        self.counts: Counter[str] = Counter()
        self._server = server
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join()

    def _run(self) -> None:
        body: dict[str, object] = {"text_input": "fox", "max_tokens": 16, "bad_words": "", "stop_words": ""}
        while not self._is_stopping:
            self.counts["requests"] += 1
            try:
                status, _ = self._server.post("/v2/models/llm_trtllm/generate", body)
                self.counts["good" if status == 200 else "errors"] += 1
            except (OSError, http.client.HTTPException, urllib.error.URLError):
                self.counts["lost"] += 1
            time.sleep(0.05)


@dataclass
class Reloads:
    """One server under load and what is done to it."""

    world: World
    repository: Path
    took_s: dict[str, list[float]] = field(default_factory=dict)  # by action, in the order of the first time
    _lengths: Any = field(default_factory=lambda: itertools.count(8000))
    _counters: dict[Any, float] = field(default_factory=dict)

    def do(self, what: str, action: Callable[[Reloads], None]) -> None:
        """One of the actions; what it finds wrong is noted."""
        begin = time.monotonic()
        try:
            action(self)
        except (OSError, http.client.HTTPException) as error:
            self.world.notes.append(f"{what}: the server did not answer: {error}")
        self.took_s.setdefault(what, []).append(time.monotonic() - begin)
        window(self.world, begin, codes=CODES)
        self.world.wait_for_canary(self.world.windows[-1].end, LOAD_S)
        self.check_metrics(what)

    def check_metrics(self, what: str) -> None:
        self.compare(what, Snapshot(self.world.server).counters())
        self.world.wait(lambda: Snapshot(self.world.server).value("cb_engine_up") == 1, LOAD_S, "the engine's gauge")

    def compare(self, what: str, now: dict[Any, float]) -> None:
        """With what was counted after the last reload."""
        notes, before = self.world.notes, self._counters
        notes += [f"{what}: {key} is gone from the metrics" for key in before if key not in now]
        fallen = [key for key, value in before.items() if now.get(key, value) < value]
        notes += [f"{what}: {key} has fallen from {before[key]:g} to {now[key]:g}" for key in fallen]
        self._counters = now

    def ask(self, verb: str, model: str, is_good: bool = True) -> None:
        status, text = self.world.server.post(f"/v2/repository/models/{model}/{verb}", {})
        if (status == 200) != is_good:
            self.world.notes.append(f"{verb} of {model}: {status} {text}")

    def change(self) -> str:
        """Other engine arguments for `llm`. Returns those before."""
        file = self.repository / "llm" / "1" / "model.json"
        before = file.read_text()
        file.write_text(json.dumps({**json.loads(before), "max_model_len": next(self._lengths)}))
        return before

    def write(self, text: str) -> None:
        (self.repository / "llm" / "1" / "model.json").write_text(text)

    def engines(self) -> set[int]:
        return set(self.world.server.engine_pids())


def load_changed(reloads: Reloads) -> None:
    reloads.change()
    reloads.ask("load", "llm")


def load_broken(reloads: Reloads) -> None:
    before = reloads.change()
    reloads.write('{"model": ')
    reloads.ask("load", "llm", is_good=False)
    reloads.write(before)


def load_second(reloads: Reloads) -> None:
    """The second front follows `llm` to its engine: the one that it had ends when nobody is left on it."""
    file = reloads.repository / "llm_trtllm" / "1" / "model.json"
    file.write_text(file.read_text() + "\n")  # the server passes over a comment in config.pbtxt
    reloads.ask("load", "llm_trtllm")


def unload_and_load(reloads: Reloads, model: str) -> None:
    for verb in ("unload", "load"):
        reloads.ask(verb, model)


def poll_changed(reloads: Reloads) -> None:
    before = reloads.engines()
    reloads.change()
    reloads.world.wait(lambda: bool(reloads.engines() - before), LOAD_S, "the change is found")


def poll_broken(reloads: Reloads) -> None:
    reloads.write('{"model": ' + " " * next(reloads._lengths))
    lines = reloads.world.server.process.lines
    known = sum("failed to load 'llm'" in line for line in lines)
    is_refused = lambda: sum("failed to load 'llm'" in line for line in list(lines)) != known  # noqa: E731
    reloads.world.wait(is_refused, LOAD_S, "the broken file is found and refused")


def poll_staying_broken(reloads: Reloads) -> None:
    """Found and refused again and again, as by somebody who tries to mend it; between that it lies there broken."""
    for _ in range(NUM_TRIES):
        poll_broken(reloads)
        time.sleep(LIES_S)


ACTIONS: dict[str, Callable[[Reloads], None]] = {
    "load over load, changed": load_changed,
    "load over load, broken": load_broken,
    "load of llm_trtllm over itself": load_second,
    "unload and load of llm_trtllm": lambda reloads: unload_and_load(reloads, "llm_trtllm"),
    "unload and load of llm": lambda reloads: unload_and_load(reloads, "llm"),
}
BROKEN_BY_POLLING: dict[str, Callable[[Reloads], None]] = {
    "polling, broken": poll_broken,
    "polling, staying broken": poll_staying_broken,
}


def run(
    setting: Setting, folder: Path, times: int, streams: int, front_ends: int, is_polling: bool
) -> tuple[Reloads, Verdict]:
    """All on one server."""

    def add_second(repository: Path) -> None:
        shutil.copytree(checkout_path("model_repository/llm_trtllm"), repository / "llm_trtllm")

    server: dict[str, Any] = {"server_arguments": BY_POLLING if is_polling else BY_HAND, "front_ends": front_ends}
    server |= {"prepare": add_second}
    load = ("--streams", str(streams), "--deadline", "300")
    with world(setting.checkpoint, setting.plan, folder, setting.seed, load, **server) as made:
        reloads, second, pid = Reloads(made, folder / "repository"), SecondFront(made.server), made.server.process.pid
        good = (folder / "repository" / "llm" / "1" / "model.json").read_text()
        for number in range(times):
            if not is_polling:
                reloads.do(*list(ACTIONS.items())[number % len(ACTIONS)])
            elif number % 2:
                reloads.do(*list(BROKEN_BY_POLLING.items())[number // 2 % len(BROKEN_BY_POLLING)])
                reloads.write(good)
            else:
                reloads.do("polling, changed", poll_changed)
        second.stop()
        made.load.stop()
        verdict = made.judge()
        verdict.counts.update(second.counts)
        if second.counts["lost"] or not second.counts["good"]:
            verdict.problems.append(f"llm_trtllm: {dict(second.counts)}")
        if made.server.process.poll() is not None or made.server.process.pid != pid:
            verdict.problems.append("the server is not the process that it was")
        return reloads, verdict


def table(results: list[tuple[Reloads, Verdict]]) -> list[str]:
    lines = [f"{'':34}{'times':>6}{'p50 s':>8}{'max s':>8}"]
    for what, took in ((what, sorted(took)) for reloads, _ in results for what, took in reloads.took_s.items()):
        lines.append(f"{what:34}{len(took):6}{took[len(took) // 2]:8.1f}{took[-1]:8.1f}")
    total: Counter[str] = sum((verdict.counts for _, verdict in results), Counter())
    names = ("requests", "good", "errors", "lost", "wrong", "unexpected", "not recovered", "canaries", "canary errors")
    return [*lines, "  ".join(f"{name} {total[name]}" for name in names)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.reload", description=__doc__)
    parser.add_argument("--times", type=int, default=100, help="reloads of all kinds together")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--front-ends", type=int, default=2, help="of llm")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.times < 1:
        parser.error(f"--times is {options.times}; it must be at least 1")
    num_polled = options.times // SHARE_OF_POLLING
    results = []
    with tempfile.TemporaryDirectory(prefix="cb-reload-", dir="/tmp") as temporary:
        base = Path(temporary)
        checkpoint = write_tiny_checkpoint(base / "checkpoint")
        setting = Setting(checkpoint, make_plan(Reference(checkpoint)), options.seed)
        for name, times in (("by-hand", options.times - num_polled), ("polling", num_polled)):
            if times:
                figures = (times, options.streams, options.front_ends, name == "polling")
                results.append(run(setting, base / name, *figures))
                print("\n".join(results[-1][1].problems[:20]), flush=True)
    print("\n".join(table(results)))
    is_clean = not any(verdict.problems for _, verdict in results)
    print("clean" if is_clean else "NOT clean")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
