"""Five times the load that a server can take: refusals are quick, what was accepted ends, all is normal soon after.

    python -m tests.faults.overload --minutes 5 --factor 5

The load is an open loop of client/load_test.py; what it wrote down for each request is judged here. Exit code 0: every
accepted request ended well, refusals came within the limit (99 of 100 of them), back to normal in 10 s.

Where clients and server share their cores, a client that has to wait for one measures itself. So there are several
clients, each with a small part of the load, and beside the figure stands how late they were.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from cb_backend.cli.paths import checkout_path
from tests.server.conftest import RunningServer, running_server
from tests.server.tiny_checkpoint import write_tiny_checkpoint

NUM_SEQS = 16
QUEUE_SIZE = 32
LENGTHS = ("--input-len", "64", "--output-len", "32")
CAPACITY_S = 15.0
NORMAL_FACTOR = 2.0  # of the latency before
NORMAL_IN_A_ROW = 3
NORMAL_LIMIT_S = 10.0
NUM_CLIENTS = 4  # processes


def run_load(
    server: RunningServer, folder: Path, name: str, *arguments: str
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """History of a run of the load test, and how well its clients kept time. Raises `CalledProcessError`."""
    history, result = folder / f"{name}.jsonl", folder / f"{name}.json"
    command = [sys.executable, str(checkout_path("client/load_test.py")), "--url", server.url, *LENGTHS]
    command += ["--processes", str(NUM_CLIENTS), "--history", str(history), "--json", str(result)]
    subprocess.run([*command, *arguments], check=True, stdout=subprocess.DEVNULL)
    client = json.loads(result.read_text())["runs"][0]["client"]
    return [json.loads(line) for line in history.read_text().splitlines()], client


def probe_s(server: RunningServer) -> float:
    """Seconds that one request takes; infinite if it fails."""
    begin = time.monotonic()
    try:
        server.client.generate("the quick brown fox", max_tokens=32, temperature=0, ignore_eos=True)
    except Exception:
        return float("inf")
    return time.monotonic() - begin


def seconds_to_normal(server: RunningServer, normal_s: float) -> float:
    """Until the first of several requests in a row that take no longer than before."""
    begin = time.monotonic()
    in_a_row, first = 0, 0.0
    while in_a_row < NORMAL_IN_A_ROW:
        sent = time.monotonic()
        if probe_s(server) <= NORMAL_FACTOR * normal_s:
            first = first if in_a_row else sent
            in_a_row += 1
        else:
            in_a_row = 0
        if time.monotonic() - begin > 120:
            return float("inf")
    return first - begin


def client_lines(history: list[dict[str, Any]], client: dict[str, float]) -> list[str]:
    """How much of the refusals' times is the clients' own, as far as they can tell."""
    own = [1000 * (r["written_s"] - r["sent_s"]) for r in history if r["status"] == "refused" and r["written_s"]]
    if not own:
        return []
    p50, p99 = np.percentile(own, [50, 99])
    return [
        f"  of that the clients took {p50:.1f} ms (p50), {p99:.1f} ms (p99) before a request had left them",
        f"  their event loops woke {client['loop_lag_p99_ms']:.1f} ms late (p99), several times a request; "
        f"the machine was {client['machine_cpu_share']:.0%} busy",
    ]


def judge(
    history: list[dict[str, Any]], client: dict[str, float], to_normal_s: float, refusal_limit_s: float
) -> list[str]:
    """Lines to print; those that tell of a failure begin with '!'."""
    statuses = Counter(record["status"] for record in history)
    refused = np.array([r["end_s"] - r["sent_s"] for r in history if r["status"] == "refused"])
    lines = [f"  {len(history)} requests: " + ", ".join(f"{n} {status}" for status, n in sorted(statuses.items()))]
    failed = [r for r in history if r["status"] not in ("ok", "refused")]
    lines += [f"! request {r['id']} ended as {r['status']}: {r['error']}" for r in failed[:10]]
    incomplete = [r for r in history if r["status"] == "ok" and sum(n for _, n in r["chunks"]) != 32]
    lines += [f"! request {r['id']} was accepted and got {r['chunks'][-1:]} only" for r in incomplete[:10]]
    if len(refused):
        p50, p99 = np.percentile(refused, [50, 99])
        lines.append(f"  refusals took {1000 * p50:.1f} ms (p50), {1000 * p99:.1f} ms (p99)")
        lines += client_lines(history, client)
        if p99 > refusal_limit_s:
            lines.append(f"! refusals took longer than {1000 * refusal_limit_s:.0f} ms")
    else:
        lines.append("! nothing was refused: this was no overload")
    lines.append(f"  back to normal after {to_normal_s:.1f} s")
    if to_normal_s > NORMAL_LIMIT_S:
        lines.append(f"! not back to normal within {NORMAL_LIMIT_S:.0f} s")
    return lines


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.overload", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--factor", type=float, default=5.0, help="times the rate that the server can take")
    parser.add_argument("--refusal-limit-ms", type=float, default=100.0)
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or options.factor <= 1:
        parser.error("--minutes must be above 0 and --factor above 1")
    with tempfile.TemporaryDirectory(prefix="cb-overload-", dir="/tmp") as temporary:
        folder = Path(temporary)
        checkpoint = write_tiny_checkpoint(folder / "checkpoint")
        sizes = {"max_num_seqs": NUM_SEQS, "max_queue_size": QUEUE_SIZE}
        (folder / "server").mkdir()
        with running_server(checkpoint, folder / "server", **sizes) as server:  # type: ignore[arg-type]
            normal_s = float(np.median([probe_s(server) for _ in range(10)]))
            saturating = ("--concurrency", str(NUM_SEQS), "--duration", str(CAPACITY_S))
            closed, _ = run_load(server, folder, "capacity", *saturating)
            capacity = sum(r["status"] == "ok" for r in closed) / max(r["end_s"] for r in closed)
            print(f"capacity {capacity:.1f} requests/s; one alone takes {normal_s:.2f} s", flush=True)
            rate, seconds = f"{options.factor * capacity:.1f}", str(options.minutes * 60)
            history, client = run_load(server, folder, "overload", "--rate", rate, "--duration", seconds)
            lines = judge(history, client, seconds_to_normal(server, normal_s), options.refusal_limit_ms / 1000)
            server.wait_idle()
    print("\n".join(lines))
    is_clean = not any(line.startswith("!") for line in lines)
    print("clean" if is_clean else "NOT clean")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
