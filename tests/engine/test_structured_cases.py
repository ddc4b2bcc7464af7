"""Cases of structured output that went wrong elsewhere, with logits and tokens that the test scripts."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cb_backend.contracts.request import FinishReason
from cb_backend.engine.grammar.guide import NOT_ALLOWED
from cb_backend.engine.llm_engine import LLMEngine
from cb_backend.engine.runner.slot_runner import SlotRunner
from tests.engine.structured import (
    EOS_ID,
    GRAMMARS,
    Texts,
    engine_for,
    json_schema,
    params,
    prompts,
    run_to_end,
)
from tests.oracles.reference_runner import ReferenceRunner
from tests.server.tiny_checkpoint import VOCAB_SIZE

PROMPTS = prompts(40)


def force_token(engine: LLMEngine, seed: int, token_id: int, after: int) -> None:
    """Rows of the request with this seed sample `token_id`, whatever is allowed, once `after` tokens are out."""
    runner = engine.runner
    assert isinstance(runner, ReferenceRunner | SlotRunner)
    sample, num_sampled = runner.ops.sample, [0]

    def forced(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids, is_failed = sample(*args, **kwargs)
        rows = (args[1].seed == seed).nonzero().flatten()
        num_sampled[0] += len(rows)
        if num_sampled[0] > after:
            token_ids[rows] = token_id
        return token_ids, is_failed

    runner.ops = dataclasses.replace(runner.ops, sample=forced)


@pytest.mark.parametrize(("kind", "run_ahead"), [("reference", 0), ("slots", 0), ("slots", 1), ("slots", 4)])
def test_w2_a_token_that_the_grammar_rejects_is_a_final_error(folder: Path, kind: str, run_ahead: int) -> None:
    """Case W2: the request ends at once and says why; its neighbours, guided and not, do not notice."""
    others = [params(GRAMMARS["regex"], seed=3), params(None, max_tokens=20, ignore_eos=True, seed=4)]
    expected = run_to_end(engine_for(folder, kind), PROMPTS[1:3], others)
    engine = engine_for(folder, kind, run_ahead=run_ahead)
    force_token(engine, seed=99, token_id=VOCAB_SIZE - 1, after=6 if kind == "slots" else 3)
    got = run_to_end(engine, PROMPTS[:3], [params(GRAMMARS["json"], seed=99), *others])
    assert got.reasons[0] is FinishReason.ERROR
    assert got.failures == {0: NOT_ALLOWED}
    assert len(got.token_ids[0]) == 3
    assert [got.token_ids[1], got.token_ids[2]] == [expected.token_ids[0], expected.token_ids[1]]


def white_space_bias(texts: Texts) -> dict[int, float]:
    token_ids = {token_id for text in (" ", "  ", "    ", "\n", "\t", " \n") for token_id in texts.ids(text)}
    assert len(token_ids) >= 3
    return dict.fromkeys(token_ids, 100.0)


def test_w4_white_space_is_bounded_between_tokens(folder: Path, texts: Texts) -> None:
    """Case W4: a model that likes white space best of all still finishes its JSON."""
    favourite = {"logit_bias": white_space_bias(texts), "temperature": 0.0, "max_tokens": 250}
    item = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    all_params = [params(json_schema(item, is_compact=is_compact), **favourite) for is_compact in (False, True)]
    got = run_to_end(engine_for(folder, "slots"), [[5, 6]] * 2, all_params)
    loose, compact = (texts.of(got.token_ids[index]) for index in (0, 1))
    assert {*got.reasons.values()} == {FinishReason.STOP}
    assert json.loads(loose) == {"a": 1}
    lengths = [len(white) for white in re.findall(r"\s+", loose)]
    assert 20 < max(lengths) <= 33
    assert compact == '{"a":1}'


def test_w4_white_space_inside_a_string_ends_by_length(folder: Path, texts: Texts) -> None:
    """Case W4: a string may hold any number of spaces, so max_tokens ends it, and the reason says so."""
    favourite = {"logit_bias": white_space_bias(texts), "temperature": 0.0, "max_tokens": 120}
    schema = json_schema({"type": "string"})
    got = run_to_end(engine_for(folder, "reference"), [[5, 6]], [params(schema, **favourite)])
    assert got.reasons[0] is FinishReason.LENGTH
    assert len(got.token_ids[0]) == 120
    assert texts.of(got.token_ids[0])[1:].isspace()


# ---- random schemas ------------------------------------------------------------------------------------------------


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["integer", "boolean", "null", "string", "enum", "const"] + ["object", "array"] * (2 if depth < 2 else 0)
    kind = rng.choice(kinds)
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
    if kind == "string":
        low = rng.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 4)}
    if kind == "enum":
        return {"enum": rng.sample(["x", "é\n", 7, -1.5, True, None, 'q"uote', ["l"]], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["c", 3, {"k": [1, 2]}])}
    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": low, "maxItems": low + 2}
    if kind == "object":
        names = rng.sample(["a", "b c", "ü", "d", 'e"'], rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.6],
            "additionalProperties": False,
        }
    return {"type": kind}


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """A plain reading of the keywords that `random_schema` uses."""
    if "const" in schema or "enum" in schema:
        choices = schema.get("enum", [schema.get("const")])
        return any(json.dumps(value) == json.dumps(choice) for choice in choices)
    kind = schema["type"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "string":
        return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
    if kind == "array":
        is_length_right = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return is_length_right and all(conforms(item, schema["items"]) for item in value)
    if kind == "object":
        properties = schema["properties"]
        return (
            isinstance(value, dict)
            and {*schema["required"]} <= {*value} <= {*properties}
            and all(conforms(entry, properties[name]) for name, entry in value.items())
        )
    return value is None if kind == "null" else isinstance(value, bool)


def test_random_schemas_are_always_met(folder: Path, texts: Texts) -> None:
    """Forty schemas at once at a high temperature, half of them compact; prefix cache, chunks and run-ahead are on."""
    rng = random.Random(11)
    schemas = [random_schema(rng) for _ in PROMPTS]
    engine = engine_for(folder, "slots", run_ahead=2, max_num_seqs=16, max_num_batched_tokens=64)
    all_params = [
        params(json_schema(schema, is_compact=index % 2 == 0), temperature=1.5, seed=index, max_tokens=450)
        for index, schema in enumerate(schemas)
    ]
    got = run_to_end(engine, PROMPTS, all_params)
    assert {*got.reasons.values()} <= {FinishReason.STOP, FinishReason.LENGTH}, got.failures
    finished = [index for index, reason in got.reasons.items() if reason is FinishReason.STOP]
    assert len(finished) >= 30
    for index in finished:
        assert got.token_ids[index][-1] == EOS_ID
        text = texts.of(got.token_ids[index])
        assert conforms(json.loads(text), schemas[index]), (schemas[index], text)
    assert np.all([len(got.token_ids[i]) == 450 for i in got.token_ids if i not in finished])
