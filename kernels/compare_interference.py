"""How long running streams wait while long prompts arrive: ours and vLLM on one GPU, one after the other.

    python kernels/compare_interference.py --vllm-kit DIR --model llama-3.2-1b --out results

Workloads (`cb_backend/study/workloads.py`): W8, 32 streams that decode and a prompt of 8,192 tokens each
second; W6-8 and W6-32, so many prompts of 8,192 tokens at once with 32 tokens out. The figure is the inter-token
latency of streams while some long prompt has arrived and has no token yet; gaps outside such times would only dilute
it. Both engines are driven in process, step by step, with random weights and the same token ids. vLLM has its defaults
for a server on this card (8,192 tokens a step); ours its own, and once more with `--max-itl-ms`.

A ratio is printed only when both arms are known to have run on the same card with the same lengths.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from compare_vllm import PEER_SHELL, card_name, read_lines, run_process  # noqa: E402

from cb_backend.cli.benchmarks.compare import refusal  # noqa: E402
from cb_backend.study.workloads import WORKLOADS, Draw, Workload, fixed, interference  # noqa: E402

LONG_PROMPT = 4096  # tokens; W6's and W8's long prompts have twice as many
NUM_LONG = 6  # of W8
MAX_MODEL_LEN = 8704
VLLM_SERVER_TOKENS = 8192  # vLLM's max_num_batched_tokens for a server on a card of 70 GiB or more

Event = tuple[float, int, int]  # seconds since the start, request, tokens
AddRequest = Callable[[int], None]
Step = Callable[[], list[tuple[int, int]]]  # what came: (request, tokens)


def drive(workload: Workload, add: AddRequest, step: Step, is_idle: Callable[[], bool]) -> list[Event]:
    """Send every request at its time and step until the last long prompt's request has ended (W8's streams go on)."""
    waiting = sorted(range(len(workload.prompts)), key=lambda index: (workload.arrivals[index], index))
    left = {index: workload.output_lens[index] for index in waiting if len(workload.prompts[index]) >= LONG_PROMPT}
    events: list[Event] = []
    start = time.perf_counter()
    while left:
        now = time.perf_counter() - start
        while waiting and workload.arrivals[waiting[0]] <= now:
            add(waiting.pop(0))
        if is_idle():
            time.sleep(0.001)
            continue
        came = step()
        now = time.perf_counter() - start
        for index, count in came:
            events.append((now, index, count))
            if index in left:
                left[index] -= count
                if left[index] <= 0:
                    del left[index]
    return events


def figures(workload: Workload, events: list[Event]) -> dict[str, Any]:
    """Milliseconds: gaps of running streams beside unanswered long prompts, and the long prompts' first tokens."""
    times: dict[int, list[float]] = {}
    for moment, index, _ in events:
        times.setdefault(index, []).append(moment)
    longs = [index for index, prompt in enumerate(workload.prompts) if len(prompt) >= LONG_PROMPT]
    windows = [(workload.arrivals[index], times[index][0], index) for index in longs]
    beside = [
        later - earlier
        for index, moments in times.items()
        for earlier, later in itertools.pairwise(moments)
        if any(earlier < end and later > begin and index != other for begin, end, other in windows)
    ]
    first = [end - begin for begin, end, _ in windows]
    if not beside:
        raise ValueError(f"{workload.name}: no stream was running while a long prompt was computed")
    return {
        "num_gaps": len(beside),
        **{f"itl_p{p}_ms": round(1e3 * float(np.percentile(beside, p)), 3) for p in (50, 99)},
        "itl_max_ms": round(1e3 * max(beside), 3),
        "ttft_long_p50_ms": round(1e3 * float(np.median(first)), 1),
        "ttft_long_max_ms": round(1e3 * max(first), 1),
        "digest": workload.lengths_digest,
    }


def workloads(vocab_size: int, repetition: int) -> list[Workload]:
    draw = Draw(vocab_size, repetition)
    return [interference(draw, NUM_LONG), WORKLOADS["W6-8"](draw), WORKLOADS["W6-32"](draw)]


def run_ours(args: argparse.Namespace) -> list[dict[str, Any]]:
    from cb_backend.contracts.config import engine_config_from_dict
    from cb_backend.contracts.token_rules import TokenRules
    from cb_backend.engine.llm_engine import create_engine
    from cb_backend.study.replay import fresh_engine

    arguments = {
        "model": str(args.model),
        "load_format": "dummy",
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
    }
    loaded = create_engine(engine_config_from_dict({**arguments, **json.loads(args.our_args)}))
    records = []
    for max_itl_ms in (None, args.max_itl_ms):
        for repetition in range(args.reps):
            for workload in workloads(loaded.info.vocab_size, repetition):
                engine = fresh_engine(loaded, max_itl_ms=max_itl_ms)

                def add(index: int, workload: Workload = workload, engine: Any = engine) -> None:
                    params = TokenRules(
                        max_tokens=workload.output_lens[index], temperature=0.6, ignore_eos=True, seed=index
                    )
                    engine.add_request(engine.make_request(index, workload.prompts[index], params))

                def step(engine: Any = engine) -> list[tuple[int, int]]:
                    output = engine.step()
                    if output is None:
                        return []
                    return [(int(i), 1) for i, t in zip(output.request_ids, output.token_ids, strict=True) if t >= 0]

                events = drive(workload, add, step, lambda engine=engine: not engine.has_unfinished())
                setting = "defaults" if max_itl_ms is None else f"max_itl_ms {max_itl_ms:g}"
                records.append({"workload": workload.name, "setting": setting, **figures(workload, events)})
                while engine.has_unfinished():  # W8's streams: their launched steps must end before the next engine
                    for request_id in range(len(workload.prompts)):
                        engine.cancel(request_id)
                    engine.step()
    loaded.close()
    return records


def run_vllm(args: argparse.Namespace) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        model=str(args.model), load_format="dummy", skip_tokenizer_init=True, dtype=args.dtype, seed=0,
        max_model_len=args.max_model_len, max_num_batched_tokens=VLLM_SERVER_TOKENS,
    )  # fmt: skip
    engine = llm.llm_engine
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    records = []
    warm_up = fixed("warm-up", 8, 64, 16, Draw(vocab_size))
    for run, workload in enumerate(
        [warm_up, *(w for repetition in range(args.reps) for w in workloads(vocab_size, repetition))]
    ):

        def add(index: int, workload: Workload = workload, run: int = run) -> None:
            params = SamplingParams(
                temperature=0.6,
                ignore_eos=True,
                max_tokens=workload.output_lens[index],
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            engine.add_request(f"{run}-{index}", {"prompt_token_ids": workload.prompts[index].tolist()}, params)

        def step(run: int = run) -> list[tuple[int, int]]:
            outputs = [(output.request_id, len(output.outputs[0].token_ids)) for output in engine.step()]
            return [
                (int(name.split("-")[1]), count) for name, count in outputs if count and name.split("-")[0] == str(run)
            ]

        if workload is warm_up:
            for index in range(len(workload.prompts)):
                add(index)
            while engine.has_unfinished_requests():
                engine.step()
            continue
        events = drive(workload, add, step, lambda: not engine.has_unfinished_requests())
        records.append({"workload": workload.name, "setting": "defaults", **figures(workload, events)})
        engine.abort_request([f"{run}-{index}" for index in range(len(workload.prompts))])
        while engine.has_unfinished_requests():
            engine.step()
    return records


def compare(args: argparse.Namespace) -> int:
    """Both arms as processes of their own, then the table."""
    args.out.mkdir(parents=True, exist_ok=True)
    kit, found, cards = args.vllm_kit.resolve(), {}, {}
    model = args.model if (args.model / "config.json").is_file() else kit / "configs" / str(args.model)
    for engine in ("ours", "vllm"):
        lines = (args.out / f"interference-{model.name}-{engine}.jsonl").resolve()
        lines.unlink(missing_ok=True)
        command = [sys.executable, str(Path(__file__).resolve()), "--arm", engine, "--model", str(model.resolve())]
        command += ["--out", str(lines), "--reps", str(args.reps), "--dtype", args.dtype]
        command += [
            "--max-itl-ms",
            str(args.max_itl_ms),
            "--our-args",
            args.our_args,
            "--max-model-len",
            str(args.max_model_len),
        ]
        if engine == "vllm":
            command = ["bash", "-c", PEER_SHELL, str(kit), *command]
        cards[engine] = card_name()
        problem = run_process(command, dict(os.environ), lines.with_suffix(".log"), args.timeout_s)
        if problem is not None:
            print(f"{engine}: {problem}", flush=True)
        found[engine] = read_lines(lines)
    print(f"card: {cards['ours']}; {model.name}, {args.dtype}, random weights, median of {args.reps} runs; ms")
    print(f"{'':10s}{'':22s}{'ITL beside long prompts':>32s}{'TTFT of them':>18s}")
    print(f"{'':10s}{'':22s}{'p50':>10s}{'p99':>10s}{'max':>10s}{'p50':>10s}{'max':>10s}   p99 against vLLM")
    for workload in dict.fromkeys(record["workload"] for records in found.values() for record in records):
        peers = [record for record in found["vllm"] if record["workload"] == workload]
        for engine in ("vllm", "ours"):
            mine = [record for record in found[engine] if record["workload"] == workload]
            for setting in dict.fromkeys(record["setting"] for record in mine):
                runs = [record for record in mine if record["setting"] == setting]
                print(row(workload, f"{engine} {setting}", runs, peers if engine == "ours" else [], cards))
    return 0 if all(found.values()) else 1


def row(
    workload: str, name: str, runs: list[dict[str, Any]], peers: list[dict[str, Any]], cards: dict[str, Any]
) -> str:
    names = ("itl_p50_ms", "itl_p99_ms", "itl_max_ms", "ttft_long_p50_ms", "ttft_long_max_ms")
    values = [float(np.median([run[name] for run in runs])) for name in names]
    ratio = ""
    if peers:
        mine, theirs = (
            [{**run, "card": cards[engine]} for run in its_runs]
            for engine, its_runs in (("ours", runs), ("vllm", peers))
        )
        reason = refusal(mine, theirs, ("card", "digest"))
        peer = float(np.median([run["itl_p99_ms"] for run in peers]))
        ratio = f"   {values[1] / peer:.2f}x" if reason is None else f"   no ratio: {reason}"
    return f"{workload:10s}{name:22s}" + "".join(f"{value:10.1f}" for value in values) + ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-kit", type=Path, default=Path("vllm"), help="folder with env.sh, unpack.py, configs/")
    parser.add_argument(
        "--model", type=Path, required=True, help="folder with config.json, or a name in the kit's configs/"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for records, logs")
    parser.add_argument("--reps", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--max-itl-ms", type=float, default=15.0, help="of our second setting")
    parser.add_argument("--our-args", default="{}", help="further keys of model.json, as JSON")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="for each arm")
    parser.add_argument("--arm", choices=("ours", "vllm"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm is None:
        return compare(args)
    records = (run_ours if args.arm == "ours" else run_vllm)(args)
    args.out.write_text("".join(json.dumps(record) + "\n" for record in records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
