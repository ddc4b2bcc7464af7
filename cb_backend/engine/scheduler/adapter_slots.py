"""Which adapter is in which slot of the device, and who uses it. No memory is touched here: plans say what to load.

A slot is a resource like a block: running requests hold references, and one without any can be overwritten, the least
recently used first. A reference is given back when no launched step has a row of its request any more, so a slot that
is overwritten is read by nobody. This module does not know requests, the queue or files.
"""

from __future__ import annotations

from collections.abc import Iterable

from cb_backend.contracts.adapters import AdapterKey

_EMPTY: AdapterKey = b""


class AdapterSlots:
    """`num_slots` slots; with 0 no request can have an adapter."""

    def __init__(self, num_slots: int) -> None:
        self.num_loads = 0
        self._keys: list[AdapterKey] = [_EMPTY] * num_slots  # by slot
        self._num_users = [0] * num_slots
        self._slot_of: dict[AdapterKey, int] = {}
        self._idle: dict[int, None] = dict.fromkeys(range(num_slots))  # without users, least recently used first
        self._loading: dict[int, list[int]] = {}  # by step: the slots that it fills, while it has not come back

    @property
    def num_slots(self) -> int:
        return len(self._keys)

    @property
    def num_resident(self) -> int:
        """Slots that hold an adapter, used or not."""
        return len(self._slot_of)

    def has_room(self, key: AdapterKey) -> bool:
        """Whether a request with this adapter can start now."""
        return key in self._slot_of or bool(self._idle)

    @property
    def resident(self) -> Iterable[AdapterKey]:
        """What slots hold, used or not, in the order of coming."""
        return self._slot_of

    def is_used(self, key: AdapterKey) -> bool:
        """Whether a slot holds it and a reference to it is held."""
        slot = self._slot_of.get(key)
        return slot is not None and self._num_users[slot] > 0

    def take(self, key: AdapterKey) -> tuple[int, bool]:
        """A reference: the slot, and whether the plan must load it. Ask `has_room` before."""
        slot = self._slot_of.get(key)
        must_load = slot is None
        if slot is None:
            # Empty ones first: what is resident may be asked for again.
            slot = next((idle for idle in self._idle if not self._keys[idle]), next(iter(self._idle)))
            self._slot_of.pop(self._keys[slot], None)
            self._keys[slot] = key
            self._slot_of[key] = slot
            self.num_loads += 1
        self._idle.pop(slot, None)
        self._num_users[slot] += 1
        return slot, must_load

    def give_back(self, slot: int) -> None:
        """A reference ends; no launched step reads the slot for it."""
        self._num_users[slot] -= 1
        if not self._num_users[slot]:
            self._idle[slot] = None

    # ---- steps ------------------------------------------------------------------------------------------------------

    def launched(self, step_id: int, slots: list[int]) -> None:
        """The step fills these slots before anything else."""
        if slots:
            self._loading[step_id] = slots

    def came_back(self, step_id: int) -> None:
        self._loading.pop(step_id, None)

    def distrust(self, step_id: int) -> list[int]:
        """The step failed: nobody knows what the slots hold that it should have filled. Nobody finds them any more;
        who uses them must start over."""
        slots = self._loading.pop(step_id, [])
        for slot in slots:
            if self._slot_of.get(self._keys[slot]) == slot:
                del self._slot_of[self._keys[slot]]
            self._keys[slot] = _EMPTY
        return slots

    def check_integrity(self, num_users: dict[int, int]) -> None:
        """Raise `AssertionError` unless these are the references, by slot, and all else agrees with them."""
        counted = {slot: number for slot, number in enumerate(self._num_users) if number}
        assert counted == num_users, f"references of adapter slots: {counted} counted, {num_users} held"
        assert set(self._idle) == {slot for slot, number in enumerate(self._num_users) if not number}, "idle slots"
        assert self._slot_of == {key: slot for slot, key in enumerate(self._keys) if key}, "slots by their contents"
