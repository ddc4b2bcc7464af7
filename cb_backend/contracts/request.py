"""One request on its way through the engine.

The scheduler owns a `Request` and is the only one that changes it. A request's progress while it runs (how many
tokens are known and computed) lives in the scheduler's slot arrays, because those are updated for the whole batch
at once; here is what belongs to the request alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.adapters import NO_ADAPTER, AdapterKey, AdapterSource
from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.contracts.token_rules import TokenRules

NO_SLOT = -1

REQUEST_ID_BITS = 40  # of a front end's own counter in a request's id; the front end's id stands above them

QueueKey = tuple[int, float, int]  # compared as it is; the least starts first


def make_request_id(front_end_id: int, counter: int) -> int:
    """An id that no other front end of the engine can give."""
    return front_end_id << REQUEST_ID_BITS | counter


def split_request_id(request_id: int) -> tuple[int, int]:
    """`(front_end_id, counter)`."""
    return request_id >> REQUEST_ID_BITS, request_id & ((1 << REQUEST_ID_BITS) - 1)


def check_prompt_length(num_tokens: int, max_model_len: int, *, has_output: bool = True) -> None:
    """Raise `InvalidRequestError` for a prompt that is empty or leaves no room for an output token, if it has one."""
    if num_tokens < 1:
        raise InvalidRequestError("the prompt has no tokens; send at least one")
    if not has_output and num_tokens > max_model_len:
        raise InvalidRequestError(
            f"the text has {num_tokens} tokens; the model takes at most {max_model_len} (max_model_len), so shorten it"
        )
    if has_output and num_tokens >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {num_tokens} tokens; at most {max_model_len - 1} fit beside one output token, so shorten"
            f" it (max_model_len is {max_model_len})"
        )


class RequestStatus(IntEnum):
    """Ordered: everything after RUNNING is finished."""

    WAITING = 0
    PREEMPTED = 1  # back in the waiting queue, its blocks given away; its tokens are kept
    RUNNING = 2
    FINISHED_STOPPED = 3  # a stop token id, or the front end found a stop string
    FINISHED_LENGTH = 4  # max_tokens, the model's length, or the whole KV cache
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.RUNNING


class FinishReason(IntEnum):
    """Why a request ended, as it travels between processes; 0 = it has not."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


@dataclass(slots=True, eq=False)
class Request:
    """What the scheduler knows of one request beyond its slot.

    `token_ids` holds prompt and output while the request has no slot (waiting or preempted); while it runs, the
    slot's row in the scheduler's token table is the truth.
    """

    request_id: int  # unique in the engine: `make_request_id`
    token_ids: NDArray[np.int32]  # [num_tokens] prompt, then what was generated before a preemption
    num_prompt_tokens: int
    params: TokenRules
    stop_token_ids: tuple[int, ...]  # params.stop_token_ids and, unless ignore_eos, the model's end-of-sequence ids
    max_total_tokens: int  # prompt + output never exceeds this
    cache_salt: bytes = b""  # requests share cached blocks only within one salt
    scheduling: SchedulingParams = field(default_factory=SchedulingParams)
    status: RequestStatus = RequestStatus.WAITING
    slot: int = NO_SLOT
    block_table: list[int] = field(default_factory=list)  # block ids in token order
    block_hashes: list[bytes] = field(default_factory=list)  # chain hash of each full block, as far as computed
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at the last admission
    num_preemptions: int = 0
    num_swaps: int = 0  # preemptions after which its blocks were kept in host memory
    num_overtaken: int = 0  # times that a later request started before this one
    num_charged_tokens: float = 0.0  # counted as served to its tenant at its first start
    arrival_time: float = 0.0  # seconds, as the engine's owner counts them
    queue_key: QueueKey = (0, 0.0, 0)  # place in the queue; set at the arrival
    adapter_source: AdapterSource | None = None  # which one is wanted; None: the model as it is
    adapter: AdapterKey = b""  # its contents, once they have been read
    adapter_slot: int = NO_ADAPTER  # where it is on the device while the request runs
    guide: object | None = None  # `engine.grammar.guide.Guide` of structured output; passed on, not looked into

    @property
    def may_read_cache(self) -> bool:
        """Whether cached prefixes can be taken over: what comes from the cache has no hidden states and no logits, so
        not where those of all tokens are averaged, nor while the prompt's log-probabilities are still to be computed.
        With the first output token they all are."""
        if self.params.pooling is not None:
            return self.params.pooling.pooling != "mean"
        return self.params.prompt_logprobs is None or len(self.token_ids) > self.num_prompt_tokens

    @property
    def is_pooling(self) -> bool:
        """Whether it ends with its prompt, and has no output token."""
        return self.params.pooling is not None

    @property
    def front_end_id(self) -> int:
        return self.request_id >> REQUEST_ID_BITS
