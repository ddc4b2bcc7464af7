"""A step log that is known by heart, of which timelines are drawn, and the elements of their pictures."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import msgspec

from cb_backend.cli.timelines.steps import Ended, Header, Joined, Row, Step, StepLogFile
from cb_backend.contracts.request import FinishReason

STOP, LENGTH, ABORT = int(FinishReason.STOP), int(FinishReason.LENGTH), int(FinishReason.ABORT)


def step(i: int, rows: list[Row], joined: list[Joined] = (), ended: list[Ended] = (), **figures: int) -> Step:  # type: ignore[assignment]
    figures = {"num_waiting": 0, "num_used_blocks": 2, "num_preemptions": 0, **figures}
    return Step(step_id=i, begin=i * 1.0, end=i + 1.0, rows=rows, joined=list(joined), ended=list(ended), **figures)


def known_log(num_slots: int = 3) -> StepLogFile:
    """7 was there before. 8 comes with two chunks and is preempted for 9, which ends; 8 returns; 7 is cancelled.

    Step 5 has a row of 9 that was launched ahead of its end and counts for nothing.
    """
    steps = [
        step(0, [Row(0, 7, 1, False), Row(1, 8, 6, True)], [Joined(1, 8, 10, 0)], num_waiting=1),
        step(1, [Row(0, 7, 1, False), Row(1, 8, 4, True)], num_waiting=1),
        step(2, [Row(0, 7, 1, False), Row(1, 8, 1, False)], num_used_blocks=8),
        step(3, [Row(0, 7, 1, False), Row(1, 9, 3, True)], [Joined(1, 9, 5, 2)], num_waiting=1, num_preemptions=1),
        step(4, [Row(0, 7, 1, False), Row(1, 9, 1, False)], ended=[Ended(9, STOP)], num_preemptions=1),
        step(5, [Row(0, 7, 1, False), Row(1, 9, 1, False)], ended=[Ended(7, ABORT)], num_preemptions=1),
        step(6, [Row(2, 8, 11, True)], [Joined(2, 8, 11, 0)], num_preemptions=1),
        step(7, [Row(2, 8, 1, False)], num_preemptions=1),
    ]
    return StepLogFile(Header(title="known <log>", num_slots=num_slots, num_blocks=10, block_size=4), steps)


def elements(svg: str, kind: str) -> list[ElementTree.Element]:
    return [e for e in ElementTree.fromstring(svg).iter() if e.get("class", "").split(" ")[0] == kind]


def paused_log(pause_s: float) -> StepLogFile:
    """Eight steps of a second, with a pause before the fifth."""
    log = known_log()
    late = [msgspec.structs.replace(s, begin=s.begin + pause_s, end=s.end + pause_s) for s in log.steps[4:]]
    return StepLogFile(log.header, log.steps[:4] + late)
