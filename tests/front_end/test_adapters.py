"""Names of adapters, the watched list behind them, models that are adapters: pytest tests/front_end/test_adapters.py"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cb_backend.contracts.config import EngineConfig
from cb_backend.contracts.errors import ConfigError
from cb_backend.front_end.adapters import (
    LOOK_INTERVAL_S,
    ListedAdapters,
    NoAdapters,
    OneAdapter,
    make_adapters,
    with_places,
)
from cb_backend.support.adapter_files import LIST_NAME, read_adapter_list
from tests.front_end.adapter_folders import Clock, clock, refusal, whole_age, write_adapter, write_list

__all__ = ["clock", "whole_age"]  # fixtures


# ---- names and texts ------------------------------------------------------------------------------------------------


def test_the_peers_texts(tmp_path: Path) -> None:
    adapters = ListedAdapters(write_list(tmp_path, {"doll": "d", "sheep": "s"}))
    assert refusal(adapters, "bactrian") == "LoRA bactrian is not supported, we currently support ['doll', 'sheep']"
    assert refusal(NoAdapters(), "doll") == "LoRA feature is not enabled."
    empty = ListedAdapters(write_list(tmp_path, {}))
    assert refusal(empty, "doll") == "LoRA doll is not supported, we currently support []"


def test_no_name_is_the_model_as_it_is(tmp_path: Path) -> None:
    assert NoAdapters().find("") is None
    assert ListedAdapters(write_list(tmp_path, {"doll": "d"})).find("") is None


def test_very_many_names_are_not_all_listed(tmp_path: Path) -> None:
    adapters = ListedAdapters(write_list(tmp_path, {f"adapter-{i}": "d" for i in range(5000)}))
    text = refusal(adapters, "x" * 1_000_000)
    assert len(text) < 4000
    assert "'adapter-0'" in text
    assert "5000 in all" in text


def test_a_model_that_is_an_adapter_takes_its_own_name_and_none(tmp_path: Path) -> None:
    adapters = OneAdapter("sheep", write_adapter(tmp_path / "s"))
    source = adapters.find("")
    assert source is not None
    assert source.path == str(tmp_path / "s")
    assert adapters.find("sheep") == source
    assert refusal(adapters, "doll") == "LoRA doll is not supported, we currently support ['sheep']"


# ---- the list at the start ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "multi_lora.json must hold a JSON object"),
        ('{"a": "x", "a": "y"}', "multi_lora.json sets 'a' more than once"),
        ('{"a": 1}', "multi_lora.json gives 1 for 'a'; give the adapter's folder"),
        ('{"a": ""}', "multi_lora.json gives '' for 'a'"),
        ('{"a": "x\\u0000y"}', "multi_lora.json gives 'x"),
        ('{"": "x"}', "multi_lora.json names an adapter ''"),
        ('{"a\\nb": "x"}', "printable text of 1 to 256 bytes"),
        ('{"\\ud800": "x"}', "printable text of 1 to 256 bytes"),
        (json.dumps({"n" * 257: "x"}), "printable text of 1 to 256 bytes"),
        ('{"a": "x"', "multi_lora.json is not valid JSON"),
        ("", "multi_lora.json is not valid JSON"),
    ],
)
def test_a_bad_list_fails_the_start(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ListedAdapters(write_list(tmp_path, text))


def test_a_missing_list_fails_the_start_by_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        ListedAdapters(tmp_path / LIST_NAME)
    assert str(tmp_path / LIST_NAME) in str(raised.value)
    assert "enable_lora" in str(raised.value)


def test_relative_folders_count_from_the_list(tmp_path: Path) -> None:
    listed = read_adapter_list(write_list(tmp_path, {"a": "adapters/a", "b": "/elsewhere/b", "c": "../c"}))
    assert listed == {"a": tmp_path / "adapters/a", "b": Path("/elsewhere/b"), "c": tmp_path / "../c"}


# ---- the list while it is served ------------------------------------------------------------------------------------


def test_an_added_name_is_served_at_once_and_a_removed_one_refused_within_a_second(
    tmp_path: Path, clock: Clock
) -> None:
    adapters = ListedAdapters(write_list(tmp_path, {"doll": "d"}), clock)
    refusal(adapters, "sheep")
    write_list(tmp_path, {"doll": "d", "sheep": "s"}, age_s=0.0)
    assert adapters.find("sheep") is not None, "no time has passed, but the name was not known"
    write_list(tmp_path, {"sheep": "s"})
    assert adapters.find("doll") is not None, "a known name is looked for at most once a second"
    clock.now += LOOK_INTERVAL_S
    assert refusal(adapters, "doll") == "LoRA doll is not supported, we currently support ['sheep']"


@pytest.mark.parametrize("broken", ['{"doll": "d", "sh', "", '{"doll": 7}', "null", "\x00\xff"])
def test_a_half_written_list_leaves_the_last_good_one(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    adapters = ListedAdapters(write_list(tmp_path, {"doll": "d"}), clock)
    write_list(tmp_path, broken, age_s=0.0)
    for _ in range(5):
        clock.now += LOOK_INTERVAL_S
        assert adapters.find("doll") is not None
        assert "['doll']" in refusal(adapters, "sheep")
    told = [record for record in caplog.records if "stays as it was" in record.message]
    assert len(told) == 1, "said once, not at each look"
    assert LIST_NAME in told[0].message
    write_list(tmp_path, {"sheep": "s"})
    assert adapters.find("sheep") is not None


def test_a_list_that_is_gone_leaves_the_last_one(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_list(tmp_path, {"doll": "d"})
    adapters = ListedAdapters(path, clock)
    path.unlink()
    for _ in range(3):
        clock.now += LOOK_INTERVAL_S
        assert adapters.find("doll") is not None
    assert sum("stays as it was" in record.message for record in caplog.records) == 1
    write_list(tmp_path, {})
    clock.now += LOOK_INTERVAL_S
    refusal(adapters, "doll")


def test_a_list_of_the_same_time_and_size_is_seen_while_it_is_fresh(tmp_path: Path, clock: Clock) -> None:
    """A coarse file system gives two writes within one tick the same time."""
    path = write_list(tmp_path, {"doll": "d"}, age_s=0.0)
    status = path.stat()
    adapters = ListedAdapters(path, clock)
    assert adapters.find("doll") is not None
    path.write_text(json.dumps({"lamb": "d"}))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert adapters.find("lamb") is not None


def test_a_mount_that_changes_a_link_is_seen(tmp_path: Path, clock: Clock) -> None:
    """As a ConfigMap is updated: the folder behind a link is another one."""
    for name, value in (("v1", {"doll": "d"}), ("v2", {"sheep": "s"})):
        (tmp_path / name).mkdir()
        write_list(tmp_path / name, value)
    (tmp_path / "data").symlink_to("v1")
    (tmp_path / LIST_NAME).symlink_to(f"data/{LIST_NAME}")
    adapters = ListedAdapters(tmp_path / LIST_NAME, clock)
    assert adapters.find("doll") is not None
    (tmp_path / "new").symlink_to("v2")
    (tmp_path / "new").replace(tmp_path / "data")
    assert adapters.find("sheep") is not None
    refusal(adapters, "doll")


def test_a_thousand_changes_leave_what_the_last_one_says(tmp_path: Path, clock: Clock) -> None:
    adapters = ListedAdapters(write_list(tmp_path, {"kept": "k"}), clock)
    for i in range(1000):
        write_list(tmp_path, {"kept": "k", f"a{i}": f"f{i}"}, age_s=0.0)
        found = adapters.find(f"a{i}")
        assert found is not None
        assert found.path == str(tmp_path / f"f{i}")
        assert adapters.find("kept") is not None
        if i:
            refusal(adapters, f"a{i - 1}")
    assert adapters.names == ["kept", "a999"]


# ---- what a model's folder makes of it ------------------------------------------------------------------------------


def make_models(repository: Path, listed: dict[str, str], own: tuple[str, ...] = ()) -> Path:
    """`llm` with a list, and models that are adapters; returns the version folder of `llm`."""
    for name, arguments in {"llm": {"model": "m"}, **{name: {"engine_of": "llm", "lora": "f"} for name in own}}.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1" / "model.json").write_text(json.dumps(arguments))
    write_list(repository / "llm" / "1", listed)
    return repository / "llm" / "1"


@pytest.mark.parametrize(
    ("num_listed", "num_own", "arguments", "expected"),
    [
        (2, 0, {}, 2),
        (2, 3, {}, 5),
        (40, 0, {}, 8),
        (0, 0, {}, None),
        (40, 0, {"max_cpu_loras": 3}, 3),
        (2, 0, {"max_loras": 6}, 6),
        (2, 0, {"enable_lora": False}, None),
    ],
)
def test_a_batch_has_room_for_the_adapters_that_are_foreseen(
    tmp_path: Path, num_listed: int, num_own: int, arguments: dict[str, Any], expected: int | None
) -> None:
    engine = make_models(tmp_path, {f"a{i}": "f" for i in range(num_listed)}, tuple(f"own{i}" for i in range(num_own)))
    config = EngineConfig(**{"model": "m", "enable_lora": True, **arguments})
    assert with_places(config, engine).max_loras == expected


def test_what_a_model_is(tmp_path: Path) -> None:
    engine = make_models(tmp_path, {"doll": "f"}, ("sheep",))
    on, off = EngineConfig(model="m", enable_lora=True), EngineConfig(model="m")
    sheep = tmp_path / "sheep" / "1"
    assert isinstance(make_adapters(on, engine, engine, "llm"), ListedAdapters)
    assert isinstance(make_adapters(off, engine, engine, "llm"), NoAdapters)
    own = make_adapters(on, engine, sheep, "sheep").find("")
    assert own is not None
    assert (own.name, own.path) == ("sheep", str(sheep / "f"))
    with pytest.raises(ConfigError, match="set enable_lora for 'llm'"):
        make_adapters(off, engine, sheep, "sheep")
