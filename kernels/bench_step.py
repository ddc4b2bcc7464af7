"""Time whole decode steps on this GPU: the captured graph that serves them, without the host.

    python kernels/bench_step.py [--models llama-3.2-1b] [--rows 1,64,256] [--context 640] [--ragged]
    python kernels/bench_step.py --rows 1 --profile      # and what the step's kernels take
    python kernels/bench_step.py --adapters 1,8,32,128   # and with rows spread over so many adapters of rank 16
    python kernels/bench_step.py --rows 1,256 --check    # dependent launches against plain ones: times, and every bit

Weights are random, every row has the same context or (`--ragged`) one of 1/8 to 15/8 of it. The floor is that of
`cb_backend.study.roofline` at the bandwidth and rate measured in the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from published_models import OTHERS, spec_of
from roofline import MODELS

from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.runner.step_buffers import StepBuffers
from cb_backend.engine.runner.step_runner import AnyRunner, StepRunner
from cb_backend.engine.step_shapes import StepShape
from cb_backend.kernels import launch
from cb_backend.kernels.compile_ahead import compile_ahead
from cb_backend.kv_cache.layout import layout_of
from cb_backend.kv_cache.storage import KVCacheStorage
from cb_backend.layers.adapter_table import AdapterTable
from cb_backend.layers.layer_maker import LayerMaker
from cb_backend.layers.layer_spec import MoESpec
from cb_backend.layers.moe import MoE
from cb_backend.layers.ops import resolve_ops
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.quantization import module_formats
from cb_backend.models.sharding import shard_spec
from cb_backend.models.spec import ModelSpec
from cb_backend.models.weights import fill_dummy
from cb_backend.parallel.group import Group, NoGroup
from cb_backend.study.machine import conditions, measure_card, model_shape
from cb_backend.study.roofline import decode_seconds

BLOCK_SIZE = 16
MAX_MODEL_LEN = 4096
ADAPTER_RANK = 16
REPLAYS = 15
ROOM = 128  # tokens a row may grow by
DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16


def make_model(name: str, max_adapters: int = 0, group: Group | None = None) -> DecoderForCausalLM:
    """max_adapters: with so many of random weights; 0: without the room for any. group: of which this device is one."""
    spec = spec_of(name)
    adapters = None
    if max_adapters:
        adapters = AdapterTable(max_adapters=max_adapters, max_rank=ADAPTER_RANK, dtype=DTYPE, device=DEVICE)
    make = LayerMaker(
        ops=resolve_ops("triton"), dtype=DTYPE, device=DEVICE, group=group or NoGroup(),
        format_of=spec.formats or module_formats(None), adapters=adapters,
    )  # fmt: skip
    model = DecoderForCausalLM(spec, make, has_own_head=not spec.tie_word_embeddings, max_model_len=MAX_MODEL_LEN)
    fill_dummy(model.placements(), 0)
    if adapters is not None:
        adapters.allocate()
        for site in adapters.sites:
            site.a.normal_(std=0.02)
            site.b.normal_(std=0.02)
            site.scales.fill_(1.0)
    return model


def make_runner(model: DecoderForCausalLM, lengths: list[int], kind: type[AnyRunner] = SlotRunner) -> AnyRunner:
    """A runner whose slots hold requests of these lengths, sampling at temperature 0.6."""
    spec = shard_spec(model.spec, model.group.size)
    per_row = [-(-(length + ROOM) // BLOCK_SIZE) for length in lengths]
    storage = KVCacheStorage(layout_of(spec, BLOCK_SIZE, DTYPE.itemsize), sum(per_row) + 1, DTYPE, DEVICE)
    storage.data.normal_(std=0.5)
    runner = kind(model, resolve_ops("triton"), storage, len(lengths), MAX_MODEL_LEN)
    blocks = (torch.randperm(sum(per_row), device=DEVICE) + 1).int()
    for slot, own in enumerate(blocks.split(per_row)):
        runner.state.block_tables[slot, : len(own)] = own
    seat(runner, lengths)
    return runner


def seat(runner: StepRunner, lengths: list[int]) -> None:
    """(Back) to these lengths."""
    state, rows = runner.state, slice(0, len(lengths))
    state.num_tokens[rows] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    state.last_token[rows] = torch.arange(len(lengths), dtype=torch.int32, device=DEVICE) + 100
    state.sampling.temperature[rows] = 0.6
    state.sampling.seed[rows] = torch.arange(len(lengths), device=DEVICE)


@torch.inference_mode()
def capture(runner: StepRunner, num_rows: int, num_adapters: int = 0) -> tuple[torch.cuda.CUDAGraph, StepBuffers]:
    """num_adapters: that the rows go through, in turn; 0: a step without any."""
    buffers = new_step(runner, num_rows, num_adapters)
    compile_ahead(lambda: runner.run_step(buffers))
    return record(runner, buffers), buffers


def new_step(runner: StepRunner, num_rows: int, num_adapters: int = 0) -> StepBuffers:
    """Buffers of a step of the first slots."""
    buffers = runner.new_buffers(StepShape(num_rows, has_adapters=num_adapters > 0))
    if num_adapters:
        rows = torch.arange(num_rows, dtype=torch.int32, device=DEVICE)
        runner.state.adapter[:num_rows] = rows % num_adapters
    buffers.slots.copy_(torch.arange(num_rows, dtype=torch.int32, device=DEVICE))
    return buffers


def with_room_for(runner: SlotRunner, num_adapters: int) -> SlotRunner:
    """As if max_loras were so many, of those that there are: what a step launches depends on it."""
    assert runner.adapters is not None
    runner.adapters.table = dataclasses.replace(runner.adapters.table, max_adapters=num_adapters)
    return runner


@torch.inference_mode()
def record(runner: StepRunner, buffers: StepBuffers) -> torch.cuda.CUDAGraph:
    """The step's graph. Takes one step: what cannot be launched raises there, outside of the capture."""
    runner.run_step(buffers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        runner.run_step(buffers)
    return graph


def time_step(graph: torch.cuda.CUDAGraph, replays: int = REPLAYS) -> float:
    """Seconds of a replay: median of single ones, the device idle before each."""
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def spec_has_experts(spec: ModelSpec) -> bool:
    return any(isinstance(layer.mlp, MoESpec) for layer in spec.layers)


@torch.inference_mode()
def experts_hit(runner: SlotRunner, num_rows: int) -> float:
    """Distinct experts of a layer that a step's rows go to, by the mean of the layers: what the floor assumes even."""
    counts: list[int] = []
    blocks = [layer.mlp for layer in runner.model.layers if isinstance(layer.mlp, MoE)]
    routes = blocks[0].ops

    def counting(*args: Any, **kwargs: Any) -> Any:
        weights, plan = routes.route_experts(*args, **kwargs)
        counts.append(len(plan.experts[: int(plan.num_blocks)].unique()))
        return weights, plan

    for block in blocks:
        block.ops = dataclasses.replace(routes, route_experts=counting)
    try:
        runner.run_step(new_step(runner, num_rows))
    finally:
        for block in blocks:
            block.ops = routes
    return statistics.mean(counts)


def use_dependent_launches(is_on: bool) -> None:
    os.environ["CB_BACKEND_DEPENDENT_LAUNCHES"] = "1" if is_on else "0"
    launch.can_overlap.cache_clear()
    launch.dependent_options.cache_clear()


@torch.inference_mode()
def check(runner: SlotRunner, lengths: list[int], num_adapters: int = 0) -> str:
    """Three steps with and without dependent launches, from the same state: times, and whether all bits agree."""
    before = runner.storage.data.clone()
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    seconds = []
    for is_on in (False, True):
        use_dependent_launches(is_on)
        graph, buffers = capture(runner, len(lengths), num_adapters)
        runner.storage.data.copy_(before)
        seat(runner, lengths)
        tokens = []
        for _ in range(3):
            graph.replay()
            tokens.append(buffers.result.clone())
        torch.cuda.synchronize()
        seen.append((torch.stack(tokens), runner.storage.data.clone(), runner.state.num_tokens.clone()))
        seconds.append(time_step(graph))
        seat(runner, lengths)
    is_equal = [torch.equal(plain, overlapped) for plain, overlapped in zip(*seen, strict=True)]
    verdict = "bits equal" if all(is_equal) else f"DIFFERENT (tokens, cache, lengths equal: {is_equal})"
    return f"plain {1e3 * seconds[0]:.3f} ms, dependent {1e3 * seconds[1]:.3f} ms, {verdict}"


def profile(graph: torch.cuda.CUDAGraph, num_shown: int = 18) -> None:
    """Kernels of one replay by their time. Dependent ones overlap, so the sum may exceed the step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    for event in events[:num_shown]:
        print(
            f"    {event.device_time_total / 3:9.1f} us {event.count // 3:5} x"
            f" {event.device_time_total / max(event.count, 1):8.2f}  {event.key[:70]}",
            flush=True,
        )


def tell_adapters(runner: SlotRunner, lengths: list[int], counts: list[int], base: float, has_profile: bool) -> None:
    """Steps of the same rows spread over so many adapters, beside `base` seconds without any."""
    for count in counts:
        if count > len(lengths):
            continue
        graph, _ = capture(with_room_for(runner, count), len(lengths), count)
        seat(runner, lengths)
        seconds = time_step(graph)
        print(f"{'':14} adapters {count:4} {1e3 * seconds:8.3f} ms, {seconds / base - 1:+.1%}", flush=True)
        if has_profile:
            profile(graph)
        del graph


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help=f"and {', '.join(OTHERS)}")
    parser.add_argument("--rows", default="1,64,256")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--ragged", action="store_true", help="contexts of 1/8 to 15/8 of --context")
    parser.add_argument(
        "--adapters", default="", help=f"numbers of adapters of rank {ADAPTER_RANK} that rows go through"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: steps are timed on a GPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    card = measure_card("cuda", "bfloat16")
    if card is None:
        print("no memory left on the GPU to measure its limits", file=sys.stderr)
        return 2
    for name in arguments.models.split(","):
        counts = [int(count) for count in arguments.adapters.split(",") if count]
        model = make_model(name, max(counts, default=0))
        for num_rows in map(int, arguments.rows.split(",")):
            lengths = [arguments.context] * num_rows
            if arguments.ragged:
                shares = torch.linspace(1 / 8, 15 / 8, num_rows)[torch.randperm(num_rows)]
                lengths = [max(1, int(arguments.context * share)) for share in shares.tolist()]
            runner = make_runner(model, lengths)
            floor = decode_seconds(model_shape(model.spec, "bfloat16"), card, num_rows, sum(lengths))
            kind = "ragged" if arguments.ragged else "equal"
            start = f"{name:14} rows {num_rows:4} context {arguments.context} {kind}"
            if arguments.check:
                for count in (0, *(count for count in counts if count <= num_rows)):
                    beside = f" adapters {count}" if count else ""
                    print(f"{start}{beside}", check(runner, lengths, count), flush=True)
            else:
                graph, _ = capture(runner, num_rows)
                seat(runner, lengths)
                seconds = time_step(graph)
                hits = f", {experts_hit(runner, num_rows):.1f} experts hit" if spec_has_experts(model.spec) else ""
                print(
                    f"{start} {1e3 * seconds:8.3f} ms, floor {1e3 * floor:.3f}, {floor / seconds:.1%}{hits}", flush=True
                )
                if arguments.profile:
                    profile(graph)
                del graph
                tell_adapters(runner, lengths, counts, seconds, arguments.profile)
            runner.close()
            del runner
            torch.cuda.empty_cache()
        del model
        torch.cuda.empty_cache()
    print(" ".join(f"{key}={value}" for key, value in conditions("cuda").items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
