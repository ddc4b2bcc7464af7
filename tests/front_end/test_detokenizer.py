"""Streaming text equals the decoding of all ids at once, and never shows half a character."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models

from cb_backend.front_end.text.detokenizer import MAX_HELD_RUN_BYTES, IncrementalDetokenizer
from tests.front_end.conftest import CJK, EMOJI, ByteFallbackKit, ByteLevelKit, Kit, as_byte_level

FEW_LONG_RUNS = settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def deltas(kit: Kit, ids: list[int], prompt_ids: list[int] | None = None) -> list[str]:
    stream = IncrementalDetokenizer(kit.tokenizer, prompt_ids or [])
    return [*(stream.push([token_id]) for token_id in ids), stream.flush()]


@pytest.mark.parametrize("kit_name", ["byte_level", "byte_fallback"])
def test_a1_cjk_in_pieces_is_delivered_whole(kit_name: str, request: pytest.FixtureRequest) -> None:
    kit = request.getfixturevalue(kit_name)
    ids = kit.ids("x", CJK, "x", CJK, CJK, EMOJI)
    parts = deltas(kit, ids)
    assert "".join(parts) == "x中x中中😀"
    assert not any("\ufffd" in part for part in parts)


def test_a1_pieces_of_two_bytes(byte_level: ByteLevelKit) -> None:
    two_bytes = byte_level.id(as_byte_level(CJK[:2]))
    assert deltas(byte_level, [two_bytes, *byte_level.ids(CJK[2:])]) == ["", "中", ""]


def test_a3_lone_continuation_byte_does_not_stop_the_stream(byte_level: ByteLevelKit) -> None:
    ids = byte_level.ids(b"\x80", "x", "ok", EMOJI)
    assert deltas(byte_level, ids) == ["\ufffd", "x", "ok", "", "", "", "😀", ""]
    assert byte_level.full_decode(ids) == "\ufffdxok😀"


def test_a3_invalid_run_of_a_byte_fallback_tokenizer(byte_fallback: ByteFallbackKit) -> None:
    ids = byte_fallback.ids("x", CJK, b"\xff", "ab", EMOJI, "x")
    assert "".join(deltas(byte_fallback, ids)) == "x\ufffd\ufffd\ufffd\ufffdab😀x" == byte_fallback.full_decode(ids)


def test_a5_a_real_replacement_character_is_delivered_at_once(byte_level: ByteLevelKit) -> None:
    assert deltas(byte_level, byte_level.ids("\ufffd".encode(), "ok")) == ["", "", "\ufffd", "ok", ""]
    assert deltas(byte_level, byte_level.ids("\ufffd", "ok")) == ["\ufffd", "ok", ""]


def test_a5_cut_off_bytes_come_once_at_the_end(byte_level: ByteLevelKit) -> None:
    ids = byte_level.ids("x", EMOJI[:3])
    assert deltas(byte_level, ids) == ["x", "", "", "", "\ufffd"]
    stream = IncrementalDetokenizer(byte_level.tokenizer)
    stream.push(ids)
    assert [stream.flush(), stream.flush()] == ["\ufffd", ""]


def test_a6_state_dies_with_the_request(byte_level: ByteLevelKit) -> None:
    streams = [IncrementalDetokenizer(byte_level.tokenizer) for _ in range(200)]
    assert {stream.push(byte_level.ids(EMOJI[:2])) for stream in streams} == {""}
    alive = [weakref.ref(stream) for stream in streams]
    del streams
    gc.collect()
    assert [ref() for ref in alive] == [None] * 200
    assert "".join(deltas(byte_level, byte_level.ids("ok", CJK))) == "ok中"


@pytest.mark.parametrize("kit_name", ["byte_level", "byte_fallback", "metaspace"])
def test_s9_ids_outside_the_vocabulary_have_no_text(kit_name: str, request: pytest.FixtureRequest) -> None:
    kit = request.getfixturevalue(kit_name)
    x = kit.id("x")
    ids = [x, kit.tokenizer.vocab_size, x, kit.tokenizer.vocab_size + 20, 2**31 - 1, -1, x]
    assert "".join(deltas(kit, ids)) == "xxx"
    assert kit.tokenizer.decode(ids) == "xxx"


def test_special_tokens_have_no_text_and_added_text_tokens_do(byte_level: ByteLevelKit) -> None:
    ids = [byte_level.id("<s>"), byte_level.id("<think now>"), *byte_level.ids("ok"), byte_level.id("</s>")]
    assert "".join(deltas(byte_level, ids)) == "<think now>ok" == byte_level.full_decode(ids)


def test_a_long_byte_fallback_run_streams(byte_fallback: ByteFallbackKit) -> None:
    """A script that the vocabulary lacks is all byte tokens: it must not wait for the end."""
    text = "ကခဂဃင" * 20  # 3 bytes each
    parts = deltas(byte_fallback, byte_fallback.ids(text.encode()))
    assert "".join(parts) == text
    shown, longest_wait, wait = 0, 0, 0
    for part in parts[:-1]:
        shown += len(part.encode())
        wait = 0 if part else wait + 1
        longest_wait = max(longest_wait, wait)
    assert shown > len(text.encode()) - MAX_HELD_RUN_BYTES
    assert longest_wait < MAX_HELD_RUN_BYTES


def test_a_long_broken_byte_fallback_run_stays_broken(byte_fallback: ByteFallbackKit) -> None:
    """One bad byte makes replacement characters of its whole run, also of good characters long after it."""
    ids = byte_fallback.ids(b"\xff" + b"a" * MAX_HELD_RUN_BYTES, CJK, "x", CJK)
    expected = "\ufffd" * (MAX_HELD_RUN_BYTES + 4) + "x中"
    assert "".join(deltas(byte_fallback, ids)) == expected == byte_fallback.full_decode(ids)


def test_a_character_across_the_limit_of_a_held_run_is_delivered_whole(byte_fallback: ByteFallbackKit) -> None:
    for num_before in range(4):
        ids = byte_fallback.ids(b"a" * num_before, EMOJI * (MAX_HELD_RUN_BYTES // 2), "x")
        parts = deltas(byte_fallback, ids)
        assert "".join(parts) == "a" * num_before + "😀" * (MAX_HELD_RUN_BYTES // 2) + "x"


def test_characters_let_go_are_not_taken_back(byte_fallback: ByteFallbackKit) -> None:
    """The one difference to the full decode: it breaks a whole run after the fact, here only what is still held."""
    ids = byte_fallback.ids(CJK * (MAX_HELD_RUN_BYTES // 3), CJK, b"\xff", "x")
    assert "".join(deltas(byte_fallback, ids)) == "中" * (MAX_HELD_RUN_BYTES // 3) + "\ufffd" * 4 + "x"
    assert byte_fallback.full_decode(ids) == "\ufffd" * (MAX_HELD_RUN_BYTES + 4) + "x"


@pytest.mark.parametrize("kit_name", ["byte_fallback", "metaspace"])
def test_leading_space_follows_the_prompt(kit_name: str, request: pytest.FixtureRequest) -> None:
    kit = request.getfixturevalue(kit_name)
    hello, world = kit.id("▁Hello"), kit.id("▁world")
    assert "".join(deltas(kit, [world, hello])) == "world Hello" == kit.full_decode([world, hello])
    assert "".join(deltas(kit, [world, hello], [hello])) == " world Hello"
    assert "Hello" + "".join(deltas(kit, [world], [hello])) == kit.full_decode([hello, world])


def test_a_prompt_of_special_tokens_only_strips_the_space(byte_fallback: ByteFallbackKit) -> None:
    ids = byte_fallback.ids("▁", "▁world")
    assert "".join(deltas(byte_fallback, ids, byte_fallback.ids("<s>"))) == " world" == byte_fallback.full_decode(ids)


@pytest.mark.parametrize("is_converted", [False, True])
@given(data=st.data())
@FEW_LONG_RUNS
def test_byte_level_deltas_equal_the_full_decode(
    is_converted: bool, byte_level: ByteLevelKit, converted_byte_level: ByteLevelKit, data: st.DataObject
) -> None:
    kit = converted_byte_level if is_converted else byte_level
    any_id = st.integers(0, kit.tokenizer.vocab_size - 1)
    high_byte = st.integers(0x80, 0xFF).map(lambda byte: kit.ids(bytes([byte]))[0])
    ids = data.draw(st.lists(any_id | high_byte, max_size=40))
    assert "".join(deltas(kit, ids)) == kit.full_decode(ids)


@given(data=st.data())
@FEW_LONG_RUNS
def test_byte_fallback_deltas_equal_the_full_decode(byte_fallback: ByteFallbackKit, data: st.DataObject) -> None:
    any_id = st.integers(0, byte_fallback.tokenizer.vocab_size - 1)
    character = st.sampled_from([CJK, EMOJI, "é".encode(), b"A"]).map(lambda b: byte_fallback.ids(b))
    groups = data.draw(st.lists(any_id.map(lambda i: [i]) | character, max_size=11))
    ids = [token_id for group in groups for token_id in group]
    assert "".join(deltas(byte_fallback, ids)) == byte_fallback.full_decode(ids)


@given(data=st.data())
@FEW_LONG_RUNS
def test_other_decoders_equal_the_full_decode(metaspace: Kit, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, metaspace.tokenizer.vocab_size - 1), max_size=20))
    assert "".join(deltas(metaspace, ids)) == metaspace.full_decode(ids)


def window_kit(folder: Path) -> Kit:
    """Of a decoder that is none of the two usual ones, with a token that is a replacement character."""
    vocabulary = {"[UNK]": 0, "play": 1, "##ing": 2, "now": 3, "\ufffd": 4}
    backend = BackendTokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["<a>", "<b>"])
    return Kit(folder, backend, {})


def test_other_decoders_deliver_each_token_at_once(tmp_path: Path) -> None:
    kit = window_kit(tmp_path)
    assert deltas(kit, [kit.id(token) for token in ("play", "##ing", "now")]) == ["play", "ing", " now", ""]


def test_a5_other_decoders_wait_four_tokens_for_what_may_be_half_a_character(tmp_path: Path) -> None:
    kit = window_kit(tmp_path)
    odd = kit.id("\ufffd")
    assert deltas(kit, [kit.id("now"), odd, kit.id("play")]) == ["now", "", " \ufffd play", ""]
    assert deltas(kit, [odd] * 5) == ["", "", "", "\ufffd \ufffd \ufffd \ufffd", "", " \ufffd"]
    stream = IncrementalDetokenizer(kit.tokenizer)
    assert [stream.push([odd]), stream.flush(), stream.flush()] == ["", "\ufffd", ""]


@given(data=st.data())
@FEW_LONG_RUNS
def test_pushes_of_any_size_give_the_same_text(byte_fallback: ByteFallbackKit, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_fallback.tokenizer.vocab_size - 1), max_size=120))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    stream = IncrementalDetokenizer(byte_fallback.tokenizer)
    text = "".join(stream.push(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)) + stream.flush()
    assert text == "".join(deltas(byte_fallback, ids))


@pytest.mark.parametrize("kit_name", ["byte_level", "converted_byte_level", "byte_fallback"])
@pytest.mark.parametrize("byte", [b"\xff", b"\xe4", b"a"])
def test_cost_does_not_grow_with_the_text(kit_name: str, byte: bytes, request: pytest.FixtureRequest) -> None:
    """20,000 tokens, valid or not, cost well below what decoding the text anew for each would (minutes)."""
    kit = request.getfixturevalue(kit_name)
    ids = kit.ids(byte) * 20_000
    start = time.thread_time()
    text = "".join(deltas(kit, ids))
    assert time.thread_time() - start < 2.0
    assert text == kit.full_decode(ids)


def test_added_tokens_that_follow_each_other_stand_without_spaces_if_asked(tmp_path: Path) -> None:
    """Only decoders that put a space between any two tokens know a difference."""
    kit = window_kit(tmp_path)
    ids = [kit.id(token) for token in ("<a>", "<b>", "play", "##ing", "<b>", "<b>", "now")]
    texts = []
    for spaces_between in ((), (False,)):  # they do by default
        stream = IncrementalDetokenizer(kit.tokenizer, (), False, *spaces_between)
        texts.append("".join([*(stream.push([token_id]) for token_id in ids), stream.flush()]))
    assert texts == ["<a> <b> playing <b> <b> now", "<a><b> playing <b><b> now"]
    assert texts[0] == kit.backend.decode(ids, skip_special_tokens=False)
    after_a_word = IncrementalDetokenizer(kit.tokenizer, [kit.id("now")], False, False)
    assert after_a_word.push([kit.id("<a>")]) == " <a>"
