"""How many responses a second the server's front ends send, and tokens with them when they coalesce: one row a model.

    python client/response_path.py --models llm
    python client/response_path.py --models one two four --streams 64 --seconds 10

Keeps so many streams open for so long, against a model whose engine is faster than its responses, so that sending is
what is measured. While a front end keeps up, a response carries one token; behind, it carries all since the last.
The server's CPU time is that of the whole machine in the same seconds, clients included (0 where there is no /proc).
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from load_generator.wire import WireOptions, open_connections

WARM_UP_S = 2.0
CONNECTIONS = 4  # of each client process


@dataclass(frozen=True)
class Measurement:
    """What came in during the measured seconds."""

    responses: int
    tokens: int

    def __add__(self, other: Measurement) -> Measurement:
        return Measurement(self.responses + other.responses, self.tokens + other.tokens)


def main() -> int:
    args = parser().parse_args()
    load = " ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"{os.cpu_count()} cores, load {load} before it; {args.streams} streams of {args.tokens} tokens,")
    print(f"{args.processes} client processes, {args.seconds:g} s a row\n")
    print("| model | responses/s | tokens/s | tokens a response | CPU of all, cores |\n| --- | --- | --- | --- | --- |")
    for model in args.models:
        cpu, began = cpu_seconds(), time.monotonic()
        try:
            total = measure(args, model)
        except (grpc.RpcError, RuntimeError) as error:
            print(f"error: {model}: {error}", file=sys.stderr)
            return 1
        cores = (cpu_seconds() - cpu) / (time.monotonic() - began)
        row = (total.responses / args.seconds, total.tokens / args.seconds, total.tokens / max(total.responses, 1))
        print(f"| {model} | {row[0]:,.0f} | {row[1]:,.0f} | {row[2]:.2f} | {cores:.1f} |", flush=True)
    return 0


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--url", default="localhost:8001", help="gRPC address of the server")
    result.add_argument("--models", nargs="+", default=["llm"])
    result.add_argument("--streams", type=_positive, default=64, help="open at once, over all client processes")
    result.add_argument("--tokens", type=_positive, default=1000, help="of one request; then its stream asks again")
    result.add_argument("--seconds", type=float, default=10.0, help="measured, after a warm-up")
    result.add_argument("--processes", type=_positive, default=2, help="clients: one takes about 10,000 responses/s")
    return result


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def measure(args: argparse.Namespace, model: str) -> Measurement:
    """Run the client processes. Raises `RuntimeError` with a request's error."""
    num_processes = min(args.processes, args.streams)
    shares = [args.streams // num_processes + (i < args.streams % num_processes) for i in range(num_processes)]
    jobs = [(args.url, model, share, args.tokens, args.seconds) for share in shares]
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        parts = pool.starmap(client_process, jobs)
    return sum(parts, Measurement(0, 0))


def client_process(url: str, model: str, streams: int, tokens: int, seconds: float) -> Measurement:
    return asyncio.run(_client(url, model, streams, tokens, seconds))


async def _client(url: str, model: str, streams: int, tokens: int, seconds: float) -> Measurement:
    request = WireOptions(model, has_finish_reason=False).request("", "a", tokens)
    async with open_connections(url, CONNECTIONS) as connections:
        counters = [[0, 0] for _ in range(streams)]
        tasks = [asyncio.create_task(_stream(next(connections), request, counter)) for counter in counters]
        sleeping = asyncio.create_task(asyncio.sleep(WARM_UP_S))
        await asyncio.wait([sleeping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        before = [tuple(counter) for counter in counters]
        if sleeping.done():
            sleeping = asyncio.create_task(asyncio.sleep(seconds))
            await asyncio.wait([sleeping, *tasks], return_when=asyncio.FIRST_COMPLETED)
        after = [tuple(counter) for counter in counters]
        failed = [task.exception() for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if failed:
        raise RuntimeError(str(failed[0]))
    grown = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(after, before, strict=True)]
    return Measurement(sum(responses for responses, _ in grown), sum(tokens for _, tokens in grown))


async def _stream(open_stream: Callable[..., Any], request: bytes, counter: list[int]) -> None:
    """One request after the other, for ever; counter: [responses with tokens, tokens]."""
    while True:
        call = open_stream()
        try:
            await call.write(request)
            await call.done_writing()
            async for message in call:
                if message.error_message:
                    raise RuntimeError(message.error_message)
                response = message.infer_response
                for output, raw in zip(response.outputs, response.raw_output_contents, strict=False):
                    if output.name == "num_output_tokens":
                        counter[0] += 1
                        counter[1] += int.from_bytes(raw, "little")
        except grpc.aio.AioRpcError as error:
            raise RuntimeError(error.details()) from None
        finally:
            call.cancel()


def cpu_seconds() -> float:
    """CPU time that all processes of the machine have used."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    except (OSError, ValueError):
        return 0.0
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # less idle and waiting


if __name__ == "__main__":
    sys.exit(main())
