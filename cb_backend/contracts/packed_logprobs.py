"""What steps give requests beside tokens, on its way to a front end: arrays as little-endian bytes, and back.

Packing is the engine's and costs the same few calls whatever the number of tokens; unpacking is the front end's. What
the figures mean is said in `step`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.step import Attachment, Pooled, PromptLogprobs, TokenLogprobs


class TokenLogprob(NamedTuple):
    """What the model thought where one token stands: chosen, or given in a prompt."""

    logprob: float  # of this token
    figures: dict[str, float]  # of this token, by the names of `step.TokenLogprobs`
    top_ids: list[int]  # likeliest first
    top_logprobs: list[float]


class PackedFigures(msgspec.Struct, frozen=True):
    """The figures of n tokens, with the k likeliest of each."""

    own: bytes  # float32 [n] of the tokens themselves
    figures: dict[str, tuple[str, bytes]]  # [n] of the tokens themselves, by name: NumPy's type, and its values
    top_ids: bytes  # int32 [n, k]
    top_logprobs: bytes  # float32 [n, k]

    def unpack(self) -> list[TokenLogprob]:
        own = np.frombuffer(self.own, "<f4").tolist()
        named = {name: np.frombuffer(values, form).tolist() for name, (form, values) in self.figures.items()}
        columns = (
            [{name: values[i] for name, values in named.items()} for i in range(len(own))],
            np.frombuffer(self.top_ids, "<i4").reshape(len(own), -1).tolist(),
            np.frombuffer(self.top_logprobs, "<f4").reshape(len(own), -1).tolist(),
        )
        return [TokenLogprob(*figures) for figures in zip(own, *columns, strict=True)]


class StepLogprobs(msgspec.Struct, tag=True, frozen=True):
    """`step.TokenLogprobs`: of the new tokens of requests that ask."""

    owners: bytes  # int64 [n] request ids
    figures: PackedFigures

    def by_owner(self) -> Iterable[tuple[int, TokenLogprob]]:
        """What each request's sink gets."""
        return zip(np.frombuffer(self.owners, "<i8").tolist(), self.figures.unpack(), strict=True)


class ChunkLogprobs(msgspec.Struct, tag=True, frozen=True):
    """`step.PromptLogprobs`: of some tokens of one prompt, one after the other."""

    owner: int  # request id
    first: int  # position of the first of them in the prompt
    figures: PackedFigures

    def by_owner(self) -> Iterable[tuple[int, ChunkLogprobs]]:
        return [(self.owner, self)]

    def unpack(self) -> list[TokenLogprob]:
        """Of one token after the other, from position `first` on."""
        return self.figures.unpack()


class PooledRow(NamedTuple):
    """What was read off one prompt."""

    values: NDArray[np.float32]  # [size]


class StepPooled(msgspec.Struct, tag=True, frozen=True):
    """`step.Pooled`: of requests that end with their prompts."""

    owners: bytes  # int64 [n] request ids
    values: bytes  # float32 [n, size]

    def by_owner(self) -> Iterable[tuple[int, PooledRow]]:
        owners = np.frombuffer(self.owners, "<i8").tolist()
        values = np.frombuffer(self.values, "<f4").reshape(len(owners), -1)
        return [(owner, PooledRow(row)) for owner, row in zip(owners, values, strict=True)]


Packed = StepLogprobs | ChunkLogprobs | StepPooled  # an `step.Attachment` of one front end's requests
Delivered = TokenLogprob | ChunkLogprobs | PooledRow  # and what a request's sink gets of it


def pack(attachment: Attachment) -> Packed | None:
    """An attachment whose owners are request ids; None for what travels otherwise."""
    if isinstance(attachment, TokenLogprobs):
        owners = attachment.owners.astype("<i8", copy=False).tobytes()
        return StepLogprobs(owners, _packed(attachment.sampled, attachment))
    if isinstance(attachment, PromptLogprobs):
        return ChunkLogprobs(int(attachment.owners[0]), attachment.first, _packed(attachment.given, attachment))
    if isinstance(attachment, Pooled):
        owners = attachment.owners.astype("<i8", copy=False).tobytes()
        return StepPooled(owners, attachment.values.astype("<f4", copy=False).tobytes())
    return None  # a failure is told as the end of its request


def _packed(own: NDArray[np.float32], logprobs: TokenLogprobs | PromptLogprobs) -> PackedFigures:
    return PackedFigures(
        own.astype("<f4", copy=False).tobytes(),
        {name: _packed_column(values) for name, values in logprobs.figures.items()},
        logprobs.top_ids.astype("<i4", copy=False).tobytes(),
        logprobs.top_logprobs.astype("<f4", copy=False).tobytes(),
    )


def _packed_column(values: NDArray[Any]) -> tuple[str, bytes]:
    form = "<f4" if values.dtype.kind == "f" else "<i4"
    return form, values.astype(form, copy=False).tobytes()
