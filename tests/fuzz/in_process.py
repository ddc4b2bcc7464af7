"""Fuzzed requests through the front end's parsing, without a server: the wire, the tokenizer, bad words, chat.

Whatever a client sends ends as a checked request or as an `InvalidRequestError` whose text is for the client.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from cb_backend.contracts.errors import InvalidRequestError
from cb_backend.contracts.messages import AddRequest, decode_front_end_message, encode, token_ids_to_bytes
from cb_backend.front_end.text.bad_words import bad_word_ids
from cb_backend.front_end.text.chat import Chat
from cb_backend.front_end.text.prompt import prompt_token_ids
from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.front_end.wire.protocol import parse_request
from cb_backend.front_end.wire.token_choice import check_token_choice
from tests.fuzz.mutations import FuzzedRequest, make_request
from tests.server.cases.case import assert_clean

MAX_MODEL_LEN = 128
MAX_SECONDS = 2.0  # of one request, of this thread's own time: the machine may do other things too


class FrontEnd:
    """What stands between the server and the engine in a front end."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """`folder` holds the tokenizer, with a chat template."""
        self._tokenizer = Tokenizer(folder)
        self._chat = Chat(self._tokenizer)
        self._vocab_size = vocab_size

    def close(self) -> None:
        self._chat.close()

    def take(self, request: FuzzedRequest) -> str | None:
        """None, or the text of the refusal. Anything else that is raised is a finding."""
        try:
            generate = parse_request(request.inputs, request.parameters, self._vocab_size)
            ids = prompt_token_ids(generate, self._tokenizer, self._chat, MAX_MODEL_LEN)
            rules = generate.params.token_rules(bad_word_ids(generate.params.bad_words, self._tokenizer))
            check_token_choice(rules[0], self._tokenizer.eos_token_ids)
        except InvalidRequestError as error:
            return str(error)
        # What was let through is sound: it fits, it is in the vocabulary, and the engine can read it.
        assert 0 < len(ids) < MAX_MODEL_LEN
        assert 0 <= min(ids) <= max(ids) < self._vocab_size
        assert len(rules) == generate.params.n
        for each in rules:
            each.check(self._vocab_size)
            message = AddRequest(1, token_ids_to_bytes(ids), each, generate.scheduling)
            assert decode_front_end_message(encode(message)) == message
        return None


def fuzz(front_end: FrontEnd, seed: int, start: int, count: int) -> Counter[str]:
    """Requests start to start + count of a seed. Returns how many were `accepted` and `refused`, and the slowest ms.

    Raises `AssertionError` that names seed and index of the first finding.
    """
    counts: Counter[str] = Counter()
    slowest = 0.0
    for index in range(start, start + count):
        request = make_request(seed, index)
        began = time.thread_time()
        try:
            refusal = front_end.take(request)
            if refusal is not None:
                assert refusal
                assert_clean(refusal)
                refusal.encode()
        except Exception as error:
            raise AssertionError(f"seed {seed}, request {index}: {error!r}\n{shown(request)}") from error
        seconds = time.thread_time() - began
        assert seconds < MAX_SECONDS, f"seed {seed}, request {index} took {seconds:.1f} s\n{shown(request)}"
        slowest = max(slowest, seconds)
        counts["accepted" if refusal is None else "refused"] += 1
    counts["slowest_ms"] = round(slowest * 1000)
    return counts


def shown(request: FuzzedRequest) -> str:
    with np.printoptions(threshold=sys.maxsize):
        return repr(request)[:2000]
