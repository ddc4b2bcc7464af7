"""A short run of `python -m tests.fuzz.run`: other requests than its first ones, by another seed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cb_backend.cli.paths import CliError
from cb_backend.cli.server.local_server import find_server
from tests.fuzz import in_process, on_server
from tests.fuzz.mutations import make_request
from tests.server.cases.transports import Wire
from tests.server.conftest import running_server
from tests.server.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

SEED = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def front_end(checkpoint: Path) -> Iterator[in_process.FrontEnd]:
    front_end = in_process.FrontEnd(checkpoint, VOCAB_SIZE)
    yield front_end
    front_end.close()


def test_requests_come_from_seed_and_index_alone() -> None:
    last = in_process.shown(make_request(SEED, 99))
    assert in_process.shown([make_request(SEED, index) for index in range(100)][-1]) == last
    assert in_process.shown(make_request(SEED + 1, 99)) != last


def test_4000_requests_through_the_parser(front_end: in_process.FrontEnd) -> None:
    counts = in_process.fuzz(front_end, SEED, 0, 4000)
    assert counts["accepted"] > 400  # mutations that leave nothing valid would look at the door only
    assert counts["refused"] > 1000
    assert counts["accepted"] + counts["refused"] == 4000


@pytest.mark.server
def test_300_requests_at_a_server_with_canaries(checkpoint: Path, tmp_path: Path) -> None:
    try:
        find_server()
    except CliError as error:
        pytest.skip(str(error))
    with running_server(checkpoint, tmp_path, front_ends=1, max_model_len=in_process.MAX_MODEL_LEN) as server:
        with Wire(server.process.grpc_address, server.process.http_address) as wire:
            counts = on_server.fuzz(server, wire, SEED, 4000, 300)
        assert counts["grpc: answered"] > 10
        assert counts["http: refused"] > 10
        assert counts["canary answers"] >= 4
        server.wait_idle()
