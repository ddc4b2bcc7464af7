"""What `bench_sleep` measures: cycles of sleep and wake, turns of two models on a card, an update of weights.

Each measurement prints what it finds, and ends the command where answers differ.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from cb_backend.front_end.engines.engine_observer import update_weights
from tests.engine.sleeping_model import WAIT_S, Model, Sink, running

PROMPT_TOKENS, LOAD = 128, 7
GIB = 1 << 30


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
