"""`docs/measured.md` and the README's table of figures, out of `kernels/results`: no number of them is written by hand.

python -m tests.docs.measured        # writes both; the suite holds them equal
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.kernel_figures import accuracy, expert_steps, formats, kernels, time_by_kind
from tests.docs.result_files import Block, card_of, comparison_blocks, interference_blocks, json_rows, newest, rows_of
from tests.docs.step_figures import families, loading, packed
from tests.docs.tables import number, source, table

ROOT = Path(__file__).resolve().parents[2]
PAGE, README = ROOT / "docs" / "measured.md", ROOT / "README.md"
BEGIN, END = "<!-- measured: written by `python -m tests.docs.measured` -->", "<!-- end of measured -->"
MODELS = {
    "qwen3-0.6b": "Qwen3-0.6B", "llama-3.2-1b": "Llama-3.2-1B", "llama-3.1-8b": "Llama-3.1-8B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B", "gpt-oss-20b": "gpt-oss-20b",
}  # fmt: skip
ROWS = {
    "offline a, output tok/s": "offline, 256 requests of 100 to 1024 tokens in and out, output tokens/s",
    "offline c, output tok/s": "offline, 1,000 requests, lognormal, mean 512 in and 256 out, output tokens/s",
    "batch 1 TPOT, ms": "one request at a time, ms a token",
    "batch 1 TTFT (128 in), ms": "one request, 128 tokens in, ms to the first",
    "first start-up, s": "start of the process to the first token, s",
}
FURTHER_ROWS = {f"batch {rows} TPOT, ms": f"{rows} requests at once, ms a token" for rows in (8, 32, 64, 256)}
README_CARD = "H200"
INTRO = """# Measured

<!-- Written by `python -m tests.docs.measured` out of `kernels/results`; do not edit. -->

The newest figure of each measurement; raw lines, older ones and other cases are in
[`kernels/results/`](../kernels/results). Weights are random and in bfloat16 unless a table says otherwise. "Limit" is
what memory bandwidth and arithmetic of the card, both measured in the run, allow."""
SECTIONS = {  # title: what stands above its tables
    "Beside vLLM": "In process, `kernels/compare_vllm.py`: of each row the newest run that had both. Ours with "
    "`max_num_batched_tokens` 8192, vLLM with its defaults. The experts of gpt-oss-20b are in mxfp4.",
    "Served": "Through `tritonserver`, clients on the same machine, 512 tokens in and 256 out: "
    "`kernels/bench_served.py`. With 4 front ends, on the H200, every load has prompts of its own; in the other runs a "
    "load began with the prompts of the one before, which the prefix cache still had: 1 of 64 streams, 64 of 256, 256 "
    "of 512.",
    "The response path alone": "Under an engine that costs nothing: "
    "`python -m tests.server.response_path --seconds 5`.",
    "Running streams beside long prompts": "Gaps beside an unanswered prompt of 8,192 tokens. W8: 32 streams, a long "
    "prompt each second; W6-8 and W6-32: so many at once. `kernels/compare_interference.py`.",
    "In flight against static batches": "In flight / static, the same engine: `cb-backend study`; what follows from it "
    "is [a decision](design/decisions/0011-in-flight-against-static.md).",
    "Narrow formats": "Whole decode steps, `kernels/bench_formats.py`, ms and the share of what the card allows; then "
    "what each costs in accuracy, `cb-backend bench accuracy`.",
    "Weights of few bits": "Whole decode steps, `kernels/bench_formats.py`, ms and the share of the limit. `gguf q4_k` "
    "and the like are a GGUF file's own blocks.",
    "Families": "Whole decode steps, `kernels/bench_step.py`, ms and the share of the limit, beside Llama's shapes of "
    "about the same sizes.",
    "Start": "`python -m tests.models.bench_load`: weights from files to the device by threads, warm out of the page "
    "cache, cold from the disk; `library` is one thread and the safetensors package. Kernels are compiled at the first "
    "start, once a machine.",
    "Where a step's time goes": "Kernels by kind, under the profiler: "
    "`cb-backend bench engine --model DIR --profile 100`.",
    "Mixtures of experts": "Whole decode steps, `kernels/bench_step.py`, with the experts of a layer that their rows "
    "hit: of random weights nearly as many as even routing does, which reads the most.",
    "Kernels": "Alone, in a CUDA graph: `kernels/bench.py` and `kernels/tune.py linear`; microseconds and the share of "
    "the limit.",
}


def _key_of(workload: str) -> str:
    return {"conv": "conversation"}.get(workload, workload)


def _figures(card: str) -> tuple[dict[tuple[str, str], list[str]], list[Block]]:
    """The cells (vLLM, ours, limit) by row and model: of the newest run that has vLLM's figure beside ours."""
    cells: dict[tuple[str, str], list[str]] = {}
    used: dict[tuple[str, str], Block] = {}
    for block in comparison_blocks():
        for name, *values in block.rows:
            if block.card == card and name in ROWS | FURTHER_ROWS and values[0] != "-":
                cells[name, block.model], used[name, block.model] = values, block
    return cells, list({id(block): block for block in used.values()}.values())


def comparison(card: str, titles: dict[str, str] = ROWS | FURTHER_ROWS) -> str:
    """The table of one card, vLLM beside ours, with its sources below."""
    cells, blocks = _figures(card)
    models, rows = _compared_models(card), []
    for name, text in titles.items():
        row = [_compared(cells.get((name, model))) for model in models]
        if any(row):
            rows.append([text, *row])
    head = ["vLLM / **cb_backend** / limit", *(MODELS[model] for model in models)]
    sources = [source(block.card, f"{MODELS[block.model]}: {block.about}", block.commit) for block in blocks]
    return table(head, rows) + "\n\n" + "\n".join(f"- {line}" for line in sorted(set(sources)))


def _compared_models(card: str) -> list[str]:
    _, blocks = _figures(card)
    return [model for model in MODELS if any(model == block.model for block in blocks)]


def _compared(cell: list[str] | None) -> str:
    if cell is None:
        return ""
    vllm, ours, limit = cell
    return f"{vllm} / **{ours}**" + (f" / {limit}" if limit != "-" else "")


def readme_table() -> str:
    """The comparison's table of one card, without its sources, and what is served."""
    text = comparison(README_CARD, ROWS).split("\n\n")[0]
    served = [row for row in _served_rows() if (row["card"], row["front_ends"]) == (README_CARD, "4")]
    models = _compared_models(README_CARD)
    best = {model: max((row for row in served if row["model"] == model), key=_speed, default=None) for model in models}
    cells = [f"**{number(row['output_tok_s'])}** ({row['streams']})" if row else "" for row in best.values()]
    title = "served over gRPC, ours alone, 512 in / 256 out, output tokens/s (streams at once)"
    return text + "\n" + table([], [[title, *cells]])


def _speed(row: dict[str, str]) -> float:
    return float(row["output_tok_s"])


def _served_rows() -> list[dict[str, str]]:
    rows = [
        {**row, "card": row["gpu"].removeprefix("2 ").removeprefix("NVIDIA ").split()[0]}
        for row in rows_of("served.csv")
        if row["streams"].isdigit() and "requests/s" not in row["server"] and not row["gpu"].startswith("2 ")
    ]
    return newest(rows, lambda row: (row["card"], row["model"], row["front_ends"], row["streams"]))


def served() -> str:
    """Through the server: a table a card and model, front ends by streams."""
    rows = _served_rows()
    parts = []
    for card in ("H200", "H100"):
        for model, name in MODELS.items():
            chosen = [row for row in rows if (row["card"], row["model"]) == (card, model)]
            if not chosen:
                continue
            cells = [
                [
                    row["front_ends"], row["streams"], number(row["output_tok_s"]), number(row["responses_s"]),
                    row["ttft_p50_ms"], row["itl_p50_ms"],
                    ", ".join(row[f"cores_{part}"] for part in ("engine", "front_ends", "server", "client")),
                ]
                for row in sorted(chosen, key=lambda row: (int(row["front_ends"]), int(row["streams"])))
            ]  # fmt: skip
            versions = {source(card, _versions(row) + f", {row['server']}", row["commit"]) for row in chosen}
            head = [
                f"{name}, front ends", "streams", "output tokens/s", "responses/s", "TTFT p50, ms",
                "inter-token p50, ms", "cores: engine, front ends, server, clients",
            ]  # fmt: skip
            parts.append(table(head, cells) + "\n\n" + "\n".join(f"- {line}" for line in sorted(versions)))
    return "\n\n".join(parts)


def _versions(row: dict[str, str]) -> str:
    return f"driver {row['driver']}, torch {row['torch']}, triton {row['triton']}"


def response_path() -> str:
    """Responses of an engine that costs nothing."""
    rows = rows_of("response_path.csv")
    cells = [
        [row["front_ends"], number(row["responses_s"]), number(row["tokens_s"]), row["tokens_per_response"]]
        for row in rows
    ]
    head = ["front ends", "responses/s", "tokens/s", "tokens a response"]
    return table(head, cells) + f"\n\n- {rows[0]['device']}, {rows[0]['streams']} streams, commit {rows[0]['commit']}"


def interference() -> str:
    """Running streams while prompts of 8,192 tokens arrive: the newest table of each card and model."""
    last = {(block.card, block.model): block for block in interference_blocks()}
    parts = []
    for (card, model), block in sorted(last.items(), reverse=True):
        head = [f"{MODELS[model]}, ms", "", "inter-token p50", "p99", "max", "TTFT of long prompts p50", "max"]
        rows = [[row[0], row[1].replace("vllm", "vLLM"), *row[2:7]] for row in block.rows]
        parts.append(table(head, rows) + f"\n\n- {source(card, block.about, block.commit)}")
    return "\n\n".join(parts)


def in_flight() -> str:
    """The newest runs of `study.jsonl` that are there in both policies, same traffic and cache."""
    rows = newest(
        [row for row in json_rows("study.jsonl") if row.get("when") in ("once", "load") and "workload" in row],
        lambda row: (row["workload"], row["policy"], row["when"], row["blocks"]),
    )
    found = {(row["workload"], row["when"], row["blocks"], row["policy"]): row for row in rows}
    pairs = [
        (key, row, found[(*key[:3], "static")])
        for key, row in found.items()
        if key[3] == "fcfs" and (*key[:3], "static") in found
    ]
    cells = [
        [
            f"{_key_of(key[0])}, {'all at once' if key[1] == 'once' else 'at 80 % of what in flight does'}",
            f"{key[2]:,}",
            *(f"{number(a)} / {number(b)}" for a, b in (_pair(one, other, *path) for path in _STUDY_FIGURES)),
        ]
        for key, one, other in sorted(pairs, key=lambda pair: (-pair[0][2], pair[0][1] != "once", pair[0][0]))
    ]  # fmt: skip
    head = ["traffic", "KV blocks", "output tokens/s", "TTFT p99, ms", "E2E p50, ms", "E2E p99, ms"]
    commits = sorted({row["commit"] for _, one, other in pairs for row in (one, other)})
    card = card_of(pairs[0][1]["card"])
    return table(head, cells) + f"\n\n- one {card}, {MODELS[pairs[0][1]['model']]}, commits {', '.join(commits)}"


_STUDY_FIGURES = (("output_tokens_per_s",), ("ttft_ms", "p99"), ("e2e_ms", "p50"), ("e2e_ms", "p99"))


def _pair(one: dict[str, object], other: dict[str, object], *path: str) -> tuple[float, float]:
    def read(row: object) -> float:
        for name in path:
            row = row[name]  # type: ignore[index]
        return float(row)  # type: ignore[arg-type]

    return read(one), read(other)


def page() -> str:
    """The whole of `docs/measured.md`."""
    bodies = (
        "### One H200\n\n" + comparison("H200") + "\n\n### One H100\n\n" + comparison("H100"),
        served(),
        response_path(),
        interference(),
        in_flight(),
        formats() + "\n\n" + accuracy(),
        packed(),
        families(),
        loading(),
        time_by_kind(),
        expert_steps(),
        kernels(),
    )
    pairs = zip(SECTIONS.items(), bodies, strict=True)
    return "\n\n".join([INTRO, *(f"## {title}\n\n{text}\n\n{body}" for (title, text), body in pairs)]) + "\n"


def readme_with_table(text: str) -> str:
    """The README with its table as the results have it. Raises `ValueError` where its marks are missing."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"README.md has no {BEGIN} ... {END}")
    return re.sub(
        re.escape(BEGIN) + r".*?" + re.escape(END), lambda _: f"{BEGIN}\n{readme_table()}\n{END}", text, flags=re.S
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme_with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} and the table of README.md written")
