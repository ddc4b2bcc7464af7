"""What a server's command line says: pytest tests/serving/test_server_arguments.py"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cb_backend.serving.server_arguments import (
    access_headers,
    client_host,
    exit_timeout_s,
    is_on,
    listen_address,
    of_process,
    parse,
)
from tests.waiting import eventually


def test_both_forms_and_the_last_of_a_name() -> None:
    words = ["tritonserver", "--http-port=1", "--allow-metrics", "false", "--http-port", "2", "--strict-readiness"]
    assert parse(words) == {"http-port": "2", "allow-metrics": "false", "strict-readiness": ""}


def test_of_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()", "--exit-timeout-secs=7"], stdin=subprocess.PIPE) as child:
        eventually(lambda: of_process(child.pid) != {}, "it executes that command")
        assert of_process(child.pid) == {"exit-timeout-secs": "7"}
    assert of_process(child.pid) == {}, "it has ended"
    assert "exit-timeout-secs" not in of_process(os.getpid())


def test_what_holds_where_nothing_is_said() -> None:
    assert exit_timeout_s({}) == 30.0
    assert exit_timeout_s({"exit-timeout-secs": "5"}) == 5.0
    assert is_on({}, "allow-http")
    assert not is_on({}, "grpc-use-ssl", "false")


@pytest.mark.parametrize(("value", "expected"), [("false", False), ("0", False), ("False", False), ("TRUE", True)])
def test_yes_and_no(value: str, expected: bool) -> None:
    assert is_on({"allow-metrics": value}, "allow-metrics") == expected


def test_metrics_are_where_http_is_unless_told_otherwise() -> None:
    assert client_host({}, "metrics") == "127.0.0.1"
    assert client_host({"http-address": "10.0.0.7"}, "metrics") == "10.0.0.7"
    assert client_host({"http-address": "10.0.0.7", "metrics-address": "0.0.0.0"}, "metrics") == "127.0.0.1"
    assert client_host({"http-address": "10.0.0.7"}, "grpc") == "127.0.0.1"


@pytest.mark.parametrize("host", ["::1", "fe80::7", "10.0.0.7"])
def test_r50j_what_a_server_is_told_is_where_it_is_asked(host: str) -> None:
    for protocol in ("http", "grpc", "metrics"):
        told = {f"{protocol}-address": listen_address(host, protocol)}
        assert client_host(told, protocol) == host
    assert client_host({"http-address": listen_address("::", "http")}, "http") == "::1"
    assert client_host({"grpc-address": "[::]"}, "grpc") == "::1"


def test_r50i_keys_of_restricted_interfaces() -> None:
    words = ["--http-restricted-api=health,metadata:Key=a=b", "--http-restricted-api", "model-repository:admin=c"]
    arguments = parse([*words, "--grpc-restricted-protocol=inference,health:Key=d"])
    assert access_headers(arguments, "http", "health") == {"Key": "a=b"}
    assert access_headers(arguments, "http", "model-repository") == {"admin": "c"}
    assert access_headers(arguments, "http", "inference") == {}
    assert access_headers(arguments, "grpc", "health") == {"triton-grpc-protocol-key": "d"}
    assert access_headers(arguments, "grpc", "model-repository") == {}
    assert access_headers({}, "http", "health") == {}
