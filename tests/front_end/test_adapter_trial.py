"""Whether an engine can serve an adapter, asked before a model is loaded."""

from __future__ import annotations

from typing import Any, cast

import pytest

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.contracts.errors import CbError, ConfigError, ErrorCode, UnavailableError
from cb_backend.contracts.messages import AddRequest, token_ids_from_bytes
from cb_backend.contracts.pooling import ModelTasks
from cb_backend.contracts.request import FinishReason
from cb_backend.front_end.engines.adapter_trial import try_adapter
from cb_backend.front_end.engines.engine_group import EngineGroup

ADAPTER = AdapterSource("doll", "/adapters/doll", 1, 100)
VOCAB_SIZE = 10


class Client:
    """Serves what a model with these tasks serves, and refuses the rest as the engine does."""

    def __init__(self, tasks: ModelTasks, error: tuple[ErrorCode, str] | None = None, num_full: int = 0) -> None:
        self.tasks, self.error, self.num_full = tasks, error, num_full
        self.served: list[AddRequest] = []

    def new_request_id(self) -> int:
        return 1

    def submit(self, request: AddRequest, sink: Any) -> None:
        if self.num_full:
            self.num_full -= 1
            raise UnavailableError("the queue is full")
        assert len(token_ids_from_bytes(request.prompt_token_ids)) > 0
        try:
            request.params.check(VOCAB_SIZE)
            self.tasks.check(request.params.pooling)
        except CbError as refusal:
            sink.on_error(refusal.code, str(refusal))
            return
        if self.error is not None:
            sink.on_error(*self.error)
            return
        self.served.append(request)
        sink.on_tokens((), int(FinishReason.STOP))


def tried(client: Client, adapter: AdapterSource | None = ADAPTER, timeout_s: float = 30.0) -> list[AddRequest]:
    try_adapter(cast(EngineGroup, client), adapter, client.tasks, timeout_s)
    return client.served


@pytest.mark.parametrize(
    "tasks",
    [
        ModelTasks(),
        ModelTasks(embedding_size=8),
        ModelTasks(can_generate=False, embedding_size=8),
        ModelTasks(can_generate=False, labels=("no", "yes")),
        ModelTasks(can_generate=False, score_token_ids=(3, 4)),
    ],
    ids=["text", "both", "embeddings", "classifier", "scores"],
)
def test_each_kind_of_model_is_asked_for_what_it_serves(tasks: ModelTasks) -> None:
    (request,) = tried(Client(tasks))
    assert request.adapter == ADAPTER
    assert (request.params.pooling is None) == tasks.can_generate


def test_without_an_adapter_nothing_is_asked() -> None:
    assert tried(Client(ModelTasks()), None) == []


def test_the_engines_reason_fails_the_load() -> None:
    client = Client(ModelTasks(), (ErrorCode.INVALID_ARG, "rank 64 is too much"))
    with pytest.raises(ConfigError, match="cannot be served: rank 64 is too much"):
        tried(client)


def test_a_full_queue_is_waited_out_and_not_for_ever() -> None:
    assert len(tried(Client(ModelTasks(), num_full=2))) == 1
    with pytest.raises(ConfigError, match=r"could not be tried within 0\.3 s: the queue is full"):
        tried(Client(ModelTasks(), num_full=1000), timeout_s=0.3)
