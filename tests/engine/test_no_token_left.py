"""Requests whose own rules leave no token, at once or after some: their own error, told as the client's to mend.

A row whose logits are not finite is another thing, whatever rules it has, and stays the engine's fault.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cb_backend.contracts.request import FinishReason
from cb_backend.contracts.structured_output import StructuredOutput
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.runner.logits_rules import NO_TOKEN_LEFT
from cb_backend.engine.runner.slot_runner import SlotRunner
from tests.engine.structured import EOS_ID, engine_for, prompts, run_to_end
from tests.oracles.reference_runner import ReferenceRunner
from tests.server.tiny_checkpoint import VOCAB_SIZE

PROMPTS = prompts(7)
PLAIN = {"max_tokens": 12, "temperature": 0.0, "seed": 0, "ignore_eos": True}
NEIGHBOURS = [TokenRules(**PLAIN), TokenRules(**PLAIN, allowed_token_ids=(5, 6, 7), presence_penalty=1.0)]

DEAD_ENDS = {  # rules, and how many tokens come before none is left
    "a word of the only token twice": ({"allowed_token_ids": (5,), "bad_words_token_ids": ((5, 5),)}, 1),
    "the same at a temperature": (
        {"allowed_token_ids": (5,), "bad_words_token_ids": ((5, 5, 5),), "temperature": 0.8, "top_k": 3, "top_p": 0.5},
        2,
    ),
    "only the end, which min_tokens forbids": (
        {"allowed_token_ids": (EOS_ID, 5), "bad_words_token_ids": ((5, 5),), "min_tokens": 6, "ignore_eos": False},
        1,
    ),
    "every token is a bad word": ({"bad_words_token_ids": tuple((i,) for i in range(VOCAB_SIZE))}, 0),
    "a grammar's only word is bad": (
        {"structured_output": StructuredOutput(kind="choice", text='["aa"]'), "allowed_token_ids": (5, 6)},
        0,
    ),
}
RUNNERS = [("reference", 0), ("slots", 0), ("slots", 4)]


@pytest.mark.parametrize(("kind", "run_ahead"), RUNNERS)
def test_rules_that_leave_no_token_are_the_clients_error(folder: Path, kind: str, run_ahead: int) -> None:
    """All dead ends in one batch, beside two requests that do not notice."""
    engine = engine_for(folder, kind, run_ahead=run_ahead)
    expected = run_to_end(engine, PROMPTS[:2], NEIGHBOURS)
    dead_ends = [TokenRules(**{**PLAIN, **rules}) for rules, _ in DEAD_ENDS.values()]
    got = run_to_end(engine, PROMPTS, [*NEIGHBOURS, *dead_ends])
    assert [got.token_ids[0], got.token_ids[1]] == [expected.token_ids[0], expected.token_ids[1]]
    for index, (name, (_, num_before)) in enumerate(DEAD_ENDS.items(), start=2):
        assert got.reasons[index] is FinishReason.ERROR, name
        assert got.failures[index] == NO_TOKEN_LEFT, name
        assert len(got.token_ids[index]) == num_before, name
    assert set(got.failures) == set(range(2, len(PROMPTS)))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("kind", "run_ahead"), RUNNERS)
def test_h4_logits_that_are_not_finite_are_no_rules_fault(folder: Path, kind: str, run_ahead: int) -> None:
    """Case H4 of a row with rules, also where these forbid the token that is broken: nothing else is to be trusted."""
    engine = engine_for(folder, kind, run_ahead=run_ahead)
    runner = engine.runner
    assert isinstance(runner, ReferenceRunner | SlotRunner)
    compute_logits = runner.model.compute_logits
    for value, where in [(NAN, slice(None)), (-INF, slice(None)), (INF, 5), (NAN, 9), (INF, 9)]:

        def poisoned(*args: Any, value: float = value, where: int | slice = where) -> torch.Tensor:
            logits = compute_logits(*args)
            logits[0, where] = value
            return logits

        runner.model.compute_logits = poisoned  # type: ignore[method-assign]
        got = run_to_end(engine, PROMPTS[:1], [TokenRules(**PLAIN, allowed_token_ids=(5, 6))])
        assert got.reasons == {0: FinishReason.ERROR}
        assert got.failures == {}, "the client is not told that its rules are wrong"
        assert got.token_ids[0] == []
