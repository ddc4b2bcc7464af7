"""Front ends of one server that make metrics of the same names and labels: pytest tests/serving/test_gauge_holders.py

The stand-in for the server frees a metric as 24.10 does, and notes every later message about it as a violation.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cb_backend.front_end.engines.runtime_dir import try_lock
from cb_backend.serving import gauge_holders, metric_exporter
from cb_backend.serving.gauge_holders import DOOR, GaugeHolders
from cb_backend.serving.metric_exporter import MetricExporter
from tests.serving.fake_server import MetricFamily

LABELS = (("model", "llm"), ("version", "1"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    MetricFamily.exported.clear()
    return tmp_path / "gauges"


def front_end(folder: Path, generation: str) -> MetricExporter:
    return MetricExporter("llm", "1", True, GaugeHolders(folder, generation))


def publish(exporter: MetricExporter, running: float, grown: float = 0.0, num_blocks: str = "10") -> None:
    """A round with one counter, one histogram, a gauge, and one whose labels say a figure."""
    exporter.begin_round()
    exporter.count("requests", "", grown)
    exporter.observe("seconds", "", (1.0, 2.0), [])
    exporter.set("running", "", running)
    exporter.set("info", "", 1, blocks=num_blocks)


def names() -> set[str]:
    return {name for name, _ in MetricFamily.exported}


def value(name: str) -> float:
    return MetricFamily.exported[name, LABELS].value


def test_r60_what_an_old_generation_gives_back_is_nothing_that_the_new_one_holds(folder: Path) -> None:
    old, new = front_end(folder, "a"), front_end(folder, "b")
    publish(old, 1, grown=3)
    publish(new, 2, grown=4)
    old.close()
    publish(new, 5, grown=1)
    assert (value("running"), value("requests")) == (5, 8)
    new.close()
    assert names() == {"requests", "seconds"}


def test_r60i_a_second_front_of_the_same_engine_goes_first_or_last(folder: Path) -> None:
    for first, second in ((0, 1), (1, 0)):
        fronts = [front_end(folder, "a"), front_end(folder, "a")]
        publish(fronts[0], 1)
        fronts[1].begin_round()
        fronts[1].count("requests", "", 1)  # it does not look after the engine: no gauges
        fronts[first].close()
        publish(fronts[second], 4, grown=1)
        assert value("running") == 4
        fronts[second].close()
    assert value("requests") == 4
    assert "running" not in names()
    assert not folder.exists()


def test_r60_counters_go_on_when_the_model_comes_back(folder: Path) -> None:
    for total in (2, 4, 6):
        exporter = front_end(folder, str(total))
        publish(exporter, 1, grown=2)
        assert value("requests") == total
        exporter.close()
        assert names() == {"requests", "seconds"}


def test_r60_a_gauge_that_only_the_old_generation_had_goes_with_it(folder: Path) -> None:
    old, new = front_end(folder, "a"), front_end(folder, "b")
    publish(old, 1, num_blocks="10")
    publish(new, 1, num_blocks="11")
    old.close()
    assert [dict(labels)["blocks"] for name, labels in MetricFamily.exported if name == "info"] == ["11"]


def test_r60_the_newest_generation_speaks_and_after_a_failed_load_the_old_one_again(folder: Path) -> None:
    old, new = front_end(folder, "a"), front_end(folder, "b")
    publish(old, 1)
    publish(new, 2)
    publish(old, 1)
    assert value("running") == 2
    new.close()
    publish(old, 1)  # unchanged, but not what was told last
    assert value("running") == 1


def test_r60_a_new_front_of_the_old_generation_brings_its_figures_back(folder: Path) -> None:
    fronts = [front_end(folder, generation) for generation in ("a", "b", "a")]
    for running, front in enumerate(fronts):
        publish(front, running)
    publish(fronts[1], 7)
    publish(fronts[0], 9)
    assert value("running") == 9


def test_r60_a_gauge_that_was_set_from_elsewhere_is_put_right(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = front_end(folder, "a")
    publish(exporter, 1)
    MetricFamily.exported["running", LABELS].set(8)  # by an old generation that had just looked
    publish(exporter, 1)
    monkeypatch.setattr(metric_exporter, "REPEAT_S", 0.0)
    publish(exporter, 1)
    assert value("running") == 1


_HOLDER = """
import sys
from pathlib import Path
from cb_backend.serving.gauge_holders import GaugeHolders
holders = GaugeHolders(Path(sys.argv[1]), "z")
assert holders.is_speaker() and holders.note('["running"]')
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another front end that holds `running` and has come last."""
    command = [sys.executable, "-c", _HOLDER, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    yield process
    process.kill()
    process.wait()


def test_r60_a_killed_front_end_holds_nothing_any_more(folder: Path, other_process: subprocess.Popen[str]) -> None:
    exporter = front_end(folder, "a")
    publish(exporter, 3)
    other_process.send_signal(signal.SIGKILL)
    other_process.wait()
    publish(exporter, 3)
    assert value("running") == 3
    exporter.close()
    assert "running" not in names()
    assert not folder.exists()


def test_r60_what_another_process_holds_stays(folder: Path, other_process: subprocess.Popen[str]) -> None:
    exporter = MetricExporter("llm", "1", True, GaugeHolders(folder, "z"))
    publish(exporter, 3)
    exporter.close()
    assert {"running", "info"} & names() == {"running"}


def test_r60_nothing_is_given_back_while_the_folder_is_locked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauge_holders, "LEAVE_TIMEOUT_S", 0.01)
    exporter = front_end(folder, "a")
    publish(exporter, 3)
    door = os.open(folder / DOOR, os.O_RDWR)
    assert try_lock(door, fcntl.LOCK_EX)
    publish(exporter, 5)
    assert value("running") == 5, "it is noted already, so nobody else gives it back"
    exporter.close()
    os.close(door)
    assert "running" in names()


def test_r60_a_gauge_waits_for_the_lock_and_counters_do_not(folder: Path) -> None:
    exporter = front_end(folder, "a")
    folder.mkdir()
    door = os.open(folder / DOOR, os.O_RDWR | os.O_CREAT)
    assert try_lock(door, fcntl.LOCK_EX)
    publish(exporter, 3, grown=1)
    assert names() == {"requests", "seconds"}
    os.close(door)
    publish(exporter, 3)
    assert value("running") == 3


def test_r60_a_folder_that_cannot_be_made_costs_the_gauges_only(tmp_path: Path) -> None:
    MetricFamily.exported.clear()
    (tmp_path / "file").write_text("")
    exporter = front_end(tmp_path / "file" / "gauges", "a")
    publish(exporter, 3, grown=1)
    assert names() == {"requests", "seconds"}
    exporter.close()
