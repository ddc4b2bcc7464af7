"""The parameters of config.pbtxt: pytest tests/serving/test_model_parameters.py"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from cb_backend.contracts.errors import ConfigError
from cb_backend.serving.model_parameters import (
    check_parameter_names,
    excludes_input,
    reports_vllm_names,
    sender_threads,
    slow_reader_timeout_s,
)


def config(**parameters: str) -> dict[str, Any]:
    return {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}


@pytest.mark.parametrize("read", [excludes_input, reports_vllm_names])
def test_flags(read: Any) -> None:
    name = "exclude_input_in_output" if read is excludes_input else "REPORT_CUSTOM_METRICS"
    spellings = {"true": True, "True": True, "yes": True, " true ": True, "false": False, "no": False, "": False}
    assert {text: read(config(**{name: text})) for text in spellings} == spellings
    assert not read({})
    with pytest.raises(ConfigError, match=f"parameter {name} in config.pbtxt is 'ture'; use true or false"):
        read(config(**{name: "ture"}))


@pytest.mark.parametrize("value", ["0", "65", "-1", "4.0", "four", "9" * 5000, "²"])
def test_a_number_of_threads_that_cannot_be(value: str) -> None:
    assert (sender_threads({}), sender_threads(config(sender_threads="64"))) == (4, 64)
    with pytest.raises(ConfigError, match=r"sender_threads in config.pbtxt is '.{1,80}'; use a number from 1 to 64"):
        sender_threads(config(sender_threads=value))


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_patience_that_cannot_be(value: str) -> None:
    assert (slow_reader_timeout_s({}), slow_reader_timeout_s(config(slow_reader_timeout_s="0.5"))) == (30.0, 0.5)
    with pytest.raises(ConfigError, match="use a number of seconds above 0"):
        slow_reader_timeout_s(config(slow_reader_timeout_s=value))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("sender_thread", "sender_threads"),
        ("Sender_Threads", "sender_threads"),
        ("slow_reader_timeout", "slow_reader_timeout_s"),
        ("report_custom_metrics", "REPORT_CUSTOM_METRICS"),
        ("exclude_input_from_output", "exclude_input_in_output"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_one_that_is_meant(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown parameter '{name}' in config.pbtxt; did you mean '{meant}'?"):
        check_parameter_names(config(**{name: "1"}))


def test_names_of_others_are_told_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        logging.getLogger("cb_backend.serving"), "warning", lambda text, *args: told.append(text % args)
    )
    check_parameter_names(config(sender_threads="1", FORCE_CPU_ONLY_INPUT_TENSORS="no", gpt_model_path="/x"))
    assert told == ["parameter 'gpt_model_path' in config.pbtxt has no effect on this backend"]
