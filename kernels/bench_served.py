"""The whole path on one machine: a real Triton server, its front ends, the engine, and a client load. For a GPU host.

    python kernels/bench_served.py --model DIR --front-ends 1,2,4,8 --streams 1,64,256,512 --out results
    python kernels/bench_served.py --model DIR --front-ends 4 --streams 64 --adapters 40 --max-loras 8

DIR is a checkpoint folder, or a config.json with `--load-format dummy`; without a tokenizer a made-up one is written
beside a copy of it. For every number of front ends a server is started, and every number of streams is sent at once
(each `--input-len` tokens in, `--output-len` out). The table says what the clients saw, and how many cores the engine,
the front ends, the server and the clients kept busy meanwhile: where the time goes. With `--adapters` each request goes
through one of so many made-up adapters, drawn by Zipf's law, and a line says what those who named them waited; before
the loads each is used once, which reads its files.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "client")]

from load_generator.options import drawn_names  # noqa: E402
from load_generator.wire import WireOptions  # noqa: E402

from cb_backend.cli.server.local_server import find_server  # noqa: E402
from cb_backend.cli.server.model_repository import copy_with_model  # noqa: E402
from cb_backend.cli.server.processes import descendants  # noqa: E402
from cb_backend.cli.server.server_process import ServerOptions, ServerProcess, free_ports  # noqa: E402
from cb_backend.support.process_watch import process_cpu_seconds  # noqa: E402

ADAPTER_RANK = 16
LOAD_FAILURES = RuntimeError, subprocess.TimeoutExpired, KeyError, IndexError
FIRST_STREAMS = 64
USES = 16  # of each adapter before the loads, as they are drawn: so many that none is left out

HEADER = (
    "front ends  streams  out tok/s  responses/s  tok/resp   TTFT p50/p99 ms   ITL p50/p99 ms  errors"
    "   cores: engine front ends server client"
)


def write_tokenizer(folder: Path) -> None:
    """A word a token id, split on spaces: text of n words is n tokens, and back.

    The load test's own words are among them: if they were unknown, all prompts would be one, and cached.
    """
    from load_generator.prompts import WORDS
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = [*dict.fromkeys(WORDS), *(f"w{i}" for i in range(vocab_size))][:vocab_size]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def cpu_seconds(server_pid: int) -> dict[str, float]:
    """CPU time so far of the server and the processes below it, by part."""
    found = {"engine": 0.0, "front ends": 0.0, "server": 0.0}
    for pid in [server_pid, *(process.pid for process in descendants(server_pid))]:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        part = "engine" if b"engine_process" in command else "front ends" if b"backend_stub" in command else "server"
        found[part] += process_cpu_seconds(pid) or 0.0
    return found


def child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_load(
    args: argparse.Namespace, server: ServerProcess, tokenizer: Path, streams: int, seed: int
) -> dict[str, Any]:
    """`streams` requests at once, or at any time; the load test's own summary, and busy cores by part.

    seed: of the prompts. Those of the load before would be found in the prefix cache.
    """
    report, history = args.out / f"load-{streams}.json", args.out / "history.jsonl"
    command = [
        *(sys.executable, str(ROOT / "client" / "load_test.py"), "--url", server.grpc_address),
        *(("--concurrency", str(streams)) if args.keeps_streams else ("--rate", args.rate)),
        *("--num-requests", str(args.num_requests or streams), "--warm-up", str(min(streams, 64))),
        *("--input-len", str(args.input_len), "--output-len", str(args.output_len), "--tokenizer", str(tokenizer)),
        *("--processes", str(min(args.processes, streams)), "--temperature", "0.6", "--json", str(report)),
        *("--history", str(history), "--seed", str(seed)),
    ]
    if args.adapters:
        command += ["--lora-names", ",".join(adapter_names(args)), "--lora-skew", str(args.zipf)]
    before, before_client, start = cpu_seconds(server.pid), child_seconds(), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout_s, check=False)
    seconds = time.perf_counter() - start
    if done.returncode != 0:
        raise RuntimeError(f"the load test failed: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
    after = cpu_seconds(server.pid)
    run: dict[str, Any] = json.loads(report.read_text())["runs"][0]
    run["cores"] = {part: (after[part] - before[part]) / seconds for part in after}
    run["cores"]["client"] = (child_seconds() - before_client) / seconds
    if args.adapters:
        run["adapters"] = waits_by_adapter(args, history)
    history.unlink()
    return run


def use_adapters_once(args: argparse.Namespace, server: ServerProcess, tokenizer: Path) -> str:
    """So many short requests that every adapter is asked for: no load waits then for what is read once. A line."""
    is_short = {
        "num_requests": USES * args.adapters,
        "input_len": 16,
        "output_len": 1,
        "keeps_streams": True,
        "zipf": 0,
    }
    start = time.perf_counter()
    try:
        run = run_load(argparse.Namespace(**vars(args) | is_short), server, tokenizer, FIRST_STREAMS, len(args.streams))
    except LOAD_FAILURES as error:
        return f"first use of the adapters failed, the loads have it: {error}"
    finally:
        (args.out / f"load-{FIRST_STREAMS}.json").unlink(missing_ok=True)  # it is no load
    found, seconds = run["adapters"], time.perf_counter() - start
    return f"first use of {found['names']} adapters: {seconds:.1f} s, longest wait {found['longest_ms']} ms"


def adapter_names(args: argparse.Namespace) -> list[str]:
    return [f"a{index}" for index in range(args.adapters)]


def waits_by_adapter(args: argparse.Namespace, history: Path) -> dict[str, Any]:
    """What requests of each adapter waited for their first token, in milliseconds: who is starved stands out."""
    wire = WireOptions(lora_names=drawn_names(tuple(adapter_names(args)), args.zipf))
    waits: dict[str, list[float]] = {}
    for line in history.read_text().splitlines():
        record = json.loads(line)
        if record["chunks"]:
            wait = 1e3 * (record["chunks"][0][0] - record["sent_s"])
            waits.setdefault(wire.lora_name(str(record["id"])) or "", []).append(wait)
    medians = [statistics.median(each) for each in waits.values()]
    by_use = sorted(waits.values(), key=len)
    rarest = [wait for each in by_use[: len(by_use) // 2] for wait in each]
    return {
        "names": len(waits),
        "median_ms_of_names": [round(min(medians)), round(max(medians))],
        "median_ms_of_rarer_half": round(statistics.median(rarest)) if rarest else None,
        "longest_ms": round(max(max(each) for each in waits.values())),
    }


def adapter_line(run: dict[str, Any]) -> str:
    found, least, most = run["adapters"], *run["adapters"]["median_ms_of_names"]
    return (
        f"{'':10} {found['names']} adapters asked for: median TTFT of each {least} to {most} ms, of the rarer half"
        f" {found['median_ms_of_rarer_half']} ms, longest {found['longest_ms']} ms"
    )


def make_adapters(args: argparse.Namespace, model: Path, folder: Path) -> dict[str, Path]:
    """Folders of made-up adapters of the model, by name."""
    if not args.adapters:
        return {}
    import torch

    from cb_backend.cli.benchmarks.made_up_adapters import write_adapters
    from cb_backend.models.registry import outline_adapters, read_model_config

    table = outline_adapters(read_model_config(model), torch.bfloat16, ADAPTER_RANK)
    folder.mkdir()
    return dict(zip(adapter_names(args), write_adapters(folder, table, args.adapters), strict=True))


def row(front_ends: int, streams: int, run: dict[str, Any]) -> str:
    summary, cores = run["summary"], run["cores"]
    ttft, itl = summary["ttft_ms"], summary["itl_token_ms"]
    errors = summary["num_requests"] - summary["num_ok"]
    itl_text = f"{itl['p50']:8.1f}/{itl['p99']:6.1f}" if itl else f"{'-':>15s}"
    return (
        f"{front_ends:10d} {streams:8d} {summary['output_tokens_per_s']:10,.0f} {summary['responses_per_s']:12,.0f}"
        f" {summary['tokens_per_response']:9.2f} {ttft['p50']:9.0f}/{ttft['p99']:7.0f} {itl_text} {errors:7d}"
        f"   {cores['engine']:13.2f} {cores['front ends']:10.2f} {cores['server']:6.2f} {cores['client']:6.2f}"
    )


def serve(args: argparse.Namespace, model: Path, front_ends: int) -> list[str]:
    """Start a server with so many front ends and send every load; the table's rows."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        adapters = make_adapters(args, model, Path(folder) / "adapters")
        arguments = json.loads(args.engine_args) | {"load_format": args.load_format}
        if adapters:
            arguments |= {"enable_lora": True, "max_loras": args.max_loras, "max_lora_rank": ADAPTER_RANK}
        target = Path(folder) / "repository"
        target.mkdir()
        repository = copy_with_model(
            ROOT / "model_repository" / "llm", str(model), target, front_ends, arguments, adapters
        )
        http, grpc, metrics = free_ports(3)
        options = ServerOptions(repository, http_port=http, grpc_port=grpc, metrics_port=metrics)
        server = ServerProcess(find_server(), options)
        start = time.perf_counter()
        server.start()
        try:
            server.wait_ready(args.timeout_s)
            print(f"{front_ends} front ends: ready after {time.perf_counter() - start:.1f} s", flush=True)
            if args.adapters:
                print(use_adapters_once(args, server, model / "tokenizer.json"), flush=True)
            for seed, streams in enumerate(args.streams):
                try:
                    run = run_load(args, server, model / "tokenizer.json", streams, seed)
                except LOAD_FAILURES as error:
                    rows.append(f"{front_ends:10d} {streams:8d}  failed: {error}")
                else:
                    rows.append(row(front_ends, streams, run))
                    with (args.out / "served.jsonl").open("a") as file:
                        file.write(json.dumps({"front_ends": front_ends, "streams": streams, **run}) + "\n")
                    if args.adapters:
                        rows.append(adapter_line(run))
                        print(rows[-2], flush=True)
                print(rows[-1], flush=True)
        except Exception:
            print("\n".join(server.last_lines(25)), file=sys.stderr)
            raise
        finally:
            server.stop()
    return rows


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--engine-args", default="{}", help="further keys of model.json, as JSON")
    parser.add_argument("--front-ends", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--streams", type=numbers, default=[1, 64, 256, 512])
    parser.add_argument("--adapters", type=int, default=0, help="names that requests go through one of")
    parser.add_argument("--max-loras", type=int, default=8, help="of them on the device at once")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the law that names are drawn by")
    parser.add_argument("--rate", default="inf", help="requests/s; inf = all at once")
    parser.add_argument("--keeps-streams", action="store_true", help="whenever a request ends the next one is sent")
    parser.add_argument("--num-requests", type=int, help="default: as many as streams")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--processes", type=int, default=8, help="client processes")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="for a start, and for each load")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model.resolve()
        if not (model / "tokenizer.json").is_file():
            model = Path(shutil.copytree(model, Path(folder) / model.name))
            write_tokenizer(model)
        rows = []
        for front_ends in args.front_ends:
            try:
                rows += serve(args, model, front_ends)
            except Exception as error:
                rows.append(f"{front_ends:10d}  failed: {error}")
    load = f"{args.num_requests} requests, a next one for each that ends" if args.keeps_streams else f"rate {args.rate}"
    print(f"\n{args.model.name}, {args.input_len} in / {args.output_len} out, {load}\n{HEADER}")
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
