"""`cb-backend doctor`: what each look says of a machine that lacks something."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from cb_backend.cli import doctor
from cb_backend.cli.main import main
from cb_backend.cli.paths import CliError
from cb_backend.cli.server.server_process import free_ports
from cb_backend.cli.terminal import machine_checks, place_checks
from cb_backend.cli.terminal.findings import FAIL, OK, WARN, Finding, exit_code, look_at, shown

Usage = namedtuple("Usage", "total used free")


def test_h16_doctor_says_a_line_a_thing_and_ends_with_a_count(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    topics = {line.split()[1] for line in lines[:-1] if not line.startswith(" ")}
    assert topics >= {"python", "libraries", "torch", "memory", "files", "server", "port", "engine", "cache"}
    assert {line.split()[0] for line in lines[:-1] if not line.startswith(" ")} <= {OK, WARN, FAIL}
    assert code == int(any(line.startswith("fail") for line in lines))
    assert lines[-1].endswith(f"{sum(line.startswith('fail') for line in lines)} fail")


def test_h16_doctor_for_programs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> list[Finding]:
        raise RuntimeError("no such bus")

    looks = (("one", lambda: [Finding(FAIL, "one", "bad", "mend it")]), ("two", broken))
    monkeypatch.setattr(doctor, "LOOKS", looks)
    assert main(["doctor", "--json"]) == 1
    one, two = json.loads(capsys.readouterr().out)
    assert one == {"state": FAIL, "topic": "one", "text": "bad", "remedy": "mend it"}
    assert two["state"] == WARN
    assert "RuntimeError: no such bus" in two["text"]


def test_only_a_failure_is_one() -> None:
    assert exit_code([Finding(OK, "a", "b"), Finding(WARN, "a", "b", "c")]) == 0
    assert exit_code(look_at([("a", lambda: [Finding(FAIL, "a", "b", "c")])])) == 1
    assert shown([Finding(FAIL, "a", "b", "do c")]).splitlines()[1].split() == ["->", "do", "c"]


def test_h16_doctor_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise CliError("no Triton server found: run in NVIDIA's container")

    monkeypatch.setattr(place_checks, "find_server", none)
    (finding,) = place_checks.server()
    assert (finding.state, finding.remedy) == (FAIL, "no Triton server found: run in NVIDIA's container")


def test_h16_doctor_a_port_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    (free,) = free_ports(1)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        findings = {finding.text: finding for finding in place_checks.ports({free: "--a", taken: "--http-port"})}
    assert findings[f"{free} is free"].state == OK
    (wrong,) = (finding for text, finding in findings.items() if str(taken) in text)
    assert (wrong.state, wrong.remedy) == (WARN, "cb-backend serve --http-port N")


def test_h16_doctor_a_library_that_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["numpy>=9999", "no-such-library>=1", "msgspec>=0.1", "numpy<2; extra == 'local-server'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    *wrong, right = machine_checks.libraries()
    assert [finding.state for finding in wrong] == [FAIL, FAIL]
    assert "needed is >=9999" in wrong[0].text
    assert wrong[1].text == "no-such-library is missing"
    assert right.text.startswith("msgspec ")


def test_h16_doctor_shared_memory_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, state in ((8 << 20, FAIL), (60 << 20, WARN), (1 << 30, OK)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: Usage(64 << 20, 0, free))
        *_, finding = machine_checks.memory()
        assert finding.state == state
        assert ("--shm-size" in finding.remedy) == (state != OK)


@pytest.mark.parametrize(("code", "output", "state", "text"), [
    (0, "NVIDIA H200, 143771, 12, 570.133\nNVIDIA H200, 143771, 0, 570.133\n", OK, "570.133: NVIDIA H200, 12 of 14"),
    (18, "Failed to initialize NVML: Driver/library version mismatch\n", FAIL, "version mismatch"),
])  # fmt: skip
def test_h16_doctor_asks_the_driver(
    code: int, output: str, state: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: f"/usr/bin/{name}")
    done = subprocess.CompletedProcess([], code, output, "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    findings = list(machine_checks.driver())
    assert len(findings) == (2 if code == 0 else 1)
    assert findings[0].state == state
    assert text in findings[0].text


def test_h16_doctor_without_a_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine_checks, "_DRIVER", tmp_path / "none")
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    (finding,) = machine_checks.driver()
    assert finding.state == WARN
    assert "--gpus all" in finding.remedy


def test_h16_doctor_a_disk_without_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CB_BACKEND_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for free, state in ((1 << 30, FAIL), (10 << 30, WARN), (100 << 30, OK)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: Usage(1 << 40, 0, free))
        own, hub, *_ = place_checks.caches()
        assert (own.state, hub.state) == (state, state)
        assert ("CB_BACKEND_CACHE=FOLDER" in own.remedy) == (state != OK)
        assert ("HF_HOME=FOLDER" in hub.remedy) == (state != OK)


def test_h16_doctor_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CB_BACKEND_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    own, hub, *_ = place_checks.caches()
    assert (own.state, hub.state) == (FAIL, FAIL)
    assert "set CB_BACKEND_CACHE to a folder that can" in own.remedy
    assert "set HF_HOME" in hub.remedy
