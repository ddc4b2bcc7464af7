"""The table of parameters beside everything that is made of it: the page, the types, both config.pbtxt."""

from __future__ import annotations

import re

import pytest

from cb_backend.cli.paths import checkout_path
from cb_backend.contracts.request_params import RequestParams
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.front_end.wire.parameters import BY_NAME, BY_TENSOR, PARAMETERS, UNSUPPORTED, UNSUPPORTED_TENSORS
from cb_backend.front_end.wire.structured_json import STRUCTURED_NAMES
from cb_backend.front_end.wire.trtllm_protocol import OTHER_INPUTS, SAME_INPUTS
from tests.docs.requests import PAGE, page

_TENSOR = re.compile(r'name: "(\w+)"\s+data_type: (\w+)\s+dims: \[ (-?\d+)(?:, -?\d+)* \]')


def config(model: str) -> str:
    return checkout_path(f"model_repository/{model}/config.pbtxt").read_text(encoding="utf-8")


def inputs_of(model: str) -> dict[str, tuple[str, int]]:
    """Type and size of each input that config.pbtxt declares."""
    text = config(model).partition("output [")[0]
    return {name: (kind, int(size)) for name, kind, size in _TENSOR.findall(text)}


def test_the_page_is_what_the_table_says() -> None:
    """If this fails: python -m tests.docs.requests"""
    assert checkout_path(str(PAGE)).read_text(encoding="utf-8") == page()


def test_every_field_of_a_clients_parameters_is_a_row() -> None:
    """But the grammar, which has names of its own."""
    fields = {*RequestParams.__struct_fields__, *SchedulingParams.__struct_fields__} - {"structured_output"}
    assert set(BY_NAME) == fields
    assert len(BY_NAME) == len(PARAMETERS)


def test_no_name_means_two_things() -> None:
    names = [*BY_NAME, *UNSUPPORTED, *STRUCTURED_NAMES]
    tensors = [*BY_TENSOR, *UNSUPPORTED_TENSORS, *OTHER_INPUTS, *SAME_INPUTS]
    for each in (names, tensors):
        assert len(set(each)) == len(each)


def test_the_tensors_of_llm_trtllm_are_those_of_the_table() -> None:
    found = inputs_of("llm_trtllm")
    assert set(found) == {*BY_TENSOR, *UNSUPPORTED_TENSORS, *OTHER_INPUTS, *SAME_INPUTS}
    types = {tensor: parameter.tensor_type for tensor, parameter in BY_TENSOR.items()}
    types |= {tensor: kind for tensor, (kind, _) in UNSUPPORTED_TENSORS.items()}
    assert {name: found[name][0] for name in types} == types
    lists = {name for name, (_, size) in found.items() if size == -1}
    assert lists == {
        "stop_words", "bad_words", "embedding_bias_words", "embedding_bias_weights", "lora_weights", "lora_config"
    }  # fmt: skip


@pytest.mark.parametrize("name", [*BY_NAME, "structured_outputs"])
def test_the_config_of_llm_names_every_parameter(name: str) -> None:
    assert re.search(rf"\b{name}\b", config("llm"))


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_the_page_says_what_each_does(parameter: object) -> None:
    name, text = parameter.name, parameter.text  # type: ignore[attr-defined]
    assert re.search(rf"^\| `{name}` \|.*\| {re.escape(text)} \|$", page(), re.MULTILINE)
