"""Requests that wait for their adapters in an engine: pytest tests/engine/test_adapted_requests.py"""

from __future__ import annotations

import numpy as np
import pytest

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.messages import ModelInfo
from cb_backend.contracts.request import Request
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import LLMEngine
from tests.engine.adapter_reader import Reader, source
from tests.fakes.engine import info_of
from tests.fakes.hash_rule import HashModel
from tests.fakes.runners import HashRunner


class AdaptedHashRunner(HashRunner):
    adapters: Reader


def engine_of(reader: Reader, num_adapter_slots: int = 2) -> LLMEngine:
    config = EngineConfig(model="fake", block_size=4, enable_lora=True, max_num_seqs=8)
    info: ModelInfo = info_of(config, 64, 256, (0,))
    runner = AdaptedHashRunner(HashModel(1000), 65, 4)
    runner.adapters = reader
    changed = {name: getattr(info, name) for name in info.__struct_fields__}
    return LLMEngine(config, runner, ModelInfo(**{**changed, "num_adapter_slots": num_adapter_slots}))


def add(engine: LLMEngine, request_id: int, wanted: AdapterSource | None, prompt: int = 9) -> Request:
    tokens = np.arange(1, 1 + prompt, dtype=np.int32)
    request = engine.make_request(request_id, tokens, TokenRules(max_tokens=4), adapter=wanted)
    engine.add_request(request)
    return request


def run(engine: LLMEngine) -> dict[int, int]:
    """Prompt tokens found in the prefix cache, by request."""
    cached: dict[int, int] = {}
    while engine.has_unfinished():
        assert engine.release_held() == []
        output = engine.step()
        cached.update(output.num_cached_tokens if output is not None else {})
    return cached


def test_a_request_waits_for_its_adapter_without_a_slot_while_others_run() -> None:
    reader = Reader({"/adapters/doll": b"d" * 16})
    reader.gate.clear()
    engine = engine_of(reader)
    add(engine, 1, source("doll"))
    add(engine, 2, None)
    while engine.scheduler.num_waiting + engine.scheduler.num_running > 1:
        engine.release_held()
        engine.step()
    assert engine.is_holding
    stats = engine.stats().adapters
    assert stats is not None
    assert stats.waiting == ("doll",)
    reader.gate.set()
    assert 1 in run(engine)
    assert not engine.is_holding
    engine.close()


def test_cached_prefixes_are_shared_by_content_alone() -> None:
    """Neither by the name (its files may have changed) nor with the model as it is."""
    reader = Reader({"/adapters/doll": b"d" * 16, "/adapters/twin": b"d" * 16, "/adapters/other": b"o" * 16})
    engine = engine_of(reader)
    for number, (wanted, num_cached) in enumerate(
        [
            (None, 0),
            (source("doll"), 0),
            (source("other"), 0),
            (source("twin"), 8),
            (source("doll"), 8),
            (None, 8),
        ]
    ):
        request = add(engine, number, wanted)
        assert run(engine) == {number: num_cached}, number
        assert request.adapter == (reader.content[wanted.path] if wanted else b"")
    reader.content["/adapters/doll"] = b"n" * 16
    add(engine, 10, source("doll", mtime_ns=2))
    assert run(engine) == {10: 0}, "the same name, other weights"
    engine.close()


def test_an_engine_without_adapters_says_so() -> None:
    engine = engine_of(Reader(), num_adapter_slots=0)
    with pytest.raises(InvalidRequestError, match=r"^LoRA feature is not enabled\.$"):
        add(engine, 1, source("doll"))
    assert engine.stats().adapters is None
    engine.close()


def test_when_nobody_needs_them_no_more_are_kept_than_is_configured() -> None:
    reader = Reader({f"/adapters/{name}": name.encode() * 16 for name in "abcdefghijkl"})
    engine = engine_of(reader)  # 2 slots, so 8 are kept
    for number, name in enumerate("abcdefghijkl"):
        add(engine, number, source(name))
    assert len(run(engine)) == 12
    assert engine.release_held() == []
    stats = engine.stats().adapters
    assert stats is not None
    assert stats.num_kept == 8
    engine.close()


def test_a_request_that_is_cancelled_while_its_adapter_is_read_leaves_nothing() -> None:
    reader = Reader({"/adapters/doll": b"d" * 16})
    reader.gate.clear()
    engine = engine_of(reader)
    add(engine, 1, source("doll"))
    assert engine.cancel(1)
    assert not engine.is_holding
    assert not engine.has_unfinished()
    reader.gate.set()
    engine.scheduler.check_integrity()
    engine.close()
