"""What must be so for every plan of a simulated engine, computed from the documents and not from its own bookkeeping.

I2 what nobody holds is not read · I3 shared and cached blocks are not written · I10 nobody overtakes but as
documented, nobody is preempted too often · I11 a running request gets a token in every other step · I12 budget, no gap
· I13 nothing is computed for who has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cb_backend.contracts.request import RequestStatus
from cb_backend.contracts.step import NOTHING_WANTED, JoinedRow, StepPlan
from cb_backend.engine.scheduler.order import MAX_OVERTAKEN
from cb_backend.engine.scheduler.preemption import MAX_PREEMPTIONS
from tests.fakes.plan_follower import FakePending
from tests.simulation.adapter_turns import waits_for_slot
from tests.simulation.adapters import key_of

if TYPE_CHECKING:
    from tests.simulation.checks import CheckedEngine


def check_plan(checked: CheckedEngine, plan: StepPlan, pending: FakePending) -> None:
    config, counters = checked.config, checked.counters
    slots, computed_tokens = plan.slots.tolist(), plan.first.tolist()
    scheduled_tokens = plan.num_tokens.tolist()
    num_rows, num_tokens = len(slots), sum(scheduled_tokens)
    is_lone_prompt = not config.enable_chunked_prefill and num_rows == 1
    assert num_tokens <= config.max_num_batched_tokens or is_lone_prompt, "I12: over the budget"
    assert num_rows <= config.max_num_seqs, "I12: more rows than max_num_seqs"
    assert min(scheduled_tokens) >= 1, "I12: an empty row"
    waiting = [checked.places[request.request_id] for request in checked.scheduler._queue]
    assert waiting == sorted(waiting), "I10: the queue is out of order"
    filled = {slot for slot, _ in plan.adapter_loads}
    for row in plan.joined:
        is_back = row.request_id in checked.computed
        counters["resumed"] += is_back
        assert checked.requests[row.request_id].num_preemptions <= MAX_PREEMPTIONS, "I10: preempted too often"
        checked.slot_owner[row.slot] = row.request_id
        checked.computed.pop(row.request_id, None)
        takes_slot = row.adapter in filled
        filled.discard(row.adapter)  # others join whoever fills it
        _check_overtaking(checked, row, is_back, takes_slot)
        arrival = checked.answers[row.request_id].arrival
        expected = [*arrival.prompt, *checked.answers[row.request_id].expected_ids]
        known = row.token_ids.tolist()
        assert len(known) >= len(arrival.prompt), "the prompt of a joining row is cut"
        assert known == expected[: len(known)], "the tokens of a joining row are wrong"
    for slot, computed, scheduled in zip(slots, computed_tokens, scheduled_tokens, strict=True):
        request_id = checked.slot_owner[slot]
        assert checked.answers[request_id].is_open, "I13: computes for a request that has ended"
        assert checked.computed.get(request_id, computed) == computed, "I12: a gap in the positions"
        checked.computed[request_id] = computed + scheduled
        checked.last_row[request_id] = plan.step_id
    wanted = {slot: key_of(checked.answers[checked.slot_owner[slot]].arrival.adapter) for slot in slots}
    checked.adapters.check(plan, checked.in_flight, wanted)
    for block_id in (*pending.written_blocks, *(device for device, _ in plan.copies.back)):
        assert checked.kv.pool.ref_cnt(block_id) == 1, "I3: a shared block is written"
        assert checked.kv.pool.link_of(block_id) is None, "I3: a cached block is written"
    assert checked.are_held(pending.read_blocks), "I2: what nobody holds is read"
    _check_decode_share(checked, plan)
    counters["guided steps"] += checked.scheduler.num_guided > 0
    counters["swapped out blocks"] += len(plan.copies.out)
    counters["swapped in blocks"] += len(plan.copies.back)
    counters["tokens"] += num_tokens
    counters["steps"] += 1
    counters["whole prompts beyond the budget"] += num_tokens > config.max_num_batched_tokens
    counters["chunks"] += plan.wants.tolist().count(NOTHING_WANTED)


def _check_overtaking(checked: CheckedEngine, row: JoinedRow, is_back: bool, takes_slot: bool) -> None:
    """I10: who starts before his place has passed nobody more urgent, and nobody too often. Who waits for a slot of an
    adapter is passed by those who take none as often as they like (I25 is about him). Where there are adapters, one
    whose adapter has a slot starts from any place: only the first of the queue are not to be passed by him then."""
    request = checked.requests[row.request_id]
    own, place = request.scheduling, checked.places[row.request_id]
    for passed in checked.scheduler._queue:
        if checked.places[passed.request_id] > place:
            continue
        if checked.scenario.num_adapter_slots and passed.request_id not in checked.first:
            continue
        other, config = passed.scheduling, checked.config
        has_share = config.reserved_share and own.priority <= config.reserved_priority < other.priority
        assert other.priority >= own.priority, "I10: overtaken by a less urgent request"
        if (
            is_back
            or has_share
            or (checked.has_tenants and (other.tenant, other.priority) != (own.tenant, own.priority))
        ):
            continue
        waits = passed.request_id in checked.waited_for_slot or waits_for_slot(checked.scheduler, passed)
        if waits and not takes_slot:
            checked.counters["passed for lack of a slot"] += 1
            continue
        checked.overtaken[passed.request_id] += 1
        checked.counters["overtaken"] += 1
        assert passed.num_preemptions == 0, "O10: overtaken after a preemption"
        assert checked.overtaken[passed.request_id] <= MAX_OVERTAKEN, "I10: overtaken too often"


def _check_decode_share(checked: CheckedEngine, plan: StepPlan) -> None:
    """I11: who is past his prefill has a row in every plan (every other without chunks), or waits for a block.

    How long at most: blocks on their way when he begins to wait suffice for him and those before him, they are
    held by steps launched until then, and the last of these is back when `run_ahead` more plans have been made.
    Whoever begins to wait later is served later. Plans of prompts alone (without chunks, or hybrid) are never two
    running, and one may come when he needs the block and one when it is there: two plans more.
    """
    is_mixed = checked.config.enable_chunked_prefill and checked.config.prefill_policy == "mixed"
    most_gap = 0 if is_mixed else 1
    most_wait = checked.scenario.run_ahead + (0 if is_mixed else 2)
    for request_id, request in checked.scheduler._table.by_id.items():
        gap = plan.step_id - checked.last_row[request_id]
        if gap <= most_gap:
            continue
        assert request.status is RequestStatus.RUNNING
        table, slot, computed = checked.scheduler._table, request.slot, checked.computed[request_id]
        if table.num_prefill_tokens[slot] <= computed < table.max_computed_tokens[slot]:
            assert computed == len(request.block_table) // checked.kv.num_groups * checked.config.block_size, (
                "I11: left out"
            )
            assert gap <= most_wait, f"I11: a long wait, {gap} plans"
            checked.counters["waits for a block"] += 1
            checked.was_short = True
