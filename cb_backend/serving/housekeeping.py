"""What a front end does between requests, on one thread: notice a stopping server, watch the engine, publish."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from cb_backend.contracts.errors import ErrorCode
from cb_backend.front_end.engines.supervisor import EngineSupervisor
from cb_backend.serving import server_arguments
from cb_backend.serving.drain import DrainWatch, readiness_probe
from cb_backend.serving.gauge_holders import GaugeHolders
from cb_backend.serving.metric_exporter import MetricExporter
from cb_backend.serving.metrics import EngineReport, Metrics
from cb_backend.serving.model_config import num_instances
from cb_backend.serving.model_parameters import reports_vllm_names
from cb_backend.serving.publisher import INTERVAL_S as PUBLISH_INTERVAL_S
from cb_backend.serving.publisher import Publisher
from cb_backend.serving.responder import Responder
from cb_backend.serving.server_arguments import exit_timeout_s, is_on

INTERVAL_S = 0.25
STARTING_INTERVAL_S = 0.05
NUM_STARTING_ROUNDS = 600  # then it may be a server that cannot be asked
LET_GO_S = 5.0  # after the last request of a model that the server stops: it has called `finalize` long before
ENGINE_SILENCE_S = 8.0  # of an engine that has work: it speaks twice a second
TIME_IS_UP = "the server is stopping and the request did not end in time; send it to another server"

logger = logging.getLogger("cb_backend.serving")


class Housekeeping:
    """Runs from its making to `close`."""

    def __init__(
        self, responder: Responder, supervisor: EngineSupervisor, server_pid: int, model_config: dict[str, Any]
    ) -> None:
        model_name, model_version = supervisor.model_name, supervisor.model_version
        self._responder = responder
        self._supervisor = supervisor
        arguments = server_arguments.of_process(server_pid)
        probe = readiness_probe(arguments, model_name, model_version)
        self._drain = DrainWatch(probe, exit_timeout_s(arguments), num_instances(model_config))
        # All fronts of an engine are one model to whoever reads the metrics.
        name, version = supervisor.engine_name, supervisor.engine_version
        holders = GaugeHolders(
            supervisor.shared_folder(f"gauges of\n{name}\n{version}"), supervisor.runtime_folder.name
        )
        exporter = MetricExporter(name, version, is_on(arguments, "allow-metrics"), holders)
        assert supervisor.client.info is not None, "the supervisor has been started"
        max_model_len = supervisor.client.info.max_model_len
        is_vllm_named = reports_vllm_names(model_config) and not supervisor.config.disable_log_stats
        self._metrics = Metrics(exporter, is_vllm_named, max_model_len)
        self._publisher = Publisher(self._publish)
        self._next_publish = time.monotonic()
        responder.on_idle = self._publisher.publish_if_cheap
        for member in supervisor.client.members:
            member.on_idle = self._wake_up
        self.is_engine_stuck = False
        self._is_closing = False
        self._has_let_go = False
        self._idle_since: float | None = None  # with no request left, while the server stops the model
        self._is_engine_idle = False  # has just fallen idle, and that is still to be published
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="housekeeping", daemon=True)
        self._thread.start()

    @property
    def is_draining(self) -> bool:
        return self._drain.is_draining

    def close(self) -> None:
        """Returns when the thread has ended and the metrics are given back."""
        self._is_closing = True
        self._wake.set()
        self._thread.join()
        self._give_metrics_back()

    def _give_metrics_back(self) -> None:
        if not self._has_let_go:
            self._publisher.close()
            self._metrics.close()

    def _wake_up(self) -> None:
        self._is_engine_idle = True
        self._wake.set()

    def _run(self) -> None:
        num_rounds = 0
        next_round = time.monotonic()
        while not self._is_closing:
            self._wake.wait(max(next_round - time.monotonic(), 0.0))
            self._wake.clear()
            try:
                self._publish_what_is_due()
                if time.monotonic() >= next_round:
                    next_round = time.monotonic() + self._interval_s(num_rounds)
                    num_rounds += 1
                    self._look_around()
            except Exception:
                logger.exception("housekeeping failed")

    def _look_around(self) -> None:
        self._drain.check()
        if self._drain.is_time_up and self._responder.num_live:
            self._responder.end_all(ErrorCode.UNAVAILABLE, TIME_IS_UP)
        self._watch_engine()
        if self._drain.is_draining and not self._has_let_go:
            self._let_go_if_kept()

    def _let_go_if_kept(self) -> None:
        """Leave the engine of a model that the server has stopped and does not take down.

        Server 24.10 keeps a model for ever after some of its cancelled streams (`UNLOADING`); the memory of the device
        is not to be kept with it. Requests are refused since the stop was noticed, so nobody misses the engine.
        """
        now = time.monotonic()
        if self._responder.num_live:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since > LET_GO_S:
            logger.info("the server has stopped this model but does not take it down; its engine is given up")
            self._give_metrics_back()
            self._has_let_go = True
            self._supervisor.close()

    def _publish_what_is_due(self) -> None:
        now = time.monotonic()
        # Taken before what it asks for is done: the engine may fall idle again meanwhile.
        is_engine_idle, self._is_engine_idle = self._is_engine_idle, False
        if now >= self._next_publish:
            self._next_publish = now + PUBLISH_INTERVAL_S
            self._publisher.publish()
        elif is_engine_idle:
            self._publisher.publish_if_cheap()

    def _interval_s(self, num_rounds: int) -> float:
        """Short until the server has been seen ready once: a stop can only be told from a start after that."""
        is_starting = not self._drain.has_been_ready and num_rounds < NUM_STARTING_ROUNDS
        return STARTING_INTERVAL_S if is_starting else INTERVAL_S

    def _watch_engine(self) -> None:
        """An engine that has requests of ours and says nothing is stuck: not ready, and the log says so."""
        is_stuck = self._supervisor.client.silence_s > ENGINE_SILENCE_S
        if is_stuck and not self.is_engine_stuck:
            logger.error("the engine has open requests and has been silent for %.0f s", ENGINE_SILENCE_S)
        self.is_engine_stuck = is_stuck

    def _publish(self) -> None:
        if self._drain.is_draining:
            return
        self._metrics.publish(self._responder.counts(), self._responder.latencies.totals())
        known = {
            index: EngineReport(member.stats, member.info, member.is_ready)
            for index, member in enumerate(self._supervisor.client.members)
            if member.stats is not None and member.info is not None
        }
        if self._supervisor.is_owner and known:
            self._metrics.publish_engines(known)
        else:
            for index, report in known.items():
                self._metrics.skip_engine(index, report.stats)
