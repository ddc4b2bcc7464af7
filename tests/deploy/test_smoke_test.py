"""The smoke test's verdict on the metrics, beside other clients and alone. pytest tests/deploy/test_smoke_test.py"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.deploy.files import DOCKER


@pytest.fixture
def smoke_test(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("smoke_test", DOCKER / "smoke_test.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "smoke_test", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "IDLE_WAIT_S", 0.3)
    monkeypatch.setattr(module, "OTHERS_WAIT_S", 0.1)
    return module


def gauges(module: ModuleType, running: float, total: float) -> dict[str, float]:
    names = module.GAUGES + module.GATEWAY_GAUGES
    return {**dict.fromkeys(names, 1.0), "cb_requests_running": running, "cb_requests_total": total}


def verdict(module: ModuleType, before: dict[str, float], after: dict[str, float]) -> str:
    deployment = module.Deployment("http://localhost:1", "http://localhost:1", "llm", 1.0)
    answers = iter([before])
    deployment.metrics = lambda: next(answers, after)
    deployment.look_before()
    return str(module.check_metrics(deployment))


def test_an_idle_deployment_passes(smoke_test: ModuleType) -> None:
    own = smoke_test.NUM_REQUESTS
    text = verdict(smoke_test, gauges(smoke_test, 0, 500), gauges(smoke_test, 0, 500 + own))
    assert "none running" in text


def test_requests_of_other_clients_are_no_failure(smoke_test: ModuleType) -> None:
    """A rollout is tested while it serves: there is always somebody's request."""
    own = smoke_test.NUM_REQUESTS
    text = verdict(smoke_test, gauges(smoke_test, 3, 500), gauges(smoke_test, 2, 500 + own))
    assert "2 running, of other clients" in text
    text = verdict(smoke_test, gauges(smoke_test, 0, 500), gauges(smoke_test, 1, 500 + own + 4))
    assert "1 running, of other clients" in text


@pytest.mark.parametrize("is_published", [True, False])
def test_an_own_request_that_goes_on_running_is_one(smoke_test: ModuleType, is_published: bool) -> None:
    own = smoke_test.NUM_REQUESTS
    before = gauges(smoke_test, 0, 500) if is_published else {}
    after = gauges(smoke_test, 1, (500 if is_published else 0) + own - 1)
    with pytest.raises(smoke_test.CheckError, match="1 requests still running"):
        verdict(smoke_test, before, after)
