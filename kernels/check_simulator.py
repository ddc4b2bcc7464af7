"""How far the simulator is from runs of the engine that were measured: a line a run, predicted over measured.

    python kernels/check_simulator.py --traces DIR

Replays the traffic of every line of `results/study.jsonl` with the step times of `results/`, which were fitted to runs
with a large cache (commit 1f00c93); those with a small one (4,095 blocks) are of another card and another commit.
`DIR` holds Azure's traces of 2023 as AzureLLMInferenceTrace_conv.csv and _code.csv. Needs no GPU; minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.study.bench import Setting, SimulatedBench
from cb_backend.study.figures import Figures, figures
from cb_backend.study.sample import sample_lengths, sample_trace
from cb_backend.study.static_admission import POLICIES
from cb_backend.study.step_times import StepTimes
from cb_backend.study.traffic import Traffic

RESULTS = Path(__file__).parent / "results"
CHECKED = (
    ("output_tokens_per_s", ""),
    ("ttft_ms", "p50"),
    ("ttft_ms", "p99"),
    ("itl_ms", "p50"),
    ("e2e_ms", "p50"),
    ("e2e_ms", "p99"),
)
LENGTHS = {"chat": ("lognormal:245:1.0:1024", "lognormal:208:0.8:1024"), "uniform": ("1155", "211")}


def traffic_of(run: dict[str, Any], times: StepTimes, folder: Path) -> Traffic:
    """The requests of a measured run: samples are drawn with a seed, so they are the same again."""
    name = run["workload"]
    if name in LENGTHS:
        sample = sample_lengths(*LENGTHS[name], run["requests"])
    else:
        sample = sample_trace(folder / f"AzureLLMInferenceTrace_{name}.csv", run["requests"])
    traffic, _ = sample.traffic(times.vocab_size, times.max_model_len, None, 0)
    if run["when"] == "once-known":
        traffic = traffic.with_known_lengths()
    return traffic.at_rate(run["rate"]) if run["when"] == "load" else traffic.at_once()


def predicted(run: dict[str, Any], times: StepTimes, folder: Path) -> Figures:
    arguments = {
        "model": times.model,
        "block_size": times.block_size,
        "num_gpu_blocks_override": run["blocks"],
        "max_model_len": times.max_model_len,
        "run_ahead": times.run_ahead,
    }
    bench = SimulatedBench(engine_config_from_dict(arguments), times)
    return figures(bench.run(traffic_of(run, times, folder), Setting(*run["setting"]), POLICIES[run["policy"]]))


def errors(found: Figures, run: dict[str, Any]) -> list[float]:
    """Predicted over measured, less one, of `CHECKED`."""
    pairs = ((getattr(found, name), run[name], key) for name, key in CHECKED)
    return [(ours[key] / theirs[key] if key else ours / theirs) - 1 for ours, theirs, key in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, metavar="DIR")
    parser.add_argument("--runs", type=Path, default=RESULTS / "study.jsonl")
    parser.add_argument("--times", type=Path, default=RESULTS / "step_times_h100_llama-3.2-1b.json")
    parser.add_argument("--blocks", type=int, help="only runs with a cache of so many blocks")
    parser.add_argument("--policy", choices=[*POLICIES], help="only runs of this scheduling policy")
    args = parser.parse_args()
    times = StepTimes.load(args.times)
    names = [f"{name.removesuffix('_ms').replace('output_tokens_per_s', 'tokens/s')} {key}" for name, key in CHECKED]
    print(f"{'workload, policy, when, requests, blocks, commit':58}" + "".join(f"{name:>11}" for name in names))
    for line in args.runs.read_text().splitlines():
        run = json.loads(line)
        if "workload" not in run:  # a study's own table of predictions
            continue
        if args.blocks in (None, run["blocks"]) and args.policy in (None, run["policy"]):
            what = f"{run['workload']} {run['policy']} {run['when']} {run['requests']} {run['blocks']} {run['commit']}"
            cells = "".join(f"{error:>+11.1%}" for error in errors(predicted(run, times, args.traces), run))
            print(f"{what:58}{cells}", flush=True)


if __name__ == "__main__":
    main()
