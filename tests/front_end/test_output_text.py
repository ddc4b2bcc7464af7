"""Tokens to text with stop strings: which text goes out, which tokens count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cb_backend.contracts.request import FinishReason
from cb_backend.contracts.request_params import RequestParams
from cb_backend.front_end.text.output_text import OutputText
from cb_backend.support import fault_points
from tests.front_end.conftest import CJK, EMOJI, ByteFallbackKit, ByteLevelKit, Kit

MANY = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def stream(kit: Kit, ids: list[int], finish_reason: FinishReason, **params: Any) -> tuple[list[str], int, bool]:
    """One token a push: (texts sent, tokens that count, whether a stop string ended it)."""
    output = OutputText(kit.tokenizer, RequestParams(**params))
    texts, num_tokens = [], 0
    for number, token_id in enumerate(ids, start=1):
        delta = output.push([token_id], finish_reason if number == len(ids) else FinishReason.NONE)
        texts.append(delta.text)
        num_tokens += delta.num_tokens
        if delta.is_stopped:
            return texts, num_tokens, True
    return texts, num_tokens, False


def whole(kit: Kit, ids: list[int], finish_reason: FinishReason, **params: Any) -> tuple[str, int, bool]:
    delta = OutputText(kit.tokenizer, RequestParams(**params)).push(ids, finish_reason)
    return delta.text, delta.num_tokens, delta.is_stopped


def test_b1_stop_string_of_four_tokens(byte_level: ByteLevelKit) -> None:
    ids = byte_level.ids("DEF", "G", "HI", "J", "x")
    assert stream(byte_level, ids, FinishReason.LENGTH, stop=("DEFGHIJ",)) == ([""] * 4, 4, True)


@pytest.mark.parametrize(("include", "text"), [(False, "a "), (True, "a bc!")])
def test_b2_text_after_the_stop_string_in_the_last_token_goes(
    byte_level: ByteLevelKit, include: bool, text: str
) -> None:
    ids = byte_level.ids("a b", "c!d", "x", "x")
    params = {"stop": ("bc!",), "include_stop_str_in_output": include}
    texts, num_tokens, is_stopped = stream(byte_level, ids, FinishReason.LENGTH, **params)
    assert ("".join(texts), num_tokens, is_stopped) == (text, 2, True)
    assert whole(byte_level, ids, FinishReason.LENGTH, **params) == (text, 2, True)


def test_b6_held_text_comes_with_the_last_token(byte_level: ByteLevelKit) -> None:
    ids = byte_level.ids("Hello", " world", "DEF", "G")
    texts, num_tokens, is_stopped = stream(byte_level, ids, FinishReason.LENGTH, stop=("DEFGHIJ" + "x" * 23,))
    assert (texts, num_tokens, is_stopped) == (["Hello", " world", "", "DEFG"], 4, False)


def test_b7_stop_word_inside_a_token(byte_level: ByteLevelKit) -> None:
    ids = byte_level.ids("Hello", " stop", " world")
    assert whole(byte_level, ids, FinishReason.LENGTH, stop=("stop",)) == ("Hello ", 2, True)


def test_c6_a_stop_string_within_min_tokens_is_text(byte_level: ByteLevelKit) -> None:
    ids = byte_level.ids("G", "x", "G", "J", "G", "x", "J")
    texts, num_tokens, is_stopped = stream(byte_level, ids, FinishReason.LENGTH, stop=("x",), min_tokens=4)
    assert ("".join(texts), num_tokens, is_stopped) == ("GxGJG", 6, True)
    assert whole(byte_level, ids, FinishReason.LENGTH, stop=("x",), min_tokens=4) == ("GxGJG", 6, True)


def test_c6_min_tokens_is_passed_by_the_token_after_it(byte_level: ByteLevelKit) -> None:
    """As for EOS: with min_tokens=4 the earliest end is the fifth token."""
    ids = byte_level.ids("G", "G", "G", "x", "x", "J")
    assert whole(byte_level, ids, FinishReason.LENGTH, stop=("x",), min_tokens=4) == ("GGGx", 5, True)
    assert whole(byte_level, ids, FinishReason.LENGTH, stop=("x",), min_tokens=3) == ("GGG", 4, True)


@pytest.mark.parametrize("num_bytes", [3, 2])
def test_the_reason_is_the_stop_string_also_where_only_the_end_completes_it(
    byte_fallback: ByteFallbackKit, num_bytes: int
) -> None:
    """Bytes are held until it is known whether they are a character, and at the end that is known."""
    data = CJK[:num_bytes]
    stop = data.decode(errors="replace")
    output = OutputText(byte_fallback.tokenizer, RequestParams(stop=(stop,)))
    delta = output.push(byte_fallback.ids("x", *(bytes([value]) for value in data)), FinishReason.LENGTH)
    assert (delta.text, delta.is_stopped, output.stop_reason) == ("x", True, stop)


def test_a_stop_string_of_a_character_in_pieces(byte_level: ByteLevelKit) -> None:
    ids = byte_level.ids("ok", CJK, EMOJI)
    assert whole(byte_level, ids, FinishReason.LENGTH, stop=("中",)) == ("ok", 4, True)


def test_cut_off_bytes_come_once_at_the_end(byte_level: ByteLevelKit) -> None:
    ids = byte_level.ids("ok", EMOJI[:2])
    assert stream(byte_level, ids, FinishReason.LENGTH) == (["ok", "", "\ufffd"], 3, False)
    assert whole(byte_level, ids, FinishReason.LENGTH, stop=("\ufffd",)) == ("ok", 3, True)


@pytest.mark.parametrize("stop", [(), ("zzz",)])
@pytest.mark.parametrize(("include", "text"), [(False, "Hello"), (True, "Hellox")])
def test_text_of_a_stop_token(byte_level: ByteLevelKit, stop: tuple[str, ...], include: bool, text: str) -> None:
    """A stop token that is ordinary text counts as a token and is shown on demand only; EOS has no text."""
    params = {"stop": stop, "include_stop_str_in_output": include}
    assert whole(byte_level, byte_level.ids("Hello", "x"), FinishReason.STOP, **params) == (text, 2, False)
    ended = [*byte_level.ids("Hello"), byte_level.id("</s>")]
    assert whole(byte_level, ended, FinishReason.STOP, **params) == ("Hello", 2, False)


def test_a_stop_token_behind_a_stop_string_does_not_count(byte_level: ByteLevelKit) -> None:
    assert whole(byte_level, byte_level.ids("G", "x", "J"), FinishReason.STOP, stop=("x",)) == ("G", 2, True)


def test_an_end_without_a_token(byte_level: ByteLevelKit) -> None:
    output = OutputText(byte_level.tokenizer, RequestParams())
    assert output.push(np.array(byte_level.ids("ok", EMOJI[:1]), dtype=np.int32)) == ("ok", 2, False)
    assert output.push(np.array([-1], dtype=np.int32), FinishReason.ABORT) == ("\ufffd", 0, False)


def test_late_tokens_are_dropped(byte_level: ByteLevelKit) -> None:
    output = OutputText(byte_level.tokenizer, RequestParams(stop=("x",)))
    assert output.push(byte_level.ids("x", "ok")) == ("", 1, True)
    assert output.is_finished
    assert output.push(byte_level.ids("ok"), FinishReason.LENGTH) == ("", 0, False)


def test_s9_padded_tail_counts_but_has_no_text(byte_level: ByteLevelKit) -> None:
    ids = [*byte_level.ids("ok"), byte_level.tokenizer.vocab_size + 5, *byte_level.ids("x")]
    assert whole(byte_level, ids, FinishReason.LENGTH) == ("okx", 3, False)


@pytest.mark.parametrize("kit_name", ["byte_level", "byte_fallback"])
@given(data=st.data())
@MANY
def test_streamed_and_whole_answers_are_equal(
    kit_name: str, byte_level: ByteLevelKit, byte_fallback: ByteFallbackKit, data: st.DataObject
) -> None:
    kit: Kit = byte_level if kit_name == "byte_level" else byte_fallback
    ids = data.draw(st.lists(st.integers(0, kit.tokenizer.vocab_size + 3), min_size=1, max_size=30))
    stops = data.draw(st.lists(st.sampled_from(["x", "xG", "\ufffd", "ab", "o", "ld", "kx"]), max_size=3, unique=True))
    params = {
        "stop": tuple(stops),
        "min_tokens": data.draw(st.integers(0, 8)),
        "include_stop_str_in_output": data.draw(st.booleans()),
    }
    reason = data.draw(st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]))
    texts, num_tokens, is_stopped = stream(kit, ids, reason, **params)
    assert ("".join(texts), num_tokens, is_stopped) == whole(kit, ids, reason, **params)
    if not stops and reason is FinishReason.LENGTH:
        assert ("".join(texts), num_tokens) == (
            kit.full_decode(i for i in ids if i < kit.tokenizer.vocab_size),
            len(ids),
        )


def test_special_tokens_are_shown_where_asked_for(byte_level: ByteLevelKit, byte_fallback: ByteFallbackKit) -> None:
    """Against the library's own decoding of everything at once."""
    params = RequestParams(skip_special_tokens=False)
    for kit in (byte_level, byte_fallback):
        bos, eos = kit.id("<s>"), kit.id("</s>")
        word = kit.ids("Hello", "x")
        ids = [*word, eos, bos, *word]
        text = OutputText(kit.tokenizer, params, word)
        pushed = "".join(text.push([token]).text for token in ids) + text.push([eos], FinishReason.STOP).text
        shown = kit.backend.decode([*word, *ids], skip_special_tokens=False)
        assert pushed == shown[len(kit.backend.decode(word)) :]
        assert "</s><s>" in pushed
        assert not pushed.endswith("</s>")  # a stop token is shown with include_stop_str_in_output only
        both = RequestParams(skip_special_tokens=False, include_stop_str_in_output=True)
        assert OutputText(kit.tokenizer, both, word).push([*word, eos], FinishReason.STOP).text.endswith("</s>")


@pytest.mark.parametrize("include", [False, True])
def test_stop_reason_of_a_string(byte_level: ByteLevelKit, include: bool) -> None:
    params = RequestParams(stop=("zzz", "top", " stop"), include_stop_str_in_output=include)
    text = OutputText(byte_level.tokenizer, params)
    assert not text.push(byte_level.ids("Hello")).is_stopped
    assert text.stop_reason is None
    assert text.push(byte_level.ids(" stop", "x")).is_stopped
    assert text.stop_reason == " stop"  # of those that end together the longest


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_stop_reason_of_ids(byte_level: ByteLevelKit, stop: tuple[str, ...]) -> None:
    x, eos = byte_level.ids("x")[0], byte_level.id("</s>")
    params = RequestParams(stop_token_ids=(x,), stop=stop)
    for ids, reason, expected in [
        ([5, x], FinishReason.STOP, x),
        ([5, eos], FinishReason.STOP, None),  # the model's own end
        ([5, x], FinishReason.LENGTH, None),
    ]:
        text = OutputText(byte_level.tokenizer, params)
        text.push(ids, reason)
        assert text.stop_reason == expected


def test_a_failure_of_the_text_reaches_whoever_pushes(byte_level: ByteLevelKit) -> None:
    def fail(point: str) -> None:
        raise RuntimeError(point)

    text = OutputText(byte_level.tokenizer, RequestParams())
    with fault_points.armed(fail), pytest.raises(RuntimeError, match=r"front_end\.text"):
        text.push(byte_level.ids("x"))
