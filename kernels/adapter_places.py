"""An estimate of what streams that each go through one of many adapters reach with few places on the device.

    python kernels/adapter_places.py [--streams 64] [--names 32] [--zipf 1] [--places 8]

Each stream asks again when it is answered, for a name drawn by Zipf's law. An adapter has a place a share f of the
time, at least an answer's time D at once, so it has none for D (1 - f) / f in between, and of its requests those that
come then wait half of that. With X requests/s of which a name has the share p, X p D (1 - f)^2 / 2 f streams wait for
it. `rotation` chooses every f best for a sum of `--places`, and takes it that whoever joins meanwhile does not keep the
place for longer. It is no bound: places go round without regard to who asks, so where streams are few, who load an
adapter when it is asked for wait less. `gathered` is what serving a name's waiting requests together reaches, names in
turns. With a place for each stream or name nobody waits. Steps take `--step-ms` and `--row-us` for each row, and a
prompt stops all rows for `--prompt-ms`: as measured on an H200 with Llama-3.1-8B, 512 tokens in, without adapters;
`--cost` is theirs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def shares(names: int, zipf: float) -> Floats:
    weights: Floats = 1.0 / np.arange(1, names + 1) ** zipf
    return weights / weights.sum()


def best_presence(share: Floats, places: float) -> Floats:
    """Of each name the share of time that it has a place: 1 / f^2 - 1 is inverse to the name's share."""
    if places >= len(share):
        return np.ones(len(share))
    low, high = 1e-12, 1e12
    for _ in range(200):
        middle = (low * high) ** 0.5
        if (1 / np.sqrt(1 + middle / share)).sum() > places:
            low = middle
        else:
            high = middle
    found: Floats = 1 / np.sqrt(1 + high / share)
    return found


def least_waiting(share: Floats, places: float) -> float:
    """Streams that wait, for each that is being answered."""
    present = best_presence(share, places)
    return float((share * (1 - present) ** 2 / (2 * present)).sum())


def gathered_waiting(share: Floats, places: float) -> float:
    """The same where every visit of a name has its waiting requests and no others; names by the root of their share."""
    return float(np.sqrt(share).sum() ** 2 / (2 * places))


def most_tokens(
    streams: int, waiting: float, output_len: int, step_s: Callable[[float], float], prompt_s: float
) -> float:
    """Output tokens/s at which the streams that are answered, and `waiting` times as many, are all that there are."""
    low, high = 0.0, 1.0 / prompt_s
    for _ in range(100):
        rate = (low + high) / 2
        rows = 1.0
        for _ in range(200):
            rows = rate * output_len * step_s(min(rows, 1e6)) / (1 - rate * prompt_s)
        if rows * (1 + waiting) > streams:
            high = rate
        else:
            low = rate
    return low * output_len


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--names", type=int, default=32)
    parser.add_argument("--zipf", type=float, default=1.0)
    parser.add_argument("--places", type=int, default=8)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=4.2)
    parser.add_argument("--row-us", type=float, default=24.5)
    parser.add_argument("--prompt-ms", type=float, default=12.5)
    parser.add_argument("--cost", type=float, default=0.11, help="what adapters add to steps and prompts")
    given = parser.parse_args()
    share = shares(given.names, given.zipf)
    rotating = gathering = 0.0
    if given.places < min(given.streams, given.names):
        rotating, gathering = least_waiting(share, given.places), gathered_waiting(share, given.places)

    def reached(waiting: float, cost: float) -> float:
        def step_s(rows: float) -> float:
            return (1 + cost) * (1e-3 * given.step_ms + 1e-6 * given.row_us * rows)

        return most_tokens(given.streams, waiting, given.output_len, step_s, 1e-3 * given.prompt_ms * (1 + cost))

    base = reached(0.0, 0.0)
    print(f"{given.streams} streams, no adapters: {base:,.0f} output tokens/s")
    for name, waiting, cost in (
        ("a place for each", 0.0, given.cost),
        (f"{given.places} places in rotation, if adapters cost nothing", rotating, 0.0),
        (f"{given.places} places in rotation", rotating, given.cost),
        (f"{given.places} places, gathered", gathering, given.cost),
    ):
        tokens = reached(waiting, cost)
        print(f"{given.names} names, {name}: {tokens:,.0f} ({tokens / base:.0%})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
