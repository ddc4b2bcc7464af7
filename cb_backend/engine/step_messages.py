"""One front end's part of a step's output, as it goes over the socket. Work per entry is done in NumPy only."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cb_backend.messages import StepOutput
from cb_backend.outputs import EngineOutput, TokenLogprobs, rows_after
from cb_backend.packed_logprobs import ChunkLogprobs, StepLogprobs
from cb_backend.request import REQUEST_ID_BITS

T = TypeVar("T")


def step_output(
    step_id: int, front_end_id: int, mask: NDArray[np.bool_], output: EngineOutput, scheduled_at: dict[int, float]
) -> StepOutput:
    """`mask` [num_entries] picks the front end's entries; the dictionaries go by request id."""
    pick = slice(None) if mask.all() else mask
    return StepOutput(
        step_id=step_id,
        request_ids=output.request_ids[pick].astype("<i8", copy=False).tobytes(),
        token_ids=output.token_ids[pick].astype("<i4", copy=False).tobytes(),
        finish_reasons=output.finish_reasons[pick].astype(np.uint8, copy=False).tobytes(),
        num_cached_tokens=_of(front_end_id, output.num_cached_tokens),
        scheduled_at=_of(front_end_id, scheduled_at),
        prompt_logprobs={
            rid: ChunkLogprobs.pack(part) for rid, part in _of(front_end_id, output.prompt_logprobs).items()
        },
        logprobs=None if output.logprobs is None else _pack(output.logprobs.moved(rows_after(mask))),
    )


def _of(front_end_id: int, by_request_id: dict[int, T]) -> dict[int, T]:
    return {rid: value for rid, value in by_request_id.items() if rid >> REQUEST_ID_BITS == front_end_id}


def _pack(logprobs: TokenLogprobs) -> StepLogprobs | None:
    return StepLogprobs.pack(logprobs) if len(logprobs.rows) else None
