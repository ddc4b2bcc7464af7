"""Host memory that keeps the blocks of preempted requests, so that they need not be computed again.

Says which block goes where; the copies travel in plans and are made by the model runner, in the order of the plans:
in one plan first out, then in, then the step itself. So a block may be given away in the plan that copies it out. This
module does not know tensors, the queue or why somebody is preempted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cb_backend.contracts.request import Request
from cb_backend.kv_cache.block_pool import NULL_BLOCK
from cb_backend.support.fault_points import reach

NO_BLOCK = -1
_NOT_LAUNCHED = 0
# What moving a token out and in costs, in tokens computed again, and what moving costs at all: a few kernel launches
# and transfers. Measured ratios differ with model and bus; these keep short requests from being moved.
_COST_PER_TOKEN = 0.2
FIXED_COST_TOKENS = 64


@dataclass(slots=True)
class _Copy:
    """Where a preempted request's blocks are."""

    host_blocks: list[int]  # in the order of the block table; NO_BLOCK where nothing is kept
    num_tokens: int  # whose keys and values they hold
    step_id: int  # of the plan that copies them out


class SwapSpace:
    """`num_blocks` blocks of host memory; 0: everything is computed again."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_swapped_out = 0  # requests, since the start
        self.num_swapped_in = 0
        self.fixed_cost_tokens = FIXED_COST_TOKENS
        self._free = list(range(num_blocks - 1, -1, -1))
        self._copies: dict[int, _Copy] = {}  # by request id
        self._outgoing: list[tuple[int, int]] = []  # (device block, host block) for the next plan
        # By request id: the step that copies out what has been brought in again before that step came back.
        self._on_trust: dict[int, int] = {}
        self._last_back = _NOT_LAUNCHED  # id of the last step that did what it was to do

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_requests(self) -> int:
        """Requests whose keys and values are here."""
        return len(self._copies)

    def num_tokens(self, request: Request) -> int:
        """Tokens of a waiting request whose keys and values are here."""
        copy = self._copies.get(request.request_id)
        return 0 if copy is None else copy.num_tokens

    def put_out(self, request: Request, blocks: Sequence[int], num_tokens: int) -> bool:
        """Keep the first `num_tokens` tokens of a preempted request, if that is cheaper than computing them again.

        `blocks`: the beginning of its block table; the null block stands where nothing is read any more.
        False if it is not, or if there is no room: then nothing is kept.
        """
        is_cheaper = self.fixed_cost_tokens + _COST_PER_TOKEN * num_tokens < num_tokens
        if not is_cheaper or len(blocks) - blocks.count(NULL_BLOCK) > len(self._free):
            return False
        reach("swap.put_out")
        host_blocks = [NO_BLOCK if block == NULL_BLOCK else self._free.pop() for block in blocks]
        self._copies[request.request_id] = _Copy(host_blocks, num_tokens, _NOT_LAUNCHED)
        self._outgoing += [pair for pair in zip(blocks, host_blocks, strict=True) if pair[1] != NO_BLOCK]
        self.num_swapped_out += 1
        return True

    def bring_in(self, request: Request, found_blocks: Sequence[int]) -> list[tuple[int, int]]:
        """(device block, host block) to copy for a request that has its block table; its place here is free then.

        What the table has of `found_blocks`, at the same places, came from the prefix cache and needs no copy.
        """
        reach("swap.bring_in")
        copy = self._copies.pop(request.request_id)
        self._give_free(copy)
        self.num_swapped_in += 1
        if copy.step_id > self._last_back:  # a plan that does both has a row of the request, which ends with it
            self._on_trust[request.request_id] = copy.step_id
        places = zip(request.block_table, copy.host_blocks, strict=False)  # the table may have room for more tokens
        return [
            (device, host)
            for place, (device, host) in enumerate(places)
            if host != NO_BLOCK and not (place < len(found_blocks) and found_blocks[place] == device)
        ]

    def _give_free(self, copy: _Copy) -> None:
        self._free.extend(block for block in copy.host_blocks if block != NO_BLOCK)

    def forget(self, request: Request) -> None:
        """The request will not come back, or is computed again: free its place, if it has one."""
        self._on_trust.pop(request.request_id, None)
        copy = self._copies.pop(request.request_id, None)
        if copy is None:
            return
        self._give_free(copy)
        if copy.step_id == _NOT_LAUNCHED:
            gone = set(copy.host_blocks)
            self._outgoing = [pair for pair in self._outgoing if pair[1] not in gone]

    def forget_all(self) -> None:
        """Nothing of what is kept may be used again."""
        for copy in self._copies.values():
            self._give_free(copy)
        self._copies.clear()
        self._outgoing.clear()

    def launch(self, step_id: int) -> tuple[tuple[int, int], ...]:
        """What the plan of this step is to copy out."""
        if not self._outgoing:
            return ()
        for copy in self._copies.values():
            if copy.step_id == _NOT_LAUNCHED:
                copy.step_id = step_id
        outgoing, self._outgoing = tuple(self._outgoing), []
        return outgoing

    def came_back(self, step_id: int) -> None:
        """This step, and so all before it that have not failed, did what it was to do."""
        self._last_back = step_id
        if self._on_trust:
            self._on_trust = {rid: copied_by for rid, copied_by in self._on_trust.items() if copied_by > step_id}

    def distrust(self, step_id: int) -> list[int]:
        """This step failed: what it or a later one was to copy out may not be there.

        Returns the ids of requests for which such copies have been brought in already, by plans made before that was
        known.
        """
        for request_id in [rid for rid, copy in self._copies.items() if copy.step_id >= step_id]:
            self._give_free(self._copies.pop(request_id))
        brought_in = [rid for rid, copied_by in self._on_trust.items() if copied_by >= step_id]
        for request_id in brought_in:
            del self._on_trust[request_id]
        return brought_in

    def check_integrity(self, waiting: set[int]) -> None:
        """Raise `AssertionError` unless every block is free or kept for one of the requests `waiting`."""
        kept = [block for copy in self._copies.values() for block in copy.host_blocks if block != NO_BLOCK]
        blocks = {*kept, *self._free}
        assert len(blocks) == self.num_blocks == len(kept) + len(self._free), "a host block is lost or free twice"
        assert blocks.issuperset(range(self.num_blocks)), "a host block that does not exist"
        assert self._copies.keys() <= waiting, "host blocks are kept for a request that does not wait"
        assert len({host for _, host in self._outgoing}) == len(self._outgoing), "two copies go to one host block"
