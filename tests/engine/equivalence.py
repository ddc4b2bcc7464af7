"""Every way of running a request gives what it gives alone: 14 settings x 14 parameter sets x 24 prompts, a tiny model.

    python -m tests.engine.equivalence [--checkpoint llama-gqa] [--journal FILE]
    python -m tests.engine.equivalence --ranks 2        # four of the settings over two processes

"Alone" is a run of the one request on the reference runner: one prompt in one step, no prefix cache, no run-ahead.
Tokens and finish reasons must be equal, log-probabilities up to 1e-4. A matrix that does nothing proves nothing: every
setting must have done what it is for (preempted, swapped, found prefixes, ...), and every parameter set must change
some answer. Over ranks "alone" is still one process.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine, create_engine
from cb_backend.kv_cache.layout import ALL_TOKENS
from cb_backend.kv_cache.make_manager import make_manager
from cb_backend.support.argument_types import positive_int
from tests.engine.drive import Run, config, run, with_reference_runner
from tests.engine.equivalence_cells import Cells
from tests.kept_results import fingerprint
from tests.models.tiny_checkpoints import write_checkpoint

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "cb_backend"
BLOCK_SIZE = 4
MAX_LEN = 96
NUM_PROMPTS = 24
MOST_TOKENS = 76  # of the longest prompt and answer
VOCAB = 97
LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Setting:
    """`must`: the statistic that shows that the setting did what it is for."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    num_blocks: int | None = None  # None: enough for all
    warm_up: int = 0  # so many of the prompts are run before
    has_cancels: bool = False  # neighbours that come and are cancelled
    is_staggered: bool = False  # prompts arrive a few steps apart
    must: str = ""


TIGHT = 20  # blocks: the longest request and a little; others beside it must give way
AT_ONCE = {"admission_reserve": -10.0}  # admit what fits now, so that growth leads to preemptions
SETTINGS = (
    Setting("plain"),
    Setting("chunks of 1", {"max_num_batched_tokens": 1, "max_num_seqs": 1}),
    Setting("chunks of 7", {"max_num_batched_tokens": 7, "max_num_seqs": 4}),
    Setting("chunks of a block", {"max_num_batched_tokens": BLOCK_SIZE, "max_num_seqs": 4}),
    Setting("whole prompts", {"enable_chunked_prefill": False, "max_num_batched_tokens": MAX_LEN}),
    Setting("tiny pool, computed again", AT_ONCE, num_blocks=TIGHT, must="num_preemptions"),
    Setting("tiny pool, swapped", {**AT_ONCE, "swap_space": 0.01}, num_blocks=TIGHT, must="num_swapped_in"),
    Setting("prefixes warm", {"enable_prefix_caching": True}, warm_up=NUM_PROMPTS, must="num_cached_prompt_tokens"),
    Setting("prefixes partly warm", {"enable_prefix_caching": True}, warm_up=6, must="num_cached_prompt_tokens"),
    Setting("batch of 1", {"max_num_seqs": 1}),
    Setting("batch of 8, staggered", {"max_num_seqs": 8}, is_staggered=True),
    Setting("batch of 32, neighbours cancelled", {"max_num_seqs": 32}, has_cancels=True, must="num_cancelled"),
    Setting("4 steps ahead", {"run_ahead": 4}),
    Setting(
        "all at once",
        {**AT_ONCE, "run_ahead": 4, "max_num_seqs": 8, "max_num_batched_tokens": 9, "enable_prefix_caching": True,
         "swap_space": 0.01},
        num_blocks=TIGHT + 4, warm_up=4, has_cancels=True, is_staggered=True, must="num_preemptions",
    ),
)  # fmt: skip

OVER_RANKS = ("chunks of 7", "tiny pool, swapped", "prefixes partly warm", "all at once")

_DRAW = {"temperature": 0.9, "seed": 7}
_LONG = {"ignore_eos": True, "max_tokens": 28}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": _DRAW,
    "top_k": {**_DRAW, "top_k": 5},
    "top_p": {**_DRAW, "top_p": 0.7},
    "min_p": {**_DRAW, "min_p": 0.2},
    "every filter": {**_DRAW, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05, **_LONG},
    "repetition": {"repetition_penalty": 1.7, **_LONG},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    "logit_bias": {"logit_bias": {5: 6.0, 9: -50.0}},
    "allowed ids": {"allowed_token_ids": tuple(range(10, 50))},
    "bad words": {},  # those of the checkpoint's own answers: `Matrix.rules`
    "stop ids after min_tokens": {"stop_token_ids": tuple(range(3, 40)), "min_tokens": 6},
    "logprobs": {"logprobs": 4},
    "long, eos ignored": _LONG,
}


def make_prompts(seed: int = 0) -> list[list[int]]:
    """Lengths around block borders; half of them share a beginning."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, VOCAB, 41).tolist()
    lengths = (1, 3, 4, 5, 8, 9, 16, 17, 31, 32, 33, 48)
    prompts = [rng.integers(3, VOCAB, length).tolist() for length in lengths]
    prompts += [shared[: 5 + 3 * i] + rng.integers(3, VOCAB, 1 + i % 4).tolist() for i in range(NUM_PROMPTS // 2)]
    return prompts


class Matrix:
    """Holds the checkpoint and the engines over it; answers are compared one cell at a time."""

    def __init__(self, checkpoint: Path, prompts: list[list[int]] | None = None, num_ranks: int = 1) -> None:
        base: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
        sizes = {"block_size": BLOCK_SIZE, "max_model_len": MAX_LEN, "num_gpu_blocks_override": 1000}
        self._base = config(str(checkpoint), **base, **sizes, disable_hybrid_kv_cache_manager=False)
        self._engine = create_engine(dataclasses.replace(self._base, swap_space=0.01, tensor_parallel_size=num_ranks))
        self._reference = with_reference_runner(self._base)
        self.prompts = prompts or make_prompts()
        self._alone: dict[str, Run] = {}

    @property
    def runner(self) -> object:
        """Of every setting."""
        return self._engine.runner

    def close(self) -> None:
        """The ranks end."""
        self._engine.close()

    def rules(self, name: str) -> TokenRules:
        given = dict(PARAMS[name])
        if name == "bad words":
            given["bad_words_token_ids"] = self._bad_words()
        return TokenRules(**{"max_tokens": 12, "temperature": 0.0, "seed": 1, **given})

    def _bad_words(self) -> tuple[tuple[int, ...], ...]:
        """What three greedy answers begin with: words of one, two and three tokens, which change them."""
        answers = sorted(self.alone("greedy").token_ids.values(), key=len, reverse=True)
        return tuple(tuple(answer[:length]) for length, answer in enumerate(answers[:3], 1))

    def alone(self, name: str) -> Run:
        """What each prompt gives by itself."""
        if name not in self._alone:
            out = Run()
            params = self.rules(name)
            for index, prompt in enumerate(self.prompts):
                lone = run(LLMEngine(self._base, self._reference.runner, self._reference.info), [prompt], params)
                out.token_ids[index], out.reasons[index] = lone.token_ids[0], lone.reasons[0]
                out.logprobs[index] = lone.logprobs.get(0, [])
            self._alone[name] = out
        return self._alone[name]

    def _engine_of(self, setting: Setting) -> LLMEngine:
        engine = self._engine
        changed: EngineConfig = dataclasses.replace(self._base, **setting.changes)
        swaps = setting.changes.get("swap_space")
        info = msgspec.structs.replace(engine.info, num_host_blocks=engine.info.num_host_blocks if swaps else 0)
        if setting.num_blocks is not None:
            info = msgspec.structs.replace(info, num_blocks=setting.num_blocks)
            if info.kv_windows != (ALL_TOKENS,):
                # Small steps, so that windows are all that the longest request holds beside what every layer keeps.
                most = min(changed.max_num_batched_tokens, 2 * BLOCK_SIZE)
                changed = dataclasses.replace(changed, max_num_batched_tokens=most, max_num_seqs=min(most, 8))
                needed = make_manager(changed, info, changed.run_ahead or 0).num_blocks_for(MOST_TOKENS)
                info = msgspec.structs.replace(info, num_blocks=needed + setting.num_blocks - TIGHT + 1)
        made = LLMEngine(changed, engine.runner, info)
        made.scheduler._swap.fixed_cost_tokens = 0  # prompts are short here
        return made

    def differences(self, setting: Setting, name: str, done: dict[str, int]) -> list[str]:
        """What one cell of the matrix (24 prompts) has wrong; `done` collects the setting's statistics."""
        engine, params = self._engine_of(setting), self.rules(name)
        if setting.warm_up:
            run(engine, self.prompts[: setting.warm_up], params)
        prompts, cancels = list(self.prompts), {}
        if setting.has_cancels:
            for index in range(min(8, len(self.prompts))):
                cancels[len(prompts)] = 3 + 2 * index
                prompts.append(self.prompts[-1 - index][:-1])
        arrivals = [index // 2 if setting.is_staggered else 0 for index in range(len(prompts))]
        got, expected = run(engine, prompts, params, arrivals=arrivals, cancels=cancels), self.alone(name)
        engine.scheduler.check_integrity()
        stats = engine.stats()
        for field_name in ("num_preemptions", "num_swapped_in", "num_cached_prompt_tokens", "num_cancelled"):
            done[field_name] = done.get(field_name, 0) + getattr(stats, field_name)
        wrong = []
        if stats.num_free_blocks != engine.info.num_blocks:
            wrong.append(
                f"{setting.name} / {name}: {engine.info.num_blocks - stats.num_free_blocks} blocks are missing"
            )
        for index in range(len(self.prompts)):
            problem = _difference(got, expected, index)
            if problem is not None:
                wrong.append(f"{setting.name} / {name} / prompt {index}: {problem}")
        return wrong


def _difference(got: Run, expected: Run, index: int) -> str | None:
    if got.token_ids[index] != expected.token_ids[index]:
        return f"{got.token_ids[index]}, alone {expected.token_ids[index]}"
    if got.reasons[index] is not expected.reasons[index]:
        return f"ends with {got.reasons[index]}, alone {expected.reasons[index]}"
    figures, lone = got.logprobs.get(index, []), expected.logprobs[index]
    if len(figures) != len(lone):
        return f"{len(figures)} logprobs, alone {len(lone)}"
    for one, other in zip(figures, lone, strict=True):
        values, others = [one.sampled, *one.top], [other.sampled, *other.top]
        if one.rank != other.rank or not np.allclose(values, others, atol=LOGPROB_TOLERANCE, rtol=0):
            return f"logprobs {values}, alone {others}"
    return None


def has_effect(matrix: Matrix, name: str) -> bool:
    """Whether a parameter set changes some answer, if it should."""
    return name in ("greedy", "logprobs") or matrix.alone(name).token_ids != matrix.alone("greedy").token_ids


def empty_cells(cells: Cells) -> Iterator[str]:
    """Settings that did not do what they are for, and parameters without effect."""
    for setting in SETTINGS:
        did = cells.of_setting(setting.name)
        if did and setting.must and not did.get(setting.must):
            yield f"{setting.name}: {setting.must} is 0, so nothing was tested"
    for name, is_effective in cells.has_effect.items():
        if not is_effective:
            yield f"{name} changes no answer"


def run_cell(matrix: Matrix, cells: Cells, setting: Setting, name: str) -> list[str]:
    """What is wrong in one cell; it is noted."""
    counts: dict[str, int] = {}
    wrong = matrix.differences(setting, name, counts)
    cells.note(setting.name, name, wrong, counts, has_effect(matrix, name))
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.engine.equivalence", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--checkpoint", default="llama-gqa", help="one of tests/models/tiny_checkpoints.py")
    parser.add_argument("--journal", type=Path, help="results so far, so that a run can be stopped and go on")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no new cell begins")
    parser.add_argument(
        "--ranks", type=positive_int, default=1, help="processes that share the model, over gloo (%(default)s)"
    )
    options = parser.parse_args(arguments)
    settings = SETTINGS if options.ranks == 1 else [setting for setting in SETTINGS if setting.name in OVER_RANKS]
    begin = told = time.monotonic()
    code = fingerprint([*PACKAGE.rglob("*.py"), *HERE.glob("*.py")]) + options.checkpoint
    code += f" over {options.ranks}" if options.ranks > 1 else ""
    cells = Cells(options.journal, code)
    # By parameter sets, so that what each request gives alone is computed once.
    left = [(s, name) for name in PARAMS for s in settings if (s.name, name) not in cells.wrong]
    print(f"{len(cells.wrong)} cells known, {len(left)} to run", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(
            Matrix(write_checkpoint(options.checkpoint, Path(folder)), num_ranks=options.ranks)
        ) as matrix,
    ):
        for setting, name in left:
            if time.monotonic() - begin > options.limit:
                break
            print("".join(f"{line}\n" for line in run_cell(matrix, cells, setting, name)[:5]), end="", flush=True)
            if time.monotonic() - told > 20:
                told = time.monotonic()
                print(f"{told - begin:.0f} s: {len(cells.wrong)} of {len(settings) * len(PARAMS)} cells", flush=True)
    empty = list(empty_cells(cells))
    print(cells.table([setting.name for setting in settings], list(PARAMS)))
    print("\n".join(empty), end="\n" if empty else "")
    num_wrong, num_left = sum(map(len, cells.wrong.values())), len(settings) * len(PARAMS) - len(cells.wrong)
    print(
        f"{len(cells.wrong) * NUM_PROMPTS} comparisons, {num_wrong} differences, {num_left} cells not run, "
        f"{time.monotonic() - begin:.0f} s"
    )
    return int(bool(num_wrong or empty or num_left))


if __name__ == "__main__":
    sys.exit(main())
