"""A request's output: token ids in, text to send out. Streamed and whole answers take this one path and read the same.

Puts the detokenizer and the stop strings together and decides which tokens count. It does not know how text is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cb_backend.contracts.request import FinishReason
from cb_backend.contracts.request_params import RequestParams
from cb_backend.front_end.text.detokenizer import IncrementalDetokenizer
from cb_backend.front_end.text.stop_strings import StopStringMatcher
from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.support.fault_points import reach


class TextDelta(NamedTuple):
    """What one push adds to the answer. (A tuple: one is made for every token of every stream.)"""

    text: str  # may be empty: half a character, or what may become a stop string
    num_tokens: int  # how many of the pushed tokens count as output
    is_stopped: bool  # a stop string is complete: the answer ends here with reason "stop", whatever else was said


class OutputText:
    """The output text of one request; state is a few bytes and dies with the object."""

    def __init__(self, tokenizer: Tokenizer, params: RequestParams, prompt_ids: Sequence[int] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_ids, params.skip_special_tokens, params.spaces_between_special_tokens
        )
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._stop_reason: int | str | None = None
        self._stops = StopStringMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._min_tokens = params.min_tokens
        self._shows_stop_token = params.include_stop_str_in_output
        self._num_tokens = 0  # output tokens so far; only counted where stop strings need it
        self._is_finished = False

    @property
    def is_finished(self) -> bool:
        """Whether the answer has ended, by a stop string or a finish reason; later tokens are dropped."""
        return self._is_finished

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string, or the one of `stop_token_ids`, that ended the answer; None for any other end."""
        return self._stop_reason

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason = FinishReason.NONE) -> TextDelta:
        """Take the next tokens; with a finish reason they are the last, and everything held back comes out.

        Negative ids stand for no token. With `FinishReason.STOP` the last id is a stop token: it counts, but its
        text is shown only with `include_stop_str_in_output` (a special token's only without
        `skip_special_tokens`). A stop string counts
        if its last character comes with a token after the first `min_tokens`; the token that completes it is the
        last that counts.
        """
        reach("front_end.text")
        if self._is_finished:
            return TextDelta("", 0, False)
        ids = [int(token_id) for token_id in token_ids if token_id >= 0]
        is_last = finish_reason != FinishReason.NONE
        if finish_reason == FinishReason.STOP and ids and ids[-1] in self._stop_token_ids:
            self._stop_reason = ids[-1]
        num_hidden = 0
        if finish_reason == FinishReason.STOP and ids and not self._shows_stop_token:
            ids.pop()
            num_hidden = 1
        delta = (self._push_plain if self._stops is None else self._push_matching)(ids, is_last)
        self._is_finished = is_last or delta.is_stopped
        if delta.is_stopped and self._stops is not None:
            self._stop_reason = self._stops.matched
        if num_hidden and not delta.is_stopped:
            return delta._replace(num_tokens=delta.num_tokens + num_hidden)
        return delta

    def _push_plain(self, ids: list[int], is_last: bool) -> TextDelta:
        text = self._detokenizer.push(ids)
        if is_last:
            text += self._detokenizer.flush()
        return TextDelta(text, len(ids), False)

    def _push_matching(self, ids: list[int], is_last: bool) -> TextDelta:
        """One token at a time: the token that completes a stop string must be known."""
        assert self._stops is not None
        parts: list[str] = []
        for num_pushed, token_id in enumerate(ids, start=1):
            self._num_tokens += 1
            text, is_stopped = self._stops.push(self._detokenizer.push((token_id,)), self._counts)
            parts.append(text)
            if is_stopped:
                return TextDelta("".join(parts), num_pushed, True)
        if is_last:
            text, is_stopped = self._stops.push(self._detokenizer.flush(), self._counts)
            parts += [text, self._stops.flush()]
            return TextDelta("".join(parts), len(ids), is_stopped)
        return TextDelta("".join(parts), len(ids), False)

    @property
    def _counts(self) -> bool:
        return self._num_tokens > self._min_tokens
