"""kernels/bench_carveout.py without a GPU: what is asked for while a step is recorded, and whether it can be timed."""

from __future__ import annotations

import sys

import pytest
import torch

from cb_backend.cli.paths import checkout_path
from cb_backend.kernels import carveout
from cb_backend.kernels.carveout import Programs

CUDA = torch.device("cuda")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(checkout_path("kernels")))
    import bench_carveout

    return bench_carveout


class Compiled:
    function = 0x10

    class metadata:  # noqa: N801  # Triton's name
        shared = 19456


def test_attention_asks_for_what_is_tried_and_then_by_the_rule(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Driver:
        @staticmethod
        def cuFuncSetAttribute(function: object, attribute: int, percent: int) -> int:  # noqa: N802  # CUDA's name
            asked.append(percent)
            return int(percent > 100)  # CUDA_ERROR_INVALID_VALUE

    monkeypatch.setattr(carveout, "_driver", Driver)
    monkeypatch.setattr(carveout, "_chosen", {})
    monkeypatch.setattr(carveout, "max_shared_bytes", lambda device: 227 << 10)
    for percent in (bench.DRIVERS, None, 57, bench.DRIVERS):
        with bench.asking_for(percent):
            carveout.make_room_for(Compiled, Programs(2, 2), CUDA)
    carveout.make_room_for(Compiled, Programs(2, 2), CUDA)
    assert asked == [-1, 18, 57, -1, 18]
    with bench.asking_for(101), pytest.raises(RuntimeError, match="does not take a carveout of 101 %"):
        carveout.make_room_for(Compiled, Programs(2, 2), CUDA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_gpu_it_says_so(bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_carveout.py"])
    assert bench.main() == 2
    assert capsys.readouterr().err == "no CUDA device: steps are timed on a GPU\n"
