"""Answers in process: the tokens of the outside opinion, and the rules of served requests."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from cb_backend import LLM, SamplingParams
from cb_backend.contracts.errors import ConfigError, InvalidRequestError, UnavailableError
from tests.llm.conftest import ARGUMENTS
from tests.server.tiny_checkpoint import Reference

PROMPTS = ["the quick brown fox", "def add(a, b):", "Grüße aus Köln", "seven wizards", "jumps", "toxic brew for"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def is_idle(llm: LLM) -> bool:
    """Nothing is owed, and every block is free."""
    stats = llm._engine.stats()
    return not llm._sinks and stats.num_running + stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


def test_answers_are_those_of_transformers(llm: LLM, checkpoint: Path) -> None:
    """More prompts than slots, in their order."""
    reference = Reference(checkpoint)
    results = llm.generate(PROMPTS, GREEDY)
    assert [each.prompt for each in results] == PROMPTS
    assert [each.outputs[0].text for each in results] == [reference.greedy_text(prompt, 12) for prompt in PROMPTS]
    assert [each.prompt_token_ids for each in results] == [reference.tokenizer.encode(p).ids for p in PROMPTS]
    assert is_idle(llm)


def test_streams_add_up_to_the_whole(llm: LLM) -> None:
    whole = [each.outputs[0] for each in llm.generate(PROMPTS, GREEDY)]
    texts, ids, reasons = [""] * len(PROMPTS), [[] for _ in PROMPTS], [None] * len(PROMPTS)
    for chunk in llm.stream(PROMPTS, GREEDY):
        texts[chunk.prompt_index] += chunk.output.text
        ids[chunk.prompt_index] += chunk.output.token_ids
        reasons[chunk.prompt_index] = chunk.output.finish_reason
    assert texts == [output.text for output in whole]
    assert ids == [output.token_ids for output in whole]
    assert reasons == [output.finish_reason for output in whole]


def test_a_prompt_may_be_ids_or_messages(llm: LLM) -> None:
    (text,) = llm.generate(PROMPTS[0], GREEDY)
    (ids,) = llm.generate(text.prompt_token_ids, GREEDY)
    assert ids.outputs[0].token_ids == text.outputs[0].token_ids
    messages = [{"role": "user", "content": "jumps"}]
    (chat,), (arguments,) = llm.generate(messages, GREEDY), llm.generate({"messages": messages}, GREEDY)
    (rendered,) = llm.generate("user: jumps<|endoftext|>assistant:", GREEDY)
    assert chat.prompt_token_ids == rendered.prompt_token_ids == arguments.prompt_token_ids
    assert len(llm.generate([messages, "jumps", [5, 6]], GREEDY)) == 3
    assert llm.generate([]) == []


def test_a_stop_string_ends_the_answer(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].text
    stop = whole[4:6]
    output = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12, stop=stop))[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (whole[: whole.index(stop)], "stop", stop)
    assert is_idle(llm)


def test_parameters_may_be_one_a_prompt(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=length) for length in (1, 5)]
    results = llm.generate(PROMPTS[:2], each)
    assert [len(result.outputs[0].token_ids) for result in results] == [1, 5]
    with pytest.raises(InvalidRequestError, match="2 prompts and 1 sampling parameters"):
        llm.generate(PROMPTS[:2], each[:1])


def test_n_answers_have_seeds_of_their_own(llm: LLM) -> None:
    (result,) = llm.generate("jumps", SamplingParams(n=3, seed=7, max_tokens=8))
    assert [output.index for output in result.outputs] == [0, 1, 2]
    alone = [llm.generate("jumps", SamplingParams(seed=7 + i, max_tokens=8))[0].outputs[0] for i in range(3)]
    assert [output.token_ids for output in result.outputs] == [output.token_ids for output in alone]


def test_log_probabilities_come_with_the_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=0)
    (result,) = llm.generate(PROMPTS[0], params)
    output = result.outputs[0]
    assert output.logprobs is not None
    assert result.prompt_logprobs is not None
    assert [next(iter(figures)) for figures in output.logprobs] == output.token_ids
    sampled = [figures[token]["logprob"] for figures, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(sampled))
    assert all(figures[token]["rank"] == 1 for figures, token in zip(output.logprobs, output.token_ids, strict=True))
    own = [None if figures is None else next(iter(figures)) for figures in result.prompt_logprobs]
    assert own == [None, *result.prompt_token_ids[1:]]


def test_structured_output_is_followed(llm: LLM) -> None:
    params = SamplingParams(temperature=0, structured_outputs={"choice": ["fox", "dog"]})
    assert llm.generate("the lazy", params)[0].outputs[0].text in ("fox", "dog")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    (result,) = llm.generate("x", SamplingParams(temperature=0, structured_outputs={"json": schema}))
    assert isinstance(json.loads(result.outputs[0].text)["a"], bool)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("x", SamplingParams(temperature=-1), "temperature must be between 0 and 100, got -1"),
        ("x" * 9000, GREEDY, "prompt"),
        ([5, 384], GREEDY, "token id 384 in 'input_ids' is outside the vocabulary"),
        ([-1], GREEDY, "token id -1"),
        (["ok", 3.5], GREEDY, "prompt 1: a prompt must be a text, token ids or chat messages, got 3.5"),
        ([{"role": "Nobody!", "content": "x"}], GREEDY, "role"),
        ("x", SamplingParams(stop=[object()]), "stop is .* which cannot be written as JSON"),
        ("x", SamplingParams(n=2, temperature=0), "all answers are the same"),
        (None, GREEDY, "a prompt must be a text, token ids or chat messages, got None"),
        (5, GREEDY, "a prompt must be a text, token ids or chat messages, got 5"),
        (np.array(5), GREEDY, "a prompt must be a text, token ids or chat messages, got array"),
        (b"abc", GREEDY, "a prompt must be a text, token ids or chat messages, got b'abc'"),
        ([b"abc"], GREEDY, "a prompt must be a text, token ids or chat messages, got b'abc'"),
        ({"prompt": "x"}, GREEDY, "an object has 'messages' .* got 'prompt'; give a text or token ids as they are"),
        ("x", 3, "params must be SamplingParams, or a list of one a prompt, got 3"),
        ("x", {"temperature": 0}, "params must be SamplingParams, or a list of one a prompt, got {'temperature': 0}"),
        ("x", ["greedy"], "params must be SamplingParams, got str"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(llm: LLM, prompt: object, params: object, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        llm.generate(prompt, params)
    assert is_idle(llm)


def test_a_late_failure_is_in_its_own_output(llm: LLM) -> None:
    """Neighbours keep their answers; a stream raises it."""
    bad = SamplingParams(structured_outputs={"regex": "("})
    fine, failed = llm.generate(["jumps", "x"], [GREEDY, bad])
    assert (fine.error, fine.outputs[0].finish_reason) == (None, "length")
    assert isinstance(failed.error, InvalidRequestError)
    assert failed.outputs[0].finish_reason is None
    with pytest.raises(InvalidRequestError, match="regex"):
        list(llm.stream("x", bad))
    assert is_idle(llm)


def test_leaving_a_stream_ends_its_prompts(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    next(stream)
    assert llm._sinks
    stream.close()
    llm.generate("jumps", GREEDY)
    assert is_idle(llm)


def test_ctrl_c_ends_the_call_between_steps(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    # Whoever runs the tests in the background of a shell may have Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS * 50, params)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert llm.generate(PROMPTS[0], GREEDY)[0].error is None
    assert is_idle(llm)


def test_a_full_queue_is_waited_for(checkpoint: Path) -> None:
    with LLM(str(checkpoint), **{**ARGUMENTS, "max_num_seqs": 1, "max_queue_size": 1}) as llm:
        results = llm.generate(PROMPTS, SamplingParams(n=2, seed=1, max_tokens=4, ignore_eos=True))
    assert [result.error for result in results] == [None] * len(PROMPTS)
    assert all(len(output.token_ids) == 4 for result in results for output in result.outputs)


def test_a_closed_one_says_so(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), **ARGUMENTS)
    stream = llm.stream("jumps", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(UnavailableError, match="closed"):
        list(stream)
    with pytest.raises(UnavailableError, match="closed; make a new one"):
        llm.generate("x")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_modle_len": 5}, "unknown engine argument 'max_modle_len'; did you mean 'max_model_len'"),
        ({"data_parallel_size": 2}, "'data_parallel_size' is for a served model"),
        ({"block_size": 0}, "block_size is 0; it must be at least 1"),
        ({"adapters": ["x"]}, r"adapters must be folders by their names .* got \['x'\]"),
        ({"adapters": {"x": 3}}, "adapters must be folders by their names, got 'x': 3"),
        ({"adapters": {3: "x"}}, "adapters must be folders by their names, got 3: 'x'"),
    ],
)
def test_wrong_arguments_are_named(checkpoint: Path, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(checkpoint), **arguments)


@pytest.mark.parametrize("model", [None, 3, ["a"]])
def test_what_is_no_name_of_a_model_is_not_looked_for(model: object) -> None:
    with pytest.raises(ConfigError, match="model must be a folder, a GGUF file or a hub id, got "):
        LLM(model)


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))
