"""From engine arguments to a model runner that is ready to step: checkpoint, kernels, memory, warm-up.

Everything that can be wrong with a deployment is found here and said in one line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.pooling import ModelTasks
from cb_backend.engine.runner.checkpoint_tokenizer import find_tokenizer, plain_encoder, read_tokenizer_eos_ids
from cb_backend.engine.runner.cuda_warm_up import create_cuda_runner, log, log_of
from cb_backend.engine.runner.load_progress import LoadProgress
from cb_backend.engine.runner.sleeper import RunnerSleeper
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.runner.start_account import StartAccount
from cb_backend.engine.runner.step_adapters import allocate_adapters, new_adapter_table
from cb_backend.engine.runner.step_runner import AnyRunner
from cb_backend.kernels.compile_ahead import begin_hashing
from cb_backend.kernels.fp8 import MIN_CAPABILITY, fp8_needs, fp8_needs_of, is_fp8_capable
from cb_backend.kernels.launch import IS_INTERPRETING
from cb_backend.kv_cache.layout import engine_layout
from cb_backend.kv_cache.storage import KVCacheStorage, resolve_kv_dtype, size_kv_cache
from cb_backend.kv_cache.swap import BlockSwapper, num_swap_blocks
from cb_backend.layers.ops import resolve_ops
from cb_backend.models.checkpoint import resolve_checkpoint
from cb_backend.models.generation_config import read_sampling_defaults
from cb_backend.models.quantization import FP8, SYNONYMS
from cb_backend.models.registry import load_model, outline_model, read_model_config, resolve_dtype
from cb_backend.models.replacement import ModelWeights, check_checkpoint, weight_stamps
from cb_backend.models.sharding import shard_spec
from cb_backend.models.spec import ModelSpec
from cb_backend.models.tasks import resolve_tasks
from cb_backend.parallel.group import Agreed, Group, NoGroup


def resolve_device(name: str) -> torch.device:
    """`auto` takes the GPU when there is one. Raises `ConfigError` when cuda is asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is 'cuda' but no CUDA device is visible; use device 'cpu' or 'auto'")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """The configured length, or the checkpoint's. Raises `ConfigError` when more is asked for than the model knows."""
    limit = spec.max_context_len
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len is {config.max_model_len} but the checkpoint's positions end at {limit}; lower it"
        )
    return config.max_model_len


def resolve_quantization(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The checkpoint's method, or fp8 where that is asked for. Raises `ConfigError` where the checkpoint has another
    method, or the GPU or the dtype does not do.
    """
    quantization = choose_quantization(config, spec)
    if quantization == FP8 and not is_fp8_capable(device):
        raise ConfigError(_not_capable(quantization, fp8_needs(device)))
    if quantization == FP8 and device.type == "cuda" and dtype != torch.bfloat16:
        raise ConfigError(_not_in_bfloat16(quantization, dtype))
    return quantization


def fp8_faults(quantization: str | None, dtype: torch.dtype, name: str, capability: tuple[int, int]) -> Iterator[str]:
    """What `resolve_quantization` would say on a GPU that is not here, by its name and compute capability."""
    if quantization != FP8:
        return
    if capability < MIN_CAPABILITY:
        yield _not_capable(quantization, fp8_needs_of(name, capability))
    if dtype != torch.bfloat16:
        yield _not_in_bfloat16(quantization, dtype)


def choose_quantization(config: EngineConfig, spec: ModelSpec) -> str | None:
    """The checkpoint's method, or fp8 where that is asked for. Raises `ConfigError` where it has another method."""
    wanted = config.quantization and SYNONYMS.get(config.quantization, config.quantization)
    if wanted == FP8 and spec.quantization == "fp8_blocks":
        wanted = spec.quantization
    if wanted not in (None, spec.quantization) and (wanted != FP8 or spec.quantization is not None):
        found = f"quantised ({spec.quantization})" if spec.quantization else "not quantised"
        raise ConfigError(f"quantization is {config.quantization!r}, but the checkpoint is {found}; remove it")
    return wanted or spec.quantization


def _not_capable(quantization: str, needs: str) -> str:
    return f"quantization is {quantization!r}, which {needs}. Use an unquantised checkpoint"


def _not_in_bfloat16(quantization: str, dtype: torch.dtype) -> str:
    return (
        f"quantization is {quantization!r}, whose products are bfloat16 on a GPU, but dtype is "
        f"{str(dtype).removeprefix('torch.')}; set dtype 'bfloat16'"
    )


def resolve_attention_backend(name: str, device: torch.device) -> str:
    """`triton` or `torch`; `auto` is what the device is for. Raises `ConfigError` for kernels that it cannot run."""
    if name == "auto":
        return "triton" if device.type == "cuda" else "torch"
    if name == "triton" and device.type == "cpu" and not IS_INTERPRETING:
        raise ConfigError("attention_backend is 'triton', whose kernels need a GPU; use 'torch' or 'auto' on a CPU")
    return name


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """PyTorch says in errors of its own that memory does not suffice, at length; these become `MemoryError`s."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).partition("\n")[0]
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in text:
            raise
        # The size asked for and the size free come first; how PyTorch's allocator may be set follows.
        raise MemoryError(". ".join(text.split(". ")[:3]).rstrip(".")) from error


def create_runner(config: EngineConfig, weights: Path | None = None) -> tuple[SlotRunner, ModelInfo]:
    """Load the checkpoint and make its cache. `weights`: as `load_runner` has it. Raises `ConfigError` with a one-line
    reason and remedy, `MemoryError` where the device or the host has too little."""
    return load_runner(config, NoGroup(), SlotRunner, weights)


@dataclass(frozen=True, slots=True)
class _Resolved:
    """What settings and small files make of a checkpoint, before a weight is read."""

    device: torch.device
    folder: Path
    stored_spec: ModelSpec  # as the checkpoint has it
    spec: ModelSpec  # as it is served
    dtype: torch.dtype
    kv_dtype: torch.dtype
    quantization: str | None
    max_model_len: int
    tokenizer_dir: Path
    tokenizer_eos_ids: tuple[int, ...]
    tasks: ModelTasks
    sampling_defaults: dict[str, float]

    @property
    def has_kv_scales(self) -> bool:
        return self.kv_dtype != self.dtype


def _resolve(config: EngineConfig, device: torch.device) -> _Resolved:
    """Finds what may be wrong with the settings and the small files. Raises `ConfigError`."""
    folder = resolve_checkpoint(config.model)
    stored_spec = read_model_config(folder)
    dtype = resolve_dtype(config.dtype, stored_spec, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, device)
    quantization = resolve_quantization(config, stored_spec, dtype, device)
    max_model_len = resolve_max_model_len(config, stored_spec)
    tokenizer_dir = find_tokenizer(config, folder)
    spec, tasks = resolve_tasks(folder, stored_spec, config, plain_encoder(tokenizer_dir))
    wants_defaults = config.generation_config == "auto"
    return _Resolved(
        device=device,
        folder=folder,
        stored_spec=stored_spec,
        spec=spec,
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        tokenizer_dir=tokenizer_dir,
        tokenizer_eos_ids=read_tokenizer_eos_ids(tokenizer_dir, spec.vocab_size),
        tasks=tasks,
        sampling_defaults=read_sampling_defaults(folder, spec.vocab_size) if wants_defaults else {},
    )


@_memory_errors()
def load_runner(
    config: EngineConfig, group: Group, kind: type[AnyRunner], weights: Path | None = None
) -> tuple[AnyRunner, ModelInfo]:
    """A runner of this kind for the group's part of the model; every device of the group must call it.

    `weights`: folder of a checkpoint of the same specification, whose tensors are loaded. All else, as where answers
    end and how they are sampled unasked, is the model's own."""
    device = resolve_device(config.device)
    is_first, name = group.rank == 0, f"rank {group.rank}: "
    account = StartAccount(device, log if is_first else lambda line: log(name + line))
    if device.type == "cuda":
        begin_hashing()
    found = _resolve(config, device)
    spec, dtype, kv_dtype, max_model_len = found.spec, found.dtype, found.kv_dtype, found.max_model_len
    ops = resolve_ops(resolve_attention_backend(config.attention_backend, device))
    adapters = new_adapter_table(config, dtype, device)
    sleeper = None if config.idle_sleep_s is None else RunnerSleeper(config, device, log)
    account.ends("checkpoint")
    filled_from = weights or found.folder
    load_format = config.load_format if weights is None else "auto"
    stamps = {} if sleeper is None or load_format == "dummy" else weight_stamps(filled_from)
    progress = LoadProgress(str(weights or config.model), device, log_of(group))  # all read alike
    model = load_model(
        filled_from,
        spec,
        ops=ops,
        dtype=dtype,
        device=device,
        load_format=load_format,
        seed=config.seed,
        measured=progress.begin,
        progress=progress.at,
        has_kv_scales=found.has_kv_scales,
        quantization=found.quantization,
        max_model_len=max_model_len,
        adapters=adapters,
        group=group,
        spreads_experts=config.enable_expert_parallel,
    )
    account.weights(model)
    if adapters is not None:
        allocate_adapters(adapters, config.max_cpu_loras, log_of(group))  # all have as much
        account.ends("adapters", "adapters", None if device.type == "cuda" else adapters.nbytes)
    new_cache = None
    if sleeper is not None:
        sleeper.take_model(model)
        new_cache = sleeper.new_cache
    layout = engine_layout(config, shard_spec(spec, group.size), kv_dtype.itemsize, max_model_len)
    if device.type == "cuda":
        runner = create_cuda_runner(kind, config, layout, model, ops, max_model_len, kv_dtype, account, new_cache)
    else:
        num_blocks = group.agree(size_kv_cache(config, layout, device), Agreed.LEAST)
        storage = KVCacheStorage(layout, num_blocks, kv_dtype, device, new_cache)
        runner = kind(model, ops, storage, config.max_num_seqs, max_model_len)
        account.ends("cache", "KV cache", storage.data.nbytes)
        account.tell()
    if sleeper is not None and isinstance(runner, SlotRunner):
        is_dummy = config.load_format == "dummy"
        own = ModelWeights(
            model, found.folder, found.stored_spec, found.quantization, found.has_kv_scales, is_dummy, config.seed
        )
        sleeper.attach(runner, own, filled_from, stamps)
    num_host_blocks = num_swap_blocks(config.swap_space, layout.bytes_per_block)
    if num_host_blocks:
        runner.swapper = BlockSwapper(runner.storage, num_host_blocks, group)
    num_adapter_slots = 0 if adapters is None else adapters.max_adapters
    return runner, _model_info(config, found, runner.storage, num_host_blocks, num_adapter_slots)


def fault_of_update(config: EngineConfig, folder: Path) -> str:
    """Why the weights of `folder`, which an update had brought to this model, cannot be served any more; empty: they
    can, as far as config and headers tell, or the model's own fault hides it. Nothing is on a device afterwards."""
    try:
        found = _resolve(config, resolve_device(config.device))
    except ConfigError:  # the start will say it
        return ""
    try:
        check_checkpoint(found.stored_spec, found.folder, folder)
        outline_model(folder, found.spec, found.dtype, found.quantization)
    except (ConfigError, OSError) as error:
        return str(error)
    return ""


def _model_info(
    config: EngineConfig, found: _Resolved, storage: KVCacheStorage, num_host_blocks: int, num_adapter_slots: int
) -> ModelInfo:
    return ModelInfo(
        model=config.model,
        tokenizer_dir=str(found.tokenizer_dir),
        vocab_size=found.spec.vocab_size,
        max_model_len=found.max_model_len,
        eos_token_ids=tuple(dict.fromkeys((*found.spec.eos_token_ids, *found.tokenizer_eos_ids))),
        block_size=config.block_size,
        num_blocks=storage.num_blocks - 1,  # block 0 is the null block
        max_num_seqs=config.max_num_seqs,
        dtype=str(found.dtype).removeprefix("torch."),
        device=found.device.type,
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=found.quantization,
        num_host_blocks=num_host_blocks,
        num_adapter_slots=num_adapter_slots,
        kv_windows=storage.layout.windows,
        sampling_defaults=found.sampling_defaults,
        tasks=found.tasks,
    )
