"""Adapters of several ranks on their way from files to every rank's host memory, and out of it again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cb_backend.contracts.adapters import AdapterKey
from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError, UnavailableError
from cb_backend.contracts.step import StepPlan
from cb_backend.engine import worker_process
from cb_backend.engine.adapters import AdapterStore
from cb_backend.engine.runner import ranks as ranks_room
from cb_backend.engine.runner.rank_adapters import SharingAdapters, TakenAdapters
from cb_backend.engine.runner.step_adapters import StepAdapters
from cb_backend.layers.adapter_table import AdapterTable
from cb_backend.layers.ops import resolve_ops
from cb_backend.models.decoder import DecoderForCausalLM
from cb_backend.models.lora_checkpoint import read_adapter
from cb_backend.models.registry import new_maker, read_model_config
from cb_backend.parallel.hand_over import Giver, new_connection
from cb_backend.parallel.worker_plan import decode_plan, encode_plan
from tests.engine.adapted import source_of
from tests.models.adapters import ALL_MODULES, write_adapter
from tests.models.test_shards_of_checkpoints import OneOf
from tests.waiting import eventually

CPU, SIZE, SLOTS = torch.device("cpu"), 3, 2
NO_ROWS = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of six heads, for three ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 48, "intermediate_size": 100, "vocab_size": 97, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=3)).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    made = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder, made / name, seed=ord(name), r=4, target_modules=ALL_MODULES) for name in "abc"]


def slots_of(folder: Path, rank: int) -> StepAdapters:
    spec, ops = read_model_config(folder), resolve_ops("torch")
    table = AdapterTable(max_adapters=SLOTS, max_rank=4, dtype=torch.float32, device=CPU)
    maker = replace(new_maker(spec, ops, torch.float32, CPU, None, OneOf(rank, SIZE)), adapters=table)
    DecoderForCausalLM(spec, maker, has_own_head=True, max_model_len=8)
    table.allocate()
    return StepAdapters(table, spec, ops)


class Ranks:
    """Rank 0 with its store, and the others as threads of this process."""

    def __init__(self, folder: Path, most_kept: int) -> None:
        self.spec = read_model_config(folder)
        self.slots = [slots_of(folder, rank) for rank in range(SIZE)]
        ends, self.others = {}, []
        for rank in range(1, SIZE):
            ends[rank], other = new_connection()
            self.others.append(TakenAdapters(self.slots[rank], other, CPU))
        self.sharing = SharingAdapters(self.slots[0], self.spec, Giver(ends))
        self.store = AdapterStore(self.sharing, most_kept)
        self.num_steps = 0

    def find(self, adapter: Path, in_use: frozenset[AdapterKey] = frozenset()) -> AdapterKey:
        keys: list[AdapterKey] = []

        def is_there() -> bool:
            key = self.store.find(source_of(adapter), 0.0)
            self.store.tidy(lambda: in_use, 0.0)
            keys.extend([] if key is None else [key])
            return key is not None

        eventually(is_there, "the adapter")
        return keys[0]

    def step(self, *loads: tuple[int, AdapterKey]) -> None:
        """A step of nothing but loads, on every rank."""
        self.num_steps += 1
        wants = np.empty(0, np.uint8)
        plan = StepPlan(self.num_steps, NO_ROWS, NO_ROWS, NO_ROWS, wants, 0, adapter_loads=loads)
        message = self.sharing.encode(plan)
        self.slots[0].load(plan)
        for other, slots in zip(self.others, self.slots[1:], strict=True):
            received = decode_plan(message)
            other.forget(received.forgotten)
            slots.load(received.plan)

    def holds(self, slot: int, adapter: Path) -> list[bool]:
        """Whether every rank's slot has its share of what is in the files."""
        found = []
        for slots in self.slots:
            whole = read_adapter(adapter, self.spec, slots.table.whole)
            found.append(torch.equal(slots.table.slab[slot], slots.table.share_of(whole.data)))
        return found

    def close(self) -> None:
        self.store.close()
        self.sharing.close()


@pytest.fixture
def ranks(folder: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    made = Ranks(folder, most_kept=getattr(request, "param", 4))
    yield made
    made.close()


def test_a_plan_fills_a_slot_on_every_rank(ranks: Ranks, adapters: list[Path]) -> None:
    a, b, c = (ranks.find(adapter) for adapter in adapters)
    ranks.step((0, a), (1, b))
    ranks.step()
    assert ranks.holds(0, adapters[0]) == ranks.holds(1, adapters[1]) == [True] * SIZE
    ranks.step((0, c))
    assert ranks.holds(0, adapters[2]) == ranks.holds(1, adapters[1]) == [True] * SIZE
    assert ranks.holds(0, adapters[0]) == [False] * SIZE


def test_the_key_is_that_of_one_device(ranks: Ranks, adapters: list[Path]) -> None:
    """So what is cached of one adapter is told apart alike, whatever the number of ranks."""
    whole = read_adapter(adapters[0], ranks.spec, ranks.slots[0].table.whole)
    assert ranks.find(adapters[0]) == whole.key
    packed = ranks.store.packed_of(whole.key)
    assert packed.data.nbytes == ranks.slots[0].table.bytes_per_adapter < whole.nbytes  # type: ignore[attr-defined]


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_others_keep_no_more_than_rank_0_does(ranks: Ranks, adapters: list[Path]) -> None:
    """And no descriptor of what was handed over stays open."""
    before = len(os.listdir("/proc/self/fd"))
    for index in (0, 1, 2, 0, 1):
        ranks.step((0, ranks.find(adapters[index])))
        assert ranks.holds(0, adapters[index]) == [True] * SIZE
        assert [other.num_kept for other in ranks.others] == [1] * (SIZE - 1)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_same_content_twice_is_there_until_nobody_has_it(
    ranks: Ranks, adapters: list[Path], tmp_path: Path
) -> None:
    copy = tmp_path / "twin"
    copy.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (copy / name).write_bytes((adapters[0] / name).read_bytes())
    first = ranks.find(adapters[0])
    assert ranks.find(copy) == first
    ranks.step()
    assert [other.num_kept for other in ranks.others] == [1] * (SIZE - 1)
    ranks.step((1, first))
    assert ranks.holds(1, adapters[0]) == [True] * SIZE


def test_a_plan_that_was_published_finds_what_it_loads(ranks: Ranks, adapters: list[Path]) -> None:
    """Rank 0 forgets an adapter right after the step: the others may come to that step later."""
    key = ranks.find(adapters[0])
    plan = StepPlan(1, NO_ROWS, NO_ROWS, NO_ROWS, np.empty(0, np.uint8), 0, adapter_loads=((0, key),))
    message = ranks.sharing.encode(plan)
    ranks.store.close()  # keeps nothing any more
    late = decode_plan(message)
    assert late.forgotten == ()
    for other, slots in zip(ranks.others, ranks.slots[1:], strict=True):
        other.forget(late.forgotten)
        slots.load(late.plan)
    assert ranks.holds(0, adapters[0])[1:] == [True] * (SIZE - 1)
    ranks.step()
    assert [other.num_kept for other in ranks.others] == [0] * (SIZE - 1)


def test_files_that_change_are_another_adapter_on_every_rank(ranks: Ranks, folder: Path, tmp_path: Path) -> None:
    keys = []
    for seed in range(2):
        write_adapter(folder, tmp_path / "doll", seed=seed, r=4, target_modules=ALL_MODULES)
        keys.append(ranks.find(tmp_path / "doll"))
        ranks.step((0, keys[-1]))
        assert ranks.holds(0, tmp_path / "doll") == [True] * SIZE
    assert keys[0] != keys[1]


def test_files_that_cannot_be_served_reach_no_rank(ranks: Ranks, tmp_path: Path, adapters: list[Path]) -> None:
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        ranks.sharing.read(str(tmp_path))
    assert [other.num_kept for other in ranks.others] == [0] * (SIZE - 1)
    ranks.step((0, ranks.find(adapters[0])))
    assert ranks.holds(0, adapters[0]) == [True] * SIZE


def test_what_a_rank_has_no_memory_for_is_the_fault_of_those_who_ask_for_it(
    ranks: Ranks, adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = ranks.slots[2].table

    def lack() -> torch.Tensor:
        raise MemoryError("none is left")

    with monkeypatch.context() as patched:
        patched.setattr(AdapterTable, "new_host_memory", lambda its: lack() if its is table else torch.zeros(
            its.bytes_per_adapter, dtype=torch.uint8
        ))  # fmt: skip
        with pytest.raises(UnavailableError) as caught:
            ranks.find(adapters[0])
    assert str(caught.value) == (
        f"adapter {adapters[0].name!r}: rank 2 could not take it: MemoryError: none is left; try again later"
    )
    ranks.step((1, ranks.find(adapters[1])))
    assert ranks.holds(1, adapters[1]) == [True] * SIZE
    assert [other.num_kept for other in ranks.others] == [1, 1], "rank 1 has forgotten what rank 2 could not take"


def test_what_comes_after_it_was_forgotten_is_not_kept(ranks: Ranks, adapters: list[Path]) -> None:
    """Of a rank that was not waited for any longer."""
    other, label = ranks.others[0], (0).to_bytes(8, "little")
    other.forget([label])
    key = ranks.find(adapters[0])
    assert [each.num_kept for each in ranks.others] == [0, 1]
    assert ranks.store.packed_of(key).key == key


class EndedError(Exception):
    """No plan is left."""


def test_a_worker_forgets_before_it_runs_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's loop, with stand-ins for what it drives."""
    plan = StepPlan(1, NO_ROWS, NO_ROWS, NO_ROWS, np.empty(0, np.uint8), 0)
    messages = [
        encode_plan(plan, ((1, b"label a"),)),
        None,
        encode_plan(plan, (), (b"label a", b"label b")),
    ]
    done: list[object] = []

    class Stand:
        def next(self, timeout_s: float) -> bytes | None:
            if not messages:
                raise EndedError
            return messages.pop(0)

        def execute(self, plan: StepPlan) -> None:
            done.append(plan.adapter_loads)

        def forget(self, labels: tuple[bytes, ...]) -> None:
            done.append(labels)

        def fault(self) -> str | None:
            return None

    monkeypatch.setattr(ranks_room, "create_shard", lambda *_: ranks_room.Shard(*4 * [Stand()]))  # type: ignore[list-item]
    with pytest.raises(EndedError):
        worker_process.run(EngineConfig(model="none"), tmp_path, 1, None)
    assert done == [((1, b"label a"),), (b"label a", b"label b"), ()]
    assert (tmp_path / "rank1.here").exists()


def test_after_the_end_a_read_ends_too(ranks: Ranks, adapters: list[Path]) -> None:
    ranks.sharing.close()
    with pytest.raises(UnavailableError, match="rank 1 is gone; rank 2 is gone"):
        ranks.sharing.read(str(adapters[0]))
