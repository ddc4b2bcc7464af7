"""Ours and vLLM on one GPU, one after the other, and the table of ratios. A script for a GPU host.

    python kernels/compare_vllm.py --vllm-kit DIR --models qwen3-0.6b,llama-3.2-1b --budget-s 540 --out results

DIR holds vLLM's arm: `bench_vllm.py`, `env.sh`, `unpack.py` with its archives, and `configs/MODEL/config.json`. For
each model the order is ours, vLLM, ours, each a process of its own with the repetitions inside, so that a card that
warms up or slows down is seen in our own spread. An arm that fails is reported and the rest goes on. `--out` gets the
raw records, each process's log and the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from cb_backend.cli.benchmarks.compare import ArmCost, affordable_repetitions, peer_records, table  # noqa: E402
from cb_backend.study.machine import config_digest  # noqa: E402
from cb_backend.study.workloads import lengths_digest  # noqa: E402

START_SECONDS = {"ours": 30.0, "vllm": 100.0}  # first guess; replaced by what was seen
SLACK = 5.0  # seconds kept back for the report

# Prints the lengths that the peer's script draws, from its own functions. Argument: the script.
PEER_LENGTHS = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("peer", sys.argv[1])
peer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(peer)
prompts, outputs = peer.lens_a()
print(json.dumps({"W1": [[len(prompt) for prompt in prompts], outputs], "c": peer.lens_c()}))
"""
# The kit's own environment, its site folder unpacked on first use, then the command. $0: the kit, $1: the interpreter.
PEER_SHELL = """
. "$0/env.sh"
[ -d "$VLLM_SITE/vllm" ] || "$1" "$0/unpack.py" "$0"/part-*.tar.xz || exit 1
exec "$@"
"""


@dataclass(frozen=True)
class Arm:
    """One process of one engine on one model."""

    engine: str  # ours | vllm
    model: Path  # folder with config.json
    process: int  # which process of this engine and model: 0 is the first start

    @property
    def name(self) -> str:
        return f"{self.model.name}-{self.engine}-{self.process}"

    @property
    def is_start_only(self) -> bool:
        return self.engine == "vllm" and self.process > 0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ours and vLLM on one GPU, and the table of ratios")
    parser.add_argument("--vllm-kit", type=Path, required=True, help="folder with bench_vllm.py")
    parser.add_argument(
        "--models", default="qwen3-0.6b,llama-3.2-1b,llama-3.1-8b", help="folders, or names in configs/"
    )
    parser.add_argument("--workloads", default="a,b,c")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--budget-s", type=float, default=math.inf, help="drop repetitions, then arms, to stay below")
    parser.add_argument("--out", type=Path, required=True, help="folder for records, logs and the table")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--our-args", default="", help="further flags of `cb-backend bench engine`, as one string")
    parser.add_argument("--vllm-args", default="", help="further flags of bench_vllm.py, as one string")
    parser.add_argument("--vllm-restart", action="store_true", help="start vLLM a second time, for its warm start-up")
    parser.add_argument("--python", default=sys.executable)
    return parser.parse_args(arguments)


class Comparison:
    """Runs the arms within the budget and keeps every record."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.kit = args.vllm_kit.resolve()
        self.deadline = time.monotonic() + args.budget_s - SLACK
        self.records: dict[tuple[Path, str], list[dict[str, Any]]] = {}  # by model and engine
        self.problems: list[str] = []
        self.start_seconds = dict(START_SECONDS)
        self.peer_digests: dict[str, str] = {}
        args.out.mkdir(parents=True, exist_ok=True)

    def run(self) -> int:
        """Every arm of every model, then the table; 0 when no arm had a problem."""
        models = [self._model_folder(name) for name in self.args.models.split(",")]
        arms = [arm for model in models for arm in self._arms(model)]
        self.peer_digests = self._read_peer_digests()
        for index, arm in enumerate(arms):
            costs = [self._cost(other) for other in arms[index:]]
            repetitions = affordable_repetitions(costs, self.deadline - time.monotonic(), self.args.reps)
            if repetitions == 0:
                self._problem(f"{arm.name}: left out, no time left in the budget")
                continue
            try:
                self._run_arm(arm, repetitions)
            except (OSError, KeyError, TypeError, ValueError) as error:  # records of another form than expected
                self._problem(f"{arm.name}: {type(error).__name__}: {error}")
        self._report(models)
        return 1 if self.problems else 0

    def _arms(self, model: Path) -> list[Arm]:
        arms = [Arm("ours", model, 0), Arm("vllm", model, 0), Arm("ours", model, 1)]
        return [*arms, Arm("vllm", model, 1)] if self.args.vllm_restart else arms

    def _model_folder(self, name: str) -> Path:
        for folder in (Path(name), self.kit / "configs" / name):
            if (folder / "config.json").is_file():
                return folder.resolve()
        raise SystemExit(f"model {name!r} has no config.json here or in the kit's configs/")

    def _cost(self, arm: Arm) -> ArmCost:
        """As seen for a, b and c together on an H100; start-up as seen in this run."""
        if arm.is_start_only:
            return ArmCost(self.start_seconds["vllm"], 1.0)
        config = json.loads((arm.model / "config.json").read_text())
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        params = layers * (4 * hidden**2 + 3 * hidden * config["intermediate_size"]) + config["vocab_size"] * hidden
        return ArmCost(self.start_seconds[arm.engine], 20 + 6e-9 * params)

    def _read_peer_digests(self) -> dict[str, str]:
        command = [self.args.python, "-B", "-c", PEER_LENGTHS, str(self.kit / "bench_vllm.py")]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            self._problem(f"the kit's lengths cannot be read: {last_line(found.stderr)}")
            return {}
        digests = {name: lengths_digest(*lens) for name, lens in json.loads(found.stdout).items()}
        return {**digests, "b": lengths_digest([128], [256])}

    def _run_arm(self, arm: Arm, repetitions: int) -> None:
        lines_file = (self.args.out / f"{arm.name}.jsonl").resolve()
        lines_file.unlink(missing_ok=True)
        start, card = time.monotonic(), card_name()
        command, environment = self._command(arm, repetitions, lines_file)
        log = self.args.out / f"{arm.name}.log"
        problem = run_process(command, environment, log, self.deadline - time.monotonic())
        lines = read_lines(lines_file)
        took = time.monotonic() - start
        print(f"{arm.name}: {repetitions} repetitions, {len(lines)} records in {took:.0f} s", flush=True)
        if problem is not None:
            self._problem(f"{arm.name}: {problem}")
        self._keep(arm, lines, {"card": card, "process": arm.process})

    def _keep(self, arm: Arm, lines: list[dict[str, Any]], conditions: dict[str, Any]) -> None:
        if arm.engine == "ours":
            records = [{**line, **conditions} for line in lines]
        else:
            conditions["config_digest"] = config_digest(arm.model)
            conditions |= {"max_model_len": self.args.max_model_len, "temperature": self.args.temperature}
            records = peer_records(lines, self.peer_digests, conditions)
        for record in records:
            if record["workload"] == "startup":
                self.start_seconds[arm.engine] = record["total_s"] + 10
        self.records.setdefault((arm.model, arm.engine), []).extend(records)
        with (self.args.out / "compare.jsonl").open("a") as file:
            file.writelines(json.dumps({"arm": arm.name, **record}) + "\n" for record in records)

    def _command(self, arm: Arm, repetitions: int, lines_file: Path) -> tuple[list[str], dict[str, str]]:
        """The arm's command and environment; both engines get the same model, dtype, lengths and temperature."""
        args = self.args
        common = ["--dtype", args.dtype, "--max-model-len", str(args.max_model_len), "--reps", str(repetitions)]
        common += ["--temperature", str(args.temperature), "--out", str(lines_file)]
        if arm.engine == "vllm":
            workloads = "none" if arm.is_start_only else args.workloads
            command = [args.python, str(self.kit / "bench_vllm.py"), "--config", str(arm.model)]
            command += ["--workloads", workloads, *common, *shlex.split(args.vllm_args)]
            return ["bash", "-c", PEER_SHELL, str(self.kit), *command], dict(os.environ)
        command = [args.python, "-m", "cb_backend.cli.main", "bench", "engine", "--load-format", "dummy"]
        command += ["--model", str(arm.model), "--workload", args.workloads, *common, *shlex.split(args.our_args)]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return command, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def _problem(self, text: str) -> None:
        self.problems.append(text)
        print(text, flush=True)

    def _report(self, models: list[Path]) -> None:
        lines = [
            f"card: {card_name()}; {self.args.dtype}, max_model_len {self.args.max_model_len}, temperature"
            f" {self.args.temperature}; random weights, token ids, in process; median (min-max)"
        ]
        for model in models:
            lines += ["", *table(model.name, *(self.records.get((model, engine), []) for engine in ("ours", "vllm")))]
        lines += ["", *(f"problem: {problem}" for problem in self.problems)]
        text = "\n".join(lines).rstrip() + "\n"
        (self.args.out / "compare.txt").write_text(text)
        print("\n" + text, end="", flush=True)


def run_process(command: list[str], environment: dict[str, str], log: Path, timeout: float) -> str | None:
    """Run to the end with all output in `log`; what went wrong in one line, or None. Past the timeout it is ended."""
    with log.open("w") as file:
        try:
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        except OSError as error:
            return f"cannot be started: {error.strerror}"
        try:
            code = process.wait(None if math.isinf(timeout) else max(timeout, 1.0))
        except subprocess.TimeoutExpired:
            return f"ended after {timeout:.0f} s: the budget is used up"
        finally:
            end_group(process)
    return None if code == 0 else f"exit code {code}: {last_line(log.read_text(errors='replace'))}"


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the process and of its own children (an engine's workers keep GPU memory)."""
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        end = time.monotonic() + patience
        while time.monotonic() < end:
            try:
                os.killpg(process.pid, number)
            except (ProcessLookupError, PermissionError):
                process.wait()
                return
            process.poll()  # take the leader away, or its remains count as a member of the group
            time.sleep(0.2)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines that were written whole."""
    records = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # cut off when the process was ended
    return records


def card_name() -> str | None:
    """Name and id of the first visible GPU; None when it cannot be told."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "-i", first, "--query-gpu=name,uuid", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def last_line(text: str) -> str:
    """The last line that says anything, for a one-line reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


if __name__ == "__main__":
    sys.exit(Comparison(parse_arguments()).run())
