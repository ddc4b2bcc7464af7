"""`cb-backend bench embed`: vectors of documents, a reranking, and streams that run beside them, in process.

Every pass draws prompts of its own, so that none is found in the prefix cache but what a reranking's documents share.
Random weights (`--load-format dummy`) do: no figure depends on their values.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cb_backend.contracts.config import engine_config_from_dict
from cb_backend.contracts.errors import ConfigError
from cb_backend.contracts.pooling import PoolingRules
from cb_backend.contracts.step import Pooled
from cb_backend.contracts.token_rules import TokenRules
from cb_backend.engine.llm_engine import create_engine
from cb_backend.study import machine
from cb_backend.support.argument_types import json_object, output_file, positive_float, positive_int
from cb_backend.support.collection import no_collection

HELP = "documents a second, short texts, a reranking, and running streams beside documents"
PARTS = ("documents", "short", "rerank", "streams")
SHORT_TEXT = 64  # tokens
STREAM_PROMPT = 128  # tokens
NUM_WAITING = 8  # documents that wait at any time beside the streams

Tokens = NDArray[np.int32]
Record = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s --model MODEL [options]"
    parser.add_argument("--model", required=True, help="folder or hub id; with dummy weights a config.json do")
    parser.add_argument("--load-format", default="auto", choices=("auto", "dummy"))
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated, of the default's")
    parser.add_argument("--documents", type=positive_int, default=1000, metavar="N", help="of a pass (%(default)s)")
    parser.add_argument("--tokens", type=positive_int, default=512, metavar="N", help="of a document (%(default)s)")
    parser.add_argument("--query-tokens", type=positive_int, default=300, metavar="N", help="before each, to rerank")
    parser.add_argument("--rerank", type=positive_int, default=100, metavar="N", help="documents of a query")
    parser.add_argument("--streams", type=positive_int, default=32, metavar="N", help="and short texts at a time")
    parser.add_argument("--answer", type=positive_int, default=400, metavar="N", help="tokens of each stream")
    parser.add_argument("--max-itl-ms", type=positive_float, default=20.0, metavar="MS", help="for the streams")
    parser.add_argument("--reps", type=positive_int, default=3, help="passes; three times as many of short ones")
    parser.add_argument("--pooling", default="last", choices=("last", "mean"))
    parser.add_argument("--max-num-batched-tokens", type=positive_int, default=8192, metavar="N")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--engine-args", type=json_object, default={}, metavar="JSON", help="more keys of model.json")
    parser.add_argument("--out", type=output_file, help="append JSON lines to this file")


def run(args: argparse.Namespace) -> int:
    """Print each figure as it is there; returns the exit code. Raises `ConfigError` for what cannot be run."""
    parts = args.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        raise ConfigError(f"--parts must be of {', '.join(PARTS)}; got {unknown[0]!r}")
    # A model that generates too computes its head for streams alone; one that pools only has none.
    for runner, own in (("pooling", PARTS[:3]), ("both", PARTS[3:])):
        if chosen := [part for part in own if part in parts]:
            bench = EmbedBench(args, runner)
            for part in chosen:
                getattr(bench, part)()
            bench.close()
    return 0


class EmbedBench:
    """An engine with the model, and what is measured with it."""

    def __init__(self, args: argparse.Namespace, runner: str) -> None:
        self._args = args
        max_model_len = max(args.tokens + args.query_tokens, SHORT_TEXT, STREAM_PROMPT + args.answer)
        config = {
            "model": args.model,
            "load_format": args.load_format,
            "device": args.device,
            "runner": runner,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "max_model_len": max_model_len,
            "max_itl_ms": args.max_itl_ms if runner == "both" else None,
        }
        self._engine = create_engine(engine_config_from_dict(config | args.engine_args))
        self._random = np.random.default_rng(0)
        self._next_id = 1
        info = self._engine.info
        self._rules = TokenRules(seed=0, pooling=PoolingRules(pooling=args.pooling))
        self._base = {**machine.conditions(info.device), "model": Path(args.model).name, "dtype": info.dtype}
        self._base |= {"pooling": args.pooling, "runner": runner, "max_num_batched_tokens": args.max_num_batched_tokens}
        about = f"{self._base['card']}; cb_backend {self._base['version']} ({self._base['commit']})"
        print(f"{about}; {self._base['model']}, {info.dtype}, runner {runner}, {args.pooling}", flush=True)
        self._seconds(self._draw_all(2, args.tokens))  # what is compiled or found out at first use

    def documents(self) -> None:
        num, tokens = self._args.documents, self._args.tokens
        seconds = self._median(self._args.reps, functools.partial(self._draw_all, num, tokens))
        record = {"documents": num, "tokens": tokens, "seconds": seconds, "documents_s": num / seconds}
        text = f"{num / seconds:,.0f} documents/s, {num * tokens / seconds:,.0f} tokens/s"
        self._emit("documents", record, f"{num} documents of {tokens} tokens: {text}")

    def short(self) -> None:
        """One short text, and some at a time: what a search's query waits."""
        for num in (1, self._args.streams):
            seconds = self._median(3 * self._args.reps, functools.partial(self._draw_all, num, SHORT_TEXT))
            record = {"documents": num, "tokens": SHORT_TEXT, "seconds": seconds}
            self._emit("short", record, f"{num} of {SHORT_TEXT} tokens: {1e3 * seconds:.2f} ms")

    def rerank(self) -> None:
        """Documents of a query, which all prompts begin with."""
        num, own, shared = self._args.rerank, self._args.tokens, self._args.query_tokens

        def pairs() -> list[Tokens]:
            query = self._draw(shared)
            return [np.concatenate([query, self._draw(own)]) for _ in range(num)]

        seconds = self._median(3 * self._args.reps, pairs)
        record = {"documents": num, "tokens": own, "query_tokens": shared, "seconds": seconds}
        text = f"{num} documents of {own} tokens after a query of {shared}: {1e3 * seconds:.1f} ms"
        self._emit("rerank", record, text)

    def streams(self) -> None:
        """Time between a stream's tokens, alone and with documents that never end beside.

        Uncounted before: how long steps take is learned while serving, and the first ones of their sizes are slow.
        Garbage waits, as it does in an engine's process.
        """
        num = self._args.streams
        with no_collection():
            self._stream(num, has_documents=True)
        for has_documents in (False, True):
            gc.collect()
            with no_collection():
                gaps, documents_s = self._stream(num, has_documents)
            p50, p99 = (1e3 * float(np.percentile(gaps, share)) for share in (50, 99))
            record = {"streams": num, "itl_p50_ms": p50, "itl_p99_ms": p99, "documents_s": documents_s}
            beside = f" beside {documents_s:,.0f} documents/s of {self._args.tokens} tokens" if has_documents else ""
            limit = f" (max_itl_ms {self._args.max_itl_ms:g})" if has_documents else ""
            text = f"{num} streams{beside}: time between tokens p50 {p50:.2f}, p99 {p99:.2f} ms{limit}"
            self._emit("streams", record | {"max_itl_ms": self._args.max_itl_ms}, text)

    def close(self) -> None:
        """Its memory is free for the next."""
        self._engine.close()
        is_on_card = self._engine.info.device != "cpu"
        del self._engine
        gc.collect()
        if is_on_card:
            import torch

            torch.cuda.empty_cache()

    def _stream(self, num: int, has_documents: bool) -> tuple[list[float], float]:
        """Seconds between tokens while all streams run, and documents/s in that time."""
        rules = TokenRules(seed=0, temperature=0.0, max_tokens=self._args.answer, ignore_eos=True)
        ids = {self._add(self._draw(STREAM_PROMPT), rules) for _ in range(num)}
        last: dict[int, float] = {}
        gaps: list[float] = []
        num_documents, began = 0, 0.0
        while ids:  # what is left of the documents when the streams have ended is worked off below
            if has_documents and len(last) == num and self._engine.scheduler.num_waiting < NUM_WAITING:
                for _ in range(NUM_WAITING):
                    self._add(self._draw(self._args.tokens), self._rules)
            output = self._engine.step()
            if output is None:
                continue
            now = time.perf_counter()
            for request_id, reason in zip(output.request_ids.tolist(), output.finish_reasons.tolist(), strict=True):
                if request_id not in ids:
                    num_documents += 1
                    continue
                if len(last) == num:
                    began = began or now
                    gaps.append(now - last[request_id])
                last[request_id] = now
                if reason:
                    ids.discard(request_id)
        seconds = time.perf_counter() - began
        self._drain()
        return gaps, num_documents / seconds

    def _median(self, reps: int, draw: Callable[[], Sequence[Tokens]]) -> float:
        return statistics.median(self._seconds(draw()) for _ in range(reps))

    def _seconds(self, prompts: Sequence[Tokens]) -> float:
        """From the first prompt's arrival to the last one's vector."""
        began = time.perf_counter()
        for prompt in prompts:
            self._add(prompt, self._rules)
        num_given = self._drain()
        seconds = time.perf_counter() - began
        if num_given != len(prompts):
            raise RuntimeError(f"{num_given} of {len(prompts)} prompts got a vector; the cache is too small")
        return seconds

    def _drain(self) -> int:
        """Requests that got a vector until none is left."""
        num_given = 0
        while self._engine.has_unfinished():
            output = self._engine.step()
            for part in output.attached if output is not None else ():
                num_given += len(part.owners) if isinstance(part, Pooled) else 0
        return num_given

    def _add(self, tokens: Tokens, rules: TokenRules) -> int:
        self._engine.add_request(self._engine.make_request(self._next_id, tokens, rules))
        self._next_id += 1
        return self._next_id - 1

    def _draw_all(self, num: int, num_tokens: int) -> list[Tokens]:
        return [self._draw(num_tokens) for _ in range(num)]

    def _draw(self, num_tokens: int) -> Tokens:
        return self._random.integers(3, self._engine.info.vocab_size, num_tokens).astype(np.int32)

    def _emit(self, workload: str, record: Record, text: str) -> None:
        print(f"  {text}", flush=True)
        if self._args.out is not None:
            with self._args.out.open("a") as file:
                file.write(json.dumps({**self._base, "workload": f"embed-{workload}", **record}) + "\n")
