"""What crosses the border between a front end and the engine process: plain typed messages, msgpack, no pickle.

Arrays travel as little-endian bytes. Front ends connect to the engine's ROUTER socket; each message is one frame.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.contracts.packed_logprobs import Packed
from cb_backend.contracts.pooling import ModelTasks
from cb_backend.contracts.queue_room import QueueRoom, RefusedRequests
from cb_backend.contracts.rest import CallOffOrders, RestAnswer, RestStats, SetRest, UpdateWeights
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.step_dump import DumpSteps, StepDump
from cb_backend.contracts.token_rules import TokenRules

# ---- front end to engine ----------------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag=True, frozen=True):
    """First message of a front end; the engine answers with `EngineReady` once it can serve."""

    front_end_id: int
    pid: int  # the engine ends the requests of a front end whose process is gone


class AddRequest(msgspec.Struct, tag=True, frozen=True):
    request_id: int
    prompt_token_ids: bytes  # int32
    params: TokenRules
    scheduling: SchedulingParams = SchedulingParams()
    adapter: AdapterSource | None = None


class CancelRequests(msgspec.Struct, tag=True, frozen=True):
    """End these requests; unknown or finished ids are ignored. No `StepOutput` entry is owed for them afterwards."""

    request_ids: list[int]


class Goodbye(msgspec.Struct, tag=True, frozen=True):
    """This front end is done; its remaining requests are aborted. The engine ends with its last front end."""

    front_end_id: int


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Sent now and then while requests are open: the engine ends those of a front end that has fallen silent."""

    front_end_id: int


class ResetPrefixCache(msgspec.Struct, tag=True, frozen=True):
    """Reuse nothing that was computed until now. Anybody may send it; the answer is one `EngineStats`."""


FrontEndMessage = (
    ResetPrefixCache
    | Hello
    | AddRequest
    | CancelRequests
    | Goodbye
    | Alive
    | DumpSteps
    | RefusedRequests
    | SetRest
    | UpdateWeights
    | CallOffOrders
)


# ---- engine to front end ----------------------------------------------------------------------------------------


class ModelInfo(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What a front end must know of the model that the engine serves."""

    model: str  # as configured
    tokenizer_dir: str  # folder with tokenizer.json, tokenizer_config.json
    vocab_size: int  # ids the model accepts as input
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int  # usable blocks of the KV cache
    max_num_seqs: int
    dtype: str
    device: str
    kv_cache_dtype: str = "auto"  # auto: as dtype
    quantization: str | None = None  # of the weights: fp8 | None
    num_host_blocks: int = 0  # for blocks of preempted requests
    num_adapter_slots: int = 0  # adapters that one batch can have; 0: none is taken
    kv_windows: tuple[int, ...] = (0,)  # newest tokens that each group of layers keeps, the largest first; 0: all
    sampling_defaults: dict[str, float] = {}  # of the checkpoint, for what requests leave out; names as in requests
    tasks: ModelTasks = ModelTasks()


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    pid: int
    info: ModelInfo


class StepOutput(msgspec.Struct, tag=True, frozen=True):
    """What one step (or several, when the engine coalesces) produced for one front end: see `step.EngineOutput`."""

    step_id: int
    request_ids: bytes  # int64 [num_entries]
    token_ids: bytes  # int32 [num_entries]
    finish_reasons: bytes  # uint8 [num_entries]
    num_cached_tokens: dict[int, int] = {}
    attached: tuple[Packed, ...] = ()  # requests with new tokens or without: of a prompt, before or beside its first
    scheduled_at: dict[int, float] = {}  # request_id -> time.monotonic() of its first step, beside its first token


class RequestFailed(msgspec.Struct, tag=True, frozen=True):
    """The engine refuses or gives up one request; this is its end."""

    request_id: int
    code: int  # errors.ErrorCode
    message: str


class Buckets(msgspec.Struct, frozen=True):
    """`buckets.BucketCounts` on its way: since the engine's start."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # [num_bounds + 1]
    sums: tuple[float, ...]  # [num_bounds + 1]


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine's steps were like, since its start."""

    num_steps: int
    num_scheduled_tokens: int  # prompt and output tokens computed
    host_seconds: float  # scheduling, taking results in, sending them
    launch_seconds: float  # in execute: launching on a GPU, computing on a CPU
    wait_seconds: float  # waiting for results
    step_seconds: Buckets
    step_requests: Buckets  # requests in a step
    step_tokens: Buckets  # tokens in a step


class AdapterStats(msgspec.Struct, frozen=True, kw_only=True):
    """Of an engine that takes adapters. Counts are since its start."""

    max_loras: int  # places on the device
    running: tuple[str, ...] = ()  # names of the adapters of running requests, each once
    waiting: tuple[str, ...] = ()  # of requests that wait, in the queue or for the files
    num_resident: int = 0  # places that hold an adapter
    num_kept: int = 0  # adapters in host memory
    num_loads: int = 0  # copies from host memory to a place
    num_reads: int = 0  # adapters read from files, those included that were refused
    num_refused: int = 0
    read_seconds: float = 0.0  # reading, checking and packing them


class EngineStats(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """State of the engine at one moment, sent to every front end about twice a second and whenever it falls idle."""

    step_id: int
    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int  # free or evictable: no request holds them
    num_preemptions: int  # this and the following count since the engine's start
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_output_tokens: int
    num_cancelled: int
    num_evicted_blocks: int
    engine_pid: int = 0  # counts of another process begin at 0
    steps: StepStats | None = None
    num_refused: int = 0  # for a full queue
    num_reset_blocks: int = 0  # cached blocks that resets have made unfindable
    num_timed_out: int = 0
    num_swapped_out: int = 0  # preempted requests whose blocks went to host memory
    num_swapped_in: int = 0
    num_host_blocks: int = 0
    num_free_host_blocks: int = 0
    num_swapped: int = 0  # of the waiting, those whose blocks are in host memory now
    num_compiled_grammars: int = 0  # of structured output; each text once
    num_refused_grammars: int = 0
    grammar_seconds: float = 0.0  # compiling them, refused ones included
    adapters: AdapterStats | None = None
    rest: RestStats | None = None  # None: it cannot sleep


class EngineFailed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot start or go on (bad checkpoint, no memory); the process ends after this message."""

    message: str


EngineMessage = (
    EngineReady | StepOutput | RequestFailed | EngineStats | EngineFailed | StepDump | QueueRoom | RestAnswer
)

_encoder = msgspec.msgpack.Encoder()
_front_end_decoder = msgspec.msgpack.Decoder(FrontEndMessage)
_engine_decoder = msgspec.msgpack.Decoder(EngineMessage)


def encode(message: FrontEndMessage | EngineMessage) -> bytes:
    return _encoder.encode(message)


def decode_front_end_message(frame: bytes) -> FrontEndMessage:
    """Raises `msgspec.DecodeError` for anything that is not a front end's message."""
    return _front_end_decoder.decode(frame)


def decode_engine_message(frame: bytes) -> EngineMessage:
    """Raises `msgspec.DecodeError` for anything that is not an engine's message."""
    return _engine_decoder.decode(frame)


def token_ids_to_bytes(token_ids: NDArray[np.int32] | list[int]) -> bytes:
    return np.asarray(token_ids, dtype="<i4").tobytes()


def token_ids_from_bytes(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data, dtype="<i4")
