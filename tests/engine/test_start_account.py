"""What a start says of itself: seconds by stage, bytes by holder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cb_backend.engine.llm_engine import create_engine
from cb_backend.engine.runner import start_account
from cb_backend.engine.runner.start_account import StartAccount
from tests.engine.drive import config
from tests.engine.fake_cuda import CUDA, FakeCuda
from tests.engine.fake_device import fake_device
from tests.engine.test_start_on_gpu import SETTINGS

GIB = 1 << 30


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_device(monkeypatch) as fake:
        yield fake


def use(monkeypatch: pytest.MonkeyPatch, *gibibytes: float) -> None:
    """What the device has in use whenever it is asked; at the end the last for good."""
    used = iter([*gibibytes, *[gibibytes[-1]] * 9])
    monkeypatch.setattr(start_account, "free_memory", lambda device: (int((80 - next(used)) * GIB), 80 * GIB))


@pytest.mark.parametrize(("products", "told"), [
    ([], None), (["linear n=1 k=2"], "linear n=1 k=2 are"),
    ([f"linear n={n} k=2" for n in range(9)], "linear n=5 k=2 and 3 more are"),
])  # fmt: skip
def test_shapes_on_default_parameters_are_one_line(
    products: list[str], told: str | None, fake: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    use(monkeypatch, 1.0)
    monkeypatch.setattr(start_account, "products_on_defaults", lambda device: products)
    StartAccount(CUDA, said.append).tell_defaults()
    assert len(said) == (told is not None)
    assert told is None or (told in said[0] and "kernels/README.md" in said[0])


def test_holders_are_what_the_device_has_more_of(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    use(monkeypatch, 0.5, 15.5, 15.75, 16.0, 76.0, 77.25)
    account = StartAccount(CUDA, said.append)
    account.ends("weights", "weights")
    account.ends("kernels", "steps' state")
    account.ends("warm-up", "steps' state")
    account.ends("cache", "KV cache")
    account.ends("graphs", "graphs")
    account.tell(GIB)
    assert said[0] == (
        "memory of the cuda device, 80.00 GiB: context and other processes 0.50 GiB, weights 15.00 GiB, steps' state "
        "0.50 GiB, KV cache 60.00 GiB, graphs 1.25 GiB, free 2.75 GiB, of which the largest step takes 1.00 GiB"
    )
    stages = ", ".join(
        rf"{stage} \d+\.\d\d" for stage in ("device", "weights", "kernels", "warm-up", "cache", "graphs")
    )
    assert re.fullmatch(rf"started in \d+\.\d\d s: {stages}", said[1])


def test_every_byte_in_use_has_a_holder(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    use(monkeypatch, 1.0, 9.0, 8.5, 30.0)  # what a stage gives back is another's no longer
    account = StartAccount(CUDA, said.append)
    for holder in ("weights", "weights", "KV cache"):
        account.ends(holder, holder)
    account.tell()
    amounts = [float(number) for number in re.findall(r"([\d.]+) GiB", said[0])]
    total, *held, free = amounts
    assert held == [1.0, 7.5, 21.5]
    assert sum(held) + free == total


def test_a_start_on_a_gpu_tells_of_both(folder: Path, fake: FakeCuda, capsys: pytest.CaptureFixture[str]) -> None:
    create_engine(config(str(folder), **SETTINGS))
    text = capsys.readouterr().err
    assert re.search(r"memory of the cuda device, 10\.00 GiB: context and other processes 2\.00 GiB, free 8", text)
    assert re.search(
        r"started in \S+ s: device \S+, checkpoint \S+, weights \S+, kernels \S+, warm-up \S+, cache", text
    )


@pytest.mark.parametrize(("dtype", "bytes_each"), [("float32", 4), ("bfloat16", 2)])
def test_a_start_on_a_cpu_counts_its_tensors(
    folder: Path, dtype: str, bytes_each: int, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = create_engine(config(str(folder), device="cpu", dtype=dtype, kv_cache_memory_bytes=1 << 24))
    model = engine.runner.model  # type: ignore[attr-defined]
    num_bytes = sum(placement.target.numel() for placement in model.placements()) * bytes_each
    embedding = model.embed_tokens.weight.numel() * bytes_each * (1 + model.has_own_head)
    show = start_account.show_bytes
    text = capsys.readouterr().err
    assert f": weights {show(num_bytes)} ({show(embedding)} of them embedding" in text
    assert f"KV cache {show(engine.runner.storage.data.nbytes)}, free" in text  # type: ignore[attr-defined]


def test_a_stage_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 1.0, 3.0, 6.0))
    monkeypatch.setattr(start_account.time, "perf_counter", lambda: next(clock))
    said: list[str] = []
    account = StartAccount(torch.device("cpu"), said.append)
    account.ends("kernels")
    account.ends("kernels")
    account.tell()
    assert said[1] == "started in 6.00 s: device 1.00, kernels 5.00"
