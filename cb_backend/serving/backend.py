"""`TritonPythonModel`, the class that the server's Python backend drives. A door: it wires the rooms together.

`execute` copies each request's inputs, opens its line of responses and hands it to a few workers that parse,
tokenise and submit it; it returns at once and never raises (an exception out of it would leak shared memory). No
torch here: the process that the server starts must not be able to die, because a dead one leaves its streams silent.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.errors import CbError, ErrorCode, InvalidRequestError, UnavailableError
from cb_backend.contracts.messages import AddRequest, token_ids_to_bytes
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.front_end.adapters import make_adapters, with_places
from cb_backend.front_end.engines.adapter_trial import try_adapter
from cb_backend.front_end.engines.supervisor import EngineSupervisor
from cb_backend.front_end.text.bad_words import bad_word_ids
from cb_backend.front_end.text.chat import Chat
from cb_backend.front_end.text.logprobs import OutputLogprobs, PromptFigures
from cb_backend.front_end.text.output_text import OutputText
from cb_backend.front_end.text.pooled import pooled_token_ids
from cb_backend.front_end.text.prompt import prompt_token_ids
from cb_backend.front_end.text.tokenized import tokenize_prompt
from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.front_end.wire.pooling_request import (
    PoolingRequest,
    asks_for_pooling,
    check_generates,
    parse_pooling,
)
from cb_backend.front_end.wire.protocol import GenerateRequest, parse_request
from cb_backend.front_end.wire.token_choice import check_token_choice
from cb_backend.serving.cancellation import CancellationPoller
from cb_backend.serving.housekeeping import Housekeeping
from cb_backend.serving.live_request import Answer, LiveAnswer, LiveRequest
from cb_backend.serving.model_config import complete_model_config
from cb_backend.serving.model_parameters import check_parameter_names, sender_threads, slow_reader_timeout_s
from cb_backend.serving.pooled_answer import PooledAnswer
from cb_backend.serving.ready_answer import send_ready
from cb_backend.serving.responder import Responder
from cb_backend.serving.rest_request import answer_rest, asked_of_rest
from cb_backend.serving.server_watch import OWN_COMMAND_LINE, start_server_watch
from cb_backend.serving.stub_process import configure_logging, refuse_unusable_numpy
from cb_backend.serving.text_answer import TextAnswer
from cb_backend.support.native_paths import native_path, shown_path
from cb_backend.support.shared_regions import note_regions, remove_regions_of_the_dead
from cb_backend.support.version_folder import engine_folder, load_engine_config

NUM_WORKERS = 2
STOPPING = "the server is stopping this model; send the request to another server or again later"

logger = logging.getLogger("cb_backend.serving")

# What a worker needs of a request: its line of responses, inputs by name, parameters as JSON, timeout in microseconds.
_Work = tuple[LiveRequest, dict[str, NDArray[Any]], str, int]


class TritonPythonModel:
    """One front end. The server makes one of these in each of the model's instance processes."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        return complete_model_config(auto_complete_model_config)

    def initialize(self, args: dict[str, str]) -> None:
        """Returns when the engine is ready. Raises with the reason when the model cannot be served."""
        configure_logging(args["model_instance_name"])
        refuse_unusable_numpy()
        model_config = json.loads(args["model_config"])
        check_parameter_names(model_config)
        num_senders = sender_threads(model_config)
        slow_reader_timeout = slow_reader_timeout_s(model_config)
        self._name = name = args["model_name"]
        version = args["model_version"]
        folder = native_path(args["model_repository"]) / version
        engine = engine_folder(folder)
        config = load_engine_config(engine / "model.json")
        self._adapters = make_adapters(config, engine, folder, name)
        engine_model = (shown_path(engine.parent.name), engine.name) if engine != folder else None
        server_pid = os.getppid()
        start_server_watch(server_pid)
        self._supervisor = EngineSupervisor(
            config, server_pid, name, version, engine_model=engine_model, launched=with_places(config, engine)
        )
        remove_regions_of_the_dead(self._supervisor.runtime_folder)
        note_regions(self._supervisor.runtime_folder, OWN_COMMAND_LINE.read_bytes())
        try:
            self._info = self._supervisor.start()
            self._tokenizer = Tokenizer(self._info.tokenizer_dir)
            self._chat = Chat(self._tokenizer)
            try_adapter(self._supervisor.client, self._adapters.find(""), self._info.tasks)
        except BaseException:
            self._supervisor.close()
            raise
        self._client = self._supervisor.client
        self._responder = Responder(num_senders, self._client.cancel, slow_reader_timeout, config.stream_interval)
        self._cancellation = CancellationPoller(self._responder, self._client.cancel)
        self._housekeeping = Housekeeping(self._responder, self._supervisor, server_pid, model_config)
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._workers = [
            threading.Thread(target=self._run_worker, name=f"worker-{i}", daemon=True) for i in range(NUM_WORKERS)
        ]
        for worker in self._workers:
            worker.start()

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            try:
                self._accept(request)
            except Exception:
                logger.exception("a request could not be taken from the server")

    def is_ready(self) -> bool:
        """Asked by newer servers (from 26.03 on) for each readiness probe, at any time."""
        if not hasattr(self, "_workers"):
            return False  # it is not there yet, or never will be
        return self._client.is_ready and not self._housekeeping.is_draining and not self._housekeeping.is_engine_stuck

    def finalize(self) -> None:
        """End everything. NOTE: a thread that still speaks to the server after this returns crashes the server."""
        if not hasattr(self, "_workers"):
            return  # initialize failed and cleaned up
        self._cancellation.close()
        self._housekeeping.close()
        for _ in self._workers:
            self._work.put(None)
        for worker in self._workers:
            worker.join()
        self._chat.close()
        self._responder.end_all(ErrorCode.UNAVAILABLE, STOPPING)
        self._responder.close()
        remove_regions_of_the_dead(self._supervisor.runtime_folder)
        self._supervisor.close()
        gc.collect()  # objects of the server's must not outlive the line to it, which ends now

    def parse(
        self, inputs: dict[str, NDArray[Any]], parameters: str, vocab_size: int
    ) -> GenerateRequest | PoolingRequest:
        """What the wire says, checked. Another wire over the same engine overrides this."""
        if asks_for_pooling(inputs):
            return parse_pooling(inputs, parameters, vocab_size, self._info.tasks, self._name)
        return parse_request(inputs, parameters, vocab_size, self._info.sampling_defaults)

    # ---- one request ------------------------------------------------------------------------------------------

    def _accept(self, request: Any) -> None:
        """From here on exactly one final response is owed, and the responder sees to it."""
        live = self._responder.open(self._client.new_request_id(), request.get_response_sender())
        try:
            if self._housekeeping.is_draining:
                raise UnavailableError(STOPPING)
            self._client.check_room()
            # Copies: the tensors lie in shared memory that the server takes back when `execute` returns.
            inputs = {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
            self._work.put((live, inputs, read_parameters(request), request.timeout()))
        except Exception as error:
            end_with(live, error)

    def _run_worker(self) -> None:
        while (work := self._work.get()) is not None:
            live = work[0]
            try:
                self._submit(*work)
            except Exception as error:
                end_with(live, error)

    def _submit(self, live: LiveRequest, inputs: dict[str, NDArray[Any]], parameters: str, timeout_us: int) -> None:
        if live.is_ended:  # cancelled while it waited here
            return
        may_sleep = self._supervisor.config.idle_sleep_s is not None
        if (action := asked_of_rest(parameters, inputs, may_sleep)) is not None:
            answer_rest(live, action, self._client.members)
            return
        generate = self.parse(inputs, parameters, self._info.vocab_size)
        if isinstance(generate, PoolingRequest):
            self._submit_pooling(live, generate, timeout_us)
            return
        if generate.tokenize is not None:
            told = tokenize_prompt(generate, self._tokenizer, self._chat, self._info.max_model_len)
            send_ready(live, text_output=told.text, tokenized=told.about)
            return
        check_generates(self._info.tasks, self._name)
        token_ids = prompt_token_ids(generate, self._tokenizer, self._chat, self._info.max_model_len)
        params = generate.params
        adapter = self._adapters.find(params.lora_name)
        rules = params.token_rules(bad_word_ids(params.bad_words, self._tokenizer))
        check_token_choice(rules[0], self._info.eos_token_ids)
        prompt = token_ids_to_bytes(token_ids)
        request_ids = [live.request_id, *(self._client.new_request_id() for _ in rules[1:])]
        answers = [
            LiveAnswer(live, request_id, self._new_answer(generate, token_ids, is_first=index == 0))
            for index, request_id in enumerate(request_ids)
        ]
        scheduling = generate.scheduling.within(timeout_us)
        requests = [
            AddRequest(request_id, prompt, rule, scheduling, adapter)
            for request_id, rule in zip(request_ids, rules, strict=True)
        ]
        others = list(zip(answers[1:], requests[1:], strict=True))
        live.begin(
            answers,
            len(token_ids),
            is_stream=generate.is_stream,
            may_end_itself=bool(params.stop),
            start_others=(lambda: self._start_others(live, others)) if others else None,
        )
        self._start(live, answers[0], requests[0])

    def _submit_pooling(self, live: LiveRequest, pooling: PoolingRequest, timeout_us: int) -> None:
        """One engine request a text; the documents of a query share its blocks as any requests with one prefix do."""
        info, adapter = self._info, self._adapters.find(pooling.lora_name)
        prompts = pooled_token_ids(pooling, self._tokenizer, info.max_model_len, info.tasks.score_template)
        num_tokens = sum(map(len, prompts))
        request_ids = [live.request_id, *(self._client.new_request_id() for _ in prompts[1:])]
        answers = [
            LiveAnswer(live, request_id, PooledAnswer(pooling, num_tokens if index == 0 else None))
            for index, request_id in enumerate(request_ids)
        ]
        live.begin(answers, num_tokens, is_stream=False, may_end_itself=False)
        rules = TokenRules(pooling=pooling.rules)
        scheduling = pooling.scheduling.within(timeout_us)
        for answer, token_ids in zip(answers, prompts, strict=True):
            if live.is_ended:  # cancelled, or one of them failed
                return
            prompt = token_ids_to_bytes(token_ids)
            self._start(live, answer, AddRequest(answer.request_id, prompt, rules, scheduling, adapter))

    def _new_answer(self, generate: GenerateRequest, prompt_ids: list[int], is_first: bool) -> Answer:
        params = generate.params
        is_asking, asks_prompt = params.logprobs is not None, is_first and params.prompt_logprobs is not None
        return TextAnswer(
            generate,
            OutputText(self._tokenizer, params, prompt_ids),
            OutputLogprobs(self._tokenizer, generate.num_logprobs) if is_asking else None,
            len(prompt_ids) if is_first else None,
            PromptFigures(self._tokenizer, prompt_ids, params.prompt_logprobs or 0) if asks_prompt else None,
        )

    def _start_others(self, live: LiveRequest, others: list[tuple[LiveAnswer, AddRequest]]) -> None:
        """Called by a sender thread, so a failure becomes the request's end instead of being raised."""
        try:
            for answer, request in others:
                if live.is_ended:
                    return
                self._start(live, answer, request)
        except Exception as error:
            end_with(live, error)

    def _start(self, live: LiveRequest, answer: LiveAnswer, request: AddRequest) -> None:
        self._client.submit(request, answer)
        if live.is_ended:  # cancelled just before the engine client knew of it
            self._client.cancel([request.request_id])


def read_parameters(request: Any) -> str:
    """The request parameters as JSON text. The server does not check them. Raises `InvalidRequestError`."""
    try:
        return str(request.parameters())
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"the request parameters (over HTTP: fields that are no inputs) are not valid UTF-8: {error.reason}"
        ) from None


def end_with(live: LiveRequest, error: Exception) -> None:
    """Answer a request with what went wrong; only errors made for users say what it was."""
    if isinstance(error, CbError):
        live.end(error.code, str(error))
        return
    logger.error("a request failed before it reached the engine", exc_info=error)
    live.end(ErrorCode.INTERNAL, "the request could not be processed; the server's log says why")
