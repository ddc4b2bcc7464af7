"""Which engine a request goes to. pytest tests/front_end/test_routing.py"""

from __future__ import annotations

import numpy as np

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.contracts.messages import token_ids_to_bytes
from cb_backend.front_end.engines.routing import LOAD_FACTOR, choose_engine, prefix_key


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def key_of(tokens: list[int], salt: str = "") -> bytes | None:
    return prefix_key(token_ids_to_bytes(tokens), salt)


def test_the_key_is_the_prompts_beginning_and_salt() -> None:
    assert key_of(prompt(63)) is None
    system = prompt(64)
    assert key_of([*system, 1]) == key_of(system + [2] * 100) != key_of(prompt(64, seed=1))
    history = prompt(300)
    assert key_of(history) == key_of(history + [5] * 200), "the next turn goes where the last one went"
    assert key_of(history) != key_of([*history[:255], 7, *history[256:]])
    assert key_of(system, "a") != key_of(system, "b")
    assert key_of(system, "\ud800") is not None


def test_an_adapter_has_prefixes_of_its_own() -> None:
    tokens = token_ids_to_bytes(prompt(64))

    def key(name: str, mtime_ns: int, salt: str = "") -> bytes | None:
        return prefix_key(tokens, salt, AdapterSource(name, "folder", mtime_ns, 1))

    keys = [prefix_key(tokens), key("a", 1), key("b", 1), key("a", 2), key("a", 1, "salt"), key("1", 1), key("", 11)]
    assert len(set(keys)) == len(keys)
    assert key("a", 1) == prefix_key(tokens, "", AdapterSource("a", "moved", 1, 99))
    assert prefix_key(token_ids_to_bytes(prompt(8)), "", AdapterSource("a", "folder", 1, 1)) is None


def test_equal_keys_meet_and_different_ones_spread() -> None:
    keys = [key_of(prompt(64, seed)) for seed in range(400)]
    chosen = [choose_engine(key, [0, 0, 0, 0]) for key in keys]
    assert chosen == [choose_engine(key, [0, 0, 0, 0]) for key in keys]
    assert all(70 < chosen.count(engine) < 130 for engine in range(4)), np.bincount(np.array(chosen))


def test_an_engine_that_is_away_moves_its_own_keys_only() -> None:
    keys = [key_of(prompt(64, seed)) for seed in range(200)]
    before = [choose_engine(key, [0, 0, 0]) for key in keys]
    after = [choose_engine(key, [0, None, 0]) for key in keys]
    assert all(new == old for old, new in zip(before, after, strict=True) if old != 1)
    assert 1 not in after
    assert choose_engine(keys[0], [None, None]) is None
    assert choose_engine(None, []) is None


def test_the_load_of_a_hot_prefix_is_bounded() -> None:
    hot, loads = key_of(prompt(64)), [0, 0, 0, 0]
    for num_before in range(200):
        engine = choose_engine(hot, loads)
        assert engine is not None
        loads[engine] += 1
        assert loads[engine] <= LOAD_FACTOR * (num_before + 1) / 4 + 1
    assert max(loads) == 63, "50 each, and a quarter more"
    assert 0 < min(loads) < 20, "engines fill up in the key's order"


def test_without_a_key_the_least_loaded_engine_is_taken() -> None:
    assert choose_engine(None, [3, 1, None, 2]) == 1
    assert choose_engine(None, [0, 0]) == 0
