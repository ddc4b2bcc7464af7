"""Log-probabilities on their way to a front end: arrays as little-endian bytes, and back to one entry a token.

Packing is the engine's and costs the same few calls whatever the number of tokens; unpacking is the front end's. What
the figures mean is said in `outputs`.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from cb_backend.outputs import PromptLogprobs, TokenLogprobs


class TokenLogprob(NamedTuple):
    """What the model thought where one token stands: chosen, or given in a prompt."""

    logprob: float  # of this token
    rank: int  # of this token, from 1
    top_ids: list[int]  # likeliest first
    top_logprobs: list[float]


class PackedFigures(msgspec.Struct, frozen=True):
    """The figures of n tokens, with the k likeliest of each."""

    own: bytes  # float32 [n] of the tokens themselves
    ranks: bytes  # int32 [n]
    top_ids: bytes  # int32 [n, k]
    top_logprobs: bytes  # float32 [n, k]

    def unpack(self) -> list[TokenLogprob]:
        own = np.frombuffer(self.own, "<f4").tolist()
        columns = (
            np.frombuffer(self.ranks, "<i4").tolist(),
            np.frombuffer(self.top_ids, "<i4").reshape(len(own), -1).tolist(),
            np.frombuffer(self.top_logprobs, "<f4").reshape(len(own), -1).tolist(),
        )
        return [TokenLogprob(*figures) for figures in zip(own, *columns, strict=True)]


class StepLogprobs(msgspec.Struct, frozen=True):
    """`outputs.TokenLogprobs`: of those entries of a `StepOutput` whose requests ask."""

    entries: bytes  # int32 [n] indices into the StepOutput's entries
    figures: PackedFigures

    @staticmethod
    def pack(logprobs: TokenLogprobs) -> StepLogprobs:
        """`logprobs.rows` must be the entries."""
        return StepLogprobs(logprobs.rows.astype("<i4").tobytes(), _packed(logprobs.sampled, logprobs))

    def unpack(self) -> dict[int, TokenLogprob]:
        """By entry."""
        return dict(zip(np.frombuffer(self.entries, "<i4").tolist(), self.figures.unpack(), strict=True))


class ChunkLogprobs(msgspec.Struct, frozen=True):
    """`outputs.PromptLogprobs`: of some tokens of one prompt, one after the other."""

    first: int  # position of the first of them in the prompt
    figures: PackedFigures

    @staticmethod
    def pack(logprobs: PromptLogprobs) -> ChunkLogprobs:
        return ChunkLogprobs(logprobs.first, _packed(logprobs.given, logprobs))

    def unpack(self) -> list[TokenLogprob]:
        """Of one token after the other, from position `first` on."""
        return self.figures.unpack()


def _packed(own: NDArray[np.float32], logprobs: TokenLogprobs | PromptLogprobs) -> PackedFigures:
    return PackedFigures(
        own.astype("<f4", copy=False).tobytes(),
        logprobs.ranks.astype("<i4", copy=False).tobytes(),
        logprobs.top_ids.astype("<i4", copy=False).tobytes(),
        logprobs.top_logprobs.astype("<f4", copy=False).tobytes(),
    )
