"""Where results go on a front end: one sink a request, and the way of a step's output to its sinks.

Nothing that a sink raises may reach the thread that delivers, or the other sinks. It does not know sockets or engines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from cb_backend.contracts.errors import ErrorCode
from cb_backend.contracts.messages import StepOutput
from cb_backend.contracts.packed_logprobs import Delivered, Packed
from cb_backend.contracts.step import NO_TOKEN
from cb_backend.support.fault_points import reach

NOT_DELIVERED = "an answer of the engine could not be used; the server's log says why"

logger = logging.getLogger("cb_backend.front_end")


class RequestSink(Protocol):
    """Where one request's results go. Called on the client's I/O thread; must be quick and must not block."""

    def on_tokens(self, token_ids: tuple[int, ...], finish_reason: int, attached: Sequence[Delivered] = ()) -> None:
        """New tokens (none in some endings); `finish_reason` other than `FinishReason.NONE` ends the request.

        `attached` has one `TokenLogprob` a token if the request asks for them, and what `on_attached` says.
        """

    def on_attached(self, attached: Sequence[Delivered]) -> None:
        """What a step gave the request beside tokens, where it gave none.

        `ChunkLogprobs`: figures of the prompt's next tokens, all of them before the first output token or with it. From
        the first on again if the prompt has to be computed anew.
        """

    def on_scheduled(self, scheduled_at: float) -> None:
        """When (`time.monotonic`) the request's first step was launched; comes just before its first token."""

    def on_error(self, code: ErrorCode, message: str) -> None:
        """The end of the request."""


def deliver(output: StepOutput, sinks: dict[int, RequestSink], abandon: Callable[[int], None]) -> None:
    """Tell each sink its part of a step, and take those that end out of `sinks`.

    `abandon` is called with the id of a request whose sink could not use its tokens: its engine must end it.
    """
    reach("front_end.deliver")
    request_ids = np.frombuffer(output.request_ids, "<i8").tolist()
    token_ids = np.frombuffer(output.token_ids, "<i4").tolist()
    attached = _by_owner(output.attached) if output.attached else {}
    for request_id, scheduled_at in output.scheduled_at.items():
        if (waiting := sinks.get(request_id)) is not None:
            waiting.on_scheduled(scheduled_at)
    for request_id in attached.keys() - set(request_ids) if attached else ():
        if (asking := sinks.get(request_id)) is not None:
            try:
                asking.on_attached(attached[request_id])
            except Exception:
                _give_up(request_id, asking, abandon)
    for request_id, token_id, reason in zip(request_ids, token_ids, output.finish_reasons, strict=True):
        sink = sinks.pop(request_id, None) if reason else sinks.get(request_id)
        if sink is None:  # cancelled here while the step was on its way
            continue
        token = (token_id,) if token_id != NO_TOKEN else ()
        try:
            if request_id in attached:
                sink.on_tokens(token, reason, attached[request_id])
            else:
                sink.on_tokens(token, reason)
        except Exception:
            _give_up(request_id, sink, abandon)


def _give_up(request_id: int, sink: RequestSink, abandon: Callable[[int], None]) -> None:
    """Within the handling of what the sink has raised."""
    logger.exception("an answer of request %d could not be delivered", request_id)
    abandon(request_id)
    tell_error(sink, ErrorCode.INTERNAL, NOT_DELIVERED)


def _by_owner(parts: Sequence[Packed]) -> dict[int, list[Delivered]]:
    attached: dict[int, list[Delivered]] = {}
    for part in parts:
        for owner, value in part.by_owner():
            attached.setdefault(owner, []).append(value)
    return attached


def tell_error(sink: RequestSink, code: ErrorCode, message: str) -> None:
    try:
        sink.on_error(code, message)
    except Exception:
        logger.exception("an error could not be delivered: %s", message)
