"""The deployment's probes, smoke test, dashboard, alerts and autoscaling against a real server (no container engine).

pytest tests/deploy/test_on_server.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from cb_backend.cli.server.addresses import http_status
from tests.deploy.files import BASE, DOCKER, deployment, documents, server_flags
from tests.server.conftest import RunningServer, running_server
from tests.server.tiny_checkpoint import write_tiny_checkpoint
from tests.waiting import WAIT_S

pytestmark = pytest.mark.server

# Grafana's own variables, filled in as it would for one replica.
GRAFANA_VARIABLES = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with the pod's drain time, after a smoke test has passed on it."""
    checkpoint = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    drain = int(server_flags()["exit-timeout-secs"])
    with running_server(checkpoint, tmp_path_factory.mktemp("repository"), exit_timeout_secs=drain) as running:
        assert smoke_test(running) == 0
        yield running


def smoke_test(running: RunningServer, **options: str) -> int:
    addresses = {"http": running.process.http_address, "metrics": running.process.metrics_address}
    command = [sys.executable, str(DOCKER / "smoke_test.py")]
    for name, address in addresses.items():
        command += [f"--{name}", options.get(name, f"http://{address}")]
    command += ["--wait", options.get("wait", str(WAIT_S)), "--model", options.get("model", "llm")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    print(done.stdout + done.stderr)
    return done.returncode


def exported_names(running: RunningServer) -> set[str]:
    with urllib.request.urlopen(f"http://{running.process.metrics_address}/metrics", timeout=WAIT_S) as response:
        return set(re.findall(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)", response.read().decode(), re.MULTILINE))


def names_in(expression: str) -> set[str]:
    """The metrics that a PromQL expression reads. Raises if it is none."""
    found = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.add(node.name)
        for attribute in ("expr", "lhs", "rhs", "vector_selector", "param"):
            if (child := getattr(node, attribute, None)) is not None:
                visit(child)
        for child in getattr(node, "args", None) or ():
            visit(child)

    visit(promql_parser.parse(expression))
    return found


def dashboard_expressions() -> list[str]:
    panels = json.loads((DOCKER / "grafana" / "cb_backend.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    for name, value in GRAFANA_VARIABLES.items():
        expressions = [expression.replace(name, value) for expression in expressions]
    return expressions


def test_smoke_test_notices_what_is_wrong(deployed: RunningServer) -> None:
    assert smoke_test(deployed, model="no_such_model", wait="1") == 1
    assert smoke_test(deployed, metrics=f"http://{deployed.process.http_address}") == 1


def test_probes_answer(deployed: RunningServer) -> None:
    container = deployment()["spec"]["template"]["spec"]["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == "http"
        assert http_status(deployed.process.http_address, container[probe]["httpGet"]["path"]) == 200, probe


def test_dashboard_shows_metrics_that_exist(deployed: RunningServer) -> None:
    exported, expressions = exported_names(deployed), dashboard_expressions()
    assert len(expressions) > 40
    for expression in expressions:
        names = names_in(expression)
        assert names, expression
        assert names <= exported, f"{names - exported} in {expression}"


def test_rules_read_metrics_that_exist(deployed: RunningServer) -> None:
    groups = yaml.safe_load((DOCKER / "prometheus" / "rules.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    known = exported_names(deployed) | recorded
    for rule in rules:
        names = names_in(rule["expr"])
        assert names, rule
        assert names <= known, f"{names - known} in {rule}"
    alerts = {rule["alert"]: rule for rule in rules if "alert" in rule}
    for rule in alerts.values():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} <= rule["annotations"].keys()
    assert "> 0.02" in alerts["CbPreemptions"]["expr"]
    assert "> 0.05" in alerts["CbManyPreemptions"]["expr"]


def test_autoscaler_reads_metrics_that_exist(deployed: RunningServer) -> None:
    metrics = documents(BASE / "hpa.yaml")[0]["spec"]["metrics"]
    names = {metric["pods"]["metric"]["name"] for metric in metrics}
    assert names == {"cb_requests_waiting", "cb_kv_cache_usage"}
    assert names <= exported_names(deployed)
    adapter = documents(Path(DOCKER / "kubernetes" / "adapter-values.yaml"))[0]["rules"]["custom"][0]["seriesQuery"]
    pattern = re.search(r'__name__=~"([^"]+)"', adapter)
    assert pattern is not None
    assert all(re.fullmatch(pattern.group(1), name) for name in names)
