"""Text to ids: BOS, the empty prompt, limits, broken folders; and the same ids as transformers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cb_backend.contracts.errors import ConfigError, InvalidRequestError
from cb_backend.front_end.text.tokenizer import Tokenizer
from tests.front_end.conftest import ByteFallbackKit, ByteLevelKit, byte_level_backend

MakeByteLevel = Callable[..., ByteLevelKit]


def test_encode_adds_what_the_post_processor_adds(byte_level: ByteLevelKit, byte_fallback: ByteFallbackKit) -> None:
    assert byte_level.tokenizer.encode("ok") == [byte_level.id("<s>"), *byte_level.ids(b"ok")]
    assert byte_fallback.tokenizer.encode("x x") == [1, *byte_fallback.ids("▁", "x", "▁", "x")]


def test_e1_an_empty_prompt_is_bos_alone(byte_level: ByteLevelKit) -> None:
    assert byte_level.tokenizer.encode("") == [byte_level.id("<s>")]


def test_e1_an_empty_prompt_without_post_processor_is_bos_alone(make_byte_level: MakeByteLevel) -> None:
    kit = make_byte_level({"bos_token": "<s>"}, has_bos=False)
    assert kit.tokenizer.encode("") == [kit.id("<s>")]
    assert kit.tokenizer.encode(" ") == kit.ids(b" ")


def test_e1_an_empty_prompt_without_bos_is_refused(make_byte_level: MakeByteLevel) -> None:
    kit = make_byte_level({"eos_token": "</s>"}, has_bos=False)
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        kit.tokenizer.encode("")
    assert kit.tokenizer.encode(" ") == kit.ids(b" ")


def test_e2_bos_is_not_doubled(byte_level: ByteLevelKit) -> None:
    bos, ok = byte_level.id("<s>"), byte_level.ids(b"ok")
    assert byte_level.tokenizer.encode("<s>ok") == [bos, *ok]
    assert byte_level.tokenizer.encode("<s>") == [bos]
    assert byte_level.tokenizer.encode("<s><s>ok") == [bos, bos, *ok]  # two were written, two are kept
    assert byte_level.tokenizer.encode("ok<s>") == [bos, *ok, bos]


def test_e2_without_an_added_bos_the_text_is_taken_as_written(make_byte_level: MakeByteLevel) -> None:
    kit = make_byte_level({"bos_token": "<s>"}, has_bos=False)
    assert kit.tokenizer.encode("<s><s>ok") == [kit.id("<s>"), kit.id("<s>"), *kit.ids(b"ok")]


def test_special_and_eos_ids(byte_level: ByteLevelKit) -> None:
    tokenizer = byte_level.tokenizer
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", byte_level.id("<s>"))
    assert tokenizer.eos_token_ids == (byte_level.id("</s>"),)
    assert tokenizer.is_special(byte_level.id("</s>"))
    assert not tokenizer.is_special(byte_level.id("<think now>"))
    assert not tokenizer.is_special(byte_level.ids("x")[0])
    assert tokenizer.vocab_size == byte_level.backend.get_vocab_size(with_added_tokens=True)


def test_special_tokens_named_in_the_configuration_only(make_byte_level: MakeByteLevel) -> None:
    config = {
        "eos_token": "<|end|>",
        "added_tokens_decoder": {"900": {"content": "<|tool|>", "special": True, "lstrip": False}},
    }
    kit = make_byte_level(config)
    end, tool = kit.tokenizer.encode("<|end|>")[1:], kit.tokenizer.encode("<|tool|>")[1:]
    assert len(end) == len(tool) == 1
    assert kit.tokenizer.eos_token_ids == tuple(end)
    assert kit.tokenizer.decode([*kit.ids("ok"), *end, *tool]) == "ok"


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=8)
    kit = ByteLevelKit(tmp_path, backend, {})
    assert kit.tokenizer.encode("okokokok") == [kit.id("<s>"), *kit.ids(b"okokokok")]
    assert kit.tokenizer.encode("o") == [kit.id("<s>"), *kit.ids(b"o")]


def test_a_prompt_that_cannot_fit_is_refused_before_tokenising(byte_level: ByteLevelKit) -> None:
    longest = max(len(token.encode()) for token in byte_level.backend.get_vocab())
    fits = "x" * (longest * 10)
    assert len(byte_level.tokenizer.encode(fits, max_model_len=10)) == len(fits) + 1
    with pytest.raises(InvalidRequestError, match=rf"at least {len(fits) + 1} bytes; at most {len(fits)} can fit"):
        byte_level.tokenizer.encode(fits + "x", max_model_len=10)
    with pytest.raises(InvalidRequestError, match="bytes"):
        byte_level.tokenizer.encode("é" * (longest * 5) + "x", max_model_len=10)


def test_lone_surrogates_are_refused(byte_level: ByteLevelKit) -> None:
    for max_model_len in (None, 100):
        with pytest.raises(InvalidRequestError, match="surrogates"):
            byte_level.tokenizer.encode("a\ud800", max_model_len)
    for encode in (
        byte_level.tokenizer.encode_plain,
        byte_level.tokenizer.encode_characters,
    ):  # what messages go through
        with pytest.raises(InvalidRequestError, match="surrogates"):
            encode("a\ud800")


def test_missing_tokenizer_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="save_pretrained") as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path) not in str(caught.value)


def test_broken_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(tmp_path)
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"7": {"special": true}}}')
    with pytest.raises(ConfigError, match="added_tokens_decoder cannot be read"):
        Tokenizer(tmp_path)


def test_without_configuration_the_file_alone_serves(tmp_path: Path) -> None:
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token_ids, tokenizer.chat_templates) == (None, (), {})
    assert len(tokenizer.encode("ok")) == 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [("{{ a }}", "{{ a }}"), ([{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}], "d")],
)
def test_chat_template_is_kept(make_byte_level: MakeByteLevel, value: object, expected: str) -> None:
    kit = make_byte_level({"chat_template": value})
    assert kit.tokenizer.chat_templates["default"] == expected
    (kit.folder / "chat_template.jinja").write_text("from a file")
    assert Tokenizer(kit.folder).chat_templates == {"default": "from a file"}


def test_threads_share_one_tokenizer(byte_level: ByteLevelKit) -> None:
    texts = [f"Hello world {number} " * (number % 7 + 1) for number in range(200)]
    expected = [byte_level.backend.encode(text).ids for text in texts]
    results: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        results[number] = [byte_level.tokenizer.encode(text) for text in texts]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [results[number] for number in range(4)] == [expected] * 4


TEXTS = ["The capital of France is", "", " ", "  two  spaces\n\n\ttab", "Grüße 中文 😀 \ufffd", "a</s>b", "x" * 500]


@pytest.mark.slow
def test_same_ids_as_transformers(byte_level: ByteLevelKit, byte_fallback: ByteFallbackKit) -> None:
    transformers = pytest.importorskip("transformers")
    folders = [byte_level.folder, byte_fallback.folder]
    # A folder with a converted real tokenizer (SmolLM2's, as the demo fetches it), where there is one.
    if "CB_TEST_TOKENIZER_DIR" in os.environ:
        folders.append(Path(os.environ["CB_TEST_TOKENIZER_DIR"]))
    for folder in folders:
        theirs, ours = transformers.AutoTokenizer.from_pretrained(str(folder)), Tokenizer(folder)
        for text in TEXTS:
            ids = theirs(text).input_ids
            if ids:
                assert ours.encode(text) == ids, (folder.name, text)
            shown = theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            assert ours.decode(ids) == shown, (folder.name, text)


def test_flags_of_added_tokens_survive(make_byte_level: MakeByteLevel) -> None:
    """`rstrip` of a token that only the configuration has: it takes the spaces after it, as in transformers."""
    flags = {"content": "<mask>", "special": True, "rstrip": True}
    kit = make_byte_level({"added_tokens_decoder": {"900": flags}})
    mask = kit.tokenizer.encode("<mask>")[1]
    assert kit.tokenizer.encode("ok<mask>   ok")[1:] == [*kit.ids(b"ok"), mask, *kit.ids(b"ok")]
