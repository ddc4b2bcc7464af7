"""Kinds A and B, the text of an answer: characters in pieces, broken bytes, stop strings over token borders."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.fakes.scripted_model import script, spell
from tests.server.cases.case import Case, over_transports
from tests.server.cases.conftest import Floor
from tests.server.cases.transports import TRANSPORTS, Reply, Wire

EMOJI = "😀".encode()
FAMILY = "👩\u200d👩\u200d👧"  # three emoji that joiners make one
LONG_STOPS = {"stop": ["never matches this, thirty chars", "nor does that one, thirty chars"]}


def unbroken(reply: Reply) -> None:
    assert "\ufffd" not in reply.text()


test_streamed_text = over_transports(
    [
        Case("a1_cjk_in_pieces", script(*spell("中文字")), text="中文字", finish="stop", check=unbroken),
        Case("a1_joined_emoji", script(*spell(FAMILY)), {"max_tokens": 64}, text=FAMILY, check=unbroken),
        Case("a3_lone_continuation_byte", script(0x80, *spell("ok"), *EMOJI), text="\ufffdok😀", finish="stop"),
        Case("a3_start_of_another_character", script(*EMOJI[:2], *spell("é!")), text="\ufffdé!"),
        Case("a5_a_real_replacement_character", script("\ufffd", "o", "k"), text="\ufffdok"),
        Case("a5_its_bytes_alone", script(*spell("\ufffdok")), text="\ufffdok"),
        Case(
            "a5_cut_off_bytes_at_max_tokens",
            script("o", "k", *EMOJI),
            {"max_tokens": 4},
            text="ok\ufffd",
            finish="length",
            num_tokens=4,
        ),
    ]
)

test_stop_strings = over_transports(
    [
        Case("b1_stop_over_tokens", script("DEF", "G", "HI", "J", "x"), {"stop": "DEFGHIJ"}, text="", finish="stop"),
        Case("b1_almost", script("DEF", "G", "HI", "x"), {"stop": ["DEFGHIJ"]}, text="DEFGHIx", finish="stop"),
        Case("b2_text_after_it_goes", script("a b", "c!d"), {"stop": ["bc!"]}, text="a ", finish="stop", num_tokens=2),
        Case("b2_included", script("a b", "c!d"), {"stop": "bc!", "include_stop_str_in_output": True}, text="a bc!"),
        Case(
            "b6_held_text_at_length",
            script(*spell("never matches this, thirty char"), then="!"),
            {**LONG_STOPS, "max_tokens": 31},
            text="never matches this, thirty char",
            finish="length",
            num_tokens=31,
        ),
        Case("b6_held_text_at_the_end", script(*spell("nor does")), LONG_STOPS, text="nor does", finish="stop"),
        Case("b7_stop_word_inside_a_token", script("x", " stop", "x"), {"stop": "stop"}, text="x ", finish="stop"),
        Case("b7_part_of_a_word", script("x", " stop", "x"), {"stop": ["top"]}, text="x s", finish="stop"),
    ]
)

test_too_many_stops = over_transports(
    [
        Case("b9_500000_stop_strings", "x", {"stop": ["a"] * 500_000}, error="at most 131072|at most 128 KiB|at most"),
        Case("b9_17_stop_strings", "x", {"stop": [str(i) for i in range(17)]}, error="stop has 17 strings; at most 16"),
        Case("b9_50000_bad_words", "x", {"bad_words": ["a"] * 50_000}, error="at most"),
        Case("b9_a_long_stop_string", "x", {"stop": "a" * 1025}, error="a stop string has 1025 bytes; at most 1024"),
    ]
)


@pytest.mark.server
def test_b1_no_piece_of_a_stop_string_is_streamed(wire: Wire) -> None:
    prompt = script("x", "DEF", "G", "HI", "J")
    for transport in ("grpc_stream", "http_stream"):
        reply = wire.ask(transport, "scripted", {"stop": "DEFGHIJ", "temperature": 0}, text_input=prompt)
        assert [piece for piece in reply.pieces() if piece] == ["x"]


@pytest.mark.server
def test_a6_nothing_of_a_cancelled_emoji_is_left(wire: Wire, floor: Floor) -> None:
    """200 requests cancelled in the middle of a character; the ones after them are clean."""
    inputs = wire.inputs("grpc_stream", {"temperature": 0, "max_tokens": 4000}, {})
    inputs["text_input"] = script("x", *EMOJI[:2], then=EMOJI[2])

    def cut(_: int) -> None:
        call = wire.start("scripted", inputs)
        next(call)
        call.cancel()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(cut, range(200)))
    for transport in TRANSPORTS:
        reply = wire.ask(transport, "scripted", {"temperature": 0}, text_input=script(*EMOJI, "x"))
        assert reply.text() == "😀x"
    floor.wait_idle("scripted")
