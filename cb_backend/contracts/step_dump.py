"""What an engine tells of its last steps to whoever asks: a question and an answer, part of `messages`."""

from __future__ import annotations

import msgspec

from cb_backend.contracts.rest import RestStats


class DumpSteps(msgspec.Struct, tag=True, frozen=True):
    """Asks for the engine's step log. Anybody may ask, without a `Hello`; the answer is one `StepDump`."""

    max_steps: int  # the newest so many


class StepDump(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The newest steps of the engine's log, oldest first: little-endian arrays, [num_steps] unless said otherwise."""

    num_slots: int
    num_blocks: int
    block_size: int
    step_ids: bytes  # int64
    begins: bytes  # float64 time.monotonic() of the launch
    ends: bytes  # float64 the result had been taken in; 0 = not yet
    num_rows: bytes  # int32
    num_decode_rows: bytes  # int32, these come first among a step's rows
    num_waiting: bytes  # int32
    num_free_blocks: bytes  # int32
    num_preemptions: bytes  # int64 since the engine's start
    slots: bytes  # int32 [sum of num_rows]
    num_scheduled_tokens: bytes  # int32 [sum of num_rows]
    request_ids: bytes  # int64 [sum of num_rows]
    joined: list[tuple[int, int, int, int, int]]  # index of the step, slot, request_id, tokens, of them cached
    ended: list[tuple[int, int, int]]  # index of the step, request_id, FinishReason
    adapters: list[tuple[int, str]] = []  # request_id, name of the adapter it goes through; none for the model as it is
    sleeps: list[tuple[float, float]] = []  # begin and end, as time.monotonic(), of those that are over
    adapter_loads: list[tuple[int, int]] = []  # index of the step that loaded one, request_id that it was loaded for
    rest: RestStats | None = None  # None: it cannot sleep
