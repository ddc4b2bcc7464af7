"""Random requests and cancels on an engine that must preempt and swap all the time, in process, on a CPU or a GPU.

    python -m tests.engine.soak --seconds 60 --device cuda

Every request is one of 32 whose tokens alone are known; each that ends must have them, and each that is cancelled a
beginning of them. At the end every block is free and swap space is empty. Exit code 0: all of that, and every kind of
event was seen.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from cb_backend.contracts.step import NO_TOKEN
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from tests.engine.drive import config, run
from tests.models.tiny_checkpoints import write_checkpoint

NUM_KINDS = 32
VOCAB = 97
SETTINGS = {
    "block_size": 16, "max_model_len": 128, "max_num_seqs": 16, "num_gpu_blocks_override": 36, "swap_space": 0.01,
    "max_num_batched_tokens": 96, "admission_reserve": -10.0,
}  # fmt: skip


def make_requests(seed: int) -> list[tuple[list[int], TokenRules]]:
    """Greedy and seeded ones, some with a shared beginning, up to the longest that the model takes."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, VOCAB, 48).tolist()
    out = []
    for index in range(NUM_KINDS):
        own = rng.integers(3, VOCAB, int(rng.integers(1, 60))).tolist()
        prompt = [*shared[: 16 * int(rng.integers(0, 4))], *own][:100]
        is_greedy = index % 2 == 0
        draw = {"temperature": 0.0} if is_greedy else {"temperature": 0.8, "top_p": 0.95}
        length = int(rng.integers(1, 128 - len(prompt)))
        out.append((prompt, TokenRules(max_tokens=length, seed=index, ignore_eos=True, **draw)))
    return out


class Soak:
    def __init__(self, engine: LLMEngine, kinds: list[tuple[list[int], TokenRules]], seed: int) -> None:
        self.engine = engine
        self.kinds = kinds
        self.alone = [run(engine, [prompt], params).token_ids[0] for prompt, params in kinds]
        self.rng = random.Random(seed)
        self.open: dict[int, tuple[int, list[int]]] = {}  # request id -> kind, tokens so far
        self.counts: Counter[str] = Counter()
        self._next_id = 1000

    def go(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._change()
            self._step()
        while self.engine.has_unfinished():
            self._step()

    def _change(self) -> None:
        while len(self.open) < 40 and self.rng.random() < 0.5:
            kind = self.rng.randrange(NUM_KINDS)
            prompt, params = self.kinds[kind]
            self.engine.add_request(self.engine.make_request(self._next_id, np.asarray(prompt, np.int32), params))
            self.open[self._next_id] = (kind, [])
            self._next_id += 1
        if self.open and self.rng.random() < 0.03:
            request_id = self.rng.choice(list(self.open))
            self.engine.cancel(request_id)
            self._judge(request_id, "cancelled")

    def _step(self) -> None:
        output = self.engine.step()
        self.counts["steps"] += 1
        if output is None:
            return
        columns = (output.request_ids, output.token_ids, output.finish_reasons)
        for request_id, token_id, reason in zip(*(column.tolist() for column in columns), strict=True):
            if token_id != NO_TOKEN:
                self.open[request_id][1].append(token_id)
            if reason:
                self._judge(request_id, "ended")

    def _judge(self, request_id: int, how: str) -> None:
        kind, tokens = self.open.pop(request_id)
        expected = self.alone[kind] if how == "ended" else self.alone[kind][: len(tokens)]
        self.counts[how] += 1
        self.counts["wrong"] += tokens != expected


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.engine.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--checkpoint", default="llama-gqa", help="one of tests/models/tiny_checkpoints.py")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(write_checkpoint(options.checkpoint, Path(folder)))
        engine = create_engine(config(checkpoint, device=options.device, dtype=options.dtype, **SETTINGS))
    engine.scheduler._swap.fixed_cost_tokens = 0  # these requests are short: let them swap all the same
    soak = Soak(engine, make_requests(options.seed), options.seed)
    soak.go(options.seconds)
    engine.scheduler.check_integrity()
    stats = engine.stats()
    figures = {
        **soak.counts,
        "preemptions": stats.num_preemptions,
        "swapped out": stats.num_swapped_out,
        "swapped in": stats.num_swapped_in,
        "cached tokens": stats.num_cached_prompt_tokens,
        "blocks missing": stats.num_blocks - stats.num_free_blocks,
        "host blocks missing": stats.num_host_blocks - stats.num_free_host_blocks,
    }
    print(json.dumps({"device": engine.info.device, "dtype": engine.info.dtype, **figures}))
    seen = ("ended", "cancelled", "preemptions", "swapped out", "swapped in", "cached tokens")
    empty = [name for name in seen if not figures.get(name)]
    if empty:
        print(f"never seen: {', '.join(empty)}")
    wrong = ("wrong", "blocks missing", "host blocks missing")
    return int(bool(empty) or any(figures[name] for name in wrong))


if __name__ == "__main__":
    sys.exit(main())
