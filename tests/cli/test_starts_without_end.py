"""Servers that answer and never become ready: pytest tests/cli/test_starts_without_end.py"""

from __future__ import annotations

from pathlib import Path

import pytest

from cb_backend.cli.paths import CliError
from cb_backend.cli.server import start_up
from cb_backend.cli.server.start_up import PartlyLoadedError, wait_ready_aloud
from tests.cli.test_serve import hung_server
from tests.waiting import WAIT_S

REFUSES_TO_TELL = """import http.server, sys
class Refuses(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
    def do_GET(self):
        self.send_response({status})
        self.end_headers()
port = next(int(word.partition("=")[2]) for word in sys.argv if word.startswith("--http-port="))
door = http.server.HTTPServer(("127.0.0.1", port), Refuses)
print({said!r} + "Started HTTPService at 127.0.0.1", flush=True)
door.serve_forever()
"""
FAILED = (
    "E1127 23:52:48.71 5985 model_lifecycle.cc:642] \"failed to load '{}' version 1: Internal: ConfigError: no {}\"\n"
)


@pytest.mark.parametrize("status", start_up.FORBIDDEN)
def test_r50i_a_server_that_refuses_to_tell_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(start_up, "STALLED_S", 0.2)
    server = hung_server(tmp_path, REFUSES_TO_TELL.format(status=status, said=""))
    server.start()
    try:
        with pytest.raises(CliError, match=rf"status {status}\); leave `health` out of --http-restricted-api"):
            wait_ready_aloud(server, lambda text: None, timeout=WAIT_S)
    finally:
        server.kill()


def test_a_server_that_goes_on_without_a_model_is_told_of_and_not_waited_for(tmp_path: Path) -> None:
    """With --exit-on-error=false: neither an end nor ever ready."""
    said = FAILED.format("llm", "weights") + FAILED.format("mood", "file") + FAILED.format("llm", "matter")
    server = hung_server(tmp_path, REFUSES_TO_TELL.format(status=400, said=said))
    server.start()
    try:
        told = r"^model 'llm' could not be loaded: no weights; model 'mood' could not be loaded: no file$"
        with pytest.raises(PartlyLoadedError, match=told):
            wait_ready_aloud(server, lambda text: None, timeout=WAIT_S)
        assert server.poll() is None
    finally:
        server.kill()
