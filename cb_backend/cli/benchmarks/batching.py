"""`cb-backend bench batching`: what in-flight batching gains, in process, on this machine.

The same requests with the same weights, cache and kernels run three ways: joining and leaving at every token
(in-flight), in fixed batches that wait for their slowest member (static), and one after the other. transformers'
`generate` on left-padded static batches is the outside reference. Ratios are taken within one run; the lines above the
table say on what.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cb_backend import __version__
from cb_backend.cli.paths import CliError
from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.study.machine import commit, cpu_name
from cb_backend.study.replay import fresh_engine
from cb_backend.support.argument_types import positive_int

HELP = "compare in-flight batching with static batches and one request at a time"


@dataclass(frozen=True, slots=True)
class Workload:
    """Token-id prompts and the number of tokens to generate for each; end-of-sequence is ignored."""

    prompts: list[np.ndarray]  # each int32 [num_prompt_tokens]
    output_lens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)


def mixed_workload(
    num_requests: int, prompt_lens: tuple[int, int], output_lens: tuple[int, int], vocab_size: int, seed: int
) -> Workload:
    """Lengths uniform in the two closed ranges, ids uniform over the vocabulary; the same for the same seed."""
    draw = random.Random(seed)
    ids = np.random.default_rng(seed)
    prompts = [ids.integers(0, vocab_size, draw.randint(*prompt_lens), dtype=np.int32) for _ in range(num_requests)]
    return Workload(prompts, [draw.randint(*output_lens) for _ in range(num_requests)])


@dataclass(frozen=True, slots=True)
class Result:
    """One timed pass. Times in seconds."""

    seconds: float
    num_output_tokens: int
    mean_latency: float  # from the start of the pass to a request's last token
    num_steps: int

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds


def run_workload(engine: LLMEngine, workload: Workload) -> Result:
    """Queue everything at once and step until all has ended. Raises if a request ends with the wrong length."""
    start = time.perf_counter()
    for index, (prompt, length) in enumerate(zip(workload.prompts, workload.output_lens, strict=True)):
        params = TokenRules(max_tokens=length, temperature=0.0, ignore_eos=True, seed=index)
        engine.add_request(engine.make_request(index, prompt, params))
    counts = [0] * len(workload.prompts)
    ends: list[float] = []
    num_steps = 0
    while engine.has_unfinished():
        output = engine.step()
        num_steps += 1
        if output is None:
            continue
        for request_id, token_id, reason in zip(
            output.request_ids.tolist(), output.token_ids.tolist(), output.finish_reasons.tolist(), strict=True
        ):
            counts[request_id] += token_id >= 0
            if reason:
                ends.append(time.perf_counter() - start)
    seconds = time.perf_counter() - start
    if counts != workload.output_lens:
        raise RuntimeError("a request ended before its length: the KV cache is too small for this workload")
    return Result(seconds, sum(counts), sum(ends) / len(ends), num_steps)


def run_transformers(model_dir: str, workload: Workload, batch_size: int, dtype: str) -> Result:
    """transformers' `generate`, greedy, left-padded batches in the order of arrival, each until its longest is done."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
    ends: list[float] = []
    num_steps = 0
    start = time.perf_counter()
    for first in range(0, len(workload.prompts), batch_size):
        prompts = workload.prompts[first : first + batch_size]
        lengths = workload.output_lens[first : first + batch_size]
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(lengths),
                min_new_tokens=max(lengths),
                do_sample=False,
                pad_token_id=0,
            )
        num_steps += max(lengths)
        ends += [time.perf_counter() - start] * len(prompts)
    seconds = time.perf_counter() - start
    return Result(seconds, workload.num_output_tokens, sum(ends) / len(ends), num_steps)


def run(args: argparse.Namespace) -> int:
    """Run the comparison and print it; returns the exit code."""
    for name in ("prompt_len", "output_len"):
        least, most = getattr(args, name)
        if least > most:
            raise CliError(f"--{name.replace('_', '-')} is {least} {most}; give the smaller number first")
    config = engine_config_from_dict(
        {
            "model": args.model,
            "dtype": args.dtype,
            "device": args.device,
            "max_num_seqs": args.batch_size,
            "enable_prefix_caching": False,  # every pass must compute every prompt
        }
    )
    engine = create_engine(config)
    workload = mixed_workload(
        args.num_requests, tuple(args.prompt_len), tuple(args.output_len), engine.info.vocab_size, args.seed
    )
    print(_conditions(engine, workload, args), flush=True)
    modes: dict[str, Callable[[], Result]] = {
        "in-flight": lambda: run_workload(fresh_engine(engine), workload),
        "static": lambda: run_workload(fresh_engine(engine, scheduling_policy="static"), workload),
        "one by one": lambda: run_workload(fresh_engine(engine, max_num_seqs=1), workload),
    }
    if not args.no_transformers:
        modes["transformers static"] = lambda: run_transformers(
            engine.info.tokenizer_dir, workload, args.batch_size, engine.info.dtype
        )
    run_workload(fresh_engine(engine), mixed_workload(2, (4, 8), (2, 2), engine.info.vocab_size, 1))  # warm-up
    results: dict[str, list[Result]] = {name: [] for name in modes}
    for repeat in range(args.repeats):  # interleaved, so that a slow minute of the machine hits all alike
        for name, run in modes.items():
            results[name].append(run())
            print(
                f"  pass {repeat + 1}/{args.repeats}  {name:20s} {results[name][-1].output_tokens_per_second:8.1f}"
                " output tokens/s",
                flush=True,
            )
    _print_table({name: _median(passes) for name, passes in results.items()})
    return 0


def _median(passes: list[Result]) -> Result:
    return sorted(passes, key=lambda result: result.seconds)[len(passes) // 2]


def _print_table(results: dict[str, Result]) -> None:
    base = results["in-flight"].output_tokens_per_second
    print(
        f"\n{'mode':20s} {'output tokens/s':>16s} {'seconds':>9s} {'mean latency s':>15s} {'steps':>7s}"
        f" {'in-flight is':>13s}"
    )
    for name, result in results.items():
        ratio = base / result.output_tokens_per_second
        print(
            f"{name:20s} {result.output_tokens_per_second:16.1f} {result.seconds:9.2f} {result.mean_latency:15.2f}"
            f" {result.num_steps:7d} {ratio:12.2f}x"
        )


def _conditions(engine: LLMEngine, workload: Workload, args: argparse.Namespace) -> str:
    import torch

    device = torch.cuda.get_device_name() if engine.info.device == "cuda" else cpu_name()
    return (
        f"cb_backend {__version__} ({commit()}), torch {torch.__version__}, Python {platform.python_version()},"
        f" {device}, {os.cpu_count()} cores, {torch.get_num_threads()} threads\n"
        f"{engine.info.model}, {engine.info.dtype}; {len(workload.prompts)} requests,"
        f" {workload.num_prompt_tokens} prompt and {workload.num_output_tokens} output tokens"
        f" (prompts {args.prompt_len[0]} to {args.prompt_len[1]}, outputs {args.output_len[0]} to"
        f" {args.output_len[1]}, uniform), batch {args.batch_size}, median of {args.repeats}"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench batching`."""
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder, GGUF file or hub id")
    parser.add_argument("--num-requests", type=positive_int, default=16)
    parser.add_argument("--prompt-len", type=positive_int, nargs=2, default=(16, 128), metavar=("MIN", "MAX"))
    parser.add_argument("--output-len", type=positive_int, nargs=2, default=(8, 128), metavar=("MIN", "MAX"))
    parser.add_argument(
        "--batch-size", type=positive_int, default=8, help="most requests at once, in every mode but one by one"
    )
    parser.add_argument("--repeats", type=positive_int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-transformers", action="store_true", help="leave the outside reference out")
