"""Engine arguments: what `1/model.json` may say, with vLLM's names, checked before anything is started.

One frozen dataclass; an unknown or ineffective key is an error that names it. Values may be strings where vLLM's own
tutorials write them so (`"enforce_eager": "true"`). This module does not know checkpoints, devices or the server.
"""

from __future__ import annotations

import difflib
from dataclasses import MISSING, dataclass, fields
from typing import Any

from cb_backend.contracts.config_values import BOOLS, coerced, show
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.pooling import POOLINGS
from cb_backend.contracts.scheduling import MAX_PRIORITY

DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "float": "float32",
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
}
KV_CACHE_DTYPES = {"auto": "auto", "fp8": "fp8", "fp8_e4m3": "fp8"}
MAX_RUN_AHEAD = 4
MAX_LORA_RANK = 512
MAX_RANKS = 8
MAX_ENGINES = 64
MAX_COUNT = 1 << 53  # whole numbers beyond it are not the same in every reader of JSON, and are no amount of anything

QUANTIZATIONS = ("fp8", "awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "modelopt", "modelopt_fp4")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "kv_cache_dtype": tuple(KV_CACHE_DTYPES),
    "load_format": ("auto", "dummy"),
    "generation_config": ("vllm", "auto"),
    "device": ("auto", "cpu", "cuda"),
    "attention_backend": ("auto", "triton", "torch"),
    "prefill_policy": ("mixed", "hybrid"),
    "runner": ("auto", "generate", "pooling", "both"),
    "pooling": (None, *POOLINGS),
    "sleep_weights": ("auto", "host", "files"),
}
# None is allowed where the field's type has it.
_AT_LEAST_ONE = (
    "max_num_seqs", "max_num_batched_tokens", "block_size", "max_queue_size", "max_queue_tokens", "stream_interval",
    "max_model_len", "kv_cache_memory_bytes", "num_gpu_blocks_override", "queue_timeout_ms", "timeout_ms",
    "max_loras", "max_cpu_loras",
)  # fmt: skip
_BETWEEN = {
    "data_parallel_size": (1, MAX_ENGINES),
    "tensor_parallel_size": (1, MAX_RANKS),
    "admission_reserve": (-10, 10),
    "reserved_priority": (-MAX_PRIORITY, MAX_PRIORITY - 1),  # the last class has nobody to be kept from
    "run_ahead": (0, MAX_RUN_AHEAD),
    "seed": (-MAX_COUNT, MAX_COUNT),
    "max_lora_rank": (1, MAX_LORA_RANK),
    "idle_sleep_s": (0, 1e9),
    "turn_s": (0, 1e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine can be told. Defaults work on a CPU box and on one GPU."""

    # What to serve
    model: str  # local folder, GGUF file, or hub id
    tokenizer: str | None = None  # another folder or hub id for the tokenizer; None: the model's
    # A checkpoint's is what its config names; else what its embedding is stored in; without files float32, as
    # transformers has it (of gpt-oss bfloat16).
    dtype: str = "auto"  # auto: the checkpoint's on a GPU, float32 on a CPU
    # The name of a method, as vLLM has it, must be the checkpoint's own method; another one is refused.
    quantization: str | None = None  # fp8: the layers' matrices, quantised at start-up; None: as the checkpoint is
    max_model_len: int | None = None  # tokens of prompt + output; None: the checkpoint's
    load_format: str = "auto"  # auto: the checkpoint's files | dummy: random weights, for benchmarks
    seed: int = 0  # of dummy weights
    generation_config: str = "vllm"  # vllm: neutral sampling defaults | auto: those of generation_config.json
    # What for
    # auto: what the checkpoint is for | generate: text | pooling: embeddings, classes, scores | both: text and these
    runner: str = "auto"
    pooling: str | None = None  # of embeddings: last | mean; None: the checkpoint's, else last
    normalize: bool | None = None  # embeddings have length 1; None: the checkpoint's, else true
    # Tokens of the head whose shares are the score, the one that means yes last, as vLLM has it: ["no", "yes"].
    classifier_from_token: tuple[str, ...] = ()
    score_template: str | None = None  # of a pair to score, with {query} and {document}; None: one after the other
    # Where
    device: str = "auto"  # auto | cpu | cuda
    engine_python: str | None = None  # interpreter of the engine process; None: the front end's own
    data_parallel_size: int = 1  # engines, each with a cache of its own and (where there are GPUs) a GPU of its own
    tensor_parallel_size: int = 1  # devices of this host that hold the model together, for each engine
    enable_expert_parallel: bool = False  # True: each device has some experts whole, not a part of every one
    disable_custom_all_reduce: bool = False  # True: GPUs add up with NCCL, though they could read each other's memory
    worker_cls: str = "auto"  # "package.module:factory" of another model runner (tests, experiments)
    attention_backend: str = "auto"  # auto | triton | torch; auto: triton on a GPU
    # The batch
    max_num_seqs: int = 256  # most requests running at once
    max_num_batched_tokens: int = 2048  # most tokens computed in one step
    enable_chunked_prefill: bool = True  # False: a prompt is computed in one step, whatever its length
    prefill_policy: str = "mixed"  # mixed | hybrid: prompts in large steps of their own while more requests gain by it
    max_itl_ms: float | None = None  # prompt tokens beside running streams are held back to keep a step below it
    # The queue
    max_queue_size: int = 4096  # requests waiting beyond free slots; one more is refused as UNAVAILABLE
    max_queue_tokens: int = 1 << 24  # prompt tokens of all of them; beyond it a request is refused as UNAVAILABLE
    queue_timeout_ms: int | None = None  # a request that has not started by then ends as UNAVAILABLE; None: it waits
    timeout_ms: int | None = None  # the same for a request that has not ended, from its arrival at the engine
    priority_aging_s: float = 10.0  # seconds of waiting that count like 1 of `priority`; 0: waiting counts nothing
    reserved_share: float = 0.0  # part of slots and blocks that only requests of `reserved_priority` can start with
    reserved_priority: int = -1  # the greatest `priority` value that may take them
    # The KV cache
    # Blocks for the expected growth of running requests stay free when another starts, and so many standard deviations
    # of it; below 0 fewer blocks than expected, so that batches and preemptions grow; -10: none.
    admission_reserve: float = 0.5
    block_size: int = 16  # tokens a block
    kv_cache_dtype: str = "auto"  # auto: the model's dtype | fp8 (e4m3): half of bfloat16's bytes, twice the blocks
    kv_cache_memory_bytes: int | None = None  # None: gpu_memory_utilization of a GPU, or 1 GiB on a CPU
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory for weights, work space and cache
    num_gpu_blocks_override: int | None = None  # number of blocks, whatever the memory says
    enable_prefix_caching: bool = True  # blocks of a prefix that is cached are shared, not computed again
    # True: layers with a window keep what has fallen out of it; False: they give those blocks back, for 2 to 4 times
    # the tokens of gemma3 and gpt-oss in the same memory
    disable_hybrid_kv_cache_manager: bool = False
    swap_space: float = 0.0  # GiB of host memory a GPU for the blocks of preempted requests; 0: they are computed again
    # Adapters
    enable_lora: bool = False  # requests may name an adapter of multi_lora.json, which then stands beside model.json
    max_lora_rank: int = 16  # greatest rank of an adapter; what every place in a batch takes memory for
    max_loras: int | None = None  # adapters in one batch; None: as many as multi_lora.json names, at most 8
    max_cpu_loras: int | None = None  # adapters kept in host memory, at least max_loras; None: 4 times max_loras
    # Sleep
    # None: never | 0: when it is told to, or another model needs the card | seconds without a request. Asleep, a model
    # gives the memory of weights and cache back; its first request wakes it.
    idle_sleep_s: float | None = None
    sleep_weights: str = "auto"  # where they are meanwhile: host (memory) | files (read again); auto: files on a CPU
    turn_s: float = 10.0  # how long a model may serve on before it makes room for another that waits for the card
    # How steps are run
    enforce_eager: bool = False  # True: no CUDA graphs
    run_ahead: int | None = None  # steps launched before the last result is read; None: 0 on a CPU, else MAX_RUN_AHEAD
    watchdog_timeout_s: float = 300.0  # an engine that has work and says nothing for so long is replaced; 0: never
    # What is sent
    stream_interval: int = 1  # tokens from one response of a stream to the next; more: fewer and larger responses
    # What is told
    disable_log_stats: bool = False  # True: no vllm:* metrics, even where config.pbtxt asks for them

    def __post_init__(self) -> None:
        _require(bool(self.model), "model is empty; name a checkpoint folder, a GGUF file or a hub id")
        for name in ("tokenizer", "engine_python"):
            _require(getattr(self, name) != "", f"{name} is empty; remove it to get the default")
        _require(self.dtype in DTYPES.values(), f"dtype is {self.dtype!r}; use one of {', '.join(DTYPES)}")
        _require(
            self.quantization in (None, *QUANTIZATIONS),
            f"quantization is {self.quantization!r}; use 'fp8', or remove it to serve the checkpoint as it is",
        )
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            _require(value in choices, f"{name} is {value!r}; use one of {', '.join(filter(None, choices))}")
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            _require(value is None or value >= 1, f"{name} is {value}; it must be at least 1")
            _require(value is None or value <= MAX_COUNT, f"{name} is {value}; it must be at most {MAX_COUNT}")
        for name, (lowest, highest) in _BETWEEN.items():
            value = getattr(self, name)
            is_inside = value is None or lowest <= value <= highest
            _require(is_inside, f"{name} is {value}; it must be between {lowest} and {highest}")
        if self.tensor_parallel_size > 1:
            self._check_for_ranks()
        self._check_parts_and_times()
        _require(
            self.prefill_policy == "mixed" or self.max_itl_ms is not None,
            "prefill_policy is 'hybrid', which changes nothing without max_itl_ms; set that too",
        )

    def steps_ahead(self, device: str) -> int:
        """`run_ahead`, where it is left to the engine what is best on a `device` (cpu | cuda)."""
        by_itself = MAX_RUN_AHEAD if device == "cuda" else 0  # on a CPU there is nothing to wait for
        return by_itself if self.run_ahead is None else self.run_ahead

    def _check_for_ranks(self) -> None:
        """What runs on one device only."""
        for is_so, what in (
            (self.worker_cls != "auto", f"worker_cls is {self.worker_cls!r}, which runs on one device"),
            (self.idle_sleep_s is not None, "idle_sleep_s is set, but sleep is supported on one device only"),
        ):
            _require(not is_so, f"{what}; set tensor_parallel_size to 1")

    def _check_parts_and_times(self) -> None:
        """The numbers whose borders belong to the range or not, each in its own way."""
        _require(
            self.max_itl_ms is None or (0 < self.max_itl_ms < float("inf") and self.enable_chunked_prefill),
            f"max_itl_ms is {self.max_itl_ms}; it must be above 0, and it needs enable_chunked_prefill",
        )
        _require(
            self.max_cpu_loras is None or self.max_cpu_loras >= (self.max_loras or 1),
            f"max_cpu_loras is {self.max_cpu_loras}, below max_loras ({self.max_loras}); a batch's adapters come from"
            " host memory, so raise it",
        )
        _require(
            self.sleep_weights == "auto" or self.idle_sleep_s is not None,
            f"sleep_weights is {self.sleep_weights!r}, which changes nothing without idle_sleep_s; set that too",
        )
        _require(
            0 <= self.swap_space < 1 << 20,
            f"swap_space is {self.swap_space:g}; it must be GiB of memory, 0 or more and below {1 << 20}",
        )
        _require(
            0 <= self.reserved_share < 1,
            f"reserved_share is {self.reserved_share}; it must be at least 0 and below 1",
        )
        _require(
            0 <= self.priority_aging_s < float("inf"),
            f"priority_aging_s is {self.priority_aging_s}; it must be a number of seconds, 0 or more",
        )
        _require(
            0 < self.gpu_memory_utilization <= 1,
            f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1",
        )
        _require(
            self.watchdog_timeout_s == 0 or 2 <= self.watchdog_timeout_s < float("inf"),
            f"watchdog_timeout_s is {self.watchdog_timeout_s}; it must be 0 (off) or at least 2 seconds",
        )


# vLLM arguments that existing model.json files carry and that change nothing here when they have these values.
_ACCEPTED_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "disable_log_requests": (True, False),
    "enable_log_requests": (True, False),
    "trust_remote_code": (False,),
    "pipeline_parallel_size": (1,),
    "lora_dtype": ("auto",),
    "fully_sharded_loras": (False,),
    "tokenizer_mode": ("auto",),
    "distributed_executor_backend": (None, "mp", "uni"),
    "scheduling_policy": ("fcfs", "priority"),
}
# What is so about others of their values; of the rest it is that they are not supported yet.
_WHY_NOT = {
    "scheduling_policy": "but requests always run in flight (`cb-backend study` compares that with static batches)",
}


def engine_config_from_dict(arguments: dict[str, Any], place: str = " in model.json") -> EngineConfig:
    """Check and coerce engine arguments, which stand in `place` (for error texts).

    Raises `ConfigError` for an unknown key, a wrong type or a bad value.
    """
    known = {field.name: field for field in fields(EngineConfig)}
    values: dict[str, Any] = {}
    for key, value in arguments.items():
        if key in _ACCEPTED_WITHOUT_EFFECT:
            _check_without_effect(key, value)
        elif key in known and (value is not None or known[key].default is not MISSING):
            values[key] = coerced(key, value, str(known[key].type))
        elif key not in known:
            close = difflib.get_close_matches(key, [*known, *_ACCEPTED_WITHOUT_EFFECT], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"unknown engine argument {key!r}{place}{hint}")
    for name, spellings in (("dtype", DTYPES), ("kv_cache_dtype", KV_CACHE_DTYPES)):
        if name in values:
            values[name] = spellings.get(values[name], values[name])
    for name, field in known.items():
        if name not in values and field.default is MISSING:
            raise ConfigError(f"model.json does not set {name!r}")
    return EngineConfig(**values)


def _check_without_effect(key: str, value: Any) -> None:
    allowed = _ACCEPTED_WITHOUT_EFFECT[key]
    plain = BOOLS.get(value.lower(), value) if isinstance(value, str) else value
    if plain not in allowed:
        raise ConfigError(
            f"engine argument {key!r} is {show(value)}, {_WHY_NOT.get(key, 'which is not supported yet')};"
            " remove it or use " + " or ".join(repr(choice) for choice in allowed)
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"engine argument {message}")
