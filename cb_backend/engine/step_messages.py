"""One front end's part of a step's output, as it goes over the socket. Work per entry is done in NumPy only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.errors import ErrorCode
from cb_backend.contracts.messages import StepOutput
from cb_backend.contracts.packed_logprobs import Packed, pack
from cb_backend.contracts.request import REQUEST_ID_BITS
from cb_backend.contracts.step import Attachment, EngineOutput, Failure
from cb_backend.engine.grammar.guide import NOT_ALLOWED, OUT_OF_STEP

T = TypeVar("T")

_INT32 = np.dtype("<i4")


class Share(NamedTuple):
    """The entries of a step's output that are one front end's."""

    front_end_id: int
    entries: slice | NDArray[np.intp]
    request_ids: bytes  # of the entries, as they go over the socket


class Shares:
    """Whose the entries of a step's output are.

    A batch that goes on as it is brings the same array of request ids step after step: it is divided once.
    """

    def __init__(self) -> None:
        self._request_ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._shares: list[Share] = []

    def of(self, output: EngineOutput) -> list[Share]:
        """One for each front end that the step concerns; without entries if only what is attached to it does."""
        if output.request_ids is not self._request_ids:
            self._request_ids, self._shares = output.request_ids, _divide(output.request_ids)
        if not output.attached:
            return self._shares
        owners = {owner >> REQUEST_ID_BITS for part in output.attached for owner in part.owners.tolist()}
        silent = owners.difference(share.front_end_id for share in self._shares)
        return [*self._shares, *(Share(front_end_id, slice(0), b"") for front_end_id in silent)]


def _divide(request_ids: NDArray[np.int64]) -> list[Share]:
    owners = request_ids >> REQUEST_ID_BITS  # [num_entries]
    packed = request_ids.astype("<i8", copy=False)
    front_end_ids = set(owners.tolist())
    if len(front_end_ids) == 1:
        return [Share(front_end_ids.pop(), slice(None), packed.tobytes())]
    parts = {front_end_id: (owners == front_end_id).nonzero()[0] for front_end_id in front_end_ids}
    return [Share(front_end_id, entries, packed[entries].tobytes()) for front_end_id, entries in parts.items()]


def failures(output: EngineOutput) -> Iterator[tuple[int, ErrorCode, str]]:
    """Request id, kind and reason of each request of which there is more to say than that it failed."""
    for failure in output.attached:
        if isinstance(failure, Failure):
            # Grammars and rules that cannot be followed are the client's to mend.
            is_ours = failure.text in (NOT_ALLOWED, OUT_OF_STEP)
            code = ErrorCode.INTERNAL if is_ours else ErrorCode.INVALID_ARG
            for request_id in failure.owners.tolist():
                yield request_id, code, failure.text


def step_output(step_id: int, share: Share, output: EngineOutput, scheduled_at: dict[int, float]) -> StepOutput:
    """The dictionaries go by request id."""
    front_end_id, entries = share.front_end_id, share.entries
    return StepOutput(
        step_id=step_id,
        request_ids=share.request_ids,
        token_ids=output.token_ids[entries].astype(_INT32, copy=False).tobytes(),
        finish_reasons=output.finish_reasons[entries].astype(np.uint8, copy=False).tobytes(),
        num_cached_tokens=_of(front_end_id, output.num_cached_tokens),
        scheduled_at=_of(front_end_id, scheduled_at),
        attached=_attached_to(front_end_id, output.attached) if output.attached else (),
    )


def _of(front_end_id: int, by_request_id: dict[int, T]) -> dict[int, T]:
    if not by_request_id:  # in nearly every step
        return {}
    return {rid: value for rid, value in by_request_id.items() if rid >> REQUEST_ID_BITS == front_end_id}


def _attached_to(front_end_id: int, attached: tuple[Attachment, ...]) -> tuple[Packed, ...]:
    packed = []
    for part in attached:
        is_own = part.owners >> REQUEST_ID_BITS == front_end_id
        own = pack(part.given_to(part.owners, is_own)) if is_own.any() else None
        if own is not None:
            packed.append(own)
    return tuple(packed)
