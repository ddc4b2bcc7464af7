"""`cb-backend bench embed` from the command line, on the real engine with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cb_backend.cli.main import main
from tests.cli.test_bench_command import CONFIG

SIZES = {"documents": 6, "tokens": 12, "query-tokens": 8, "rerank": 3, "streams": 2, "answer": 8, "reps": 1}


def flags(tmp_path: Path, **more: object) -> list[str]:
    model = tmp_path / "tiny"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["LlamaForCausalLM"]}))
    named = {"model": model, "load-format": "dummy", "device": "cpu", "out": tmp_path / "out.jsonl", **SIZES}
    named |= {"max-num-batched-tokens": 32, "engine-args": '{"num_gpu_blocks_override": 40, "block_size": 4}', **more}
    return ["bench", "embed", *(word for name, value in named.items() for word in (f"--{name}", str(value)))]


def records(tmp_path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_every_part_has_its_record_and_line(pooling: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(tmp_path, pooling=pooling)) == 0
    found = records(tmp_path)
    names = ["embed-documents", "embed-short", "embed-short", "embed-rerank", "embed-streams", "embed-streams"]
    assert [record["workload"] for record in found] == names
    assert [record["documents"] for record in found[:4]] == [6, 1, 2, 3]
    assert {record["pooling"] for record in found} == {pooling}
    assert all(record["seconds"] > 0 for record in found[:4])
    alone, beside = found[4:]
    assert alone["documents_s"] == 0 < beside["documents_s"]
    assert 0 < beside["itl_p50_ms"] <= beside["itl_p99_ms"]
    lines = capsys.readouterr().out.splitlines()
    assert sum("tiny, float32" in line for line in lines) == 2  # an engine for vectors alone, one for both
    assert len(lines) == 2 + len(names)


def test_parts_are_chosen(tmp_path: Path) -> None:
    assert main(flags(tmp_path, parts="rerank")) == 0
    assert [record["workload"] for record in records(tmp_path)] == ["embed-rerank"]


@pytest.mark.parametrize("parts", ["rerank,documets", ""])
def test_an_unknown_part_is_one_line(parts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(tmp_path, parts=parts)) == 1
    error = capsys.readouterr().err
    assert "--parts must be of documents, short, rerank, streams; got " in error
    assert not (tmp_path / "out.jsonl").exists()


def test_a_cache_too_small_for_a_document_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"engine-args": '{"num_gpu_blocks_override": 2, "block_size": 4}'}
    assert main(flags(tmp_path, parts="documents", **small)) == 1
    assert "the prompt has 12 tokens, but the whole KV cache holds 8" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
