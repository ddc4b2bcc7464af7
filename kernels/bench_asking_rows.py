"""What rows that ask for log-probabilities or penalties cost the batch they are in. For a GPU host.

    python kernels/bench_asking_rows.py --model DIR --load-format dummy --rows 64 --asking 0,1,64

A batch of `--rows` requests decodes, of which some ask (`--asking`); the table gives the time of a step, and the host's
part of it in `execute`. At the end a mixed batch runs with and without run-ahead: its tokens must be equal. DIR
needs no more than a config.json where the weights are random.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # after PYTHONPATH: another version's package can be measured with this file

from cb_backend.contracts.config import engine_config_from_dict  # noqa: E402
from cb_backend.contracts.step import NO_TOKEN  # noqa: E402
from cb_backend.contracts.token_rules import TokenRules  # noqa: E402
from cb_backend.engine.llm_engine import LLMEngine, create_engine  # noqa: E402

PLAIN = TokenRules(max_tokens=1, temperature=0.6, ignore_eos=True, seed=0)
KINDS = {
    "logprobs=5": {"logprobs": 5},
    "presence_penalty": {"presence_penalty": 1.0},
    "logit_bias of 3": {"logit_bias": {5: 1.0, 6: 2.0, 7: -1.0}},
    "both of the first": {"logprobs": 5, "presence_penalty": 1.0},
}


def fresh_engine(engine: LLMEngine, **changes: int) -> LLMEngine:
    """A new scheduler and an empty cache over the same runner."""
    return LLMEngine(dataclasses.replace(engine.config, **changes), engine.runner, engine.info)


def decode(engine: LLMEngine, all_params: list[TokenRules], input_len: int) -> tuple[list[float], list[list[int]]]:
    """Seconds of every step in which all rows decode, and the tokens by request."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, engine.info.vocab_size, (len(all_params), input_len)).astype(np.int32)
    for index, params in enumerate(all_params):
        engine.add_request(engine.make_request(index, prompts[index], msgspec.structs.replace(params, seed=index)))
    tokens: list[list[int]] = [[] for _ in all_params]
    seconds = []
    last = time.perf_counter()
    while engine.has_unfinished():
        output = engine.step()
        now = time.perf_counter()
        if output is None:
            continue
        if len(output.token_ids) == len(all_params):
            seconds.append(now - last)
        last = now
        for index, token in zip(output.request_ids.tolist(), output.token_ids.tolist(), strict=True):
            if token != NO_TOKEN:
                tokens[index].append(token)
    return seconds, tokens


def with_asking(num_rows: int, num_asking: int, changes: dict[str, object], output_len: int) -> list[TokenRules]:
    plain = msgspec.structs.replace(PLAIN, max_tokens=output_len)
    asking = msgspec.structs.replace(plain, **changes)
    return [asking if index < num_asking else plain for index in range(num_rows)]


def print_row(
    engine: LLMEngine, name: str, num_asking: int, args: argparse.Namespace, changes: dict[str, object]
) -> None:
    fresh = fresh_engine(engine)
    seconds, _ = decode(fresh, with_asking(args.rows, num_asking, changes, args.output_len), args.input_len)
    before = fresh.stats().steps
    steady = sorted(seconds[len(seconds) // 5 :])
    launch = 0.0 if before is None else before.launch_seconds / max(before.num_steps, 1)
    p90 = steady[len(steady) * 9 // 10]
    print(
        f"{name:18s} {num_asking:4d} of {args.rows:3d} rows   step p50 {statistics.median(steady) * 1e3:7.3f} ms"
        f"   p90 {p90 * 1e3:7.3f} ms   launching {launch * 1e3:6.3f} ms",
        flush=True,
    )


def check_run_ahead(engine: LLMEngine, args: argparse.Namespace) -> bool:
    """Whether a batch of every kind gives the same tokens at run-ahead 0 and 4."""
    kinds = [
        {},
        *KINDS.values(),
        {"repetition_penalty": 1.3, "min_tokens": 20},
        {"bad_words_token_ids": ((5,), (6, 7))},
    ]
    params = [with_asking(1, 1, kinds[index % len(kinds)], 60)[0] for index in range(min(args.rows, 32))]
    runs = [decode(fresh_engine(engine, run_ahead=depth), params, 40)[1] for depth in (0, 4)]
    return runs[0] == runs[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--asking", type=lambda text: [int(part) for part in text.split(",")], default=[0, 1, 64])
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--max-model-len", type=int, default=2048)
    args = parser.parse_args()
    config = {"model": args.model, "load_format": args.load_format, "max_num_seqs": args.rows}
    engine = create_engine(engine_config_from_dict({**config, "max_model_len": args.max_model_len}))
    decode(fresh_engine(engine), with_asking(args.rows, args.rows, {}, 8), args.input_len)
    for name, changes in KINDS.items():
        for num_asking in args.asking:
            if num_asking or name == next(iter(KINDS)):
                print_row(engine, name if num_asking else "nobody asks", num_asking, args, changes)
    is_same = check_run_ahead(engine, args)
    print(f"run-ahead 0 and 4 give {'the same' if is_same else 'OTHER'} tokens")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
