"""Which faults of a server are told at its start: pytest tests/cli/test_known_faults.py"""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.cli.server.known_faults import Configuration, known_faults, own_python_models
from cb_backend.cli.server.local_server import Version, read_version
from tests.cli.test_repositories import make_repository

HEADER, METRICS, DEAD_FRONT_END = "triton_grpc_error", "makes metrics", "stays ready"
CANCELLED, FAILED_LOAD = "cancelled just as it ends", "a load that fails over a loaded model"
MARKS = (HEADER, METRICS, DEAD_FRONT_END, CANCELLED, FAILED_LOAD)
AT_GRPC = {HEADER, CANCELLED}
MAKES_METRICS = "family = pb_utils.MetricFamily(name='n')\n"
EVERYTHING = Configuration({"model-control-mode": "explicit"}, [MAKES_METRICS])


def told(version: Version | None, configuration: Configuration) -> set[str]:
    lines = known_faults(version, configuration)
    assert all("\n" not in line and line.startswith("known fault of this server (2.") for line in lines)
    told = {mark for mark in MARKS if any(mark in line for line in lines)}
    assert len(told) == len(lines)
    return told


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ((2, 51), {HEADER, METRICS, DEAD_FRONT_END, CANCELLED, FAILED_LOAD}),
        ((2, 52), {HEADER, METRICS, DEAD_FRONT_END, FAILED_LOAD}),
        ((2, 63), {HEADER, METRICS, DEAD_FRONT_END, FAILED_LOAD}),
        ((2, 64), {HEADER, METRICS, FAILED_LOAD}),
        ((2, 67), {HEADER, METRICS, FAILED_LOAD}),
        ((2, 68), {METRICS, FAILED_LOAD}),
        ((2, 70), {METRICS, FAILED_LOAD}),
        ((2, 71), set()),
        ((3, 0), set()),
        (None, set()),
    ],
)
def test_faults_end_with_a_release(version: Version | None, expected: set[str]) -> None:
    assert told(version, EVERYTHING) == expected


@pytest.mark.parametrize(
    ("arguments", "sources", "expected"),
    [
        ({}, [], AT_GRPC),
        ({"allow-grpc": "false"}, [], set()),
        ({"allow-grpc": "false", "model-control-mode": "poll"}, [], {FAILED_LOAD}),
        ({"model-control-mode": "poll"}, [MAKES_METRICS], {*AT_GRPC, METRICS, FAILED_LOAD}),
        ({"model-control-mode": "none"}, [MAKES_METRICS], AT_GRPC),
        ({"model-control-mode": "explicit"}, ["x = 1\n"], {*AT_GRPC, FAILED_LOAD}),
        ({"model-control-mode": "explicit", "allow-metrics": "0"}, [MAKES_METRICS], {*AT_GRPC, FAILED_LOAD}),
    ],
)
def test_only_what_the_configuration_can_meet(
    arguments: dict[str, str], sources: list[str], expected: set[str]
) -> None:
    assert told((2, 51), Configuration(arguments, sources)) == {DEAD_FRONT_END, *expected}


def test_models_of_this_package_are_not_yours(tmp_path: Path) -> None:
    repository = make_repository(tmp_path, '{"model": "org/name"}')
    assert own_python_models(repository) == []
    (tmp_path / "other" / "1").mkdir(parents=True)
    (tmp_path / "other" / "1" / "model.py").write_text(MAKES_METRICS)
    assert own_python_models(repository) == [MAKES_METRICS]


def test_version_of_an_installed_server(tmp_path: Path) -> None:
    assert read_version(tmp_path) is None
    (tmp_path / "TRITON_VERSION").write_text("2.59.1\n")
    assert read_version(tmp_path) == (2, 59)
    (tmp_path / "TRITON_VERSION").write_text("main\n")
    assert read_version(tmp_path) is None
