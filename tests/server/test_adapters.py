"""Adapters on a real server: whose answer is whose, while files and lists change: pytest tests/server/test_adapters.py

Texts are compared with transformers, the adapter merged into the weights.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cb_backend.cli.paths import checkout_path
from cb_backend.support.adapter_files import LIST_NAME, WEIGHTS_NAME
from tests.server.adapted_server import (
    GREEDY,
    NAMES,
    NUM_TOKENS,
    PROMPT,
    Adapted,
    delete,
    of_another_model,
    poison,
    truncate,
)
from tests.server.conftest import RunningServer, running_server
from tests.server.tiny_adapters import MergedReference, write_adapter
from tests.server.tiny_checkpoint import Reference
from tests.waiting import eventually

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def adapted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    made: list[Adapted] = []

    def prepare(repository: Path) -> None:
        adapters = Adapted(None, checkpoint, repository / "llm" / "1")  # type: ignore[arg-type]
        for seed, name in enumerate(NAMES):
            adapters.add(name, seed, rank=2 + 3 * seed)
        adapters.write_list()
        made.append(adapters)

    folder = tmp_path_factory.mktemp("adapted")
    with running_server(checkpoint, folder, prepare=prepare, enable_lora="true", max_loras=2) as server:
        [adapters] = made
        adapters.server = server
        yield adapters


@pytest.fixture
def spare(adapted: Adapted) -> Iterator[str]:
    """A name of the test's own, listed for as long as it runs."""
    name = f"spare{time.monotonic_ns()}"
    adapted.add(name, seed=hash(name) % 1000)
    adapted.write_list((*NAMES, name))
    yield name
    adapted.write_list()
    shutil.rmtree(adapted.folder(name))


def others_notice_nothing(adapted: Adapted, during: Callable[[], None]) -> None:
    """Streams of the model and of other adapters that run meanwhile give their own answers."""
    names = ("", "doll", "sheep") * 2
    with ThreadPoolExecutor(len(names)) as pool:
        answers = [pool.submit(adapted.ask, name) for name in names]
        during()
        answers += [pool.submit(adapted.ask, name) for name in names]
        found = [answer.result() for answer in answers]
    assert found == [(adapted.expected(name), "") for name in (*names, *names)]


# ---- whose answer is whose ------------------------------------------------------------------------------------------


def test_each_adapter_gives_its_own_answer_in_one_batch(adapted: Adapted) -> None:
    names = ("", *NAMES) * 3
    assert len({adapted.expected(name) for name in names}) == 4, "the adapters differ, or nothing is shown here"
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(adapted.ask, names))
    assert found == [(adapted.expected(name), "") for name in names]


def test_cached_prefixes_are_an_adapters_own(adapted: Adapted) -> None:
    prompt = "the quick brown fox jumps over the lazy dog while seven wizards make toxic brew " * 3
    for name in ("doll", "", "sheep", "doll", "", "sheep"):
        assert adapted.ask(name, prompt) == (adapted.expected(name, prompt), "")


def test_request_parameters_over_http_and_the_peers_refusal(adapted: Adapted) -> None:
    body = {"text_input": PROMPT, "exclude_input_in_output": True, **GREEDY}
    status, text = adapted.server.post("/v2/models/llm/generate", {**body, "lora_name": "wolf"})
    assert status == 200
    assert json.loads(text)["text_output"] == adapted.expected("wolf")
    status, text = adapted.server.post("/v2/models/llm/generate", {**body, "lora_name": "unavailable"})
    assert status == 400
    listed = "LoRA unavailable is not supported, we currently support ['doll', 'sheep', 'wolf']"
    assert json.loads(text)["error"] == listed


def test_which_adapters_are_in_use_is_in_the_metrics(adapted: Adapted) -> None:
    def told(label: str) -> list[str]:
        lines = [line for line in adapted.server.metrics().splitlines() if line.startswith("vllm:lora_requests_info{")]
        return sorted(line.partition(f'{label}="')[2].partition('"')[0] for line in lines)

    with contextlib.ExitStack() as stack:
        for name in ("doll", "sheep", "wolf"):
            stream = adapted.send(name, max_tokens=16000, ignore_eos=True)  # for as long as it is looked at
            stack.callback(stream.close, cancel=True)
            if name != "wolf":
                stream.wait(num_texts=1)
        eventually(lambda: told("running_lora_adapters") == ["doll,sheep"], "two adapters run, in one series")
        eventually(lambda: told("waiting_lora_adapters") == ["wolf"], "the third waits for a place")
        assert told("max_lora") == ["2"]
    eventually(lambda: told("running_lora_adapters") == [""], "nobody runs")
    assert (adapted.server.gauge("cb_adapters_resident", "llm") or 0) <= 2
    assert (adapted.server.gauge("cb_adapter_loads_total", "llm") or 0) >= 2


# ---- lists that change ----------------------------------------------------------------------------------------------


def test_a_name_that_is_added_is_served_at_once_and_a_removed_one_refused_while_its_streams_end(
    adapted: Adapted,
) -> None:
    adapted.add("late", seed=77)
    try:
        assert "is not supported" in adapted.ask("late")[1]
        adapted.write_list((*NAMES, "late"))
        assert adapted.ask("late") == (adapted.expected("late"), "")
        running = adapted.send("late")
        running.wait(num_texts=1)
        adapted.write_list()
        eventually(lambda: "is not supported" in adapted.ask("late", max_tokens=1)[1], "the name is refused")
        running.wait().close()
        assert (running.text, running.errors) == (adapted.expected("late"), [])
    finally:
        adapted.write_list()


@pytest.mark.parametrize("text", ['{"doll": "adapters/do', "", "[1]", '{"doll": 3}'])
def test_a_half_written_list_changes_nothing(adapted: Adapted, text: str) -> None:
    def break_it() -> None:
        adapted.list.write_text(text)
        time.sleep(1.5)  # longer than it takes to look at the file

    try:
        others_notice_nothing(adapted, break_it)
    finally:
        adapted.write_list()


def test_many_changes_under_load(adapted: Adapted) -> None:
    """Each adds a name and takes the last one away. A thousand: python -m tests.faults.run --fault F14 --times 30."""
    adapted.add("turn", seed=5)
    version = adapted.version

    def change() -> None:
        for number in range(30):
            listed = {name: f"adapters/{name}" for name in NAMES} | {f"turn{number}": "adapters/turn"}
            new = version / "list.new"
            new.write_text(json.dumps(listed))
            new.rename(adapted.list)
            assert adapted.ask(f"turn{number}", max_tokens=4)[1] == ""

    try:
        others_notice_nothing(adapted, change)
    finally:
        adapted.write_list()


@pytest.mark.parametrize("spoil", [truncate, poison, delete, of_another_model])
def test_a_spoiled_adapter_ends_its_own_requests_with_the_reason(
    adapted: Adapted, spare: str, spoil: Callable[[Path], None]
) -> None:
    """Never served before, so nothing of it is in memory."""
    spoil(adapted.folder(spare) / WEIGHTS_NAME)

    def ask() -> None:
        for _ in range(3):
            text, error = adapted.ask(spare)
            assert text == ""
            assert WEIGHTS_NAME in error
            assert spare in error

    others_notice_nothing(adapted, ask)


def test_an_adapter_that_was_repaired_is_served(adapted: Adapted, spare: str) -> None:
    truncate(adapted.folder(spare) / WEIGHTS_NAME)
    assert WEIGHTS_NAME in adapted.ask(spare)[1]
    adapted.add(spare, seed=99)
    eventually(lambda: adapted.ask(spare) == (adapted.expected(spare), ""), "the new files count")


def test_an_adapter_that_is_swapped_while_it_is_in_use(adapted: Adapted, spare: str) -> None:
    """Whoever began with the old one ends with it; whoever comes later gets the new one, never its cached prefixes."""
    before = adapted.expected(spare)
    assert adapted.ask(spare) == (before, "")
    running = adapted.send(spare)
    running.wait(num_texts=1)

    def swap() -> None:
        adapted.add(spare, seed=123)

    others_notice_nothing(adapted, swap)
    running.wait().close()
    assert (running.text, running.errors) == (before, [])
    after = adapted.expected(spare)
    assert before != after
    found: list[str] = []

    def is_new() -> bool:
        found.append(adapted.ask(spare)[0])
        return found[-1] == after

    eventually(is_new, "the new files count")
    assert set(found) <= {before, after}, "nothing between the two"


def test_a_deleted_adapter_that_is_in_use_goes_on(adapted: Adapted, spare: str) -> None:
    expected = adapted.expected(spare)
    running = adapted.send(spare)
    running.wait(num_texts=1)
    others_notice_nothing(adapted, lambda: delete(adapted.folder(spare) / WEIGHTS_NAME))
    running.wait().close()
    assert (running.text, running.errors) == (expected, [])


# ---- an adapter as a model ------------------------------------------------------------------------------------------


def post(server: RunningServer, path: str) -> tuple[int, str]:
    return server.post(f"/v2/repository/{path}", {})


def states(server: RunningServer) -> dict[str, str]:
    return {entry["name"]: entry.get("state", "") for entry in json.loads(post(server, "index")[1])}


def test_an_adapter_is_a_model_of_its_own(checkpoint: Path, tmp_path: Path) -> None:
    """Triton's load, unload, readiness and index speak of it; the engine stays."""

    def prepare(repository: Path) -> None:
        (repository / "llm" / "1" / LIST_NAME).write_text("{}")
        for seed, name in enumerate(("sheep", "broken")):
            model = Path(shutil.copytree(checkout_path("model_repository/llm"), repository / name))
            (model / "config.pbtxt").write_text((repository / "llm" / "config.pbtxt").read_text())
            (model / "1" / "model.json").write_text('{"engine_of": "llm", "lora": "files"}')
            write_adapter(model / "1" / "files", checkpoint, seed)
        truncate(repository / "broken" / "1" / "files" / WEIGHTS_NAME)

    arguments = ("--model-control-mode=explicit", "--load-model=llm")
    with running_server(
        checkpoint, tmp_path / "models", front_ends=1, prepare=prepare, server_arguments=arguments, enable_lora=True
    ) as server:
        engines = server.engine_pids()
        base = Reference(checkpoint).greedy_text(PROMPT, NUM_TOKENS)
        sheep = MergedReference(checkpoint, tmp_path / "models" / "sheep" / "1" / "files")
        body = {"text_input": PROMPT, "exclude_input_in_output": True, **GREEDY}
        generate = lambda name, **more: server.post(f"/v2/models/{name}/generate", {**body, **more})  # noqa: E731
        assert post(server, "models/sheep/load") == (200, "")
        assert states(server)["sheep"] == "READY"
        assert json.loads(generate("sheep")[1])["text_output"] == sheep.greedy_text(PROMPT, NUM_TOKENS)
        assert json.loads(generate("sheep", lora_name="sheep")[1])["text_output"] == sheep.greedy_text(
            PROMPT, NUM_TOKENS
        )
        assert "['sheep']" in generate("sheep", lora_name="wolf")[1]
        assert json.loads(generate("llm")[1])["text_output"] == base
        status, text = post(server, "models/broken/load")
        assert status == 400
        assert WEIGHTS_NAME in text
        assert states(server)["broken"] != "READY"
        write_adapter(tmp_path / "models" / "broken" / "1" / "files", checkpoint, 1)
        assert post(server, "models/broken/load") == (200, "")
        assert post(server, "models/sheep/unload") == (200, "")
        eventually(lambda: states(server)["sheep"] != "READY", "the model is unloaded")
        assert generate("sheep")[0] in (400, 404, 503)
        assert json.loads(generate("llm")[1])["text_output"] == base
        assert server.engine_pids() == engines, "one engine for all of them"
