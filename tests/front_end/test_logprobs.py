"""Log-probabilities as the client gets them: vllm_backend's JSON, cut at the same token as the text."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from cb_backend.contracts.packed_logprobs import ChunkLogprobs, StepLogprobs, TokenLogprob, pack
from cb_backend.contracts.request import FinishReason
from cb_backend.contracts.request_params import RequestParams
from cb_backend.contracts.step import PromptLogprobs, TokenLogprobs
from cb_backend.front_end.text.logprobs import OutputLogprobs, PromptFigures
from cb_backend.front_end.text.output_text import OutputText
from tests.front_end.conftest import CJK, ByteFallbackKit, ByteLevelKit, Kit


def figures(ids: list[int], values: list[float], sampled: float, rank: int) -> TokenLogprob:
    return TokenLogprob(sampled, {"rank": rank}, ids, values)


def test_json_of_vllm_backend(byte_level: ByteLevelKit) -> None:
    """The chosen token first, then the likeliest ones; equals share a rank (case F9)."""
    hello, world, x, ok = byte_level.ids("Hello", " world", "x", "ok")
    out = OutputLogprobs(byte_level.tokenizer, 3)
    top = [world, hello, x, ok]  # the step computed one more than this request asked for
    out.push(
        [x, ok], [figures(top, [-1.0, -1.5, -1.5, -2.5], -1.5, 2), figures(top, [-1.0, -1.5, -1.5, -2.5], -2.5, 4)]
    )
    assert json.loads(out.take_json()) == [
        {
            str(x): {"logprob": -1.5, "rank": 2, "decoded_token": "x"},
            str(world): {"logprob": -1.0, "rank": 1, "decoded_token": " world"},
            str(hello): {"logprob": -1.5, "rank": 2, "decoded_token": "Hello"},
        },
        {
            str(ok): {"logprob": -2.5, "rank": 4, "decoded_token": "ok"},
            str(world): {"logprob": -1.0, "rank": 1, "decoded_token": " world"},
            str(hello): {"logprob": -1.5, "rank": 2, "decoded_token": "Hello"},
            str(x): {"logprob": -1.5, "rank": 2, "decoded_token": "x"},
        },
    ]
    assert out.cumulative == -4.0
    assert out.take_json() == "[]"


def test_f6_zero_gives_the_chosen_token_alone(byte_level: ByteLevelKit) -> None:
    (x,) = byte_level.ids("x")
    out = OutputLogprobs(byte_level.tokenizer, 0)
    out.push([x], [figures([5, 6], [-0.5, -0.6], -3.0, 9)])
    assert json.loads(out.take_json()) == [{str(x): {"logprob": -3.0, "rank": 9, "decoded_token": "x"}}]


def test_without_the_parameter_there_is_a_sum_and_null(byte_level: ByteLevelKit) -> None:
    out = OutputLogprobs(byte_level.tokenizer, None)
    out.push([1, 2], [figures([], [], -0.5, 1), figures([], [], -0.25, 1)])
    assert (out.take_json(), out.cumulative) == ("null", -0.75)


def test_minus_infinity_is_still_json(byte_level: ByteLevelKit) -> None:
    out = OutputLogprobs(byte_level.tokenizer, 1)
    out.push([1], [figures([2], [-math.inf], -math.inf, 1)])
    assert "Infinity" not in (text := out.take_json())
    assert json.loads(text)[0]["1"]["logprob"] == -9999.0


def test_e7_special_tokens_are_told_apart(byte_level: ByteLevelKit, byte_fallback: ByteFallbackKit) -> None:
    """Case E7: ids stand next to strings, and special tokens are written out."""
    for kit in (byte_level, byte_fallback):
        bos, eos = kit.id("<s>"), kit.id("</s>")
        out = OutputLogprobs(kit.tokenizer, 2)
        out.push([eos], [figures([eos, bos], [-0.1, -3.0], -0.1, 1)])
        entry = json.loads(out.take_json())[0]
        assert [entry[str(i)]["decoded_token"] for i in (eos, bos)] == ["</s>", "<s>"]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
def test_f5_the_tokens_texts_joined_are_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    """Case F5: a client that adds up the tokens' lengths points at the right characters."""
    kit: Kit = request.getfixturevalue(kind)
    prompt = kit.backend.encode("x").ids
    ids = [i for i in kit.backend.encode("Hello world x").ids if i not in kit.tokenizer.pieces.special_ids]
    text = OutputText(kit.tokenizer, RequestParams(), prompt).push(ids, FinishReason.LENGTH).text
    assert "".join(kit.tokenizer.token_text(i) for i in ids) == text
    assert kit.tokenizer.token_text(10**6) == kit.tokenizer.token_text(-1) == ""


def test_half_a_character_is_marked(byte_level: ByteLevelKit, byte_fallback: ByteFallbackKit) -> None:
    for kit in (byte_level, byte_fallback):
        for token in kit.ids(CJK[:1]):
            assert kit.tokenizer.token_text(token) == "\ufffd"


def test_a_stop_string_cuts_figures_and_text_at_one_token(byte_level: ByteLevelKit) -> None:
    ids = byte_level.ids("Hello", " stop", "x")
    text = OutputText(byte_level.tokenizer, RequestParams(stop=("stop",)))
    out = OutputLogprobs(byte_level.tokenizer, 0)
    delta = text.push(ids)
    out.push(ids[: delta.num_tokens], [figures([], [], -float(i), 1) for i in (1, 2, 3)][: delta.num_tokens])
    assert (delta.text, delta.num_tokens, out.cumulative) == ("Hello ", 2, -3.0)
    assert [list(entry) for entry in json.loads(out.take_json())] == [[str(i)] for i in ids[:2]]


def test_figures_cross_the_process_border() -> None:
    logprobs = TokenLogprobs(
        owners=np.array([1, 3, 4]),
        sampled=np.array([-0.5, -1.0, -2.0], np.float32),
        figures={"rank": np.array([1, 2, 3], np.int32), "entropy": np.array([0.5, 1.0, 0.25], np.float32)},
        top_ids=np.array([[7, 8], [9, 10], [11, 12]], np.int32),
        top_logprobs=np.array([[-0.5, -1.5], [-0.25, -1.0], [-0.125, -8.0]], np.float32),
    )
    packed = pack(logprobs.given_to(np.array([70, 80, 90]), np.array([True, False, True])))
    assert isinstance(packed, StepLogprobs)
    assert dict(packed.by_owner()) == {
        70: TokenLogprob(-0.5, {"rank": 1, "entropy": 0.5}, [7, 8], [-0.5, -1.5]),
        90: TokenLogprob(-2.0, {"rank": 3, "entropy": 0.25}, [11, 12], [-0.125, -8.0]),
    }


def chunk(first: int, given: list[float], ranks: list[int], top: list[list[tuple[int, float]]]) -> ChunkLogprobs:
    ids = np.array([[token for token, _ in row] for row in top], np.int32)
    values = np.array([[value for _, value in row] for row in top], np.float32)
    packed = pack(
        PromptLogprobs(
            np.array([1]), first, np.array(given, np.float32), {"rank": np.array(ranks, np.int32)}, ids, values
        )
    )
    assert isinstance(packed, ChunkLogprobs)
    return packed


def test_f1_a_prompts_figures_in_vllms_form(byte_level: ByteLevelKit) -> None:
    """Case F1: the first is null; the given token comes first, then the likeliest; chunks in a row make one list."""
    hello, world, x = byte_level.ids("Hello", " world", "x")
    figures = PromptFigures(byte_level.tokenizer, [hello, world, x], 1)
    figures.push(chunk(1, [-2.0], [3], [[(x, -0.25), (hello, -0.5)]]))
    figures.push(chunk(2, [-0.125], [1], [[(x, -0.125), (hello, -4.0)]]))  # the step computed one more than asked for
    assert json.loads(figures.take_json()) == [
        None,
        {
            str(world): {"logprob": -2.0, "rank": 3, "decoded_token": " world"},
            str(x): {"logprob": -0.25, "rank": 1, "decoded_token": "x"},
        },
        {str(x): {"logprob": -0.125, "rank": 1, "decoded_token": "x"}},
    ]


def test_a_prompt_computed_anew_is_told_once(byte_level: ByteLevelKit) -> None:
    figures = PromptFigures(byte_level.tokenizer, byte_level.ids("x", "ok", "x"), 0)
    none: list[list[tuple[int, float]]] = [[]]
    figures.push(chunk(1, [-2.0], [3], none))
    figures.push(chunk(1, [-3.0, -4.0], [1, 2], none * 2))
    told = json.loads(figures.take_json())
    assert [next(iter(entry.values()))["logprob"] for entry in told[1:]] == [-3.0, -4.0]
    assert json.loads(PromptFigures(byte_level.tokenizer, [5], 4).take_json()) == [None]
