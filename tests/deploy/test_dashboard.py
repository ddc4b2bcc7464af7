"""What Grafana asks and Prometheus warns of, without a server: pytest tests/deploy/test_dashboard.py

That the metrics exist is checked on a real one, in test_on_server.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest

from tests.deploy.files import DOCKER

# Grafana's own variables, filled in as it would.
GRAFANA_VARIABLES = {"$__rate_interval": "1m", "$model": "llm", "$instance": ".*"}
ACCUMULATING = ("_total", "_bucket", "_sum", "_count")


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCKER / "grafana" / "cb_backend.json").read_text())
    return found


def panels(kind: str | None = None) -> list[dict[str, Any]]:
    return [one for one in dashboard()["panels"] if kind in (None, one["type"])]


def parsed(expression: str) -> Any:
    for name, value in GRAFANA_VARIABLES.items():
        expression = expression.replace(name, value)
    return promql_parser.parse(expression)


def selectors(node: Any, parents: tuple[str, ...] = ()) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Every selector of an expression, with the functions and ranges around it, outermost first."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node, parents
    here = "range" if isinstance(node, promql_parser.MatrixSelector) else ""
    here = node.func.name if isinstance(node, promql_parser.Call) else here
    for attribute in ("expr", "lhs", "rhs", "vector_selector", "param"):
        if (child := getattr(node, attribute, None)) is not None:
            yield from selectors(child, (*parents, here))
    for child in getattr(node, "args", None) or ():
        yield from selectors(child, (*parents, here))


def questions() -> list[tuple[str, Any, tuple[str, ...]]]:
    """(title of the panel, selector, what is around it) of the whole dashboard."""
    found = [
        (panel["title"], selector, parents)
        for panel in panels()
        for target in panel.get("targets", [])
        for selector, parents in selectors(parsed(target["expr"]))
    ]
    assert len(found) > 60
    return found


def test_no_panel_mixes_models_or_replicas_that_were_not_chosen() -> None:
    for title, selector, _ in questions():
        names = {matcher.name for matcher in selector.matchers.matchers}
        assert {"model", "instance"} <= names, f"{selector.name} in {title}"


def test_one_model_is_shown_at_a_time() -> None:
    """A percentile over two models is one of neither; replicas of a model may be taken together."""
    variables = {one["name"]: one for one in dashboard()["templating"]["list"]}
    assert not variables["model"]["includeAll"]
    assert not variables["model"]["multi"]
    assert variables["instance"]["includeAll"]


def test_what_only_grows_is_shown_as_a_rate_and_what_moves_both_ways_is_not() -> None:
    for title, selector, parents in questions():
        is_rate = bool({"rate", "increase"} & set(parents))
        assert is_rate == selector.name.endswith(ACCUMULATING), f"{selector.name} in {title}"
        assert ("range" in parents) == (is_rate or "max_over_time" in parents), title


def test_quantiles_are_taken_over_buckets_by_their_bounds_in_seconds() -> None:
    num_quantiles = 0
    for panel in panels():
        for target in panel.get("targets", []):
            expression = target["expr"]
            if "histogram_quantile" in expression:
                num_quantiles += 1
                assert "sum by (le) (rate(" in expression
                assert "_seconds_bucket{" in expression
                assert panel["fieldConfig"]["defaults"]["unit"] == "s", panel["title"]
    assert num_quantiles > 10


def test_figures_of_now_are_of_now() -> None:
    """Over a range Grafana would show the last value of a server that is long gone, and in green."""
    stats = panels("stat")
    assert [one["title"] for one in stats][:3] == ["Engines up", "Failing", "First token, p99"]
    for panel in stats:
        assert [target["instant"] for target in panel["targets"]] == [True], panel["title"]


def test_the_file_lists_panels_as_they_are_seen() -> None:
    places = [(panel["gridPos"]["y"], panel["gridPos"]["x"]) for panel in panels()]
    assert places == sorted(places)
    assert [panel["title"] for panel in panels("row")] == [
        "Now",
        "What users feel",
        "Trouble, and the response path",
        "The batch",
        "Memory",
    ]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Prometheus")
def test_alerts_fire_when_they_should() -> None:
    for arguments in (["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"]):
        done = subprocess.run(
            ["promtool", *arguments], cwd=DOCKER / "prometheus", capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr
