"""Two revisions of the package on one card: the same kernels, the same bits, and how long captured decode steps take.

    git worktree add ../before REVISION
    python kernels/compare_revisions.py ../before [--models llama-3.2-1b] [--rows 1,64,256] [--rounds 3]

Each revision runs its own `kernels/bench_step.py` in turn, so that a drift of the card's speed meets both, and in a
process a model: behind another model's memory a step of Llama-3.2-1B takes up to a tenth longer. Of a step are
compared: the kernels of a replay by name and number, and after three replays from one state every bit of the tokens,
lengths and KV cache. Exit code 1 where a kernel or a bit differs. Where the step's time does, the kernels follow whose
own time changed most (profiled, so that the parts need not add up to the whole).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
STEPS = 3  # replays whose bits are compared
CHUNK = 1 << 26  # words of 16 bits added up at a time
PLACES = 1_000_003
FELT = 0.01  # of a step's time: less is not looked into


def look_at(folder: Path, models: list[str], rows: list[int]) -> list[dict[str, Any]]:
    """Runs in a process of one revision: what its steps launch, leave behind and take. One entry a model and size."""
    sys.path[:0] = [str(folder), str(folder / "kernels")]
    import torch
    from bench_step import capture, make_model, make_runner, seat, time_step

    found = []
    for name in models:
        torch.manual_seed(0)
        model = make_model(name)
        for num_rows in rows:
            torch.manual_seed(num_rows)
            lengths = [640] * num_rows
            runner = make_runner(model, lengths)
            before = runner.storage.data.clone()
            graph, buffers = capture(runner, num_rows)
            runner.storage.data.copy_(before)
            seat(runner, lengths)
            for _ in range(STEPS):
                graph.replay()
            torch.cuda.synchronize()
            state = (runner.state.last_token[:num_rows], runner.state.num_tokens[:num_rows], runner.storage.data)
            entry: dict[str, Any] = {"model": name, "rows": num_rows, "bits": [digest(part) for part in state]}
            seat(runner, lengths)
            entry["seconds"] = time_step(graph, 40)
            # Last: replays after a profiled one were seen to fail.
            entry["kernels"], entry["microseconds"] = kernels_of(graph)
            found.append(entry)
            del graph, buffers, before
            runner.close()
            del runner
            torch.cuda.empty_cache()
        del model
        torch.cuda.empty_cache()
    return found


def digest(tensor: Any) -> int:
    """A number that another bit anywhere, or an exchange of two words, changes: sums of words times their places."""
    import torch

    words, total = tensor.contiguous().view(-1).view(torch.int16), 0
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK].long()
        places = torch.arange(start + 1, start + 1 + len(part), device=part.device) % PLACES + 1
        total = (total * 31 + int((part * places).sum())) % (1 << 61)
    return total


def kernels_of(graph: Any) -> tuple[dict[str, int], dict[str, float]]:
    """By name, of one replay: launches, and microseconds of them all."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graph.replay()
        torch.cuda.synchronize()
    events = profiler.events()
    microseconds: Counter[str] = Counter()
    for event in events:
        microseconds[event.name] += event.device_time
    return dict(Counter(event.name for event in events)), dict(microseconds)


def run(folder: Path, model: str, rows: str) -> list[dict[str, Any]]:
    """`look_at` in a process that sees this revision alone. Raises `CalledProcessError` with its output shown."""
    command = [sys.executable, str(Path(__file__).resolve()), str(folder), "--look", "--models", model, "--rows", rows]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=folder).stdout
    found: list[dict[str, Any]] = json.loads(printed.splitlines()[-1])
    return found


def differences(before: dict[str, int], after: dict[str, int]) -> str:
    """Kernels that the two do not launch equally often; empty: none."""
    names = [name for name in {**before, **after} if before.get(name, 0) != after.get(name, 0)]
    return ", ".join(f"{name[:60]} {before.get(name, 0)} -> {after.get(name, 0)}" for name in names)


def most_changed(old: list[dict[str, Any]], new: list[dict[str, Any]], most: int = 4) -> list[str]:
    """Lines of the kernels whose time in a replay changed most, by the medians of the rounds."""
    names = {name: None for entry in (*old, *new) for name in entry["microseconds"]}
    times = {
        name: [statistics.median(entry["microseconds"].get(name, 0.0) for entry in side) for side in (old, new)]
        for name in names
    }
    changed = sorted(times, key=lambda name: -abs(times[name][1] - times[name][0]))[:most]
    return [f"    {times[name][0]:9.1f} -> {times[name][1]:9.1f} us  {name[:80]}" for name in changed]


def compare(before: Path, model: str, rows: str, rounds: int) -> bool:
    """Print how the model's steps of both revisions differ; whether none does in kernels or bits."""
    sides: dict[str, list[list[dict[str, Any]]]] = {"before": [], "after": []}
    for _ in range(rounds):
        for side, folder in (("before", before), ("after", HERE)):
            sides[side].append(run(folder, model, rows))
    is_same = True
    for index, first in enumerate(sides["before"][0]):
        old, new = ([one[index] for one in sides[side]] for side in ("before", "after"))
        changed = differences(old[0]["kernels"], new[0]["kernels"])
        has_bits = all(one["bits"] == first["bits"] for one in old + new)
        times = [statistics.median(one["seconds"] for one in side) for side in (old, new)]
        ratios = [b["seconds"] / a["seconds"] for a, b in zip(old, new, strict=True)]
        is_same &= has_bits and not changed
        print(
            f"{first['model']:14} rows {first['rows']:4}  {1e3 * times[0]:8.3f} -> {1e3 * times[1]:8.3f} ms"
            f"  ratio {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})"
            f"  {sum(new[0]['kernels'].values())} launches {changed or 'equal'}"
            f"  bits {'equal' if has_bits else 'DIFFER'}",
            flush=True,
        )
        if abs(statistics.median(ratios) - 1) > FELT:
            print(*most_changed(old, new), sep="\n", flush=True)
    return is_same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="a checkout of the other revision")
    parser.add_argument("--models", default="qwen3-0.6b,llama-3.2-1b,llama-3.1-8b")
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--rounds", type=int, default=3, help="times that each revision is run (%(default)s)")
    parser.add_argument("--look", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.look:
        rows = [int(number) for number in arguments.rows.split(",")]
        print(json.dumps(look_at(arguments.before, arguments.models.split(","), rows)))
        return 0
    is_same = [
        compare(arguments.before.resolve(), model, arguments.rows, arguments.rounds)
        for model in arguments.models.split(",")
    ]
    return 0 if all(is_same) else 1


if __name__ == "__main__":
    sys.exit(main())
