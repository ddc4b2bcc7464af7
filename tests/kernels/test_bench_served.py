"""kernels/bench_served.py: what its loads ask for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cb_backend.cli.paths import checkout_path


class MadeUpServer:
    pid, grpc_address = 1, "127.0.0.1:1"

    def __init__(self, *_: Any) -> None: ...

    def start(self) -> None: ...

    def wait_ready(self, timeout_s: float) -> None: ...

    def stop(self) -> None: ...


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """The benchmark on a server and with a client that are made up; `commands` are the client's."""
    monkeypatch.syspath_prepend(str(checkout_path("kernels")))
    import bench_served
    from load_generator import options

    commands: list[list[str]] = []

    def plans_of(command: list[str]) -> list[Any]:
        asked = options.parser().parse_args(command[2:])
        return list(options.plan_run(asked, options.loads(asked)[0], options.lengths(asked), asked.seed))

    def load(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        records = [{"id": plan.request_id, "sent_s": 0.0, "chunks": [[0.5]]} for plan in plans_of(command)]
        (tmp_path / "history.jsonl").write_text("\n".join(map(json.dumps, records)))
        report = Path(command[command.index("--json") + 1])
        latency = {"p50": 1.0, "p99": 1.0}
        summary = {"output_tokens_per_s": 1.0, "responses_per_s": 1.0, "tokens_per_response": 1.0, "num_requests": 1}
        summary |= {"ttft_ms": latency, "itl_token_ms": latency, "num_ok": 1}
        report.write_text(json.dumps({"runs": [{"summary": summary}]}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(bench_served, "ServerProcess", MadeUpServer)
    monkeypatch.setattr(bench_served, "find_server", lambda: None)
    monkeypatch.setattr(bench_served, "copy_with_model", lambda *_: tmp_path)
    monkeypatch.setattr(bench_served, "make_adapters", lambda *_: {})
    monkeypatch.setattr(bench_served, "descendants", lambda pid: [])
    monkeypatch.setattr(bench_served.subprocess, "run", load)
    return SimpleNamespace(bench=bench_served, options=options, commands=commands, plans_of=plans_of)


def arguments(out: Path, **given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{
        "streams": [4, 4, 8], "adapters": 0, "engine_args": "{}", "load_format": "dummy", "timeout_s": 1.0, "out": out,
        "keeps_streams": False, "rate": "inf", "num_requests": None, "input_len": 32, "output_len": 2, "processes": 1,
        "zipf": 1.0, "max_loras": 8, **given,
    })  # fmt: skip


def test_no_load_finds_the_prompts_of_the_one_before_in_the_cache(
    workshop: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from load_generator.prompts import PromptBuilder, Vocabulary

    workshop.bench.serve(arguments(tmp_path), tmp_path, 1)
    assert "failed" not in capsys.readouterr().out
    prompts: list[set[str]] = []
    for command in workshop.commands:
        builder = PromptBuilder(Vocabulary(), workshop.options.parser().parse_args(command[2:]).seed)
        prompts.append({builder.build(plan) for plan in workshop.plans_of(command)})
    assert [len(each) for each in prompts] == [4, 4, 8]
    assert len(set.union(*prompts)) == 16


def test_every_adapter_is_used_before_the_loads(
    workshop: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workshop.bench.serve(arguments(tmp_path, adapters=32, streams=[64]), tmp_path, 1)
    first, load = (workshop.options.parser().parse_args(command[2:]) for command in workshop.commands)
    assert (first.output_len, load.output_len) == ("1", "2")
    assert (first.lora_skew, load.lora_skew) == (0.0, 1.0)
    assert "first use of 32 adapters" in capsys.readouterr().out


def test_loads_go_on_where_the_first_use_fails_and_it_leaves_no_report(
    workshop: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = workshop.bench.subprocess.run

    def fail_first(command: list[str], **given: Any) -> SimpleNamespace:
        done: SimpleNamespace = load(command, **given)
        done.returncode, done.stderr, done.stdout = int(len(workshop.commands) == 1), "no server", ""
        return done

    monkeypatch.setattr(workshop.bench.subprocess, "run", fail_first)
    rows = workshop.bench.serve(arguments(tmp_path, adapters=32, streams=[8]), tmp_path, 1)
    printed = capsys.readouterr().out
    assert "first use of the adapters failed" in printed
    assert "no server" in printed
    assert "failed" not in "".join(rows)
    assert sorted(path.name for path in tmp_path.glob("load-*.json")) == ["load-8.json"]
