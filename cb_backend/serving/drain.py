"""Notices that the server is stopping (or unloading this model), which nothing tells a Python model.

From that moment the server still delivers what open requests send, until its exit time limit; it calls `finalize` only
when every request has had its final response. So: refuse new work, let running requests go on, and end the rest
shortly before the limit, so that no client is left without an answer.

The server is asked over its own HTTP or gRPC port. NOTE: `pb_utils.is_model_ready` would be nearer, but its error
("Server not ready", just what is looked for) is read after the server has freed it: measured on 24.10, four calls
of five crashed this process. NOTE: newer servers also call a model not ready while its `is_ready` says so, which ours
does when the engine is away; so a "not ready" counts only if the server's index does not list the model as loaded.
"""

from __future__ import annotations

import http.client
import json
import logging
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from cb_backend.serving.server_arguments import access_headers, client_host, is_on

# How long before the limit the last requests are ended. The server then takes the front ends down one after the
# other (it sleeps 1 s for each), and an exit that is not complete at the limit was seen to end in a crash.
MARGIN_S = 2.0
MARGIN_PER_FRONT_END_S = 1.5
MAX_MARGIN_SHARE = 0.4
NUM_SIGNS = 2  # looks in a row that must agree
PROBE_TIMEOUT_S = 2.0
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})

# Whether the model is ready; False: being stopped (or not started yet); None when it cannot be told now.
Probe = Callable[[], bool | None]

logger = logging.getLogger("cb_backend.serving")


class DrainWatch:
    """`check` from time to time; once `is_draining`, it stays so. `is_time_up`: end what is still open."""

    def __init__(self, is_model_ready: Probe | None, exit_timeout_s: float, num_front_ends: int = 1) -> None:
        """`is_model_ready` None: the server cannot be asked, so nothing is ever noticed."""
        self._is_model_ready = is_model_ready
        margin_s = min(MARGIN_S + MARGIN_PER_FRONT_END_S * num_front_ends, MAX_MARGIN_SHARE * exit_timeout_s)
        self._drain_s = exit_timeout_s - margin_s
        self.has_been_ready = False  # before that, not ready means starting
        self._num_signs = 0
        self._first_sign = 0.0
        self._deadline: float | None = None

    @property
    def is_draining(self) -> bool:
        return self._deadline is not None

    @property
    def is_time_up(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def check(self) -> None:
        """Ask the server once; about a millisecond."""
        if self.is_draining or self._is_model_ready is None:
            return
        is_ready = self._is_model_ready()
        if is_ready is None:
            return
        if is_ready or not self.has_been_ready:
            self.has_been_ready |= is_ready
            self._num_signs = 0
            return
        if self._num_signs == 0:
            self._first_sign = time.monotonic()
        self._num_signs += 1
        if self._num_signs >= NUM_SIGNS:
            self._deadline = self._first_sign + self._drain_s
            logger.info("the server is stopping this model: new requests are refused, open ones may go on for a while")


def readiness_probe(arguments: dict[str, str], model_name: str, model_version: str) -> Probe | None:
    """How to ask the server with this command line: over HTTP, else gRPC; None if it has neither without TLS."""
    if is_on(arguments, "allow-http"):
        host, port = client_host(arguments, "http"), int(arguments.get("http-port", 8000))
        keys = (access_headers(arguments, "http", "health"), access_headers(arguments, "http", "model-repository"))
        return lambda: ask_over_http(host, port, model_name, model_version, *keys)
    if is_on(arguments, "allow-grpc") and not is_on(arguments, "grpc-use-ssl", "false"):
        host = client_host(arguments, "grpc")
        url = f"{f'[{host}]' if ':' in host else host}:{arguments.get('grpc-port', '8001')}"
        keys = (access_headers(arguments, "grpc", "health"), access_headers(arguments, "grpc", "model-repository"))
        return _grpc_probe(url, model_name, model_version, *keys)
    logger.warning("the server has no HTTP port, and no gRPC port without TLS: its stopping will not be noticed")
    return None


def ask_over_http(
    host: str,
    port: int,
    model_name: str,
    model_version: str,
    health_headers: Mapping[str, str] = _NO_HEADERS,
    index_headers: Mapping[str, str] = _NO_HEADERS,
) -> bool | None:
    """True: ready; False: stopping or unloading; None: not clear, or loaded but not well.

    The headers open a server's restricted health and repository interfaces (see `access_headers`).

    Requests on connections of their own: the server waits for open connections when it stops.

    Its listener closes first of all, so a refused connection means that it is stopping. While HTTP streams are open
    the listener stays until they have ended, and resets every new connection (24.10).
    """
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        path = f"/v2/models/{quote(model_name)}/versions/{model_version}/ready"
        connection.request("GET", path, headers={"Connection": "close", **health_headers})
        is_ready = {200: True, 400: False, 404: False, 503: False}.get(connection.getresponse().status)
        if is_ready is not False:
            return is_ready
        connection.close()
        connection.request("POST", "/v2/repository/index", b"{}", headers={"Connection": "close", **index_headers})
        answer = connection.getresponse()
        is_loaded = answer.status == 200 and is_listed_ready(json.load(answer), model_name, model_version)
        return None if is_loaded else False
    except (ConnectionRefusedError, ConnectionResetError):
        return False
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def is_listed_ready(index: Any, model_name: str, model_version: str) -> bool:
    """Whether the server's index of its repository says that the model is loaded: its state, whatever its health."""
    entry = {"name": model_name, "version": model_version, "state": "READY"}
    return isinstance(index, list) and any(
        isinstance(model, dict) and entry.items() <= model.items() for model in index
    )


def _grpc_probe(
    url: str, model_name: str, model_version: str, health_headers: dict[str, str], index_headers: dict[str, str]
) -> Probe:
    # Imported here: most servers have an HTTP port, and this costs memory in every front end.
    from tritonclient.grpc import InferenceServerClient
    from tritonclient.utils import InferenceServerException

    client = InferenceServerClient(url)

    def ask() -> bool | None:
        try:
            if client.is_model_ready(model_name, model_version, health_headers, PROBE_TIMEOUT_S):
                return True
            index = client.get_model_repository_index(index_headers, as_json=True, client_timeout=PROBE_TIMEOUT_S)
            return None if is_listed_ready(index.get("models"), model_name, model_version) else False
        except InferenceServerException as error:
            # A stopping server answers UNAVAILABLE, and so does a port on which nobody listens any more.
            return False if str(error.status()).endswith("UNAVAILABLE") else None

    return ask
