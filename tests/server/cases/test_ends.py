"""Kinds C and D, the end of an answer: end-of-sequence ids, min_tokens, and lengths at every border."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from cb_backend.contracts.token_rules import TokenRules
from tests.fakes.hash_model import MODEL
from tests.fakes.scripted_model import EOS, SECOND_EOS, script
from tests.server.cases.case import Case, over_transports
from tests.server.cases.conftest import BLOCK_SIZE, MAX_MODEL_LEN, NARROW_BLOCKS, Floor
from tests.server.cases.transports import TRANSPORTS, Wire

LAST = -1  # the model's last id, which the tokenizer does not know
EITHER_END = {SECOND_EOS: 40.0, EOS: 39.0, "x": 20.0}

test_ends = over_transports(
    [
        Case(
            "c1_ignore_eos_ignores_every_eos_id",
            script("x", EOS, SECOND_EOS, then="x"),
            {"ignore_eos": True, "max_tokens": 20},
            text="x" * 18,
            finish="length",
            num_tokens=20,
        ),
        Case("c1_each_eos_id_ends", script("x", SECOND_EOS, "y"), text="x", finish="stop", num_tokens=2),
        Case(
            "c2_min_tokens_covers_every_eos_id",
            script(*[EITHER_END] * 8),
            {"min_tokens": 5},
            text="xxxxx",
            finish="stop",
            num_tokens=6,
        ),
        Case(
            "c4_only_output_counts_and_the_last_id_stays",
            script(*[{EOS: 40.0, LAST: 30.0, "x": 20.0}] * 12, pad="p" * 100),
            {"min_tokens": 10},
            text="",  # the tokenizer has no text for that id
            finish="stop",
            num_tokens=11,
        ),
        Case("c6_stop_string_before_min_tokens", script(*"axbcdxe"), {"stop": "x", "min_tokens": 4}, text="axbcd"),
        Case("d1_the_longest_prompt", [7] * (MAX_MODEL_LEN - 1), {"max_tokens": 5}, model="llm", num_tokens=1),
        Case(
            "d1_a_prompt_of_the_models_length",
            [7] * MAX_MODEL_LEN,
            {"max_tokens": 1},
            model="llm",
            error=f"the prompt has {MAX_MODEL_LEN} tokens; at most {MAX_MODEL_LEN - 1} fit",
        ),
    ]
)

POOL = NARROW_BLOCKS * BLOCK_SIZE  # tokens


def lengths() -> list[Case]:
    """From one block below the pool to two above: completes, ends by length when the pool is full, or is refused."""
    cases = []
    for num_prompt in (POOL - BLOCK_SIZE, POOL - 4, POOL - 1, POOL, POOL + 1, POOL + BLOCK_SIZE, POOL + 2 * BLOCK_SIZE):
        fits = num_prompt < POOL
        num_tokens = min(4, POOL - num_prompt) if fits else None
        error = None if fits else f"{num_prompt}"
        name = f"d3_{num_prompt}_tokens_in_a_pool_of_{POOL}"
        prompt = [index % 256 for index in range(num_prompt)]
        cases.append(Case(name, prompt, {"max_tokens": 4}, model="narrow", num_tokens=num_tokens, error=error))
    return cases


test_pool = over_transports(lengths())

test_max_tokens = over_transports(
    [Case("d7_missing", script(then="x"), {}, text="x" * 16, finish="length", num_tokens=16)]
    + [
        Case(f"{name}_{value!r}", "x", {"max_tokens": value}, error="max_tokens")
        for name, value in [("d5", 0), *(("d7", value) for value in (None, "", -1, 2**31, 1.5, True))]
    ]
    + [Case("d5_with_the_prompt_in_front", "x", {"max_tokens": 0}, {"exclude_input_in_output": False, "stream": False},
            error="max_tokens must be between 1 and 2147483647, got 0")]
)  # fmt: skip


@pytest.mark.server
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_d4_fifty_requests_of_one_token_half_of_them_full_hits(wire: Wire, floor: Floor, transport: str) -> None:
    """Case D4: whole blocks are cached, the last token is computed again, everybody gets a final."""
    salt = TRANSPORTS.index(transport)
    warm = [salt, *range(4 * BLOCK_SIZE - 1)]
    prompts = [warm if index % 2 else [index, salt, *range(3 * BLOCK_SIZE)] for index in range(50)]
    first = wire.ask(transport, "hash", {"max_tokens": 1}, input_ids=warm)
    with ThreadPoolExecutor(25) as pool:
        asked = [pool.submit(wire.ask, transport, "hash", {"max_tokens": 1}, input_ids=prompt) for prompt in prompts]
        replies = [future.result() for future in asked]
    for prompt, reply in zip([warm, *prompts], [first, *replies], strict=True):
        assert (reply.error, reply.num_finals) == (None, 1)
        assert reply.output_ids() == hash_output(prompt, 1)
    floor.wait_idle("hash")


def hash_output(prompt: list[int], max_tokens: int) -> list[int]:
    """What H answers to this prompt alone."""
    return MODEL.lone_output(prompt, b"", TokenRules(), (), len(prompt) + max_tokens)
