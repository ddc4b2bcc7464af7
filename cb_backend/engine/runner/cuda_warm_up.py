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
from collections.abc import Callable

import numpy as np
import torch

from cb_backend.contracts.adapters import NO_ADAPTER
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.pooling import PoolingRules
from cb_backend.contracts.step import JoinedRow, StepPlan, Want
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.runner.start_account import StartAccount
from cb_backend.engine.runner.step_runner import AnyRunner, StepRunner
from cb_backend.engine.step_shapes import StepShape, adapter_shapes, pooling_shapes, step_shapes
from cb_backend.kernels.compile_ahead import compile_ahead
from cb_backend.kv_cache.layout import KVLayout
from cb_backend.kv_cache.storage import KVCacheStorage, size_kv_cache
from cb_backend.layers.ops import Ops
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.parallel.group import Agreed, Group

GRAPH_MEMORY = 512 << 20  # kept free for graph capture and library workspaces
MIB = 1 << 20
LAUNCH_PART = 3
# Seconds. Of longer steps no graphs are made: so they cannot make the start much longer, and with very many layers the
# driver's queue of launches fills up, so that the host only seems to need as long as the device.
LONGEST_LAUNCH_BOUND = 0.1


def log(message: str) -> None:
    """Progress of a start-up, for the server's log. A log that cannot be written (a full disk) is no reason to fail."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"cb_backend engine: {message}\n")  # at once: other ranks write to the same log
        sys.stderr.flush()


def log_of(group: Group) -> Callable[[str], None]:
    """`log` of rank 0; of ranks whose start is like its own, silence."""
    return log if group.rank == 0 else lambda message: None


def create_cuda_runner(
    kind: type[AnyRunner],
    config: EngineConfig,
    layout: KVLayout,
    model: DecoderForCausalLM,
    ops: Ops,
    max_model_len: int,
    kv_dtype: torch.dtype,
    account: StartAccount,
    new_cache: Callable[[int], torch.Tensor] | None = None,
) -> AnyRunner:
    """Warm up, size the cache (`new_cache`: its memory, as `KVCacheStorage` has it), capture. Raises `ConfigError` that
    says what to lower when memory does not suffice.

    All devices of the model's group do it together, so that each makes the calls that the others wait for: whatever
    follows from a time or from what memory is free is agreed.
    """
    device = torch.device("cuda")
    torch.cuda.reset_peak_memory_stats()
    small = KVCacheStorage(layout, 2, kv_dtype, device)
    runner = kind(model, ops, small, config.max_num_seqs, max_model_len)
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
    num_blocks, shapes = _size_cache(config, layout, device, model.group, shapes, step_bytes)
    runner.storage = KVCacheStorage(layout, num_blocks, kv_dtype, device, new_cache)
    account.ends("cache", "KV cache")
    say = log_of(model.group)
    say(
        f"KV cache: {num_blocks - 1} blocks of {config.block_size} tokens, {runner.storage.data.nbytes // MIB} MiB of"
        f" {str(kv_dtype).removeprefix('torch.')}"
    )
    if shapes:
        runner.capture(shapes, say)
    account.ends("graphs", "graphs")
    account.tell(step_bytes)
    if model.group.rank == 0:  # all launch the same
        account.tell_defaults()
    return runner


def rehearsed_shapes(max_num_seqs: int, max_num_batched_tokens: int, has_adapters: bool) -> list[StepShape]:
    """Steps that launch between them every kernel that a step of any size does."""
    most_rows = min(max_num_seqs, max_num_batched_tokens)
    sizes = {1 << bits for bits in range(most_rows.bit_length())} | {most_rows}
    shapes = [*(StepShape(size) for size in sorted(sizes)), StepShape(0, 16, 1), StepShape(0, 256, 1)]
    if has_adapters:  # the plan's tiles, and what runs beside a product, are chosen by the number of tokens
        others = {2, 4, 8, 32, 64, 128} - sizes | {512, 1024, 2048}
        others = {size for size in others if size < max_num_batched_tokens} | {max_num_batched_tokens}
        prompts = (StepShape(0, size, 1) for size in sorted(others))
        shapes += [shape._replace(has_adapters=True) for shape in (*shapes, *prompts)]
    return shapes


@torch.inference_mode()
def _compile_kernels(runner: StepRunner, max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Compile what steps of every size launch, several processes at once. The warm-up then finds it compiled."""
    start = time.perf_counter()
    shapes = rehearsed_shapes(max_num_seqs, max_num_batched_tokens, runner.adapters is not None)

    def launch_all() -> None:
        for shape in shapes:
            runner.rehearse_step(runner.new_buffers(shape))

    group = runner.model.group
    try:
        number = compile_ahead(launch_all, is_rehearsal=group.rank > 0)
    except (OSError, TimeoutError) as error:  # no memory or no right to fork: the warm-up compiles
        log(f"kernels are compiled one by one: {error}")
    else:
        log_of(group)(f"{number} kernels compiled in {time.perf_counter() - start:.1f} s")
    group.agree(0, Agreed.LEAST)


def warm_up(
    runner: StepRunner, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, vocab_size: int
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
        runner.complete(plan)
    if want is Want.HIDDEN:
        return
    logits = torch.zeros(1, vocab_size, dtype=torch.float32, device=runner.device)
    every_token = torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32, device=runner.device)
    runner.ops.apply_token_bitmask(logits, every_token, torch.zeros(1, dtype=torch.int64, device=runner.device))


def _shapes_to_capture(runner: StepRunner, config: EngineConfig) -> list[StepShape]:
    """All shapes, or those of prompts alone where nothing is generated; of the large ones none where the device takes
    much longer for such a step than the host."""
    sizes = config.max_num_seqs, config.max_num_batched_tokens
    with_adapters = adapter_shapes(*sizes) if runner.adapters is not None else []
    if runner.model.spec.generates:
        shapes = step_shapes(*sizes) + with_adapters
    else:
        shapes = pooling_shapes(*sizes) + [shape for shape in with_adapters if not shape.num_decode]
    large = [shape for shape in shapes if shape.is_large and not shape.has_adapters]
    if not large or _is_launch_bound(runner, max(large, key=lambda shape: shape.num_prefill)):
        return shapes
    return [shape for shape in shapes if not shape.is_large]


def _is_launch_bound(runner: StepRunner, shape: StepShape) -> bool:
    """Whether launching a step kernel by kernel takes the host more than a third of the device's time for it.

    A part, for while serving the host has more to do for a step than to launch it.
    """
    buffers, agree = runner.new_buffers(shape), runner.model.group.agree
    for _ in range(2):  # the first time the host may have kernels to load
        torch.cuda.synchronize()
        start = time.perf_counter()
        runner.run_step(buffers)
        launch_seconds = time.perf_counter() - start
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        is_bound = agree(int(LAUNCH_PART * launch_seconds > seconds), Agreed.LEAST) > 0
        if not is_bound:
            break
    log(f"a step of {shape.num_tokens} tokens takes {seconds * 1e3:.1f} ms, its launches {launch_seconds * 1e3:.1f} ms")
    return agree(int(is_bound and seconds < LONGEST_LAUNCH_BOUND), Agreed.LEAST) > 0


def _size_cache(
    config: EngineConfig,
    layout: KVLayout,
    device: torch.device,
    group: Group,
    shapes: list[StepShape],
    step_bytes: int,
) -> tuple[int, list[StepShape]]:
    """(blocks of the cache, shapes to capture): not the large ones where the memory suffices but for them.

    Graphs have a pool of their own, which takes as much as the largest step that they hold: beside the step itself.
    """
    small = [shape for shape in shapes if not shape.is_large]
    num_blocks = 0  # beside all shapes
    if len(small) < len(shapes):
        # Where the configuration names the cache's size, it may not fit any more.
        with contextlib.suppress(ConfigError):
            num_blocks = size_kv_cache(config, layout, device, 2 * step_bytes + GRAPH_MEMORY)
        num_blocks = group.agree(num_blocks, Agreed.LEAST)
    if num_blocks:
        return num_blocks, shapes
    num_blocks = group.agree(size_kv_cache(config, layout, device, step_bytes + GRAPH_MEMORY), Agreed.LEAST)
    if len(small) < len(shapes):
        log(f"no memory for graphs of full steps beside {num_blocks - 1} blocks: they are launched kernel by kernel")
    return num_blocks, small


def _largest_step_bytes() -> int:
    """Memory that the largest step took beside what is there for good.

    Not beside what is reserved for that: packing weights may leave holes of gigabytes in it, and graphs, whose pool is
    another, cannot lie in them.
    """
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    return peak - torch.cuda.memory_allocated()
