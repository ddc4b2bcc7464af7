"""Send prompts to a served model and print the answers: several at once, streamed if wanted.

    python client/generate.py --chat "What is the capital of France?" --system "Answer in one word." --temperature 0
    python client/generate.py "The capital of France is" "Once upon a time" --stream --max-tokens 64

Ctrl-C cancels what still runs. Exit code 0: every prompt was answered; 1: an error; 130: cancelled.
"""

from __future__ import annotations

import argparse
import sys
import threading
from typing import Any

from cb_client import Client, ClientError, Prompt


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    if args.system is not None and not args.chat:
        parser.error("--system is a chat message; give --chat as well")
    client = Client(args.url, args.model)
    sampling = _sampling(args)
    printer = _Printer(len(args.prompts))
    is_cancelled = threading.Event()
    errors: list[str] = []

    def answer(index: int, prompt: Prompt) -> None:
        try:
            pieces = client.stream(prompt, **sampling) if args.stream else iter([client.generate(prompt, **sampling)])
            for piece in pieces:
                if is_cancelled.is_set():
                    return  # leaving the iterator cancels the request
                printer.piece(index, piece)
        except ClientError as error:
            errors.append(f"error: prompt {index + 1}: {error}" if len(args.prompts) > 1 else f"error: {error}")
        finally:
            printer.end(index)

    # Daemon threads: after Ctrl-C nobody waits for an answer that is not streamed; the broken connection cancels it.
    prompts = [_messages(text, args.system) if args.chat else text for text in args.prompts]
    threads = [threading.Thread(target=answer, args=item, daemon=True) for item in enumerate(prompts)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        is_cancelled.set()
        for thread in threads:
            thread.join(timeout=2.0)
        print("\ncancelled", file=sys.stderr)
        return 130
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


class _Printer:
    """One prompt: its text as it comes. Several: whole lines, each with the number of its prompt."""

    def __init__(self, num_prompts: int) -> None:
        self._is_single = num_prompts == 1
        self._has_printed = False
        self._pending = [""] * num_prompts
        self._lock = threading.Lock()

    def piece(self, index: int, text: str) -> None:
        with self._lock:
            self._has_printed = True
            if self._is_single:
                print(text, end="", flush=True)
                return
            *lines, self._pending[index] = (self._pending[index] + text).split("\n")
            for line in lines:
                print(f"[{index + 1}] {line}", flush=True)

    def end(self, index: int) -> None:
        with self._lock:
            if self._is_single:
                print(end="\n" if self._has_printed else "", flush=True)
            elif self._pending[index]:
                print(f"[{index + 1}] {self._pending[index]}", flush=True)


def _messages(text: str, system: str | None) -> list[dict[str, Any]]:
    """What a user says, as chat messages."""
    said = {"role": "user", "content": text}
    return [said] if system is None else [{"role": "system", "content": system}, said]


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "ignore_eos")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Send prompts to a served model and print the answers.")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument(
        "--chat", action="store_true", help="each PROMPT is what a user says, put into the checkpoint's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system's message before it")
    parser.add_argument("--stream", action="store_true", help="print text as it is generated")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, help="0 = greedy; the server's default is 1")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end the answer at this text; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on to --max-tokens in any case")
    parser.add_argument("--url", default="localhost:8001", help="host:port of the server's gRPC")
    parser.add_argument("--model", default="llm")
    return parser


if __name__ == "__main__":
    sys.exit(main())
