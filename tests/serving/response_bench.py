"""A responder without an engine: the test plays the engine client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cb_backend.contracts.request_params import RequestParams
from cb_backend.contracts.scheduling import SchedulingParams
from cb_backend.front_end.text.logprobs import OutputLogprobs, PromptFigures
from cb_backend.front_end.text.output_text import OutputText
from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.front_end.wire.protocol import GenerateRequest
from cb_backend.serving.live_request import LiveAnswer, LiveRequest
from cb_backend.serving.responder import Responder
from cb_backend.serving.text_answer import TextAnswer
from tests.fakes.counting_runner import write_byte_tokenizer
from tests.serving.fake_server import ResponseSender

PROMPT_IDS = list(b"prompt ")


class Bench:
    """Opens requests on it; `cancelled` are the ids that it ended at the engine."""

    def __init__(self, folder: Path, **options: float) -> None:
        write_byte_tokenizer(folder)
        self.tokenizer = Tokenizer(folder)
        self.cancelled: list[int] = []
        self.responder = Responder(2, self.cancelled.extend, **options)  # type: ignore[arg-type]
        self.next_id = 0

    def open(
        self,
        send_s: float = 0.0,
        is_stream: bool = True,
        start_others: Callable[[], None] | None = None,
        **params: object,
    ) -> tuple[LiveRequest, ResponseSender]:
        sender = ResponseSender(send_s)
        self.next_id += 1
        live = self.responder.open(self.next_id, sender)
        generate = GenerateRequest(
            scheduling=SchedulingParams(),
            text="prompt ",
            params=RequestParams(**{"max_tokens": 1000, **params}),
            is_stream=is_stream,
            is_input_prepended=not is_stream,
            return_finish_reason=True,
            return_num_input_tokens=True,
            return_num_output_tokens=True,
            return_cumulative_logprob=True,
        )
        answers = [
            LiveAnswer(live, 1000 * index + self.next_id, self._answer(generate, is_first=index == 0))
            for index in range(generate.params.n)
        ]
        may_end = bool(generate.params.stop)
        live.begin(answers, len(PROMPT_IDS), is_stream=is_stream, may_end_itself=may_end, start_others=start_others)
        return live, sender

    def _answer(self, generate: GenerateRequest, is_first: bool) -> TextAnswer:
        num_top = generate.params.prompt_logprobs if is_first else None
        return TextAnswer(
            generate,
            OutputText(self.tokenizer, generate.params),
            None if generate.params.logprobs is None else OutputLogprobs(self.tokenizer, None),
            len(PROMPT_IDS) if is_first else None,
            None if num_top is None else PromptFigures(self.tokenizer, PROMPT_IDS, num_top),
        )
