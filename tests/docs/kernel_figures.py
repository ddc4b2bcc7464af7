"""The parts of `docs/measured.md` about steps and kernels, out of the CSV files of `kernels/results`."""

from __future__ import annotations

from tests.docs.result_files import card_of, expert_blocks, kernel_time_blocks, newest, rows_of
from tests.docs.tables import number, percent, source, table

CARDS = ("H200", "H100")
OPS = ("decode_attention", "decode_attention_fp8", "prefill_attention", "qkv_post", "rms_norm", "sample")
PRODUCTS = {
    "linear.csv": ("library_us", "ours_us"),
    "linear_fp8.csv": ("bf16_us", "library_us", "ours_us"),
    "linear_packed.csv": ("bf16_us", "ours_us"),
}
SHOWN_ROWS = ("1", "8", "32", "64", "128", "256")


def _sources(rows: list[dict[str, str]]) -> str:
    """One line a card: versions, and the commits that the rows are of."""
    lines = []
    for gpu in sorted({row["gpu"] for row in rows}, reverse=True):
        chosen = [row for row in rows if row["gpu"] == gpu]
        versions = {f"driver {row['driver']}, torch {row['torch']}, triton {row['triton']}" for row in chosen}
        commits = ", ".join(sorted({row["commit"] for row in chosen}))
        lines.append("- " + source(card_of(gpu), "; ".join(sorted(versions)), commits))
    return "\n".join(lines)


def formats() -> str:
    """Whole decode steps of the formats, a table a card."""
    rows = newest(rows_of("formats.csv"), lambda row: (row["gpu"], row["format"], row["rows"]))
    parts = []
    for card in CARDS:
        chosen = {(row["rows"], row["format"]): row for row in rows if card_of(row["gpu"]) == card}
        counts = sorted({count for count, _ in chosen}, key=int)
        names = list(dict.fromkeys(name for _, name in chosen))
        cells = [[count, *(_step(chosen.get((count, name))) for name in names)] for count in counts]
        parts.append(table([f"Llama-3.1-8B, one {card}, rows of 1,024 tokens", *names], cells))
    return "\n\n".join(parts) + "\n\n" + _sources(rows)


def _step(row: dict[str, str] | None) -> str:
    return f"{row['ms']} ({percent(row['share_of_limit'])})" if row else ""


def accuracy() -> str:
    """What the formats cost, against float32."""
    rows = newest(rows_of("accuracy.csv"), lambda row: (row["model"], row["format"]))
    cells = [
        [
            row["format"], row["largest_error"], row["mean_error"], percent(row["relative_error"], 1), row["kl_nats"],
            percent(row["same_top_token"], 1), row["tokens_before_differing"],
        ]
        for row in rows
    ]  # fmt: skip
    one = rows[0]
    sources = dict.fromkeys(
        f"- {row['device']}, {row['prompts']} greedy answers, torch {row['torch']}, commit {row['commit']}"
        for row in rows
    )
    head = [
        f"{one['model']}, against itself in float32", "largest error of a logit", "mean error", "relative", "KL, nats",
        "same most likely token", f"tokens before an answer differs (of {one['tokens']})",
    ]  # fmt: skip
    return table(head, cells) + "\n\n" + "\n".join(sources)


def time_by_kind() -> str:
    """The kernels of a step by kind, without those below 0.1 % of its time."""
    parts = []
    for block in kernel_time_blocks():
        rows = [row for row in block.rows if row[4] != "0.0%"]
        head = [f"{block.model[0].upper()}{block.model[1:]}", "a step", "us a step", "us each", "share"]
        parts.append(
            table(head, rows) + f"\n\n- {source(block.card, block.about.rsplit(', commit', 1)[0], block.commit)}"
        )
    return "\n\n".join(parts)


def kernels() -> str:
    """Each kernel of the layers, cases by cards; then the products."""
    return "\n\n".join([*(_op(op) for op in OPS), *(_products(name) for name in PRODUCTS)])


def _op(op: str) -> str:
    rows = newest(rows_of(f"{op}.csv"), lambda row: (row["op"], row["model"], row["case"], row["gpu"]))
    found = {(row["op"], row["model"], row["case"], card_of(row["gpu"])): row for row in rows if not row["error"]}
    cards = [card for card in CARDS if any(key[3] == card for key in found)]
    cells = []
    for name, model, case in dict.fromkeys(key[:3] for key in found):
        pairs = [found.get((name, model, case, card)) for card in cards]
        times = [f"{number(row['us'])} ({percent(row['share_of_limit'])})" if row else "" for row in pairs]
        cells.append([name, model, case, *times])
    return f"### {op}\n\n" + table(["kernel", "model", "case", *cards], cells) + "\n\n" + _sources(rows)


def _products(name: str) -> str:
    rows = newest(rows_of(name), lambda row: (row.get("format"), row["shape"], row["m"], row["gpu"]))
    head = ["shape", *(f"{m} rows" for m in SHOWN_ROWS)]
    cells = []
    for shape in dict.fromkeys(row["shape"] for row in rows):
        found = {row["m"]: row for row in rows if row["shape"] == shape}
        cells.append([shape, *(_best(found[m], PRODUCTS[name]) if m in found else "" for m in SHOWN_ROWS)])
    text = (
        "Times of all ways, us (" + " / ".join(column.removesuffix("_us") for column in PRODUCTS[name]) + " / limit):"
    )
    return f"### {name.removesuffix('.csv')}\n\n{text}\n\n" + table(head, cells) + "\n\n" + _sources(rows)


def _best(row: dict[str, str], columns: tuple[str, ...]) -> str:
    return " / ".join(row[column] or "-" for column in (*columns, "floor_us"))


def expert_steps() -> str:
    """Steps of models with experts: a table a model and context."""
    blocks = newest(expert_blocks(), lambda block: (block.card, block.model))
    parts = []
    for block in sorted(blocks, key=lambda block: (block.card, block.model)):
        head = [block.model, "ms", "limit, ms", "share", "experts hit"]
        parts.append(table(head, block.rows) + f"\n\n- {source(block.card, block.about, block.commit)}")
    return "\n\n".join(parts)
