"""A step's output on its way: every entry reaches the front end that its request id names, and no other."""

from __future__ import annotations

import numpy as np

from cb_backend.contracts.request import FinishReason, make_request_id
from cb_backend.contracts.step import EngineOutput, PromptLogprobs, TokenLogprobs
from cb_backend.engine.step_messages import Shares, step_output

IDS = np.array([make_request_id(front_end, number) for front_end, number in ((1, 7), (2, 8), (1, 9))])


def output(request_ids: np.ndarray, first_token: int = 10, **more: object) -> EngineOutput:
    count = len(request_ids)
    tokens, reasons = np.arange(first_token, first_token + count, dtype=np.int32), np.zeros(count, np.uint8)
    reasons[count - 1 :] = FinishReason.STOP
    return EngineOutput(request_ids, tokens, reasons, **more)  # type: ignore[arg-type]


def told(shares: Shares, step: EngineOutput) -> dict[int, tuple[list[int], list[int], list[int]]]:
    """By front end: request ids, token ids, finish reasons."""
    messages = {share.front_end_id: step_output(1, share, step, {}) for share in shares.of(step)}
    return {
        front_end: (
            np.frombuffer(message.request_ids, "<i8").tolist(),
            np.frombuffer(message.token_ids, "<i4").tolist(),
            list(message.finish_reasons),
        )
        for front_end, message in messages.items()
    }


def test_entries_go_to_the_front_end_that_their_ids_name() -> None:
    ids = IDS.tolist()
    assert told(Shares(), output(IDS)) == {1: ([ids[0], ids[2]], [10, 12], [0, 1]), 2: ([ids[1]], [11], [0])}
    assert told(Shares(), output(IDS[:1])) == {1: (ids[:1], [10], [1])}
    assert told(Shares(), output(IDS[:0])) == {}


def test_the_same_batch_brings_new_tokens_and_another_batch_new_shares() -> None:
    shares, ids = Shares(), IDS.tolist()
    told(shares, output(IDS))
    assert told(shares, output(IDS, 20)) == {1: ([ids[0], ids[2]], [20, 22], [0, 1]), 2: ([ids[1]], [21], [0])}
    assert told(shares, output(IDS[1:])) == {2: ([ids[1]], [10], [0]), 1: ([ids[2]], [11], [1])}


def test_log_probabilities_go_with_their_entries() -> None:
    values = np.array([-1.0, -2.0, -3.0], np.float32)
    logprobs = TokenLogprobs(
        IDS, values, {"rank": np.ones(3, np.int32)}, np.zeros((3, 1), np.int32), np.zeros((3, 1), np.float32)
    )
    step = output(IDS, attached=(logprobs,))
    packed = {share.front_end_id: step_output(1, share, step, {}).attached for share in Shares().of(step)}
    told = {
        front_end: {owner: figures.logprob for part in parts for owner, figures in part.by_owner()}
        for front_end, parts in packed.items()
    }
    assert told == {1: {IDS[0]: -1.0, IDS[2]: -3.0}, 2: {IDS[1]: -2.0}}


def test_a_front_end_is_told_of_its_prompt_though_it_has_no_entry() -> None:
    asking = make_request_id(3, 1)
    chunk = PromptLogprobs(
        np.array([asking]),
        1,
        np.zeros(1, np.float32),
        {"rank": np.ones(1, np.int32)},
        np.zeros((1, 0), np.int32),
        np.zeros((1, 0), np.float32),
    )
    shares = Shares()
    step = output(IDS, attached=(chunk,))
    messages = {share.front_end_id: step_output(1, share, step, {}) for share in shares.of(step)}
    assert messages.keys() == {1, 2, 3}
    assert messages[3].request_ids == messages[3].token_ids == messages[3].finish_reasons == b""
    assert [owner for part in messages[3].attached for owner, _ in part.by_owner()] == [asking]
    assert messages[1].attached == messages[2].attached == ()
    assert {share.front_end_id for share in shares.of(output(IDS))} == {1, 2}
