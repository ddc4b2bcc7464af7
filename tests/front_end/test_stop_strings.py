"""Stop strings against a naive reference, whatever the token borders."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cb_backend.front_end.text.stop_strings import StopStringMatcher


def run(pieces: list[str], stops: list[str], *, include: bool = False, num_passed: int = 0) -> tuple[list[str], bool]:
    """Push the pieces; the first `num_passed` do not count. Returns what was sent and whether it stopped."""
    matcher = StopStringMatcher(stops, include)
    sent = []
    for number, piece in enumerate(pieces):
        assert matcher.matched is None, "though one may have been passed over"
        text, is_stopped = matcher.push(piece, number >= num_passed)
        sent.append(text)
        if is_stopped:
            assert (matcher.push("more"), matcher.flush()) == (("", True), ""), "nothing comes after a stop"
            assert matcher.matched in stops
            return sent, True
    return [*sent, matcher.flush()], False


def naive(pieces: list[str], stops: list[str], *, include: bool, num_passed: int) -> tuple[str, bool]:
    """Try every end in order; at an end, the longest stop string."""
    text = "".join(pieces)
    num_passed_characters = len("".join(pieces[:num_passed]))
    for end in range(num_passed_characters + 1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end if include else end - max(lengths)], True
    return text, False


def test_b1_no_piece_of_a_stop_string_is_sent() -> None:
    assert run(["DEF", "G", "HI", "J"], ["DEFGHIJ"]) == (["", "", "", ""], True)


def test_b2_borders_do_not_matter_and_the_rest_goes() -> None:
    assert run(["a b", "c!d"], ["bc!"]) == (["a ", ""], True)
    assert run(["a b", "c!d"], ["bc!"], include=True) == (["a b", "c!"], True)


def test_b6_text_held_back_comes_out_at_the_end() -> None:
    stop = "abcdefghijklmnopqrstuvwxyz0123"
    text = stop[:29]
    sent, is_stopped = run(list(text), [stop])
    assert (sent[-1], "".join(sent), is_stopped) == (text, text, False)


def test_b6_only_what_may_become_a_stop_string_is_held() -> None:
    assert run(["aab", "aac"], ["aabaab"]) == (["", "aabaac", ""], False)
    assert run(["xaab", "y"], ["aabaab"]) == (["x", "aaby", ""], False)


def test_b7_a_stop_word_inside_a_token() -> None:
    assert run(["please", " stop", " now"], ["stop"]) == (["please", " "], True)


def test_c6_a_match_before_min_tokens_is_passed_over() -> None:
    pieces = ["a", "x", "b", "c", "d", "x", "e"]
    sent, is_stopped = run(pieces, ["x"], num_passed=4)
    assert ("".join(sent), is_stopped) == ("axbcd", True)


def test_c6_a_match_that_begins_before_and_ends_after_counts() -> None:
    assert run(["ab", "cd"], ["bc"], num_passed=1) == (["a", ""], True)


def test_earliest_end_wins_then_the_longest() -> None:
    assert run(["abcd"], ["abcd", "bc"]) == (["a"], True)
    assert run(["xDEFy"], ["EF", "DEF"]) == (["x"], True)


def test_nothing_is_sent_after_a_stop() -> None:
    matcher = StopStringMatcher(["."])
    assert [matcher.push("a.b"), matcher.push("c")] == [("a", True), ("", True)]
    assert matcher.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    assert run(["a", "b"], []) == (["a", "b", ""], False)


@pytest.mark.parametrize("stop", ["^", "]", "-", "\\", "[a-z]", ".", "\n", "é", "😀", "\ufffd"])
def test_stop_strings_are_plain_text(stop: str) -> None:
    assert run(["some text", f"x{stop}y"], [stop]) == (["some text", "x"], True)


letters = st.text("ab", max_size=6)


@given(
    pieces=st.lists(letters, max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
    include=st.booleans(),
    num_passed=st.integers(0, 12),
)
@settings(max_examples=500, deadline=None)
def test_equals_the_naive_search(pieces: list[str], stops: list[str], include: bool, num_passed: int) -> None:
    sent, is_stopped = run(pieces, stops, include=include, num_passed=num_passed)
    assert ("".join(sent), is_stopped) == naive(pieces, stops, include=include, num_passed=num_passed)


@given(pieces=st.lists(letters, max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1))
@settings(max_examples=300, deadline=None)
def test_everything_certain_is_sent_at_once(pieces: list[str], stops: list[str]) -> None:
    """After each push, what is held is the longest end that begins a stop string, not more."""
    matcher, text, sent = StopStringMatcher(stops), "", ""
    for piece in pieces:
        delta, is_stopped = matcher.push(piece)
        if is_stopped:
            return
        text, sent = text + piece, sent + delta
        can_become = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        assert text[len(sent) :] == text[len(text) - max(can_become, default=0) :]


def test_cost_is_linear_on_the_worst_text() -> None:
    """16 stop strings of 1,024 equal characters, one short of a match over and over."""
    stops = ["a" * 1023 + character for character in "bcdefghijklmnopq"]
    matcher = StopStringMatcher(stops)
    text = ("a" * 1023 + "z") * 60
    start = time.thread_time()
    sent = "".join(matcher.push(text[i : i + 4])[0] for i in range(0, len(text), 4)) + matcher.flush()
    assert time.thread_time() - start < 3.0
    assert sent == text
