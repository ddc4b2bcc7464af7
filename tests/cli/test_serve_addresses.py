"""Where a server listens, as each door wants to be told. pytest tests/cli/test_serve_addresses.py"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cb_backend.cli.paths import CliError
from cb_backend.cli.server.addresses import http_status, numeric_host
from cb_backend.cli.server.local_server import ServerInstallation
from cb_backend.cli.server.server_process import ServerOptions, ServerProcess, check_ports, free_ports


def options(**changes: object) -> ServerOptions:
    http, grpc, metrics = free_ports(3)
    values = {"model_repository": Path(), "http_port": http, "grpc_port": grpc, "metrics_port": metrics, **changes}
    return ServerOptions(**values)  # type: ignore[arg-type]


def not_started(binary: Path, **changes: object) -> ServerProcess:
    return ServerProcess(ServerInstallation(binary, Path(), {}, "a stand-in"), options(**changes))


def test_r50j_an_ipv6_address_is_told_as_each_door_wants_it() -> None:
    server = not_started(Path("server"), host="::1")
    assert {"--http-address=ipv6:::1", "--grpc-address=[::1]"} <= set(server.command())
    assert server.http_address == f"[::1]:{server.options.http_port}"
    assert server.grpc_address == f"[::1]:{server.options.grpc_port}"
    assert server.metrics_address == f"[::1]:{server.options.metrics_port}"
    check_ports(server.options)
    every = not_started(Path("server"), host="::")
    assert every.http_address == f"[::1]:{every.options.http_port}"


def test_r50j_names_become_addresses() -> None:
    assert numeric_host("localhost") in ("127.0.0.1", "::1")
    assert [numeric_host(host) for host in ("::1", "[::1]", "0.0.0.0")] == ["::1", "::1", "0.0.0.0"]
    with pytest.raises(CliError, match=r"--host 'no\.such\.invalid' is no address of this machine"):
        numeric_host("no.such.invalid")
    with pytest.raises(CliError, match=r"--host '192\.0\.2\.1' is no address of this machine"):
        numeric_host("192.0.2.1")


class _Restricted(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.headers.get("Key") == "a=b" else 403)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_r50i_serve_asks_a_restricted_health_api_with_its_key() -> None:
    door = HTTPServer(("127.0.0.1", 0), _Restricted)
    threading.Thread(target=door.serve_forever, daemon=True).start()
    try:
        port = door.server_address[1]
        assert http_status(f"127.0.0.1:{port}", "/v2/health/ready") == 403
        words = ("--http-restricted-api=health,metadata:Key=a=b", "--allow-metrics=false")
        server = not_started(Path("server"), http_port=port, extra_arguments=words)
        assert server.is_ready()
        other = ("--http-restricted-api=metadata:Key=a=b", "--allow-metrics=false")
        assert not not_started(Path("server"), http_port=port, extra_arguments=other).is_ready()
    finally:
        door.shutdown()
        door.server_close()
