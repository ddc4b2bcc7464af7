"""Special tokens that `tokenizer.json` does not have: in templates, prompts and answers as transformers has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from cb_backend.contracts.errors import ConfigError
from cb_backend.front_end.text.chat import Chat
from cb_backend.front_end.text.detokenizer import IncrementalDetokenizer
from cb_backend.front_end.text.tokenizer import Tokenizer
from tests.front_end.published_case import CHATML, PLAIN
from tests.front_end.published_tokenizers import bare_byte_level

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    bare_byte_level().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, **files: Any) -> None:
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))


def both(folder: Path) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    return Tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))


def test_r10a_bos_and_eos_of_the_special_tokens_map(folder: Path) -> None:
    write(folder, tokenizer_config={"chat_template": PLAIN}, special_tokens_map=CHATML)
    ours, theirs = both(folder)
    assert (ours.bos_token, ours.bos_token_id) == ("<s>", theirs.bos_token_id)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    chat = Chat(ours)
    ids = chat.encode(json.dumps(MESSAGES))
    chat.close()
    assert ids == theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert ids[0] == ours.bos_token_id
    assert ours.eos_token_ids[0] in ids


def test_r10a_an_empty_prompt_is_the_maps_bos(folder: Path) -> None:
    write(folder, special_tokens_map={"bos_token": {"content": "<s>", "lstrip": False, "special": True}})
    ours, theirs = both(folder)
    assert ours.encode("") == [theirs.bos_token_id]


def test_r10a_the_map_goes_before_a_configuration_without_a_list_of_tokens(folder: Path) -> None:
    write(folder, tokenizer_config={"bos_token": "</s>"}, special_tokens_map={"bos_token": "<s>"})
    ours, theirs = both(folder)
    assert ours.bos_token == theirs.bos_token == "<s>"
    write(folder, tokenizer_config={"bos_token": "</s>", "added_tokens_decoder": {}})
    ours, theirs = both(folder)
    assert ours.bos_token == theirs.bos_token == "</s>"


def test_r10a_a_broken_map_is_named(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text("[")
    with pytest.raises(ConfigError, match=r"special_tokens_map\.json is not valid JSON"):
        Tokenizer(folder)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": CHATML | {"additional_special_tokens": ["<|tool|>"]}},
        {"tokenizer_config": CHATML | {"extra_special_tokens": ["<|tool|>"]}},
        {"tokenizer_config": CHATML | {"extra_special_tokens": {"tool_token": "<|tool|>"}}},
        {"tokenizer_config": CHATML, "special_tokens_map": {"additional_special_tokens": ["<|tool|>"]}},
        {"tokenizer_config": CHATML | {"extra_special_tokens": ["<|tool|>"]}, "added_tokens": {"<|tool|>": 300}},
    ],
)
def test_r10b_tokens_beside_the_file_are_one_token_and_no_text(folder: Path, files: dict[str, Any]) -> None:
    write(folder, **files)
    ours, theirs = both(folder)
    tool = theirs.convert_tokens_to_ids("<|tool|>")
    assert ours.encode("Hello<|tool|>") == theirs("Hello<|tool|>").input_ids
    assert ours.encode("Hello<|tool|>").count(tool) == 1
    assert ours.decode([tool]) == theirs.decode([tool], skip_special_tokens=True) == ""
    assert ours.control_tokens["<|tool|>"] == tool
    stream = IncrementalDetokenizer(ours)
    assert stream.push([tool]) + stream.flush() == ""


def test_r10b_added_tokens_that_nobody_calls_special_are_text(folder: Path) -> None:
    write(folder, tokenizer_config=CHATML, added_tokens={"<|tool|>": 300, "<|im_end|>": 299})
    ours, theirs = both(folder)
    ids = ours.encode("x<|tool|><|im_end|>")
    assert ids == theirs("x<|tool|><|im_end|>").input_ids
    assert len(ids) == 3
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "x<|tool|>"


@pytest.mark.parametrize("values", [{"<|tool|>": "x"}, {"<|tool|>": None}, {"<|tool|>": [1]}])
def test_r10b_a_broken_list_is_named(folder: Path, values: dict[str, Any]) -> None:
    write(folder, added_tokens=values)
    with pytest.raises(ConfigError, match=r"added_tokens\.json must hold an object of tokens and their ids"):
        Tokenizer(folder)
