"""A checkpoint's chat template, rendered in a process of its own with a time limit.

The limit is of the process's own time: on a machine that is busy with other things nothing is wrong with a template.
One worker process a template, started at the first use and again after it had to be killed. What messages mean, and
how the text becomes tokens, is `chat`'s business.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from cb_backend.contracts.errors import CbError, InvalidRequestError
from cb_backend.front_end.interpreter import find_python
from cb_backend.front_end.text.answer_forms import reasoning_field
from cb_backend.front_end.text.message_forms import MessageForms, find_forms
from cb_backend.support.native_paths import native_path
from cb_backend.support.process_watch import process_cpu_seconds

RENDER_TIMEOUT_S = 2.0  # of a core
START_TIMEOUT_S = 20.0  # of a core
MAX_WAIT_S = 60.0  # whatever the process has computed meanwhile
LOOK_S = 0.1
MAX_RENDERED_BYTES = 16 << 20
_MAX_REASON = 200  # characters of a template's own words that an error repeats

_WORKER = Path(__file__).with_name("template_worker.py")


class _WorkerEndedError(Exception):
    """The worker died, or did not answer in time."""


class ChatTemplate:
    """Renders one template. Safe to call from several threads; they take turns."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.reasoning_field = reasoning_field(source)
        self._lock = threading.Lock()  # guards the worker
        self._worker: subprocess.Popen[bytes] | None = None
        self._variables: frozenset[str] = frozenset()
        self._forms: MessageForms | None = None
        self._forms_lock = threading.Lock()

    def variables(self) -> frozenset[str]:
        """Names that the template takes from outside. Raises as `render` does."""
        with self._lock:
            self._start()
            return self._variables

    def render(self, values: dict[str, Any]) -> str:
        """The text for these values. Raises `InvalidRequestError` with the template's reason, or its time limit."""
        line = json.dumps(values).encode() + b"\n"
        with self._lock:
            self._start()
            answer = self._ask(line, RENDER_TIMEOUT_S)
        if "refusal" in answer:
            raise InvalidRequestError(f"the model's chat template refuses the messages: {_short(answer['refusal'])}")
        if "error" in answer:
            raise InvalidRequestError(f"the model's chat template failed on the messages: {_short(answer['error'])}")
        return str(answer["text"])

    def forms(self, values: dict[str, Any]) -> MessageForms:
        """What it wants messages to look like. `values`: of every request. Asked once; raises as `variables` does."""
        with self._forms_lock:
            if self._forms is None:
                self._forms = find_forms(lambda more: self.render({**values, **more}))
            return self._forms

    def close(self) -> None:
        """End the worker; a later call would start another one."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        if self._worker is not None and self._worker.poll() is None:
            return
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(native_path(path)) for path in sys.path if path)}
        self._worker = subprocess.Popen(
            [find_python(), str(_WORKER), str(2 * START_TIMEOUT_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            cwd="/",
        )
        answer = self._ask(json.dumps(self._source).encode() + b"\n", START_TIMEOUT_S)
        if "error" in answer:
            self._stop()
            raise InvalidRequestError(f"the model's chat template cannot be used: {_short(answer['error'])}")
        self._variables = frozenset(answer["variables"])

    def _ask(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        """One question. A worker that does not answer is killed: it may be in an endless loop."""
        try:
            return _exchange(self._worker, line, timeout_s)
        except _WorkerEndedError as error:
            self._stop()
            raise InvalidRequestError(f"the model's chat template {error}") from None
        except (OSError, ValueError) as error:
            self._stop()
            raise CbError(f"the chat template could not be rendered: {type(error).__name__}") from error

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()


def _exchange(worker: subprocess.Popen[bytes] | None, line: bytes, timeout_s: float) -> dict[str, Any]:
    assert worker is not None
    assert worker.stdin is not None
    assert worker.stdout is not None
    to_worker, from_worker = worker.stdin.fileno(), worker.stdout.fileno()
    os.set_blocking(to_worker, False)
    limit, deadline = _computed_s(worker) + timeout_s, time.monotonic() + MAX_WAIT_S
    received = bytearray()
    while not received.endswith(b"\n"):
        readable, writable, _ = select.select([from_worker], [to_worker] if line else [], [], LOOK_S)
        if _computed_s(worker) > limit or time.monotonic() > deadline:
            raise _WorkerEndedError(f"took longer than {timeout_s:g} s on these messages")
        if writable:
            try:
                line = line[os.write(to_worker, line) :]
            except BlockingIOError:
                pass
            except BrokenPipeError:
                raise _WorkerEndedError("ended its process") from None
        if readable:
            data = os.read(from_worker, 1 << 16)
            if not data:
                raise _WorkerEndedError("ended its process")
            received += data
            if len(received) > MAX_RENDERED_BYTES:
                raise _WorkerEndedError(f"gave more than {MAX_RENDERED_BYTES} bytes")
    answer: dict[str, Any] = json.loads(received)
    return answer


def _computed_s(worker: subprocess.Popen[bytes]) -> float:
    """Also of one that has ended: it has not been waited for."""
    return process_cpu_seconds(worker.pid) or 0.0


def _short(text: str) -> str:
    line = " ".join(text.split()).encode("ascii", "backslashreplace").decode()
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + "..."
