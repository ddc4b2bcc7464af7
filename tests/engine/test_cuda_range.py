"""A GPU's range of memory over a driver that keeps books: what is mapped is released, whatever fails in between."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.rest import NoRoomError
from cb_backend.engine.runner import cuda_range
from cb_backend.engine.runner.cuda_range import CudaRange, DriverError, driver

PAGE = 2 << 20
SUCCESS, OUT_OF_MEMORY, BROKEN = 0, 2, 999


class Books:
    """A card of some pages. Addresses are numbers; nobody reads what is there."""

    def __init__(self, pages: int) -> None:
        self.free = pages * PAGE
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}  # address -> (bytes, handle)
        self.readable: set[int] = set()
        self.reserved: dict[int, int] = {}
        self.failing: dict[str, int] = {}
        self._next = 1
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=SUCCESS, CUDA_ERROR_OUT_OF_MEMORY=OUT_OF_MEMORY)
        self.CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
        self.CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
        self.CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
        self.CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def CUmemAllocationProp(self) -> Any:  # noqa: N802 - the driver's name
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    CUmemAccessDesc = CUmemAllocationProp

    def _fails(self, name: str) -> tuple[int] | None:
        code = self.failing.get(name, SUCCESS)
        return (code,) if code else None

    def cuMemGetAllocationGranularity(self, kind: Any, option: int) -> tuple[int, int]:  # noqa: N802
        return SUCCESS, PAGE

    def cuMemAddressReserve(self, size: int, *_: int) -> tuple[int, int]:  # noqa: N802
        self.reserved[1 << 40] = size
        return SUCCESS, 1 << 40

    def cuMemCreate(self, size: int, kind: Any, flags: int) -> tuple[int, ...]:  # noqa: N802
        assert size % PAGE == 0
        if (failed := self._fails("cuMemCreate")) is not None:
            return failed
        if size > self.free:
            return (OUT_OF_MEMORY,)
        self.free -= size
        self._next += 1
        self.handles[self._next] = size
        return SUCCESS, self._next

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[int, ...]:  # noqa: N802
        if (failed := self._fails("cuMemMap")) is not None:
            return failed
        assert not any(start < address + size and address < start + used for start, (used, _) in self.mapped.items())
        self.mapped[address] = size, handle
        return (SUCCESS,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[int, ...]:  # noqa: N802
        if (failed := self._fails("cuMemSetAccess")) is not None:
            return failed
        self.readable.add(address)
        return (SUCCESS,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[int]:  # noqa: N802
        ends = [start for start in self.mapped if address <= start < address + size]
        assert sum(self.mapped[start][0] for start in ends) == size
        for start in ends:
            del self.mapped[start]
            self.readable.discard(start)
        return (SUCCESS,)

    def cuMemRelease(self, handle: int) -> tuple[int]:  # noqa: N802
        assert all(used != handle for _, used in self.mapped.values()), "released while it is mapped"
        self.free += self.handles.pop(handle)
        return (SUCCESS,)

    def cuMemAddressFree(self, address: int, size: int) -> tuple[int]:  # noqa: N802
        assert not self.mapped
        assert self.reserved.pop(address) == size
        return (SUCCESS,)


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Iterator[Books]:
    found = Books(pages=1000)
    monkeypatch.setattr(cuda_range, "driver", lambda: found)
    monkeypatch.setattr(CudaRange, "_tensor", lambda self, start, num_bytes: (self._start + start, num_bytes))
    monkeypatch.setattr("cb_backend.engine.runner.memory_range.free_memory", lambda device: (found.free, 1000 * PAGE))
    yield found
    assert found.free == 1000 * PAGE, "memory is lost"


def new_range(num_bytes: int) -> CudaRange:
    return CudaRange(num_bytes, torch.device("cuda", 0))


def test_memory_is_taken_as_tensors_come_and_goes_and_comes_back_whole(books: Books) -> None:
    held = new_range(700 * PAGE)
    places = [held.place(size) for size in (5, 3 * PAGE + 1, 300 * PAGE, 7)]
    assert [place[0] - (1 << 40) for place in places] == [0, 512, 3 * PAGE + 1024, 303 * PAGE + 1024]
    assert held.held_bytes == sum(books.handles.values()) == 304 * PAGE
    held.give_up()
    held.give_up()
    assert (held.held_bytes, books.free, books.mapped) == (0, 1000 * PAGE, {})
    for _ in range(3):
        held.take_back()
        held.take_back()
        assert held.held_bytes == 304 * PAGE
        assert books.readable == {1 << 40}
        held.give_up()
    held.close()
    assert books.reserved == {}


def test_a_card_without_so_much_memory_loses_none(books: Books) -> None:
    held = new_range(600 * PAGE)
    held.place(600 * PAGE)
    held.give_up()
    books.free -= 500 * PAGE
    with pytest.raises(NoRoomError, match=r"1\.17 GiB are needed, 0\.98 GiB of 1\.95 GiB are free on the cuda device"):
        held.take_back()
    assert held.held_bytes == 0
    books.free += 500 * PAGE
    held.take_back()
    held.give_up()


@pytest.mark.parametrize("name", ["cuMemMap", "cuMemSetAccess", "cuMemCreate"])
@pytest.mark.parametrize("code", [BROKEN, OUT_OF_MEMORY])
def test_a_call_that_fails_leaves_nothing_behind(books: Books, name: str, code: int) -> None:
    held = new_range(4 * PAGE)
    books.failing[name] = code
    with pytest.raises((DriverError, NoRoomError)):
        held.place(PAGE)
    assert (books.handles, books.mapped) == ({}, {})
    books.failing.clear()
    held.place(PAGE)
    held.give_up()


def test_more_than_was_said_does_not_fit(books: Books) -> None:
    with pytest.raises(ValueError, match="do not fit a range"):
        new_range(PAGE).place(PAGE + 1)


def test_without_cuda_bindings_sleep_is_refused_by_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> Any:
        raise ImportError(f"No module named {name.partition('.')[0]!r}")

    monkeypatch.setattr(cuda_range.importlib, "import_module", import_module)
    with pytest.raises(ConfigError, match=r"idle_sleep_s needs the package cuda-bindings .*pip install"):
        driver()
