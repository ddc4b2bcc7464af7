"""A client process: streams of requests in a closed loop and a canary now and then, all noted in a history.

    python -m tests.faults.traffic --url HOST:PORT --plan plan.json --history history.jsonl --streams 16

It sends until its standard input ends, then waits for what is open. Every request has an RPC of its own, so that
cancelling one cancels no other. It does not judge: that is the checker's business, afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from tests.faults.history import HistoryWriter, Item, read_plan

STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
# NOTE: with the metadata "triton_grpc_error" an error would come with its code, and server 24.10 was seen to crash when
# many such streams end at once. Without it only the text comes; ours says enough.
METADATA = ()
CODE_OF_WORDS = (
    ("send the request again", "UNAVAILABLE"),
    ("send it again", "UNAVAILABLE"),
    ("send it to another server", "UNAVAILABLE"),
    ("send the request to another server", "UNAVAILABLE"),
    ("queue is full", "UNAVAILABLE"),
    ("timed out after", "UNAVAILABLE"),
    ("the server's log says why", "INTERNAL"),
    ("not ready", "NOT_READY"),  # the server's own words
    ("unknown model", "NOT_READY"),
    ("is not found", "NOT_READY"),
    ("shared memory", "INTERNAL"),
    ("is not healthy", "NOT_HEALTHY"),
)
CONNECTIONS = 4
RETRY_S = 1.0  # after an error, as a client would
LONG_TOKENS = 12_000  # of requests that are only there to be cancelled or killed
CANARY = 0  # its item
BAD = ({"max_tokens": 0}, {"temperature": -1}, {"max_tokenz": 3}, {"top_p": "high"}, {"n": 10**6})


def message(prompt: str, sampling: dict[str, Any]) -> bytes:
    """A serialised request."""
    request = service_pb2.ModelInferRequest(model_name="llm")
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, text in (("text_input", prompt), ("sampling_parameters", json.dumps(sampling))):
        data = text.encode()
        request.inputs.add(name=name, datatype="BYTES", shape=[1])
        request.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
    for name in ("stream", "exclude_input_in_output", "return_finish_reason"):
        request.inputs.add(name=name, datatype="BOOL", shape=[1])
        request.raw_input_contents.append(b"\x01")
    return bytes(request.SerializeToString())


def text_output(response: Any, name: str) -> str:
    for index, output in enumerate(response.outputs):
        if output.name == name and len(response.raw_output_contents[index]) > 4:
            return str(response.raw_output_contents[index][4:].decode())
    return ""


def code_of(error: str) -> str:
    """What kind of error a text in the stream is; a refusal of a bad request unless it is known for something else."""
    return next((code for words, code in CODE_OF_WORDS if words in error), "INVALID_ARGUMENT")


class Traffic:
    def __init__(self, options: argparse.Namespace, items: list[Item], history: HistoryWriter) -> None:
        self.options = options
        self.items = items
        self.history = history
        self.rng = random.Random(options.seed)
        self.is_stopping = asyncio.Event()
        self._counter = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), self._on_stdin)
        # Without a pool of its own every channel to the same address would share one connection.
        choices = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
        choices += [("grpc.max_reconnect_backoff_ms", 500)]
        channels = [grpc.aio.insecure_channel(self.options.url, options=choices) for _ in range(CONNECTIONS)]
        parse = service_pb2.ModelStreamInferResponse.FromString
        calls = [channel.stream_stream(STREAM_METHOD, None, parse) for channel in channels]
        tasks = [self._stream(calls[i % CONNECTIONS]) for i in range(self.options.streams)]
        if self.options.canary_interval:
            tasks.append(self._canaries(calls[0]))
        await asyncio.gather(*tasks)
        await asyncio.gather(*(channel.close() for channel in channels))

    def _on_stdin(self) -> None:
        if not sys.stdin.buffer.read1(4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self.is_stopping.set()

    async def _stream(self, call: Any) -> None:
        while not self.is_stopping.is_set():
            draw = self.rng.random()
            if draw < self.options.cancel_fraction:
                await self._one(call, "load", self._random_item(), cancel_after=self.rng.randint(0, 4))
            elif draw < self.options.cancel_fraction + self.options.bad_fraction:
                await self._one(call, "bad", CANARY, bad=self.rng.choice(BAD))
            elif not await self._one(call, "long" if self.options.long else "load", self._random_item()):
                await asyncio.sleep(RETRY_S)

    async def _canaries(self, call: Any) -> None:
        """At fixed times, whatever became of the last."""
        running: set[asyncio.Task[bool]] = set()
        while not self.is_stopping.is_set():
            task = asyncio.create_task(self._one(call, "canary", CANARY))
            running.add(task)
            task.add_done_callback(running.discard)
            await asyncio.sleep(self.options.canary_interval)
        await asyncio.gather(*running)

    def _random_item(self) -> int:
        return self.rng.randrange(len(self.items))

    async def _one(
        self, open_call: Any, role: str, item: int, cancel_after: int | None = None, bad: dict[str, Any] | None = None
    ) -> bool:
        """Send one request and note what comes. True if it ended well."""
        self._counter += 1
        request, write = f"{self.options.name}-{self._counter}", self.history.write
        entry = self.items[item]
        prompt = "x" * self.options.bad_bytes if bad is not None and self.options.bad_bytes else entry.prompt
        # The model's own end of an answer may come after a few tokens.
        is_long = cancel_after is not None or self.options.long
        length = {"max_tokens": LONG_TOKENS, "ignore_eos": True} if is_long else {"max_tokens": entry.max_tokens}
        sampling = {**length, "temperature": 0, **(bad or {})}
        is_good, num_deltas = False, 0
        write(request, "send", role=role, item=item)
        call = open_call(metadata=METADATA, timeout=self.options.deadline)
        try:
            await call.write(message(prompt, sampling))
            await call.done_writing()
            while True:
                if cancel_after is not None and num_deltas >= cancel_after:
                    write(request, "cancel")
                    call.cancel()
                    return True
                received = await call.read()
                if received is grpc.aio.EOF:
                    break
                if received.error_message:
                    write(request, "error", text=received.error_message, code=code_of(received.error_message))
                    continue
                response = received.infer_response
                text, flag = text_output(response, "text_output"), "triton_final_response"
                if flag in response.parameters and response.parameters[flag].bool_param:
                    write(request, "final", text=text, code=text_output(response, "finish_reason"))
                    is_good = True
                else:
                    write(request, "delta", text=text)
                    num_deltas += 1
        except grpc.aio.AioRpcError as error:
            is_own = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            kind = "give_up" if is_own else "error"
            write(request, kind, code="CONNECTION", text=f"{error.code().name}: {error.details()}")
            return False
        write(request, "closed")
        return is_good


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="tests.faults.traffic", description=__doc__)
    options.add_argument("--url", required=True)
    options.add_argument("--plan", type=Path, required=True, help="items to send, as `history.write_plan` writes them")
    options.add_argument("--history", type=Path, required=True)
    options.add_argument("--name", default="a", help="begins the requests' names")
    options.add_argument("--streams", type=int, default=16)
    options.add_argument("--canary-interval", type=float, default=0.0, help="seconds; 0: none")
    options.add_argument("--cancel-fraction", type=float, default=0.0)
    options.add_argument("--bad-fraction", type=float, default=0.0)
    options.add_argument("--bad-bytes", type=int, default=0, help="length of the prompts of bad requests")
    options.add_argument("--long", action="store_true", help="requests that would run for minutes")
    options.add_argument("--deadline", type=float, default=60.0, help="seconds after which a client gives up")
    options.add_argument("--seed", type=int, default=0)
    return options


def main() -> None:
    options = parser().parse_args()
    history = HistoryWriter(options.history)

    async def run() -> None:
        await Traffic(options, read_plan(options.plan), history).run()

    asyncio.run(run())
    history.close()


if __name__ == "__main__":
    main()
