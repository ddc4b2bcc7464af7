"""`LLM`: a checkpoint and its engine in this process. The caller's thread runs the steps.

Prompts become requests as a server's do, and answers become text as a server's do; here they are only put together,
fed and collected. It draws no pictures but the progress bar's.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from cb_backend.contracts.config import EngineConfig, engine_config_from_dict
from cb_backend.contracts.errors import CbError, ConfigError, ErrorCode, UnavailableError
from cb_backend.engine.llm_engine import LLMEngine, StepFailedError, create_engine
from cb_backend.engine.step_messages import Shares, failures, step_output
from cb_backend.front_end.adapters import Adapters, NamedAdapters, NoAdapters
from cb_backend.front_end.engines.request_sink import deliver
from cb_backend.front_end.text.chat import Chat
from cb_backend.front_end.text.tokenizer import Tokenizer
from cb_backend.llm.answer import LiveAnswer, LivePrompt
from cb_backend.llm.interrupts import whole
from cb_backend.llm.progress import progress_bar
from cb_backend.llm.prompts import Prepared, Prompt, as_list, prepare
from cb_backend.llm.results import Chunk, RequestOutput
from cb_backend.llm.sampling import SamplingParams
from cb_backend.support.native_paths import native_path

_OF_A_SERVER = (
    "engine_python", "data_parallel_size", "watchdog_timeout_s", "stream_interval", "disable_log_stats", "idle_sleep_s",
    "sleep_weights", "turn_s",
)  # fmt: skip
_HOLDING_S = 0.001  # between looks at requests that wait for their grammars


class LLM:
    """A model to ask. Not for several threads at once. Close it, or use it as a context manager."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        **engine_arguments: Any,
    ) -> None:
        """Load the checkpoint: a folder, a GGUF file or a hub id. Arguments are those of `model.json`.

        adapters: folders (as PEFT saves them) by the names that `SamplingParams.lora_name` gives; read at first use.
        Raises `ConfigError` with a one-line reason and remedy.
        """
        if adapters is not None:
            engine_arguments = {"enable_lora": True, **engine_arguments}
        folders = _folders(adapters or {})
        self.config = _config(model, engine_arguments)
        self._adapters: Adapters = NamedAdapters(folders) if self.config.enable_lora else NoAdapters()
        self._engine = create_engine(self.config)
        try:
            self._tokenizer = Tokenizer(self._engine.info.tokenizer_dir)
            self._chat = Chat(self._tokenizer)
        except BaseException:
            self._engine.close()
            raise
        self.info = self._engine.info
        self._closing = weakref.finalize(self, _close, self._engine, self._chat)
        self._sinks: dict[int, LiveAnswer] = {}  # by request id
        self._shares = Shares()
        self._next_id = 1
        self._step_id = 0
        self._lock = threading.Lock()  # held for a step

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what runs and give the memory back. May be called again."""
        if self._closing.alive:
            for live in {id(sink.live): sink.live for sink in list(self._sinks.values())}.values():
                live.fail(UnavailableError("the LLM was closed before this prompt ended"))
            self._closing()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Whole answers, one `RequestOutput` a prompt, in their order.

        prompts: one or a list; each a text, token ids, or chat messages (`{"role", "content"}`).
        params: for all prompts, or one a prompt.
        progress: draw a bar on standard error, if that is a terminal.
        Raises `InvalidRequestError` before anything runs if a prompt or its parameters cannot be served; what fails
        later is in the `error` of its output. Ctrl-C ends all prompts of the call.
        """
        ready = self._prepared(prompts, params)
        results: list[RequestOutput | None] = [None] * len(ready)
        with progress_bar(len(ready), is_wanted=progress) as advance:
            num_tokens = 0

            def count(chunk: Chunk) -> None:
                nonlocal num_tokens
                num_tokens += len(chunk.output.token_ids)

            for ended in self._run(ready, count):
                for live in ended:
                    results[live.index] = live.output
                advance(len(ended), num_tokens)
        return [result for result in results if result is not None]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Chunk]:
        """What is new of the answers, as it comes; arguments as of `generate`.

        The iterator runs the steps: closing it (leaving its loop) ends its prompts. A prompt that fails raises its
        error, after which nothing of the call goes on.
        """
        return self._stream(self._prepared(prompts, params))

    def _stream(self, ready: list[Prepared]) -> Iterator[Chunk]:
        chunks: deque[Chunk] = deque()
        for ended in self._run(ready, chunks.append):
            while chunks:
                yield chunks.popleft()
            for live in ended:
                if live.output.error is not None:
                    raise live.output.error

    # ---- steps ------------------------------------------------------------------------------------------------

    def _prepared(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Prepared]:
        self._check_open()
        return prepare(as_list(prompts), params, self.info, self._tokenizer, self._chat, self._adapters)

    def _check_open(self) -> None:
        if not self._closing.alive:
            raise UnavailableError("this LLM is closed; make a new one")

    def _run(self, ready: list[Prepared], on_chunk: Callable[[Chunk], None]) -> Iterator[list[LivePrompt]]:
        """Run the prompts to their ends; after each step, those that have ended in it."""
        waiting = deque(enumerate(ready))
        open_prompts: list[LivePrompt] = []
        try:
            while waiting or open_prompts:
                while waiting and (live := self._begin(*waiting[0], on_chunk, bool(open_prompts))) is not None:
                    open_prompts.append(live)
                    waiting.popleft()
                self._step()
                ended = [live for live in open_prompts if live.is_ended]
                open_prompts = [live for live in open_prompts if not live.is_ended]
                for live in open_prompts:
                    if live.is_begun:
                        self._start_others(live)
                yield ended
        finally:
            for live in open_prompts:
                live.cancel()

    def _begin(
        self, index: int, prepared: Prepared, on_chunk: Callable[[Chunk], None], can_wait: bool
    ) -> LivePrompt | None:
        """None: the engine's queue is full, so the prompt waits for others to end."""
        self._check_open()
        ids = range(self._next_id, self._next_id + len(prepared.rules))
        live = LivePrompt(index, prepared, ids, self._tokenizer, self._cancel, on_chunk)
        try:
            self._start(live.answers[0], 0)
        except UnavailableError as error:
            if can_wait:
                return None
            live.fail(error)
        except CbError as error:
            live.fail(error)
        self._next_id = ids.stop
        return live

    def _start(self, answer: LiveAnswer, index: int) -> None:
        prepared = answer.live.prepared
        request = self._engine.make_request(
            answer.request_id,
            np.array(prepared.token_ids, np.int32),
            prepared.rules[index],
            prepared.generate.scheduling,
            prepared.adapter,
        )
        self._engine.add_request(request)
        self._sinks[answer.request_id] = answer
        answer.is_started = True

    def _start_others(self, live: LivePrompt) -> None:
        """The prompt is in the prefix cache now. Those that find the queue full are tried again after the next step."""
        for index, answer in enumerate(live.answers):
            if answer.is_started:
                continue
            try:
                self._start(answer, index)
            except UnavailableError as error:
                if self._sinks:
                    return
                live.fail(error)
                return
            except CbError as error:
                live.fail(error)
                return

    def _cancel(self, request_id: int) -> None:
        self._sinks.pop(request_id, None)
        if self._closing.alive:
            self._engine.cancel(request_id)

    def _step(self) -> None:
        self._check_open()
        if not self._lock.acquire(blocking=False):
            raise UnavailableError("this LLM is at work in another thread; use one thread, or one LLM each")
        try:
            with whole():
                self._step_whole()
        finally:
            self._lock.release()

    def _step_whole(self) -> None:
        engine = self._engine
        for request_id, reason in engine.expire():
            self._tell_error(request_id, ErrorCode.UNAVAILABLE, reason)
        for request_id, error in engine.release_held():
            self._tell_error(request_id, error.code, str(error))
        try:
            output = engine.step()
        except StepFailedError as error:
            output = error.output
            reason = f"a step of the engine failed: {error}"
            for request_id in output.request_ids.tolist():
                self._tell_error(request_id, ErrorCode.INTERNAL, reason)
        if output is None:
            if engine.is_holding:
                time.sleep(_HOLDING_S)
            return
        self._step_id += 1
        for request_id, code, reason in failures(output):
            self._tell_error(request_id, code, reason)
        for share in self._shares.of(output):
            deliver(step_output(self._step_id, share, output, {}), self._sinks, self._cancel)  # type: ignore[arg-type]

    def _tell_error(self, request_id: int, code: ErrorCode, reason: str) -> None:
        sink = self._sinks.pop(request_id, None)
        if sink is not None:
            sink.on_error(code, reason)


def _folders(adapters: Mapping[str, str | os.PathLike[str]]) -> dict[str, Path]:
    """Raises `ConfigError` for what names no folders."""
    if not isinstance(adapters, Mapping):
        raise ConfigError(f"adapters must be folders by their names ({{'name': 'folder'}}), got {adapters!r:.80}")
    for name, folder in adapters.items():
        if not isinstance(name, str) or not isinstance(folder, (str, os.PathLike)):
            raise ConfigError(f"adapters must be folders by their names, got {name!r:.80}: {folder!r:.80}")
    return {name: native_path(os.fspath(folder)).expanduser().absolute() for name, folder in adapters.items()}


def _config(model: str | os.PathLike[str], arguments: dict[str, Any]) -> EngineConfig:
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(f"model must be a folder, a GGUF file or a hub id, got {model!r:.80}")
    for name in _OF_A_SERVER:
        if name in arguments:
            raise ConfigError(f"engine argument {name!r} is for a served model and has no effect in process; remove it")
    return engine_config_from_dict({"model": str(model), **arguments}, place="")


def _close(engine: LLMEngine, chat: Chat) -> None:
    chat.close()
    engine.close()
