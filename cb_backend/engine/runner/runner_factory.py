"""From engine arguments to a model runner that is ready to step: checkpoint, kernels, memory, warm-up.

Everything that can be wrong with a deployment is found here and said in one line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.messages import ModelInfo
from cb_backend.engine.runner.cuda_warm_up import create_cuda_runner, log
from cb_backend.engine.runner.load_progress import LoadProgress
from cb_backend.engine.runner.slot_runner import SlotRunner
from cb_backend.engine.runner.start_account import StartAccount
from cb_backend.engine.runner.step_adapters import allocate_adapters, new_adapter_table
from cb_backend.kernels.fp8 import MIN_CAPABILITY, fp8_needs, fp8_needs_of, is_fp8_capable
from cb_backend.kernels.launch import IS_INTERPRETING
from cb_backend.kv_cache.layout import kept_windows, layout_of
from cb_backend.kv_cache.storage import KVCacheStorage, resolve_kv_dtype, size_kv_cache
from cb_backend.kv_cache.swap import BlockSwapper, num_swap_blocks
from cb_backend.layers.ops import resolve_ops
from cb_backend.models.checkpoint import has_tokenizer, resolve_checkpoint, resolve_tokenizer
from cb_backend.models.generation_config import read_sampling_defaults
from cb_backend.models.quantization import FP8, SYNONYMS
from cb_backend.models.registry import load_model, read_model_config, resolve_dtype
from cb_backend.models.spec import ModelSpec
from cb_backend.models.spec_fields import within_vocabulary
from cb_backend.models.tasks import EncodePlain, resolve_tasks
from cb_backend.support.tokenizer_files import load_tokenizer, token_text


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


@_memory_errors()
def create_runner(config: EngineConfig) -> tuple[SlotRunner, ModelInfo]:
    """Load the checkpoint and make its cache. Raises `ConfigError` with a one-line reason and remedy, `MemoryError`
    where the device or the host has too little."""
    device = resolve_device(config.device)
    account = StartAccount(device, log)
    folder = resolve_checkpoint(config.model)
    spec = read_model_config(folder)
    dtype = resolve_dtype(config.dtype, spec, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, device)
    quantization = resolve_quantization(config, spec, dtype, device)
    max_model_len = resolve_max_model_len(config, spec)
    # What small files may have wrong is found before the weights are loaded.
    tokenizer_dir = find_tokenizer(config, folder)
    spec, tasks = resolve_tasks(folder, spec, config, plain_encoder(tokenizer_dir))
    tokenizer_eos_ids = read_tokenizer_eos_ids(tokenizer_dir, spec.vocab_size)
    wants_defaults = config.generation_config == "auto"
    sampling_defaults = read_sampling_defaults(folder, spec.vocab_size) if wants_defaults else {}
    ops = resolve_ops(resolve_attention_backend(config.attention_backend, device))
    adapters = new_adapter_table(config, dtype, device)
    account.ends("checkpoint")
    progress = LoadProgress(config.model, device, log)
    model = load_model(
        folder,
        spec,
        ops=ops,
        dtype=dtype,
        device=device,
        load_format=config.load_format,
        seed=config.seed,
        measured=progress.begin,
        progress=progress.at,
        has_kv_scales=kv_dtype != dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        adapters=adapters,
    )
    account.weights(model)
    if adapters is not None:
        allocate_adapters(adapters, config.max_cpu_loras, log)
        account.ends("adapters", "adapters", None if device.type == "cuda" else adapters.nbytes)
    windows = () if config.disable_hybrid_kv_cache_manager else kept_windows(spec.windows, max_model_len)
    layout = layout_of(spec, config.block_size, kv_dtype.itemsize, windows)
    if device.type == "cuda":
        runner = create_cuda_runner(config, layout, model, ops, max_model_len, kv_dtype, account)
    else:
        storage = KVCacheStorage(layout, size_kv_cache(config, layout, device), kv_dtype, device)
        runner = SlotRunner(model, ops, storage, config.max_num_seqs, max_model_len)
        account.ends("cache", "KV cache", storage.data.nbytes)
        account.tell()
    num_host_blocks = num_swap_blocks(config.swap_space, layout.bytes_per_block)
    if num_host_blocks:
        runner.swapper = BlockSwapper(runner.storage, num_host_blocks)
    info = ModelInfo(
        model=config.model,
        tokenizer_dir=str(tokenizer_dir),
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *tokenizer_eos_ids))),
        block_size=config.block_size,
        num_blocks=runner.storage.num_blocks - 1,  # block 0 is the null block
        max_num_seqs=config.max_num_seqs,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=quantization,
        num_host_blocks=num_host_blocks,
        num_adapter_slots=0 if adapters is None else adapters.max_adapters,
        kv_windows=layout.windows,
        sampling_defaults=sampling_defaults,
        tasks=tasks,
    )
    return runner, info


def find_tokenizer(config: EngineConfig, folder: Path) -> Path:
    """The tokenizer's folder; the checkpoint's own when it has none, for whoever works with token ids alone.

    A front end that finds no tokenizer there refuses to start. Raises `ConfigError` for one that cannot be converted.
    """
    if config.tokenizer is None and not has_tokenizer(folder):
        return folder
    return resolve_tokenizer(config.tokenizer, folder)


def plain_encoder(tokenizer_dir: Path) -> EncodePlain | None:
    """What `resolve_tasks` asks token ids of; None where there is no tokenizer."""
    if not (tokenizer_dir / "tokenizer.json").is_file():
        return None
    return lambda text: list(load_tokenizer(tokenizer_dir)[0].encode(text, add_special_tokens=False).ids)


def read_tokenizer_eos_ids(tokenizer_dir: Path, vocab_size: int) -> tuple[int, ...]:
    """The id of the tokenizer's `eos_token`: fine-tuned models end their turns with it, whatever their
    generation_config.json kept of the base model. Warns of ids that the tokenizer has and the model lacks.

    Raises `ConfigError` for a tokenizer that cannot be read.
    """
    if not (tokenizer_dir / "tokenizer.json").is_file():
        return ()
    backend, settings = load_tokenizer(tokenizer_dir)
    highest = max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= vocab_size:
        log(
            f"the tokenizer's ids go up to {highest}, the model's vocabulary ends at {vocab_size - 1}: prompts that"
            " need the others are refused"
        )
    eos_token = token_text(settings.get("eos_token"))
    eos_token_id = None if eos_token is None else backend.token_to_id(eos_token)
    return () if eos_token_id is None else within_vocabulary([eos_token_id], vocab_size, "the tokenizer's eos_token")
