"""A gateway of its own process in front of a real server with the tiny model."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from cb_backend.cli.server.server_process import free_ports
from tests.server.conftest import RunningServer, running_server
from tests.server.tiny_checkpoint import write_tiny_checkpoint
from tests.waiting import WAIT_S


@contextlib.contextmanager
def running_gateway(url: str, *arguments: str) -> Iterator[str]:
    """The address of a gateway that answers; ended afterwards, with exit code 0."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "cb_backend.cli.main", "openai", "--url", url, "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + WAIT_S
        while not _answers(address):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the gateway did not start: {process.communicate(timeout=5)[0]}")
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    assert "Traceback" not in output, output


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/health", timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@pytest.fixture(scope="session")
def gateway_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("gateway") / "tiny")
    with running_server(checkpoint, tmp_path_factory.mktemp("gateway-models"), front_ends=1) as running:
        yield running


@pytest.fixture(scope="session")
def gateway(gateway_server: RunningServer) -> Iterator[str]:
    with running_gateway(gateway_server.url) as address:
        yield address
