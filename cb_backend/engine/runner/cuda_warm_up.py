"""Bring a model up on a GPU: compile and run everything once, size the cache from what is left, capture the graphs.

The order matters: kernels are compiled by several processes before anything launches them; the largest step runs on a
cache of two blocks, which shows how much memory steps need; the cache then takes the rest of the allowance; graphs are
captured last, on the real cache.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time

import numpy as np
import torch

from cb_backend.contracts.adapters import NO_ADAPTER
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.pooling import PoolingRules
from cb_backend.contracts.step import JoinedRow, NoMasks, StepPlan, Want
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.runner.start_account import StartAccount
from cb_backend.engine.step_shapes import StepShape, adapter_shapes, step_shapes
from cb_backend.kernels.compile_ahead import compile_ahead
from cb_backend.kv_cache.layout import KVLayout
from cb_backend.kv_cache.storage import KVCacheStorage, size_kv_cache
from cb_backend.layers.ops import Ops
from cb_backend.models.decoder import DecoderForCausalLM

GRAPH_MEMORY = 512 << 20  # kept free for graph capture and library workspaces
MIB = 1 << 20
LAUNCH_PART = 3
# Seconds. Of longer steps no graphs are made: so they cannot make the start much longer, and with very many layers the
# driver's queue of launches fills up, so that the host only seems to need as long as the device.
LONGEST_LAUNCH_BOUND = 0.1


def log(message: str) -> None:
    """Progress of a start-up, for the server's log. A log that cannot be written (a full disk) is no reason to fail."""
    with contextlib.suppress(OSError):
        print(f"cb_backend engine: {message}", file=sys.stderr, flush=True)


def create_cuda_runner(
    config: EngineConfig,
    layout: KVLayout,
    model: DecoderForCausalLM,
    ops: Ops,
    max_model_len: int,
    kv_dtype: torch.dtype,
    account: StartAccount,
) -> SlotRunner:
    """Warm up, size the cache, capture. Raises `ConfigError` that says what to lower when memory does not suffice."""
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats()
    small = KVCacheStorage(layout, 2, kv_dtype, device)
    runner = SlotRunner(model, ops, small, config.max_num_seqs, max_model_len)
    _compile_kernels(runner, config.max_num_seqs, config.max_num_batched_tokens)
    account.ends("kernels", "steps' state")
    try:
        warm_up(runner, config.max_num_batched_tokens, config.max_num_seqs, max_model_len, model.spec.vocab_size)
        shapes = [] if config.enforce_eager or not model.ropes.is_static else _shapes_to_capture(runner, config)
    except torch.cuda.OutOfMemoryError:
        raise ConfigError(
            f"a step of max_num_batched_tokens {config.max_num_batched_tokens} and max_num_seqs {config.max_num_seqs}"
            " does not fit the GPU's memory beside the weights; lower one of them"
        ) from None
    torch.cuda.synchronize()
    step_bytes = _largest_step_bytes()
    account.ends("warm-up", "steps' state")
    num_blocks, shapes = _size_cache(config, layout, device, shapes, step_bytes)
    runner.storage = KVCacheStorage(layout, num_blocks, kv_dtype, device)
    account.ends("cache", "KV cache")
    log(
        f"KV cache: {num_blocks - 1} blocks of {config.block_size} tokens, {runner.storage.data.nbytes // MIB} MiB of"
        f" {str(kv_dtype).removeprefix('torch.')}"
    )
    if shapes:
        runner.graphs.capture(shapes, runner.new_buffers, runner.run_step, runner.rehearse_step, log)
        runner.memory.prepare(runner.graphs.shapes)
    account.ends("graphs", "graphs")
    account.tell(step_bytes)
    return runner


@torch.inference_mode()
def _compile_kernels(runner: SlotRunner, max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Compile what steps of every size launch, several processes at once. The warm-up then finds it compiled."""
    start = time.perf_counter()
    most_rows = min(max_num_seqs, max_num_batched_tokens)
    sizes = {1 << bits for bits in range(most_rows.bit_length())} | {most_rows}
    shapes = [*(StepShape(size) for size in sorted(sizes)), StepShape(0, 16, 1), StepShape(0, 256, 1)]
    if runner.adapters is not None:  # the plan's tiles are chosen by the number of tokens
        prompts = [StepShape(0, size, 1) for size in (512, 1024, 2048) if size <= max_num_batched_tokens]
        shapes += [shape._replace(has_adapters=True) for shape in (*shapes, *prompts)]

    def launch_all() -> None:
        for shape in shapes:
            runner.rehearse_step(runner.new_buffers(shape))

    try:
        number = compile_ahead(launch_all)
    except (OSError, TimeoutError) as error:  # no memory or no right to fork: the warm-up compiles
        log(f"kernels are compiled one by one: {error}")
    else:
        log(f"{number} kernels compiled in {time.perf_counter() - start:.1f} s")


def warm_up(
    runner: SlotRunner, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, vocab_size: int
) -> None:
    """Run the largest step and each kind of step once. Every block table names the null block alone."""
    params = TokenRules(max_tokens=1)
    special = TokenRules(max_tokens=1, min_tokens=1, presence_penalty=1.0, logprobs=1)
    want = Want.TOKENS
    if not runner.model.spec.generates:
        params, want = TokenRules(max_tokens=1, pooling=PoolingRules()), Want.HIDDEN
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    longest = min(max_model_len, -(-max_num_batched_tokens // num_rows))
    kinds = [
        ([min(max_model_len, max_num_batched_tokens)], params),
        ([longest] * num_rows, params),
        ([1] * num_rows, params),
        ([1] * num_rows, special),  # rules work on float32 logits, for which kernels are compiled apart
    ]
    if want is Want.HIDDEN:
        del kinds[2:]  # nothing decodes
    # With adapters what is fused without them is not, which takes memory.
    adapters = (NO_ADAPTER,) if runner.adapters is None else (NO_ADAPTER, 0)
    for (lengths, params), adapter in itertools.product(kinds, adapters):
        counts = np.asarray(lengths, np.int32)
        tokens = np.arange(int(counts.max()), dtype=np.int32) % vocab_size
        joined = tuple(
            JoinedRow(slot, slot, tokens[:count], count, (), params, (), count + 1, adapter)
            for slot, count in enumerate(lengths)
        )
        is_decode = lengths[0] == 1 and want is Want.TOKENS
        plan = StepPlan(
            step_id=1,
            slots=np.arange(len(lengths), dtype=np.int32),
            first=np.zeros(len(lengths), np.int32),
            num_tokens=counts,
            wants=np.full(len(lengths), want, np.uint8),
            num_decode_rows=len(lengths) if is_decode else 0,
            joined=joined,
        )
        runner.execute(plan, NoMasks()).result()
    if want is Want.HIDDEN:
        return
    logits = torch.zeros(1, vocab_size, dtype=torch.float32, device=runner.device)
    every_token = torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32, device=runner.device)
    runner.ops.apply_token_bitmask(logits, every_token, torch.zeros(1, dtype=torch.int64, device=runner.device))


def _shapes_to_capture(runner: SlotRunner, config: EngineConfig) -> list[StepShape]:
    """All shapes, or those of prompts alone where nothing is generated; of the large ones none where the device takes
    much longer for such a step than the host."""
    sizes = config.max_num_seqs, config.max_num_batched_tokens
    shapes = step_shapes(*sizes) + (adapter_shapes(*sizes) if runner.adapters is not None else [])
    if not runner.model.spec.generates:
        shapes = [shape for shape in shapes if not shape.num_decode]
    large = [shape for shape in shapes if shape.is_large and not shape.has_adapters]
    if not large or _is_launch_bound(runner, max(large, key=lambda shape: shape.num_prefill)):
        return shapes
    return [shape for shape in shapes if not shape.is_large]


def _is_launch_bound(runner: SlotRunner, shape: StepShape) -> bool:
    """Whether launching a step kernel by kernel takes the host more than a third of the device's time for it.

    A part, for while serving the host has more to do for a step than to launch it.
    """
    buffers = runner.new_buffers(shape)
    for _ in range(2):  # the first time the host may have kernels to load
        torch.cuda.synchronize()
        start = time.perf_counter()
        runner.run_step(buffers)
        launch_seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        is_bound = LAUNCH_PART * launch_seconds > seconds
        if not is_bound:
            break
    log(f"a step of {shape.num_tokens} tokens takes {seconds * 1e3:.1f} ms, its launches {launch_seconds * 1e3:.1f} ms")
    return is_bound and seconds < LONGEST_LAUNCH_BOUND


def _size_cache(
    config: EngineConfig,
    layout: KVLayout,
    device: torch.device,
    shapes: list[StepShape],
    step_bytes: int,
) -> tuple[int, list[StepShape]]:
    """(blocks of the cache, shapes to capture): not the large ones where the memory suffices but for them.

    Graphs have a pool of their own, which takes as much as the largest step that they hold: beside the step itself.
    """
    small = [shape for shape in shapes if not shape.is_large]
    if len(small) < len(shapes):
        # Where the configuration names the cache's size, it may not fit any more.
        with contextlib.suppress(ConfigError):
            return size_kv_cache(config, layout, device, 2 * step_bytes + GRAPH_MEMORY), shapes
    num_blocks = size_kv_cache(config, layout, device, step_bytes + GRAPH_MEMORY)
    if len(small) < len(shapes):
        log(f"no memory for graphs of full steps beside {num_blocks - 1} blocks: they are launched kernel by kernel")
    return num_blocks, small


def _largest_step_bytes() -> int:
    """Memory that the largest step took beside what is there for good."""
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    return peak - torch.cuda.memory_reserved()
