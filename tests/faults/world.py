"""One server under load, and what an injection needs of it: its processes, its faults' file, its clients' histories."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cb_backend.cli.server.processes import descendants
from tests.faults.checker import Verdict, Window, check_folder, write_windows
from tests.faults.faulty_runner import ENVIRONMENT, FaultFile
from tests.faults.history import Event, HistoryReader, Item, write_plan
from tests.server.conftest import RunningServer, running_server
from tests.server.tiny_checkpoint import Reference
from tests.waiting import WAIT_S

CANARY = Item("the quick brown fox", 8, "")
PROMPTS = (
    "the quick", "fox jumps over the lazy dog", "def add(a, b):", "Grüße aus Köln", "東京は夜の", "🙂🙃",
    "seven wizards",
    "the quick brown fox jumps over the lazy dog while seven wizards make toxic brew for the evil queen " * 3,
    "Привет", "print(add(1, 2))", "queen " * 40,
)  # fmt: skip
LENGTHS = (1, 8, 40, 120)
NUM_STREAMS = 16


def make_plan(reference: Reference) -> list[Item]:
    """The canary and every prompt at every length, with the texts that transformers gives."""
    torch.set_num_threads(1)  # a tiny model's threads only wait for one another, for minutes where cores are busy
    longest = max(LENGTHS)
    items = [Item(CANARY.prompt, CANARY.max_tokens, reference.greedy_text(CANARY.prompt, CANARY.max_tokens))]
    for prompt in PROMPTS:
        ids = torch.tensor([reference.tokenizer.encode(prompt).ids])
        with torch.inference_mode():
            output = reference.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest, do_sample=False, pad_token_id=0
            )
        new_ids = output[0, ids.shape[1] :].tolist()
        for length in LENGTHS:
            text = reference.tokenizer.decode(new_ids[:length], skip_special_tokens=True)
            items.append(Item(prompt, length, text))
    return items


class Client:
    """A traffic process."""

    def __init__(self, url: str, folder: Path, name: str, *arguments: str) -> None:
        self.name = name
        self.history = folder / f"history-{name}.jsonl"
        command = [sys.executable, "-m", "tests.faults.traffic", "--url", url, "--plan", str(folder / "plan.json")]
        self._process = subprocess.Popen(
            [*command, "--history", str(self.history), "--name", name, *arguments], stdin=subprocess.PIPE
        )
        self._reader = HistoryReader(self.history)
        self.events: list[Event] = []

    def read(self) -> list[Event]:
        self.events += self._reader.read()
        return self.events

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self, timeout_s: float = 5 * WAIT_S) -> None:
        """Send nothing new, wait for what is open."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(timeout_s) == 0, f"client {self.name} failed"


@dataclass
class World:
    """`windows` is filled by injections; clients that are killed are noted by name."""

    server: RunningServer
    folder: Path
    plan: list[Item]
    faults: FaultFile
    load: Client
    rng: random.Random
    windows: list[Window] = field(default_factory=list)
    killed: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    num_aborts: int = 0  # of the server, where that is no fault of ours
    restart_limit_s: float = 30.0

    def client(self, name: str, *arguments: str) -> Client:
        """A further client, judged with the others."""
        return Client(self.server.url, self.folder, name, *arguments)

    def stubs(self) -> list[int]:
        processes = [process.pid for process in descendants(self.server.process.pid)]
        return [pid for pid in processes if "triton_python_backend_stub" in _command_line(pid)]

    def engine(self) -> int:
        return self.server.engine_pids()[0]

    def wait(self, is_true: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Seconds that it took. Raises `TimeoutError`."""
        begin = time.monotonic()
        while not is_true():
            if time.monotonic() - begin > timeout_s:
                raise TimeoutError(f"not within {timeout_s:g} s: {what}")
            time.sleep(0.05)
        return time.monotonic() - begin

    def wait_for_canary(self, after: float, timeout_s: float = WAIT_S) -> None:
        """Until a canary that was sent after this time has ended well."""

        def has_come() -> bool:
            events = self.load.read()
            sent = {e.request for e in events if e.kind == "send" and e.role == "canary" and e.time >= after}
            return any(e.kind == "final" and e.request in sent for e in events)

        self.wait(has_come, timeout_s, "a canary ends well")

    def judge(self) -> Verdict:
        write_windows(self.folder, self.windows, self.killed)
        verdict = check_folder(self.folder)
        verdict.problems += self.notes
        verdict.counts["server aborts"] += self.num_aborts
        return verdict


@contextlib.contextmanager
def world(
    checkpoint: Path, plan: list[Item], folder: Path, seed: int, load: tuple[str, ...] = (), **server: Any
) -> Iterator[World]:
    """A server with 16 streams and a canary a second on it; at the end every block must be free and all be gone."""
    folder.mkdir(parents=True)
    write_plan(folder / "plan.json", plan)
    faults = FaultFile(folder / "faults.json")
    environment = {ENVIRONMENT: str(folder / "faults.json"), **server.pop("environment", {})}
    arguments = {"worker_cls": "tests.faults.faulty_runner:create_runner", **server}
    with running_server(checkpoint, folder / "repository", environment=environment, **arguments) as running:
        options = ["--streams", str(NUM_STREAMS), "--canary-interval", "1", "--seed", str(seed), *load]
        client = Client(running.url, folder, "load", *options)
        made = World(running, folder, plan, faults, client, random.Random(seed))
        try:
            made.wait_for_canary(0.0)
            yield made
        except BaseException:
            client.kill()
            raise


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""
