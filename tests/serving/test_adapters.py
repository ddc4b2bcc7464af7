"""Adapters at the door of the server, with a real engine process that counts: pytest tests/serving/test_adapters.py"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cb_backend.contracts.adapters import AdapterSource
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.messages import AddRequest
from cb_backend.support import adapter_files
from cb_backend.support.adapter_files import CONFIG_NAME, LIST_NAME, WEIGHTS_NAME, folder_stamp
from tests.serving.driven_model import ask, make_repository, server_args
from tests.serving.fake_server import InferenceRequest, TritonError

DOLL_AND_SHEEP = {"doll": "adapters/doll", "sheep": "adapters/sheep"}


def write_folder(folder: Path) -> None:
    """Something that has the names of an adapter's files."""
    folder.mkdir(parents=True)
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        (folder / name).write_text("{}")
        os.utime(folder / name, (1_000_000_000, 1_000_000_000))


def make_lora_repository(folder: Path, adapters: Any = DOLL_AND_SHEEP, **arguments: Any) -> Path:
    model = make_repository(folder, **{"enable_lora": "true", **arguments})
    for name in ("doll", "sheep"):
        write_folder(model / "1" / "adapters" / name)
    if adapters is not None:
        (model / "1" / LIST_NAME).write_text(json.dumps(adapters))
    return model


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A short path: sockets live below it."""
    folder = Path(tempfile.mkdtemp(prefix="cb-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapter_files, "changed_ns", lambda status: status.st_mtime_ns)  # as old as `write_folder` says
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder
    assert list((folder / f"cb_backend-{os.getuid()}").iterdir()) == []
    shutil.rmtree(folder)


def start(args: dict[str, str], kind: str = "backend") -> Any:
    if kind == "trtllm":
        from cb_backend.serving.trtllm import TritonPythonModel as Model
    else:
        from cb_backend.serving.backend import TritonPythonModel as Model  # type: ignore[assignment]
    model = Model()
    model.initialize(args)
    return model


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Any]:
    model = start(server_args(make_lora_repository(folder / "lora")))
    yield model
    model.finalize()


@pytest.fixture
def submitted(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[AddRequest]:
    """What has gone to the engine since the test's begin."""
    sent: list[AddRequest] = []
    submit = model._client.submit

    def noting(request: AddRequest, sink: Any) -> None:
        sent.append(request)
        # The counting engine serves anybody; which adapter it was asked for is all that is looked at here.
        submit(AddRequest(request.request_id, request.prompt_token_ids, request.params, request.scheduling), sink)

    monkeypatch.setattr(model._client, "submit", noting)
    return sent


def version_of(folder: Path) -> Path:
    return folder / "lora" / "llm" / "1"


def test_a_named_adapter_goes_to_the_engine_as_its_files(model: Any, folder: Path, submitted: list[AddRequest]) -> None:
    assert ask(model, "a", sampling={"lora_name": "doll", "max_tokens": 2}).sender.wait().error is None
    path = str(version_of(folder) / "adapters" / "doll")
    stamp = folder_stamp(Path(path))
    assert stamp is not None
    assert stamp.inode not in (os.stat(f"{path}/{name}").st_ino for name in (WEIGHTS_NAME, CONFIG_NAME)), "one file's"
    assert [request.adapter for request in submitted] == [AdapterSource("doll", path, 10**18, 4, stamp.inode, 10**18)]


@pytest.mark.parametrize("name", [None, ""])
def test_no_name_is_the_model_as_it_is(model: Any, submitted: list[AddRequest], name: str | None) -> None:
    assert ask(model, "a", sampling={"lora_name": name, "max_tokens": 2}).sender.wait().error is None
    assert [request.adapter for request in submitted] == [None]


def test_each_of_n_answers_has_the_adapter(model: Any, submitted: list[AddRequest]) -> None:
    sampling = {"lora_name": "sheep", "n": 3, "temperature": 1.0, "max_tokens": 2}
    assert ask(model, "a", stream=False, sampling=sampling).sender.wait().error is None
    assert [request.adapter.name for request in submitted if request.adapter] == ["sheep"] * 3


def test_the_name_may_be_a_request_parameter_and_the_input_counts(model: Any, submitted: list[AddRequest]) -> None:
    alone = InferenceRequest({"text_input": "a"}, {"lora_name": "doll", "max_tokens": 2})
    both = InferenceRequest(
        {"text_input": "a", "sampling_parameters": '{"lora_name": "sheep", "max_tokens": 2}'}, {"lora_name": "doll"}
    )
    for request in (alone, both):
        model.execute([request])
        assert request.sender.wait().error is None
    assert [request.adapter.name for request in submitted if request.adapter] == ["doll", "sheep"]


def test_an_unknown_name_is_refused_with_the_peers_text_and_nobody_else_is(
    model: Any, submitted: list[AddRequest]
) -> None:
    requests = [ask(model, "a", sampling={"lora_name": name, "max_tokens": 2}) for name in ("doll", "bactrian", "")]
    errors = [request.sender.wait().error for request in requests]
    text = "LoRA bactrian is not supported, we currently support ['doll', 'sheep']"
    assert errors == [None, (TritonError.INVALID_ARG, text), None]


@pytest.mark.parametrize("value", [7, ["doll"], {"a": 1}, True])
def test_a_name_that_is_no_text_is_refused_by_name(model: Any, value: Any) -> None:
    error = ask(model, "a", sampling={"lora_name": value}).sender.wait().error
    assert error is not None
    assert error[0] == TritonError.INVALID_ARG
    assert error[1].startswith("lora_name must be a string")


def test_the_list_changes_while_the_model_serves(model: Any, folder: Path, submitted: list[AddRequest]) -> None:
    path = version_of(folder) / LIST_NAME
    before = path.read_text()
    try:
        path.write_text(json.dumps({**DOLL_AND_SHEEP, "new": "adapters/doll"}))
        assert ask(model, "a", sampling={"lora_name": "new", "max_tokens": 2}).sender.wait().error is None
        path.write_text('{"new": "adapt')
        assert ask(model, "a", sampling={"lora_name": "new", "max_tokens": 2}).sender.wait().error is None
    finally:
        path.write_text(before)
    deadline = time.monotonic() + 30
    while (error := ask(model, "a", sampling={"lora_name": "new"}).sender.wait().error) is None:
        assert time.monotonic() < deadline, "a removed name is still served"
        time.sleep(0.1)
    assert error[1] == "LoRA new is not supported, we currently support ['doll', 'sheep']"


def test_the_trtllm_wire_names_adapters_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = start(server_args(make_lora_repository(folder / "trtllm")), "trtllm")
    sent: list[AddRequest] = []
    submit = model._client.submit
    monkeypatch.setattr(model._client, "submit", lambda request, sink: sent.append(request) or submit(
        AddRequest(request.request_id, request.prompt_token_ids, request.params, request.scheduling), sink
    ))  # fmt: skip
    try:
        requests = [InferenceRequest({"text_input": "a", "lora_name": name}) for name in ("sheep", "", "wolf")]
        model.execute(requests)
        errors = [request.sender.wait().error for request in requests]
    finally:
        model.finalize()
    assert errors[:2] == [None, None]
    assert errors[2] == (
        TritonError.INVALID_ARG, "LoRA wolf is not supported, we currently support ['doll', 'sheep']"
    )  # fmt: skip
    assert sorted(request.adapter.name if request.adapter else "" for request in sent) == ["", "sheep"]


@pytest.mark.parametrize("value", [False, "false", None])
def test_without_enable_lora_every_name_is_refused_with_the_peers_text(folder: Path, value: Any) -> None:
    arguments = {} if value is None else {"enable_lora": value}
    model = start(server_args(make_repository(folder / f"off-{value}-{type(value).__name__}", **arguments)))
    try:
        errors = [ask(model, "a", sampling={"lora_name": name}).sender.wait().error for name in ("doll", "")]
    finally:
        model.finalize()
    assert errors == [(TritonError.INVALID_ARG, "LoRA feature is not enabled."), None]


@pytest.mark.parametrize(
    ("adapters", "message"),
    [(None, "multi_lora.json is missing"), (["doll"], "must hold a JSON object"), ({"doll": 1}, "gives 1 for 'doll'")],
)
def test_a_list_that_is_missing_or_wrong_fails_the_load(tmp_path: Path, adapters: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(server_args(make_lora_repository(tmp_path, adapters)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_lora": "maybe"}, "'enable_lora' must be of type bool"),
        ({"max_lora_rank": 0}, "max_lora_rank is 0; it must be between 1 and 512"),
        ({"max_loras": 0}, "max_loras is 0; it must be at least 1"),
        ({"max_loras": 4, "max_cpu_loras": 2}, r"max_cpu_loras is 2, below max_loras \(4\)"),
        ({"lora_dtype": "float16"}, "'lora_dtype' is 'float16'"),
        ({"max_lora": 4}, "did you mean 'max_loras'"),
    ],
)
def test_wrong_arguments_fail_the_load_by_name(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        start(server_args(make_lora_repository(tmp_path, **arguments)))
