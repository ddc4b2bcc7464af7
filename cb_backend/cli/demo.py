"""`cb-backend demo`: a real server, several prompts streamed at once, a picture of the batch, a table.

The prompts differ in length and start one after another, so that requests join and leave the running batch under the
reader's eyes. On a terminal the streams are drawn side by side; elsewhere plain lines are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from cb_backend.cli.demo_model import DEMO_MODEL, ensure_demo_model
from cb_backend.cli.demo_view import LineView, LiveView, Stream, View, print_table
from cb_backend.cli.paths import CliError, checkout_path, load_client
from cb_backend.cli.server.local_server import find_server
from cb_backend.cli.server.model_repository import check_model_repository, served_checkpoints
from cb_backend.cli.server.server_process import ServerOptions, ServerProcess, free_ports
from cb_backend.cli.server.start_up import wait_ready_aloud

START_TIMEOUT_S = 600.0
STREAM_TIMEOUT_S = 60.0
STAGGER_S = 0.4
INTERRUPTED_GRACE_S = 5.0  # for a server whose requests nobody waits for
ONLY_LLM = ("--model-control-mode=explicit", "--load-model=llm")  # its neighbours would double the start's time
SHOWN_LINES = 20  # of the server's log, after a failure

# (prompt, max_tokens): short and long prompts, short and long answers, in an order in which they overtake each other.
PROMPTS = (
    ("<|im_start|>user\nTell me a short story about a lighthouse.<|im_end|>\n<|im_start|>assistant\n", 96),
    ("The capital of France is", 16),
    (
        "<|im_start|>system\nYou answer in plain words.<|im_end|>\n<|im_start|>user\n"
        "A bakery sells bread, rolls and cakes. "
        "On Monday it sold 40 loaves of bread, 120 rolls and 3 cakes; on Tuesday 35 loaves, 150 rolls and 5 cakes; on "
        "Wednesday it was closed for a family celebration, and on Thursday it sold 60 loaves, 90 rolls and 2 cakes. "
        "Describe how the week went.<|im_end|>\n<|im_start|>assistant\n",
        64,
    ),
    ("def fibonacci(n):", 48),
    ("<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n", 32),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-repository", type=Path, metavar="DIR", help="default: the checkout's model_repository")
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")


def run(args: argparse.Namespace) -> int:
    with _prompt_interrupts():
        return _run(args)


@contextlib.contextmanager
def _prompt_interrupts() -> Iterator[None]:
    """Ctrl-C is answered at once, before anything that takes its time is ended."""

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        os.write(2, b"\nstopping\n")  # a handler must not wait for a lock that the interrupted print holds
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run(args: argparse.Namespace) -> int:
    started = time.monotonic()
    client_module = load_client()
    repository = args.model_repository or checkout_path("model_repository")
    check_model_repository(repository)
    if DEMO_MODEL in served_checkpoints(repository):
        ensure_demo_model(_say)
    http_port, grpc_port, metrics_port = free_ports(3)
    options = ServerOptions(
        repository,
        "127.0.0.1",
        http_port,
        grpc_port,
        metrics_port,
        exit_timeout_secs=10,
        extra_arguments=ONLY_LLM,
    )
    server = ServerProcess(find_server(), options)
    server.start()
    _say(f"starting Triton Inference Server on {server.grpc_address}")
    try:
        _wait_ready(server)
        _say(f"ready after {time.monotonic() - started:.1f} s; {len(PROMPTS)} prompts, one every {STAGGER_S} s\n")
        client = client_module.Client(server.grpc_address, "llm", timeout=STREAM_TIMEOUT_S)
        view: View = LiveView() if sys.stdout.isatty() and not args.plain else LineView()
        streams = stream_all(client, view)
    except KeyboardInterrupt:
        _end_early(server)
        raise
    finally:
        exit_code = server.stop()
    try:
        check(streams, exit_code)
    except CliError:
        print("the server's last lines:", *server.last_lines(SHOWN_LINES), sep="\n  ", file=sys.stderr)
        raise
    print_table(streams)
    _say(f"\nserver stopped cleanly; the whole demo took {time.monotonic() - started:.0f} s")
    return 0


def _end_early(server: ServerProcess) -> None:
    """Nobody waits for answers any more; a second Ctrl-C waits for nothing."""
    try:
        server.stop(INTERRUPTED_GRACE_S, is_draining=False)
    except KeyboardInterrupt:
        server.kill()


def _wait_ready(server: ServerProcess) -> None:
    wait_ready_aloud(server, _say, START_TIMEOUT_S)


def stream_all(client: Any, view: View) -> list[Stream]:
    """Start one stream after another and return when all have ended. A stream's failure is in its `error`."""
    begun = time.perf_counter()
    streams = [Stream(i + 1, prompt, max_tokens) for i, (prompt, max_tokens) in enumerate(PROMPTS)]
    is_over = threading.Event()
    arguments = [(client, stream, view, begun, is_over) for stream in streams]
    threads = [threading.Thread(target=_follow, args=each, daemon=True) for each in arguments]
    try:
        with view:
            for thread in threads:
                thread.start()
                time.sleep(STAGGER_S)
            for thread in threads:
                thread.join()
    finally:
        is_over.set()  # after an interrupt: streams that still run are cancelled
    return streams


def _follow(client: Any, stream: Stream, view: View, begun: float, is_over: threading.Event) -> None:
    """Run one stream and tell the view what happens. Never raises: the reason of a failure goes into `stream.error`."""
    stream.started_at = time.perf_counter()
    view.joins(stream, stream.started_at - begun)
    try:
        responses = client.responses(stream.prompt, is_streaming=True, max_tokens=stream.max_tokens, temperature=0)
        for response in responses:
            stream.add(response)
            view.text(stream, response.received_at - begun, response.text)
            if is_over.is_set():
                return responses.close()  # which cancels it
    except Exception as error:  # any failure of one stream is a failure of the demo, with this text
        stream.error = str(error) or type(error).__name__
    view.leaves(stream, time.perf_counter() - begun)


def check(streams: list[Stream], exit_code: int) -> None:
    """Raises `CliError` if something did not go as shown."""
    for stream in streams:
        if stream.error is not None:
            raise CliError(f"stream #{stream.number} failed: {stream.error}")
        if stream.num_output_tokens < 1 or stream.finish_reason is None:
            raise CliError(
                f"stream #{stream.number} ended after {stream.num_output_tokens} tokens without a finish reason"
            )
    if exit_code != 0:
        raise CliError(f"the server ended with exit code {exit_code} instead of 0")


def _say(text: str) -> None:
    print(text, flush=True)
