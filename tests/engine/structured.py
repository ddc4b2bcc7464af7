"""What the tests of structured output share: a tiny checkpoint with a real tokenizer, grammars, and who checks them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from cb_backend.contracts.structured_output import StructuredOutput
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine
from tests.engine import drive
from tests.engine.drive import Run, run

EOS_ID = 0  # of tests.server.tiny_checkpoint

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "is_new": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "is_new"],
    "additionalProperties": False,
}
SQL = 'root ::= "SELECT " column ("," column)? " FROM t"\ncolumn ::= [a-c]+ | "*"'
LIST = 'start: item ("," item){0,3}\nitem: /[0-9]{1,2}/\n'


def json_schema(schema: dict[str, Any], **options: Any) -> StructuredOutput:
    return StructuredOutput(kind="json", text=json.dumps(schema), **options)


GRAMMARS = {
    "json": json_schema(PERSON, is_compact=True),
    "regex": StructuredOutput(kind="regex", text=r"(\d{3}-){1,2}[x-z]{2}é"),
    "choice": StructuredOutput(kind="choice", text='["yes","no","na\\u00efve \\"quote\\"","東京"]'),
    "gbnf": StructuredOutput(kind="grammar", text=SQL),
    "lark": StructuredOutput(kind="grammar", text=LIST),
}


def is_valid(name: str, text: str) -> bool:
    """Whether a text is what `GRAMMARS[name]` asks for, by other means than a grammar library."""
    if name == "json":
        return is_person(json.loads(text))
    pattern = {
        "regex": r"([0-9]{3}-){1,2}[x-z]{2}é",
        "choice": 'yes|no|naïve "quote"|東京',
        "gbnf": r"SELECT ([a-c]+|\*)(,([a-c]+|\*))? FROM t",
        "lark": r"[0-9]{1,2}(,[0-9]{1,2}){0,3}",
    }[name]
    return re.fullmatch(pattern, text) is not None


def is_person(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and list(value) == ["name", "age", "tags", "is_new"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and isinstance(value["tags"], list)
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a", "b"}
        and isinstance(value["is_new"], bool)
    )


def params(structured: StructuredOutput | None, **changes: Any) -> TokenRules:
    return TokenRules(**{"max_tokens": 200, "temperature": 0.8, "seed": 7, "structured_output": structured, **changes})


def engine_for(folder: Path, kind: str, **changes: object) -> LLMEngine:
    """As `drive.engine_for`, with room for grammars' long answers."""
    settings = {"max_model_len": 512, "max_num_batched_tokens": 24, "max_num_seqs": 8, "num_gpu_blocks_override": 400}
    return drive.engine_for(folder, kind, **{**settings, **changes})


class Texts:
    """A run's outputs as text, ends of sequence left out."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def of(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)


def run_to_end(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], all_params: Sequence[TokenRules], **how: Any
) -> Run:
    """As `drive.run`; afterwards nothing may be left of anything."""
    out = run(engine, prompts, list(all_params), **how)
    engine.scheduler.check_integrity()
    assert engine.stats().num_free_blocks == engine.info.num_blocks
    return out


def prompts(count: int, vocab_size: int = 384) -> list[list[int]]:
    generator = np.random.default_rng(count)
    return [generator.integers(1, vocab_size, int(generator.integers(3, 20))).tolist() for _ in range(count)]


NAMES = list(GRAMMARS)
PROMPTS = prompts(2 * len(NAMES) + 2)
# Two of each kind, greedy and drawn, and two requests without a grammar.
ALL_PARAMS = [
    *(params(GRAMMARS[name], temperature=0.0) for name in NAMES),
    *(params(GRAMMARS[name], temperature=1.2, seed=seed) for seed, name in enumerate(NAMES)),
    *(params(None, temperature=temperature, max_tokens=40, ignore_eos=True) for temperature in (0.0, 0.9)),
]


def check_texts(texts: Texts, token_ids: Sequence[Sequence[int]]) -> None:
    """Whether the answers to `ALL_PARAMS` are what their grammars ask for."""
    for index, (own, answer) in enumerate(zip(ALL_PARAMS, token_ids, strict=True)):
        if own.structured_output is not None:
            name, text = NAMES[index % len(NAMES)], texts.of(answer)
            assert is_valid(name, text), (name, text)
