"""Many random scenarios; prints failing seeds and counters.

python -m tests.simulation.run --seeds 100000 --start 0
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections import Counter

from tests.simulation.scenario import make_scenario
from tests.simulation.world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many scenarios")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--traces", type=int, default=3, help="how many failures to print in full")
    arguments = parser.parse_args()
    counters: Counter[str] = Counter()
    failing: list[int] = []
    began = time.perf_counter()
    for seed in range(arguments.start, arguments.start + arguments.seeds):
        try:
            counters += World(make_scenario(seed)).run()
        except Exception as error:
            failing.append(seed)
            if len(failing) <= arguments.traces:
                print(f"seed {seed}: {error!r}")
                traceback.print_exc()
    for name, count in sorted(counters.items()):
        print(f"{count:12,}  {name}")
    seconds = time.perf_counter() - began
    print(f"{arguments.seeds} scenarios in {seconds:.1f} s, {len(failing)} failing: {failing[:50]}")
    return bool(failing)


if __name__ == "__main__":
    raise SystemExit(main())
