"""What the gateway costs: time that it adds to the first token, and chunks that one process passes on in a second.

    python -m tests.gateway.bench                      # against a stand-in of the server, which costs next to nothing
    python -m tests.gateway.bench --url HOST:8001      # against a server that runs
    python -m tests.gateway.bench --profile gateway.txt

The stand-in, the gateway and the client are processes of their own. On a machine that is busy or has few cores the
chunks a second of the gateway's own CPU time tell more than those of the clock. Figures are printed and never asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2_grpc

from cb_backend.cli.server.server_process import free_ports
from cb_backend.gateway.calls import Prompt, make_inputs
from cb_backend.gateway.triton import make_request
from tests.waiting import WAIT_S

HOST = "127.0.0.1"
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a server's gRPC address; default: a stand-in")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--requests", type=int, default=300, help="for the first token (%(default)s)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64], help="at a time (%(default)s)")
    parser.add_argument("--tokens", type=int, default=40_000, help="of all streams together (%(default)s)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="the gateway's own profile, by cProfile")
    args = parser.parse_args()
    load = " ".join(f"{load:.1f}" for load in os.getloadavg())
    print(f"{os.cpu_count()} cores, load {load}; Python {sys.version.split()[0]}")
    with server(args.url) as url, gateway(url, args.profile) as (port, pid):
        first_token(args, url, port)
        print("\n| streams | chunks | chunks/s | chunks/s of the gateway's CPU | its CPU, cores |\n|" + " --- |" * 5)
        for num_streams in args.streams:
            throughput(args, port, pid, num_streams)
    return 0


def first_token(args: argparse.Namespace, url: str, port: int) -> None:
    """Medians of requests one after the other, in turns: straight to the server, and through the gateway."""
    body = chat_body(args.model, 1)
    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        prompt = Prompt("messages", json.dumps(body["messages"]))
        inputs = make_inputs(prompt, {"max_tokens": 1}, is_stream=True, has_logprobs=False)
        straight, through = [], []
        for index in range(args.requests):
            began = time.perf_counter()
            next(stub.ModelStreamInfer(iter([make_request(args.model, inputs, f"bench-{index}")])))
            straight.append(time.perf_counter() - began)
            began = time.perf_counter()
            asyncio.run(read_stream(port, body, stop_at=2))  # the first chunk has the role alone
            through.append(time.perf_counter() - began)
    own, gateways = (1000 * statistics.median(values) for values in (straight, through))
    print(
        f"first token, median of {args.requests}: {own:.2f} ms straight, {gateways:.2f} ms through the gateway, ",
        end="",
    )
    print(f"{gateways - own:+.2f} ms (HTTP connection included)")


def throughput(args: argparse.Namespace, port: int, pid: int, num_streams: int) -> None:
    body = chat_body(args.model, args.tokens // num_streams)

    async def read_all() -> int:
        return sum(await asyncio.gather(*(read_stream(port, body) for _ in range(num_streams))))

    cpu, began = cpu_seconds(pid), time.perf_counter()
    num_chunks = asyncio.run(read_all())
    seconds, cpu = time.perf_counter() - began, cpu_seconds(pid) - cpu
    row = (
        f"{num_chunks:,}",
        f"{num_chunks / seconds:,.0f}",
        f"{num_chunks / max(cpu, 0.01):,.0f}",
        f"{cpu / seconds:.2f}",
    )
    print(f"| {num_streams} | {' | '.join(row)} |", flush=True)


def chat_body(model: str, num_tokens: int) -> dict[str, object]:
    message = {"role": "user", "content": "Hello"}
    return {"model": model, "messages": [message], "max_tokens": num_tokens, "stream": True, "ignore_eos": True}


async def read_stream(port: int, body: dict[str, object], stop_at: int | None = None) -> int:
    """Events of one streamed request; only counted, so that the client costs little."""
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(data)}\r\nconnection: close\r\n\r\n"
    )
    writer.write(head.encode() + data)
    num_events, rest = 0, b""
    try:
        while part := await reader.read(1 << 16):
            if not num_events and not rest and not part.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(part.decode(errors="replace"))
            rest += part
            num_events += rest.count(b"\ndata: ")
            rest = rest[-6:] if not rest.endswith(b"\ndata: ") else b""
            if stop_at is not None and num_events >= stop_at:
                break
    finally:
        writer.close()
    return num_events


def cpu_seconds(pid: int) -> float:
    """Of a process and its threads since its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


@contextmanager
def server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    (port,) = free_ports(1)
    with subprocess.Popen([sys.executable, "-m", "tests.fakes.triton_server", str(port)], stdout=subprocess.PIPE) as it:
        assert it.stdout is not None
        it.stdout.readline()
        yield f"{HOST}:{port}"
        it.kill()


@contextmanager
def gateway(url: str, profile: Path | None) -> Iterator[tuple[int, int]]:
    """Its port and its process."""
    (port,) = free_ports(1)
    profiler = [] if profile is None else ["-m", "cProfile", "-o", f"{profile}.pstats"]
    words = ["-m", "cb_backend.cli.main", "openai", "--url", url, "--port", str(port)]
    with subprocess.Popen([sys.executable, *profiler, *words], stdout=subprocess.DEVNULL) as it:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield port, it.pid
        it.terminate()
        it.wait(WAIT_S)
    if profile is not None:
        import pstats

        with profile.open("w") as file:
            pstats.Stats(f"{profile}.pstats", stream=file).sort_stats("tottime").print_stats(40)
        print(f"profile: {profile}")


if __name__ == "__main__":
    sys.exit(main())
