"""Load test of a served model over gRPC streams: latencies, tokens/s, goodput, errors; JSON and one-file HTML report.

    python client/load_test.py --rate 4 8 16 --duration 60 --input-len lognormal:220:0.9:1000 --html report.html
    python client/load_test.py --concurrency 64 --num-requests 512 --input-len 512 --output-len 256 --processes 4
    python client/load_test.py --arrival trace --trace conversation_trace.jsonl --num-requests 500 --time-scale 0.5
    python client/load_test.py --compare before.json after.json --html compare.html

An open loop measures from the scheduled send time, so a server that falls behind cannot hide it by slowing the
client. Exit code 0: the run is complete; 1: no request succeeded; 2: it could not start, or a file not
be written; 130: ended by Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from dataclasses import replace
from datetime import datetime
from typing import Any

import grpc
from load_generator import options, report, server_metrics, summary
from load_generator.contracts import WorkerSpec
from load_generator.fleet import FleetResult, run_fleet, share
from load_generator.options import Load
from load_generator.progress import show_progress
from load_generator.prompts import Vocabulary, calibrate, vocabulary_of_tokenizer
from load_generator.records import Status, write_history
from load_generator.wire import count_input_tokens, why_no_model

from cb_backend.support.process_watch import machine_cpu_seconds
from cb_backend.traffic.traces import TraceError
from cb_backend.traffic.workload import Lengths, WorkloadError

SHOWN_ERRORS = 3  # kinds of them a run, on the terminal


class StartError(Exception):
    """The test cannot begin; the message says why and what to do."""


def main(argv: list[str] | None = None) -> int:
    args = options.parser().parse_args(argv)
    # A container that is told to end reports what was done, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _compare(args) if args.compare else _measure(args, argv)
    except (StartError, WorkloadError, TraceError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cancelled before anything was measured", file=sys.stderr)
        return 130


def _compare(args: argparse.Namespace) -> int:
    try:
        results = [report.load_result(path) for path in args.compare]
    except ValueError as error:
        raise StartError(str(error)) from None
    for result, path in zip(results, args.compare, strict=True):
        if results[0]["label"] == results[1]["label"]:
            result["label"] = f"{result['label']} ({path.stem})"
    print(report.text_table(results))
    if args.html:
        args.html.write_text(report.html_report(results), encoding="utf-8")
    return 0


def _measure(args: argparse.Namespace, argv: list[str] | None) -> int:
    options.check(args)
    loads, source = options.loads(args), options.lengths(args)
    if reason := why_no_model(args.url, args.model):
        raise StartError(f"{args.url} does not serve {args.model!r} ({reason}); give --model")
    vocabulary, warnings = _vocabulary(args)
    if args.history:
        args.history.write_text("", encoding="utf-8")
    result = _new_result(args, argv, vocabulary)
    unwritten: OSError | None = None
    for index, load in enumerate(loads):
        run, was_interrupted = _run(args, load, source, vocabulary, args.seed + index * options.RUN_SEED_STEP)
        run["warnings"] = warnings + run["warnings"]
        result["runs"].append(run)
        result["was_interrupted"] = was_interrupted
        try:
            _write(args, result)  # after every run: a sweep that is ended early keeps what it has
        except OSError as error:  # a full disk: what was measured is told all the same
            unwritten = error
        if was_interrupted:
            break
    print(report.text_table([result]))
    for run in result["runs"]:
        for text in [*_failures(run["summary"]["errors"]), *run["warnings"]]:
            print(f"warning: {run['load']['label']}: {text}", file=sys.stderr)
    if unwritten is not None:
        raise unwritten
    if result["was_interrupted"]:
        return 130
    return 0 if any(run["summary"]["num_ok"] for run in result["runs"]) else 1


def _failures(errors: dict[str, int]) -> list[str]:
    """The commonest reasons for which requests failed, as the server gave them; the result file has more."""
    texts = [f"{count} failed: {text}" for text, count in list(errors.items())[:SHOWN_ERRORS]]
    num_more = len(errors) - len(texts)
    return texts + ([f"{num_more} further kinds of errors (--json and --html have them)"] if num_more else [])


def _vocabulary(args: argparse.Namespace) -> tuple[Vocabulary, list[str]]:
    """How long words are in tokens. Also the check that a server answers at all. Raises `StartError`."""
    if args.tokenizer is not None:
        try:
            return vocabulary_of_tokenizer(str(args.tokenizer)), []
        except ImportError:
            raise StartError("--tokenizer needs the package tokenizers") from None
        except Exception as error:  # the package raises nothing narrower
            raise StartError(f"--tokenizer {args.tokenizer}: {error}") from None
    if args.tokens_per_word is not None:
        return Vocabulary(tokens_per_word=args.tokens_per_word, source="given"), []
    wire = replace(options.wire_options(args), has_input_counts=True)
    try:
        return calibrate(lambda text: count_input_tokens(args.url, wire, text), "server", args.seed), []
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            raise StartError(
                f"no server takes requests at {args.url}: {error.details()}; start one, or give --url"
            ) from None
        reason = error.details()
    except ValueError as error:
        reason = str(error)
    return Vocabulary(), [f"prompt lengths assume one token per word: the probe failed ({reason})"]


def _run(
    args: argparse.Namespace, load: Load, source: Lengths, vocabulary: Vocabulary, seed: int
) -> tuple[dict[str, Any], bool]:
    """One run and its figures, as in the result file; and whether the user ended it."""
    plans = options.plan_run(args, load, source, seed)
    is_closed = load.kind == "concurrency"
    template = WorkerSpec(
        process=0,
        url=args.url,
        wire=options.wire_options(args),
        vocabulary=vocabulary,
        seed=seed,
        requests=plans,
        warm_up=options.plan_warm_up(args, source, seed),
        num_streams=int(load.value or 0) if is_closed else None,
        num_requests=args.num_requests,
        duration_s=args.duration,
        drain_timeout_s=args.drain_timeout,
        request_timeout_s=args.request_timeout or None,
        num_connections=args.connections,
    )
    metrics_before = _metrics(args)
    cpu_before = machine_cpu_seconds()
    with show_progress(load.label, args.num_requests if is_closed else len(plans)) as display:
        fleet = run_fleet(share(template, args.processes), display)
    cpu_share = _cpu_share(cpu_before, machine_cpu_seconds())
    if args.history:
        write_history(args.history, load.label, fleet.records)
    figures = summary.summarise(fleet.records, summary.Slo(args.slo_ttft_ms, args.slo_tpot_ms))
    figures["offered_per_s"] = None if is_closed else summary.offered_per_s(fleet.records)
    client, warnings = summary.judge_client(fleet.records, fleet.health, cpu_share)
    run = {
        "load": load.to_json(),
        "summary": figures,
        "curves": summary.curves(fleet.records),
        "client": client,
        "warnings": fleet.warnings + warnings,
        "server": _server(args, metrics_before, fleet),
    }
    return run, fleet.was_interrupted


def _metrics(args: argparse.Namespace) -> str | None:
    if not args.metrics_url:
        return None
    try:
        return server_metrics.fetch(args.metrics_url)
    except (OSError, ValueError) as error:
        print(f"warning: {args.metrics_url}: {error}", file=sys.stderr)
        return None


def _server(args: argparse.Namespace, before: str | None, fleet: FleetResult) -> dict[str, Any] | None:
    after = _metrics(args) if before is not None else None
    if before is None or after is None:
        return None
    num_finished = sum(record.status is Status.OK for record in fleet.records)
    return server_metrics.difference(before, after, args.model, num_finished)


def _cpu_share(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float:
    if before is None or after is None or after[1] <= before[1]:
        return 0.0
    return (after[0] - before[0]) / (after[1] - before[1])


def _new_result(args: argparse.Namespace, argv: list[str] | None, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "schema": report.SCHEMA,
        "label": args.label or args.model,
        "started_at": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["load_test.py", *(sys.argv[1:] if argv is None else argv)]),
        "url": args.url,
        "model": args.model,
        "client_cpus": os.cpu_count(),
        "prompts": {
            "tokens_per_word": vocabulary.tokens_per_word,
            "num_extra_tokens": vocabulary.num_extra_tokens,
            "source": vocabulary.source,
        },
        "was_interrupted": False,
        "runs": [],
    }


def _write(args: argparse.Namespace, result: dict[str, Any]) -> None:
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.html:
        args.html.write_text(report.html_report([result]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
