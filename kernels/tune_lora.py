"""Choose the launch parameters of adapters' kernels in whole captured steps.

    python kernels/tune.py lora [--models llama-3.1-8b] [--rows 1,8,32] [--seconds 120] [--dry-run]

Shrink and expand run between the products of a step, whose weights they compete with, so nothing is chosen from what
they take alone. Steps of all `--rows`, each row through an adapter of its own, are searched together by the geometric
mean of their times, then steps of prompts. With adapters gate and up are a plain product, for which the base model has
no entry: it is chosen here too. Entries are marked, and the tuners of kernels alone leave them. Where the file has an
entry for a number of rows (`rows`), that one is searched for steps of as many, and none that they would not launch.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_step import BLOCK_SIZE, DEVICE, make_model, make_runner, new_step, seat, time_step, with_room_for
from captured_steps import CapturedSteps, search_until
from linear_shapes import SMALL_TILES, Parameters
from roofline import MODELS
from step_search import CONFIRMING_ROUNDS, Search, Settings, gains
from tuned_table import BY_STEPS, Table, read_table

from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.runner.step_buffers import StepBuffers
from cb_backend.engine.step_shapes import StepShape
from cb_backend.kernels.launch import launch_parameters, next_power_of_2
from cb_backend.models.decoder import DecoderForCausalLM

DEFAULT_ROWS = "1,8,32"
PROMPT_TOKENS, NUM_PROMPTS = 2048, 8
REPLAYS = 5
DECODE_TILE, PROMPT_TILE = 16, 64  # rows of an item, as the table has them for so many tokens
# block_k, block_r (of 64: q, k and v in one tile), warps, stages; of few rows
SHRINKS = (
    (512, 16, 2, 1), (512, 16, 4, 1), (512, 16, 8, 1), (1024, 16, 4, 1), (1024, 16, 8, 1), (256, 16, 4, 2),
    (128, 16, 4, 3), (128, 16, 2, 4), (128, 64, 2, 4), (128, 64, 4, 3), (256, 64, 4, 2), (512, 64, 4, 1),
)  # fmt: skip
PROMPT_SHRINKS = (
    (64, 64, 4, 3), (64, 16, 4, 3), (128, 64, 4, 2), (128, 64, 4, 3), (128, 64, 8, 3), (256, 64, 8, 2),
)  # fmt: skip
# block_n, warps, programs an item (0: one a tile)
EXPANDS = ((64, 2, 0), (64, 4, 0), (128, 2, 0), (128, 4, 0), (256, 4, 0), (256, 8, 0), (512, 8, 0))
GATED_EXPANDS = ((64, 2, 0), (64, 4, 0), (128, 4, 0), (128, 8, 0), (256, 4, 0), (256, 8, 0))  # each of gate and up
PROMPT_EXPANDS = ((128, 8, 0), (64, 8, 8), (64, 8, 16), (128, 4, 8), (128, 8, 8), (128, 8, 16))
PROMPT_GATED_EXPANDS = ((64, 4, 8), (64, 8, 8), (64, 8, 16), (128, 8, 8), (128, 8, 0))
ONE_ROW_TILES = ((2, 2048, 4), (4, 2048, 8), (4, 1024, 4), (2, 2048, 8), (4, 2048, 4))


@dataclass(frozen=True)
class Entry:
    """What is searched: an op under conditions. Stands where a product's shape does."""

    op: str
    conditions: tuple[tuple[str, int], ...]

    @property
    def when(self) -> dict[str, int]:
        return dict(self.conditions)

    @property
    def name(self) -> str:
        return f"{self.op} {self.when}"


def entry(op: str, **when: int) -> Entry:
    return Entry(op, tuple(when.items()))


def changes_of(name: str, rows: list[int]) -> dict[Entry, list[Parameters]]:
    """What is tried, an entry after the other, where every row goes through an adapter."""
    shape = MODELS[name]
    found: dict[Entry, list[Parameters]] = {}
    gate_up = 2 * shape.intermediate_size
    for num_rows in rows:
        tiles: list[Parameters] = [
            {"block_n": n, "block_k": k, "splits": 1, "num_warps": warps, "num_stages": stages}
            for n, k, warps, stages in SMALL_TILES
        ]
        if num_rows == 1:
            tiles = [
                {"vector": 1, "block_n": n, "block_k": k, "num_warps": warps, "fold": 8}
                for n, k, warps in ONE_ROW_TILES
            ] + tiles[:2]
        found[entry("linear", n=gate_up, k=shape.hidden_size, m=next_power_of_2(num_rows))] = tiles
    return found | lora_changes(name, rows, DECODE_TILE, SHRINKS, EXPANDS, GATED_EXPANDS)


def lora_changes(
    name: str,
    rows: list[int],
    tile: int,
    shrinks: tuple[tuple[int, int, int, int], ...],
    expands: tuple[tuple[int, int, int], ...],
    gated_expands: tuple[tuple[int, int, int], ...],
) -> dict[Entry, list[Parameters]]:
    """Of steps of so many tokens, whose items have `tile` rows."""
    shape = MODELS[name]
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    inputs = dict.fromkeys((shape.hidden_size, q_size, shape.intermediate_size))
    outputs = dict.fromkeys((q_size + 2 * kv_size, shape.hidden_size))
    found: dict[Entry, list[Parameters]] = {}
    for k in inputs:
        for num_rows in rows:
            found[shrink_entry(k, tile, num_rows)] = [
                {"block_k": block_k, "block_r": block_r, "num_warps": warps, "num_stages": stages}
                for block_k, block_r, warps, stages in shrinks
            ]
    launches = [("lora_expand", n, expands) for n in outputs]
    for op, n, sizes in [*launches, ("lora_expand_gated", shape.intermediate_size, gated_expands)]:
        found[entry(op, n=n, m=tile, bytes=2)] = [
            {"block_n": block_n, "block_r": 16, "num_warps": warps} | ({"programs": programs} if programs else {})
            for block_n, warps, programs in sizes
        ]
    return found


def shrink_entry(k: int, tile: int, num_rows: int) -> Entry:
    """The one of the file that steps of so many rows launch by, or would if there were one."""
    when = {"k": k, "m": tile, "bytes": 2}
    of_rows = {**when, "rows": next_power_of_2(num_rows)}
    has_own = any(each.get("when") == of_rows for each in read_table(DEVICE).get("lora_shrink", []))
    return entry("lora_shrink", **(of_rows if has_own else when))


class AdapterSteps(CapturedSteps):
    """Captured steps with adapters; their time is the geometric mean."""

    def milliseconds(self, step: list[torch.cuda.CUDAGraph]) -> float:
        times = []
        for (runner, _), graph in zip(self.steps, step, strict=True):
            seat(runner, self.lengths)
            times.append(1e3 * time_step(graph, REPLAYS))
        return statistics.geometric_mean(times)


def decode_steps(model: DecoderForCausalLM, rows: list[int], context: int) -> AdapterSteps:
    steps: list[tuple[SlotRunner, StepBuffers]] = []
    lengths = [context] * max(rows)
    for num_rows in rows:
        runner = with_room_for(make_runner(model, lengths), num_rows)
        steps.append((runner, new_step(runner, num_rows, num_rows)))
    return AdapterSteps(steps, lengths)


def new_prompt_step(runner: SlotRunner, lengths: list[int], num_adapters: int = 0) -> StepBuffers:
    """Buffers of a step of prompts, the whole of each, in the first slots; runner's slots hold as many tokens."""
    num_tokens = sum(lengths)
    buffers = runner.new_buffers(StepShape(0, num_tokens, len(lengths), has_adapters=num_adapters > 0))
    slots = torch.arange(len(lengths), dtype=torch.int32, device=DEVICE)
    sizes = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    ends = sizes.cumsum(0)
    positions = torch.cat([torch.arange(length, device=DEVICE) for length in lengths])
    of_token = slots.long().repeat_interleave(sizes)
    if num_adapters:
        runner.state.adapter[: len(lengths)] = slots % num_adapters
    blocks = runner.state.block_tables[of_token, positions // BLOCK_SIZE].long()
    segments = buffers.segments
    buffers.slots.copy_(slots)
    segments["token_ids"].copy_(positions + 100)
    segments["positions"].copy_(positions)
    segments["num_prompt_tokens"].copy_(sizes[of_token])
    segments["slot_mapping"].copy_(blocks * BLOCK_SIZE + positions % BLOCK_SIZE)
    segments["sample_index"].copy_(ends - 1)
    segments["prompt_slots"].copy_(slots)
    segments["query_start_loc"].copy_(torch.nn.functional.pad(ends, (1, 0)))
    segments["prompt_seq_lens"].copy_(sizes)
    return buffers


def prompt_steps(model: DecoderForCausalLM) -> AdapterSteps:
    lengths = [PROMPT_TOKENS // NUM_PROMPTS] * NUM_PROMPTS
    runner = with_room_for(make_runner(model, lengths), NUM_PROMPTS)
    return AdapterSteps([(runner, new_prompt_step(runner, lengths, NUM_PROMPTS))], lengths)


def tune(steps: AdapterSteps, changes: dict[Entry, list[Parameters]], seconds: float) -> Table:
    """The entries that gained; of those that stay as they are nothing, and of none where all together gain nothing."""
    started = time.perf_counter()
    first: Settings = {each: dict(launch_parameters(each.op, DEVICE, **each.when)) for each in changes}
    try:
        search = search_until(started + seconds, steps, first)
        run_search(search, changes)
        before, after = search.times(search.make_all([first, search.best]), CONFIRMING_ROUNDS)
    finally:
        steps.close()
    print(f"  first {before:.4f} ms, best {after:.4f} ms ({after / before - 1:+.2%})", flush=True)
    table: Table = {}
    for each, use in search.best.items():
        if use != first[each] and gains(before, after):
            table.setdefault(each.op, []).append({"when": each.when, "use": use, **BY_STEPS})
    return table


def run_search(search: Search, changes: dict[Entry, list[Parameters]]) -> None:
    """Each entry's parameters on the best so far, over and over until nothing gains or time is over."""
    before: Settings | None = None
    while before != search.best:
        before = search.best
        for each, many in changes.items():
            if not search.choose(each.name, [{each: parameters} for parameters in many]):
                return


@torch.inference_mode()
def run(arguments: argparse.Namespace, save: Callable[[Table], None]) -> None:
    """Search every model's steps of decode rows, then of prompts; `save` has what is found of each."""
    torch.manual_seed(0)
    rows = [int(number) for number in (arguments.rows or DEFAULT_ROWS).split(",")]
    for name in arguments.models.split(","):
        model = make_model(name, max(*rows, NUM_PROMPTS))
        print(f"{name}, {' and '.join(map(str, rows))} rows through as many adapters", flush=True)
        save(tune(decode_steps(model, rows, arguments.context), changes_of(name, rows), arguments.seconds * 0.7))
        torch.cuda.empty_cache()
        print(f"{name}, {PROMPT_TOKENS} tokens of {NUM_PROMPTS} prompts", flush=True)
        prompts = lora_changes(name, [PROMPT_TOKENS], PROMPT_TILE, PROMPT_SHRINKS, PROMPT_EXPANDS, PROMPT_GATED_EXPANDS)
        save(tune(prompt_steps(model), prompts, arguments.seconds * 0.3))
        del model
        torch.cuda.empty_cache()
    print(torch.cuda.get_device_name())
