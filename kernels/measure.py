"""Run lists of measurements on one machine: lanes side by side, each command under its time limit, a table at the end.

    python kernels/measure.py kernels/plans/packed.plan kernels/plans/seeds.plan --out DIR --limit 560
    python kernels/measure.py kernels/plans/packed.plan --out DIR        # goes on: what is done already is skipped

A plan has a line a command, `lane seconds name [lines]: command`; `\\` goes on in the next line, `#` begins a comment.
bash runs the command in this repository's root and ends it after so many seconds; what it prints is DIR/name.txt, and
its last `lines` (1) stand in the table. The lines of a lane run one after the other, lanes side by side:

    gpu0, gpu1, ...   that GPU alone (CUDA_VISIBLE_DEVICES), and a share of the cores
    gpus              all GPUs: waits for what stands above it on a GPU, and what stands below on one waits for it
    cpu, cpu0, ...    no GPU, and a share of the cores that the GPUs' lanes leave

Commands see OUT (DIR), CORES (how many they have) and `python` (this one). A command with a $NAME in capitals that is
not set is not run, as is one that could not end before --limit. Exit code 0: all have run and ended with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from measuring_plan import GPU_CORES, Line, PlanError, read_plans, share_cores  # noqa: E402

from cb_backend.cli.server.processes import session_members  # noqa: E402
from cb_backend.front_end.engines.engine_launch import visible_gpus  # noqa: E402

GRACE_S = 5.0  # from SIGTERM to SIGKILL
TICK_S = 0.05
OF_LANE = ("CUDA_VISIBLE_DEVICES", "CORES")  # variables
# Asked in a process of its own: a CUDA context would hold memory of a GPU that is measured.
ABOUT_HOST = """
import os, torch
from cb_backend.study.machine import conditions
about = conditions("cuda" if torch.cuda.is_available() else "cpu")
about |= {"gpus": torch.cuda.device_count(), "load": " ".join(f"{load:.1f}" for load in os.getloadavg())}
print(", ".join(f"{name} {value}" for name, value in about.items()))
"""


@dataclass
class Running:
    """A command that has been started, as the leader of a session of its own."""

    line: Line
    process: subprocess.Popen[bytes]
    start: float
    told_to_end: float | None = None  # when

    def end(self) -> None:
        """SIGTERM, and SIGKILL when that has not helped in time. To be called again until the command has ended."""
        now = time.monotonic()
        if self.told_to_end is None:
            self.told_to_end = now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
        elif now - self.told_to_end > GRACE_S:
            self.kill()

    def kill(self) -> None:
        """Also what the command has left behind."""
        for process in session_members(self.process.pid):
            process.kill()
        if self.process.poll() is None:
            self.process.kill()


@dataclass(frozen=True)
class End:
    """How a command ended; a line of DIR/ends.jsonl."""

    name: str
    command: str
    seconds: float
    code: int | None  # None: it was ended at its limit

    @property
    def verdict(self) -> str:
        return "ended at its limit" if self.code is None else f"exit {self.code}"


class Measurements:
    """What is to be run, what runs, and how it ended."""

    def __init__(
        self,
        lines: list[Line],
        out: Path,
        limit: float,
        gpus: list[str],
        again: Iterable[str] = (),
        gpu_cores: int = GPU_CORES,
    ) -> None:
        self.lines, self.out, self.limit, self.gpus = lines, out, limit, gpus
        cores = sorted(os.sched_getaffinity(0))
        self.cores = share_cores((line.lane for line in lines), len(gpus), cores, gpu_cores)
        self.environment = {**os.environ, "OUT": str(out), "PYTHONUNBUFFERED": "1"}
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        self.start = time.monotonic()
        self.journal = out / "ends.jsonl"
        self.ends = {end.name: end for end in self._journalled() if end.name not in again}
        self.not_run: dict[str, str] = {}  # name -> why
        self.running: list[Running] = []
        self.is_stopped = False

    def stop(self, *_: object) -> None:
        """As a handler of signals: nothing is broken off midway, so that no command is started and forgotten."""
        self.is_stopped = True

    def _journalled(self) -> Iterator[End]:
        """How lines have ended whose commands are still the same, the newest last."""
        commands = {line.name: line.command for line in self.lines}
        for text in self.journal.read_text().splitlines() if self.journal.exists() else ():
            end = End(**json.loads(text))
            if commands.get(end.name) == end.command:
                yield end

    def run(self) -> None:
        """All lines that are not done, until it is stopped; what still runs then, or on an exception, is ended."""
        waiting = [line for line in self.lines if line.name not in self.ends]
        try:
            while (waiting or self.running) and not self.is_stopped:
                self._look_after()
                waiting = self._start_what_can(waiting)
                time.sleep(TICK_S)
        finally:
            self.not_run |= {line.name: "stopped before" for line in [*waiting, *(run.line for run in self.running)]}
            self._end_all()

    def _start_what_can(self, waiting: list[Line]) -> list[Line]:
        """Begins lines whose lanes are free of running ones and of those above them. Returns the ones that wait on."""
        held, still = [run.line.lane for run in self.running], []
        for line in waiting:
            if any(line.excludes(lane) for lane in held):
                still.append(line)
            elif why := self._why_not(line):
                self.not_run[line.name] = why
                continue
            else:
                self._begin(line)
            held.append(line.lane)
        return still

    def _why_not(self, line: Line) -> str:
        """Why a line whose turn it is cannot be run; empty: it can."""
        missing = [name for name in line.variables() if name not in self.environment and name not in OF_LANE]
        if missing:
            return f"${missing[0]} is not set"
        if line.lane.startswith("gpu") and not self._devices(line.lane):
            return f"there is no such GPU: {len(self.gpus)} are visible"
        left = self.limit - (time.monotonic() - self.start)
        return "" if line.seconds + GRACE_S <= left else f"it may take {line.seconds:g} s of {max(0.0, left):.0f}"

    def _devices(self, lane: str) -> list[str]:
        if lane.startswith("cpu"):
            return []
        return self.gpus if lane == "gpus" else self.gpus[int(lane[3:]) :][:1]

    def _begin(self, line: Line) -> None:
        cores = self.cores[line.lane]
        of_lane = dict(zip(OF_LANE, (",".join(self._devices(line.lane)), str(len(cores))), strict=True))
        command = ["taskset", "-c", ",".join(map(str, cores)), "bash", "-c", line.command]
        with (self.out / f"{line.name}.txt").open("wb") as file:
            file.write(f"$ {line.command}\n".encode())
            file.flush()
            process = subprocess.Popen(
                command, cwd=ROOT, env=self.environment | of_lane, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.running.append(Running(line, process, time.monotonic()))

    def _look_after(self) -> None:
        for run in list(self.running):
            seconds = time.monotonic() - run.start
            if run.process.poll() is None:
                if seconds > run.line.seconds:
                    run.end()
                continue
            run.kill()
            self.running.remove(run)
            code = run.process.returncode if run.told_to_end is None else None
            end = End(run.line.name, run.line.command, round(seconds, 1), code)
            self.ends[end.name] = end
            with self.journal.open("a") as file:
                file.write(json.dumps(vars(end)) + "\n")
            elapsed = time.monotonic() - self.start
            print(f"[{elapsed:6.1f} s] {run.line.lane} {end.name}: {end.seconds} s, {end.verdict}", flush=True)

    def _end_all(self) -> None:
        while self.running:
            for run in list(self.running):
                run.end()
                if run.process.poll() is not None:
                    run.kill()
                    self.running.remove(run)
            time.sleep(TICK_S)

    def table(self) -> str:
        """A row a line of the plans, and the last lines that it printed."""
        width, rows = max((len(line.name) for line in self.lines), default=0), []
        for line in self.lines:
            start = f"{line.name:{width}} {line.lane:5}"
            if line.name in self.not_run:
                rows.append(f"{start}        -  not run: {self.not_run[line.name]}")
                continue
            end = self.ends[line.name]
            rows.append(f"{start} {end.seconds:6.1f} s  {end.verdict}")
            printed = (self.out / f"{line.name}.txt").read_text(errors="replace").splitlines()[1:]
            rows += [f"    {text}" for text in [text for text in printed if text.strip()][-line.num_shown :]]
        return "\n".join(rows) + "\n"


def about_host() -> str:
    """What every figure of the run depends on."""
    told = subprocess.run([sys.executable, "-c", ABOUT_HOST], cwd=ROOT, capture_output=True, text=True, check=False)
    return told.stdout.strip() or f"unknown host: {(told.stderr.strip().splitlines() or ['nothing was printed'])[-1]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path, nargs="+", metavar="PLAN")
    parser.add_argument("--out", type=Path, required=True, help="folder of results; what is done in it is skipped")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds by which all must have ended")
    parser.add_argument(
        "--gpu-cores", type=int, metavar="N",
        help=f"at most so many for each GPU, where the plans have lanes of cpu as well ({GPU_CORES})",
    )  # fmt: skip
    parser.add_argument("--again", nargs="+", default=[], metavar="NAME", help="lines to run although they are done")
    options = parser.parse_args(arguments)
    try:
        lines = read_plans(options.plans)
    except (OSError, PlanError) as error:
        parser.error(str(error))
    if unknown := set(options.again) - {line.name for line in lines}:
        parser.error(f"--again {' '.join(sorted(unknown))}: there are {' '.join(line.name for line in lines)}")
    gpu_cores = GPU_CORES if options.gpu_cores is None else options.gpu_cores
    if gpu_cores < 1:
        parser.error(f"--gpu-cores {gpu_cores}: at least 1")
    if options.gpu_cores is not None and not any(line.lane.startswith("cpu") for line in lines):
        parser.error("--gpu-cores: the plans have no lane of cpu that could have the others")
    options.out.mkdir(parents=True, exist_ok=True)
    out, gpus = options.out.resolve(), visible_gpus()
    measurements = Measurements(lines, out, options.limit, gpus, options.again, gpu_cores)
    head = f"{time.strftime('%F %T')}: {about_host()}"
    print(head, flush=True)
    with (options.out / "hosts.txt").open("a") as file:
        file.write(f"{head}\n")

    before = {number: signal.signal(number, measurements.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        measurements.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    table = measurements.table()
    print(f"\n{table}", end="", flush=True)
    (options.out / "table.txt").write_text(table)
    if measurements.is_stopped:
        return 130
    return int(bool(measurements.not_run) or any(end.code != 0 for end in measurements.ends.values()))


if __name__ == "__main__":
    sys.exit(main())
