"""How fast a model sleeps and wakes, and what of a card it holds meanwhile. Prints; fails where answers differ.

    python -m tests.engine.bench_sleep cycles MODEL [--cycles 200] [--seconds 120]   # sizes, times, answers under load
    python -m tests.engine.bench_sleep turns MODEL [--seconds 20]                    # two models that need a whole card
    python -m tests.engine.bench_sleep update MODEL FOLDER                           # other weights, and back
    python -m tests.engine.bench_sleep write FOLDER --shape 8b                       # a checkpoint for `update`

MODEL is a folder with a config.json: weights are random (`--load-format dummy`). Engines run as behind a server: in
processes of their own, asked by a front end's client. Answers that are compared come from requests that run alone, so
that no neighbour moves their rounding; the load around them does not.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
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
from cb_backend.front_end.engines.engine_observer import set_rest, update_weights
from cb_backend.front_end.engines.runtime_dir import EngineLife
from cb_backend.front_end.engines.supervisor import EngineSupervisor

WAIT_S = 120.0
PROMPT_TOKENS, ANSWER_TOKENS, LOAD = 128, 12, 7
GIB = 1 << 30


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


def card_bytes() -> int:
    """Used on the card, by everybody; 0 where there is none."""
    index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    command = ["nvidia-smi", "-i", index, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) << 20
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return 0


def some_prompts(number: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, 2000) for _ in range(length)] for _ in range(number)]


def told(seconds: Sequence[float]) -> str:
    ordered = sorted(seconds)
    return f"median {statistics.median(ordered):.3f}, worst {ordered[-1]:.3f} s of {len(ordered)}"


def same(found: Sink, expected: list[int], when: str) -> None:
    if found.token_ids != expected:
        raise SystemExit(f"DIFFERENT TOKENS {when}: {found.token_ids} instead of {expected}")


def cycles(args: argparse.Namespace, base: Path) -> None:
    prompts, empty = some_prompts(8), card_bytes()
    long = some_prompts(1)[0]
    if not args.no_plain:
        with running(args, "plain", base) as plain:
            plain.ask(long)
            awake = plain.ask(long, 200)
            print(f"plain: {1e3 * (awake.times[-1] - awake.times[0]) / 199:.3f} ms a token")
            expected_long = awake.token_ids
    with running(args, "sleeper", base, idle_sleep_s=0) as model:
        model.ask(long)
        alone = model.ask(long, 200)
        print(f"sleeper: {1e3 * (alone.times[-1] - alone.times[0]) / 199:.3f} ms a token")
        if not args.no_plain:
            same(alone, expected_long, "in memory that comes and goes")
        expected = [model.ask(prompt).token_ids for prompt in prompts]
        ttft = [model.ask(prompt).times[0] for prompt in some_prompts(20, 120)]
        print(f"awake: {(card_bytes() - empty) / GIB:.2f} GiB of the card; first token: {told(ttft)}")
        print(f"first sleep, host memory to be pinned: {model.sleep():.2f} s")
        print(f"ASLEEP: {(card_bytes() - empty) / 1e9:.3f} GB of the card (goal 1.5)", flush=True)
        for pause, when in ((0.0, "at once"), (args.rest, f"{args.rest:g} s asleep")):
            wakes, falls = [], []
            for index in range(12):
                time.sleep(pause)
                answer = model.ask(prompts[index % 8])
                wakes.append(answer.times[0])
                same(answer, expected[index % 8], "after a sleep")
                falls.append(model.sleep())
            print(f"WAKE TO FIRST TOKEN, {when}: {told(wakes)} (goal 0.6); falling asleep: {told(falls)}", flush=True)
    with running(args, "under load", base, idle_sleep_s=0.02) as model:
        expected = [model.ask(prompt).token_ids for prompt in prompts]
        _under_load(args, model, prompts, expected)


def _under_load(args: argparse.Namespace, model: Model, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """Wakes by a request that is compared, then load; the next may come before, while or after it falls asleep."""
    draw, begin, done, first = random.Random(1), time.perf_counter(), 0, None
    model.wait_asleep()
    firsts: list[float] = []
    while done < args.cycles and time.perf_counter() - begin < args.seconds:
        answer = model.ask(prompts[done % 8])
        firsts.append(answer.times[0])
        same(answer, expected[done % 8], f"in cycle {done}")
        for sink in [model.start(prompts[draw.randrange(8)], draw.randrange(1, 32)) for _ in range(LOAD)]:
            sink.wait()
        if done % 4 == 3:  # wakes it again at any moment
            time.sleep(draw.random() * 0.1)
            model.ask(prompts[0], 4)
        model.wait_asleep()
        done += 1
        if done == min(10, args.cycles):
            first = (*model.host_bytes(), card_bytes())
    last = (*model.host_bytes(), card_bytes())
    first = first or last
    shown = [f"{(last[i] - first[i]) / 2**20:+.1f} MiB" for i in (0, 2)]
    print(
        f"UNDER LOAD: {done} cycles, {model.rest.num_wakes} wakes, answers equal; since cycle 10 host {shown[0]}, card "
        f"asleep {shown[1]}, {last[1] - first[1]:+d} files; first token {told(firsts)}",
        flush=True,
    )


def turns(args: argparse.Namespace, base: Path) -> None:
    prompts = some_prompts(8)
    with running(args, "A", base, idle_sleep_s=0, turn_s=2) as one:
        expected = one.ask(prompts[0]).token_ids
        with running(args, "B", base, idle_sleep_s=0, turn_s=2, seed=1) as two:
            print(f"B has the card, A is {one.rest.state}; {card_bytes() / GIB:.1f} GiB used")
            other = two.ask(prompts[0]).token_ids
            switches = []
            for index in range(8):
                model, tokens = ((one, expected), (two, other))[index % 2]
                answer = model.ask(prompts[0])
                same(answer, tokens, "after a turn of the other")
                switches.append(answer.times[0])
            print(f"TURNS, neither busy: first token {told(switches)}", flush=True)
            counts = {"A": 0, "B": 0}
            end = time.perf_counter() + args.seconds

            def load(name: str, model: Model, seed: int) -> None:
                draw = random.Random(seed)
                while time.perf_counter() < end:
                    model.ask(prompts[draw.randrange(8)], draw.randrange(1, 64))
                    counts[name] += 1

            threads = [
                threading.Thread(target=load, args=(n, m, s), daemon=True)
                for n, m in (("A", one), ("B", two))
                for s in (1, 2)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            wakes = one.rest.num_wakes + two.rest.num_wakes
            print(f"TURNS, both busy for {args.seconds:g} s: {counts} requests ended, {wakes} wakes in all", flush=True)
            if not all(counts.values()):
                raise SystemExit("one of them never had the card")


def update(args: argparse.Namespace, base: Path) -> None:
    prompts = some_prompts(8)
    with running(args, "updated", base, idle_sleep_s=0) as model:
        old = [model.ask(prompt).token_ids for prompt in prompts]
        cached = model.ask(prompts[0], 300).token_ids  # of a prompt that is in the cache, as the one below
        most, is_over = [card_bytes()], threading.Event()

        def watch() -> None:
            while not is_over.wait(0.05):
                most.append(card_bytes())

        before, watching = card_bytes(), threading.Thread(target=watch, daemon=True)
        watching.start()
        running_one = model.start(prompts[0], 300)
        while not running_one.token_ids:
            time.sleep(0.001)
        for folder, name in ((args.folder, "to the files"), (args.model, "back")):
            begin = time.perf_counter()
            answer = update_weights(model.life, str(Path(folder).absolute()), WAIT_S)
            if answer.problem:
                raise SystemExit(answer.problem)
            took = time.perf_counter() - begin
            print(f"UPDATE {name}: swapped in {answer.seconds:.2f} s, {took:.2f} s with waiting")
            tokens = [model.ask(prompt).token_ids for prompt in prompts]
            if folder == args.folder and tokens == old:
                raise SystemExit("the update changed nothing")
            if folder == args.folder:
                same(running_one.wait(), cached, "of who ran meanwhile")
        is_over.set()
        watching.join()
        print(
            f"old answers again: {tokens == old}; most of the card beyond before: {(max(most) - before) / 1e6:.0f} MB"
        )
        if tokens != old:
            raise SystemExit("DIFFERENT TOKENS after the old weights came back")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("cycles", "turns", "update"):
        command = commands.add_parser(name)
        command.add_argument("model")
        if name == "update":
            command.add_argument("folder")
        command.add_argument("--cycles", type=int, default=200)
        command.add_argument("--seconds", type=float, default=120.0 if name == "cycles" else 20.0)
        command.add_argument("--rest", type=float, default=1.0, help="seconds asleep: what was given up is cleared")
        command.add_argument("--no-plain", action="store_true", help="no engine without sleep beside")
        command.add_argument("--engine", type=_pairs, default={}, metavar="NAME=VALUE,...", help="engine arguments")
    write = commands.add_parser("write")
    write.add_argument("folder", type=Path)
    write.add_argument("--shape", default="8b")
    args = parser.parse_args()
    if args.command == "write":
        from tests.models.bench_load import write as write_checkpoint

        write_checkpoint(args.folder, args.shape)
        return
    base = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
    try:
        {"cycles": cycles, "turns": turns, "update": update}[args.command](args, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _pairs(text: str) -> dict[str, object]:
    return dict(pair.split("=", 1) for pair in text.split(",") if pair)


if __name__ == "__main__":
    sys.exit(main())
