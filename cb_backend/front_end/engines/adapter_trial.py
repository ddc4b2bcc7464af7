"""Whether an engine can serve an adapter: found out by asking for one token with it, or for what it gives instead.

So a model that is an adapter fails its load with the reason that its requests would get, and one that is loaded has an
adapter in host memory. It keeps no state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.contracts.errors import ConfigError, ErrorCode, UnavailableError
from cb_backend.contracts.messages import AddRequest, token_ids_to_bytes
from cb_backend.contracts.packed_logprobs import Delivered
from cb_backend.contracts.pooling import ModelTasks, PoolingRules
from cb_backend.contracts.scheduling import MAX_PRIORITY, SchedulingParams
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.front_end.engines.engine_group import EngineGroup

TRIAL_TIMEOUT_S = 120.0  # a full queue, a slow disk
PAUSE_S = 0.2  # before it is tried again


class _Outcome:
    """The engine client's sink for the one request."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.error: tuple[ErrorCode, str] | None = None

    def on_tokens(self, token_ids: tuple[int, ...], finish_reason: int, attached: Sequence[Delivered] = ()) -> None:
        if finish_reason:
            self.is_over.set()

    def on_attached(self, attached: Sequence[Delivered]) -> None:
        pass

    def on_scheduled(self, scheduled_at: float) -> None:
        pass

    def on_error(self, code: ErrorCode, message: str) -> None:
        self.error = code, message
        self.is_over.set()


def try_adapter(
    client: EngineGroup, adapter: AdapterSource | None, tasks: ModelTasks, timeout_s: float = TRIAL_TIMEOUT_S
) -> None:
    """Returns when the adapter has been served once; at once if there is none to try. tasks: the model's.

    Raises `ConfigError` with the engine's reason, also if the engine does not come to it in time.
    """
    if adapter is None:
        return
    deadline = time.monotonic() + timeout_s
    reason = "the engine does not answer"
    while (left := deadline - time.monotonic()) > 0:
        error = _ask(client, adapter, _least(tasks), left)
        if error is None:
            return
        code, reason = error
        if code is not ErrorCode.UNAVAILABLE:
            raise ConfigError(f"the adapter cannot be served: {reason}")
        time.sleep(PAUSE_S)
    raise ConfigError(f"the adapter could not be tried within {timeout_s:g} s: {reason}")


def _least(tasks: ModelTasks) -> TokenRules:
    """The least that the model can be asked for."""
    if tasks.can_generate:
        return TokenRules(max_tokens=1)
    if tasks.embedding_size:
        return TokenRules(pooling=PoolingRules())
    if tasks.labels:
        return TokenRules(pooling=PoolingRules(readout="classifier"))
    return TokenRules(pooling=PoolingRules(readout="head", token_ids=tasks.score_token_ids))


def _ask(
    client: EngineGroup, adapter: AdapterSource, rules: TokenRules, timeout_s: float
) -> tuple[ErrorCode, str] | None:
    """Why there was no answer; None: there was one."""
    outcome = _Outcome()
    request_id = client.new_request_id()
    # Before everybody who waits: the load of a model waits for it.
    scheduling = SchedulingParams(priority=-MAX_PRIORITY)
    request = AddRequest(request_id, token_ids_to_bytes([0]), rules, scheduling, adapter)
    try:
        client.submit(request, outcome)
    except UnavailableError as error:
        return ErrorCode.UNAVAILABLE, str(error)
    if not outcome.is_over.wait(timeout_s):
        client.cancel([request_id])
        return ErrorCode.UNAVAILABLE, "the engine has not come to it"
    return outcome.error
