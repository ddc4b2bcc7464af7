"""One server for the whole floor: the tiny model and fakes, each with an engine of its own.

llm        R: random weights, transformers is the reference
scripted   S: the prompt says which logits win (`tests/fakes/scripted_model.py`)
hash       H: the next token is a hash of all that the block table leads to (`tests/fakes/hash_model.py`)
narrow     H with one slot and ten blocks
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.counting_runner import write_byte_tokenizer
from tests.fakes.scripted_model import write_scripted_tokenizer
from tests.server.cases.transports import Wire
from tests.server.conftest import RunningServer, running_server
from tests.server.shared_server import SharedServer
from tests.waiting import eventually

MAX_MODEL_LEN = 1024  # of llm
MAX_NUM_SEQS = 8  # of the scripted and the hash model
NARROW_BLOCKS = 10
BLOCK_SIZE = 16

# Renders the messages' texts behind a BOS; two texts make it do what a template must not.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if messages[0].content == 'walk' %}{{ ''.__class__.__mro__[1].__subclasses__() }}{% endif %}"
    "{% if messages[0].content == 'loop' %}{% for i in range(10 ** 9) %}{% endfor %}{% endif %}"
    "{% macro again() %}{{ again() }}{% endmacro %}"
    "{% if messages[0].content == 'recurse' %}{{ again() }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def add_model(repository: Path, name: str, worker: str, folder: Path, **arguments: Any) -> None:
    """A copy of `llm` that runs a fake."""
    shutil.copytree(repository / "llm", repository / name)
    arguments |= {"model": str(folder), "worker_cls": f"tests.fakes.{worker}"}
    (repository / name / "1" / "model.json").write_text(json.dumps(arguments))


def add_fakes(repository: Path) -> None:
    scripted, hashed = (repository.parent / f"{repository.name}-{name}" for name in ("scripted", "hash"))
    write_scripted_tokenizer(scripted, CHAT_TEMPLATE)
    write_byte_tokenizer(hashed)
    add_model(repository, "scripted", "scripted_model:create_runner", scripted, max_num_seqs=MAX_NUM_SEQS)
    add_model(repository, "hash", "hash_model:create_runner", hashed, max_num_seqs=MAX_NUM_SEQS)
    narrow = {"max_num_seqs": 1, "num_gpu_blocks_override": NARROW_BLOCKS}
    add_model(repository, "narrow", "hash_model:create_slow_runner", hashed, **narrow)


class Floor:
    """The server, and figures of one of its models."""

    def __init__(self, server: RunningServer, wire: Wire) -> None:
        self.server, self.wire = server, wire
        self.process = server.process

    def metric(self, model: str, family: str, **labels: str) -> float:
        """Sum of the matching lines of /metrics."""
        text = self.server.metrics()
        found = re.findall(rf"^{family}{{([^}}]*)}} (\S+)$", text, re.MULTILINE)
        wanted = {f'model="{model}"', *(f'{name}="{value}"' for name, value in labels.items())}
        return sum(float(value) for line, value in found if wanted <= set(line.split(",")))

    def num_active(self, model: str) -> float:
        return self.metric(model, "nv_trt_llm_request_metrics", request_type="active")

    def num_waiting(self, model: str) -> float:
        return self.metric(model, "nv_trt_llm_request_metrics", request_type="waiting")

    def num_used_blocks(self, model: str) -> float:
        return self.metric(model, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type="used")

    def wait_idle(self, model: str) -> None:
        """No request and no block left, by the server's own gauges."""
        eventually(lambda: self.num_active(model) == 0 and self.num_used_blocks(model) == 0, f"{model} is idle again")


@pytest.fixture(scope="session")
def shared_floor(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer[Floor]]:
    @contextlib.contextmanager
    def start() -> Iterator[Floor]:
        options: dict[str, Any] = {"front_ends": 1, "prepare": add_fakes, "max_model_len": MAX_MODEL_LEN}
        options |= {"exit_timeout_secs": 10}  # all of it is waited for where the server keeps a model by its own fault
        with (
            running_server(checkpoint, tmp_path_factory.mktemp("floor"), **options) as running,
            Wire(running.process.grpc_address, running.process.http_address, running.kept.cancelled) as wire,
        ):
            yield Floor(running, wire)

    shared = SharedServer(start)
    yield shared
    shared.close()


@pytest.fixture
def floor(shared_floor: SharedServer[Floor]) -> Floor:
    return shared_floor.get()


@pytest.fixture
def wire(floor: Floor) -> Wire:
    return floor.wire
