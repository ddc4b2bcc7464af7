"""kernels/bench_served.py: what its loads ask for."""

from __future__ import annotations

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


def test_no_load_finds_the_prompts_of_the_one_before_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(checkout_path("kernels")))
    import bench_served
    from load_generator import options
    from load_generator.prompts import PromptBuilder, Vocabulary

    commands: list[list[str]] = []

    def load(command: list[str], **_: Any) -> SimpleNamespace:
        commands.append(command)
        (tmp_path / "history.jsonl").touch()
        report = Path(command[command.index("--json") + 1])
        latency = {"p50": 1.0, "p99": 1.0}
        summary = {"output_tokens_per_s": 1.0, "responses_per_s": 1.0, "tokens_per_response": 1.0, "num_requests": 1}
        summary |= {"ttft_ms": latency, "itl_token_ms": latency, "num_ok": 1}
        report.write_text(json.dumps({"runs": [{"summary": summary}]}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(bench_served, "ServerProcess", MadeUpServer)
    monkeypatch.setattr(bench_served, "find_server", lambda: None)
    monkeypatch.setattr(bench_served, "copy_with_model", lambda *_: tmp_path)
    monkeypatch.setattr(bench_served, "descendants", lambda pid: [])
    monkeypatch.setattr(bench_served.subprocess, "run", load)
    arguments = SimpleNamespace(
        streams=[4, 4, 8], adapters=0, engine_args="{}", load_format="dummy", timeout_s=1.0, out=tmp_path,
        keeps_streams=False, rate="inf", num_requests=None, input_len=32, output_len=2, processes=1,
    )  # fmt: skip
    bench_served.serve(arguments, tmp_path, 1)
    assert "failed" not in capsys.readouterr().out

    prompts: list[set[str]] = []
    for command in commands:
        asked = options.parser().parse_args(command[2:])
        plans = options.plan_run(asked, options.loads(asked)[0], options.lengths(asked), asked.seed)
        builder = PromptBuilder(Vocabulary(), asked.seed)
        prompts.append({builder.build(plan) for plan in plans})
    assert [len(each) for each in prompts] == [4, 4, 8]
    assert len(set.union(*prompts)) == 16
