"""A model over several ranks: how they come up together, and rank 0's runner, which tells the others what it runs."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import CbError, ConfigError
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.step import MaskSource, StepPlan, StepResult
from cb_backend.engine.runner.cuda_warm_up import log
from cb_backend.engine.runner.pending_step import PendingStep
from cb_backend.engine.runner.rank_adapters import SharingAdapters, TakenAdapters
from cb_backend.engine.runner.runner_factory import load_runner, resolve_device
from cb_backend.engine.runner.shard_runner import ShardRunner
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.workers import RING_FILE, Workers, WorkersLostError, threads_of_rank
from cb_backend.models.checkpoint import resolve_checkpoint
from cb_backend.models.registry import read_model_config, resolve_dtype
from cb_backend.models.sharding import check_shares
from cb_backend.models.spec import ModelSpec
from cb_backend.parallel.choose_group import can_open_peer_memory, choose_group
from cb_backend.parallel.group import Agreed
from cb_backend.parallel.hand_over import Giver
from cb_backend.parallel.plan_ring import ReaderBehindError, RingReader, RingWriter
from cb_backend.parallel.torch_group import TorchGroup, join_group
from cb_backend.parallel.worker_plan import encode_plan

logger = logging.getLogger("cb_backend.engine")


class RankedRunner:
    """Implements `step.WatchedRunner` as rank 0 of several: every plan goes out before it runs here."""

    def __init__(self, runner: SlotRunner, workers: Workers, ring: RingWriter, group: TorchGroup) -> None:
        self.runner = runner
        self.workers = workers
        self.adapters: SharingAdapters | None = None
        self._encode: Callable[[StepPlan], bytes] = encode_plan
        if runner.adapters is not None:
            self.adapters = SharingAdapters(runner.adapters, runner.model.spec, Giver(workers.connections))
            self._encode = self.adapters.encode
        self._ring = ring
        self._group = group
        self._lost: str | None = None

    def execute(self, plan: StepPlan, masks: MaskSource) -> RankedStep:
        """Raises `WorkersLostError` whatever failed: the other ranks may wait for what this one has not done."""
        self.check()
        try:
            self._ring.publish(self._encode(plan))
            return RankedStep(self.runner.execute(plan, masks), self)
        except Exception as error:
            self._lost = self.workers.lost_soon() or _why_failed(error)
            raise WorkersLostError(self._lost) from error
        except BaseException:  # a second Ctrl-C, which no step holds up
            self._lost = "rank 0 was interrupted in a step, which the others go on with"
            raise

    def lost(self) -> str | None:
        """Why no step can be run any more; None while all ranks live."""
        if self._lost is None:
            self._lost = self.workers.lost() or self._group.fault()
        return self._lost

    def check(self) -> None:
        """Raises `WorkersLostError` where no step can be run any more."""
        if self.lost() is not None:
            raise WorkersLostError(self._lost)

    def cache_key(self, num_prompt_tokens: int) -> bytes:
        return self.runner.cache_key(num_prompt_tokens)

    def close(self) -> None:
        if self.adapters is not None:
            self.adapters.close()
        _end(self.workers, self._ring, self.runner, self._group)


def _end(workers: Workers, ring: RingWriter | None, runner: SlotRunner | None, group: TorchGroup | None) -> None:
    """All ranks, or as much of them as there is; the folder goes whatever fails."""
    workers.end()
    try:
        if ring is not None:
            ring.close()
        if runner is not None:
            runner.close()  # before the group: NCCL waits for the graphs that its sums are in
        if group is not None:
            group.leave()
    finally:
        workers.forget_folder()


def _why_failed(error: Exception) -> str:
    if isinstance(error, ReaderBehindError):
        return f"rank {error.reader + 1} lives, but has taken no plan for {error.seconds:g} s"
    return f"rank 0 failed in a step: {error}"


class RankedStep(NamedTuple):
    """A `Pending` whose result all ranks have come to."""

    pending: PendingStep
    runner: RankedRunner

    def result(self) -> StepResult:
        """Raises `WorkersLostError` where a rank is gone: what a device had of it then may mean nothing."""
        result = self.pending.result()
        self.runner.check()
        return result


def create_ranked(config: EngineConfig, folder: Path | None = None) -> tuple[RankedRunner, ModelInfo]:
    """Start the other ranks and load together with them: they meet in a folder of their own within this one.

    Raises what `create_runner` raises.
    """
    device = _take_device(config, 0)
    # Before there are others: what must be fetched or converted is so once, and not by all of them side by side.
    spec = read_model_config(resolve_checkpoint(config.model))
    check_shares(spec, config.tensor_parallel_size, spreads_experts=config.enable_expert_parallel)
    if device.type == "cuda" and dist.is_initialized():
        raise ConfigError(
            "this process has a group of torch.distributed already (of another model over several GPUs, or its own);"
            " close that first"
        )
    workers = Workers(config, folder)
    ring: RingWriter | None = None
    group: TorchGroup | None = None
    runner: SlotRunner | None = None
    try:
        ring = RingWriter(workers.folder / RING_FILE, workers.size - 1)
        workers.start()
        workers.wait_until_here()
        group = workers.while_they_live(lambda: _join(config, spec, workers.folder, 0, device))
        workers.call_when_lost(group.abandon)
        runner, info = load_runner(config, group, SlotRunner)
        group.agree(0, Agreed.LEAST)  # all have loaded
        if device.type == "cuda":
            workers.tidy_folder()
        else:
            workers.forget_folder()
        return RankedRunner(runner, workers, ring, group), info
    except BaseException as error:
        why = None if isinstance(error, CbError) else workers.why_lost()
        traceback.clear_frames(error.__traceback__)  # graphs go before the group, also those of half a runner
        with _telling_what_failed_first():
            _end(workers, ring, runner, group)
        if why is not None:
            raise why from error
        raise


@contextlib.contextmanager
def _telling_what_failed_first() -> Iterator[None]:
    """Something has failed, and is to be raised: what fails while that is tidied up is only logged."""
    try:
        yield
    except Exception:
        logger.exception("the ranks could not be ended in order")


class Shard(NamedTuple):
    """Another rank."""

    runner: ShardRunner
    group: TorchGroup
    reader: RingReader  # of its plans
    adapters: TakenAdapters | None


def create_shard(config: EngineConfig, folder: Path, rank: int, connection: socket.socket | None = None) -> Shard:
    """Load together with the other ranks. connection: over which adapters come; None: there are none.

    Raises what `create_runner` raises.
    """
    device = _take_device(config, rank)
    reader = RingReader(folder / RING_FILE, rank - 1, config.tensor_parallel_size - 1)
    group = _join(config, read_model_config(resolve_checkpoint(config.model)), folder, rank, device)
    runner, _ = load_runner(config, group, ShardRunner)
    adapters = None
    if runner.adapters is not None and connection is not None:
        adapters = TakenAdapters(runner.adapters, connection, device)
    group.agree(0, Agreed.LEAST)
    return Shard(runner, group, reader, adapters)


def _take_device(config: EngineConfig, rank: int) -> torch.device:
    """The rank's device, which becomes the thread's current one. Raises `ConfigError` where there are too few."""
    device, size = resolve_device(config.device), config.tensor_parallel_size
    if device.type == "cpu":
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(threads_of_rank(size))
        return device
    found = torch.cuda.device_count()
    if found < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but GPUs that can be seen: {found}; lower it, or name more in"
            " CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def _join(config: EngineConfig, spec: ModelSpec, folder: Path, rank: int, device: torch.device) -> TorchGroup:
    """The group of all ranks, in the way that suits their devices and the model."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a thread's own
    group = join_group(folder, rank, config.tensor_parallel_size, device)
    try:
        return choose_group(
            group,
            config.max_num_batched_tokens,
            spec.hidden_size,
            resolve_dtype(config.dtype, spec, device),
            log=log,
            is_peer_wanted=not config.disable_custom_all_reduce,
            can_open=can_open_peer_memory(),
        )
    except BaseException:
        with _telling_what_failed_first():
            group.leave()
        raise
