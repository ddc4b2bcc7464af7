"""kernels/captured_steps.py with runners that note how they would launch: settings hold while a step is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from cb_backend.cli.paths import checkout_path
from cb_backend.kernels import launch

CPU = torch.device("cpu")
UNTRIED = {"block_n": 1}


@dataclass(frozen=True)
class Product:
    """What settings are keyed by."""

    n: int
    op: str = "linear"

    @property
    def when(self) -> dict[str, int]:
        return {"n": self.n}


@dataclass(eq=False)
class NotingRunner:
    """Its step launches one product of each size, at whatever parameters are in force."""

    name: str
    launched: list[tuple[str, str, int]] = field(default_factory=list)
    num_closed: int = 0

    def run_step(self, buffers: str) -> None:
        for n in (16, 32):
            use = launch.launch_parameters("linear", CPU, n=n, m=8)
            if use.get("block_n") == 666:
                raise RuntimeError("out of shared memory")
            self.launched.append((buffers, f"{n}", use.get("block_n", 1)))

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(checkout_path("kernels")))
    import captured_steps

    seated: list[tuple[str, list[int]]] = []

    def record(runner: NotingRunner, buffers: str) -> str:
        runner.run_step(buffers)
        return f"graph of {buffers}"

    monkeypatch.setattr(captured_steps, "seat", lambda runner, lengths: seated.append((runner.name, lengths)))
    monkeypatch.setattr(captured_steps, "record", record)
    monkeypatch.setattr(captured_steps, "compile_ahead", lambda rehearse: rehearse())
    monkeypatch.setattr(launch, "_tuned_parameters", lambda op, device, **conditions: UNTRIED)
    first, second = NotingRunner("first"), NotingRunner("second")
    steps = captured_steps.CapturedSteps([(first, "a"), (first, "b"), (second, "c")], [640, 640])
    return SimpleNamespace(steps=steps, first=first, second=second, seated=seated)


def test_makes_each_step_with_the_settings_and_from_the_same_state(captured: SimpleNamespace) -> None:
    graphs = captured.steps.make({Product(16): {"block_n": 64}})
    assert graphs == ["graph of a", "graph of b", "graph of c"]
    assert captured.seated == [(name, [640, 640]) for name in ("first", "first", "second")]
    assert captured.first.launched == [("a", "16", 64), ("a", "32", 1), ("b", "16", 64), ("b", "32", 1)]
    assert captured.second.launched == [("c", "16", 64), ("c", "32", 1)]
    assert launch.launch_parameters("linear", CPU, n=16, m=8) == UNTRIED  # no longer in force


def test_what_cannot_be_launched_raises_when_made_and_leaves_nothing_in_force(captured: SimpleNamespace) -> None:
    with pytest.raises(RuntimeError, match="shared memory"):
        captured.steps.make({Product(32): {"block_n": 666}})
    assert launch.launch_parameters("linear", CPU, n=32, m=8) == UNTRIED


def test_compiles_at_all_settings_but_those_that_fail(captured: SimpleNamespace) -> None:
    captured.steps.compile([{Product(16): {"block_n": 666}}, {Product(16): {"block_n": 32}}])
    assert captured.first.launched == [("a", "16", 32), ("a", "32", 1), ("b", "16", 32), ("b", "32", 1)]


@pytest.mark.parametrize("error", [TimeoutError("it took too long"), ChildProcessError("a process has died")])
def test_a_search_goes_on_where_compiling_ahead_does_not_end(
    error: Exception, captured: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import captured_steps

    def compile_ahead(rehearse: object) -> None:
        raise error

    monkeypatch.setattr(captured_steps, "compile_ahead", compile_ahead)
    captured.steps.compile([{}])
    assert f"{error}; the rest is compiled one by one" in capsys.readouterr().out


def test_closes_each_runner_once(captured: SimpleNamespace) -> None:
    captured.steps.close()
    assert (captured.first.num_closed, captured.second.num_closed) == (1, 1)
