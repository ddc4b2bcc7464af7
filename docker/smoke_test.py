"""Is a deployment alive, right, and visible? Asks a running server the few things that must hold after every rollout.

    python docker/smoke_test.py                                          # a server on this machine
    kubectl port-forward deploy/llm 8000 8002 & python docker/smoke_test.py

It waits until the model is ready, then checks one answer, the same answer streamed, several streams at once, the error
for a bad request, and the gauges that autoscalers and gateways read. Prints a line a check; exit code 1 if one fails.
Needs Python alone.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

PROMPT = "The capital of France is"
NUM_STREAMS = 8
NUM_REQUESTS = NUM_STREAMS + 3  # that the checks send: an answer, the same streamed, the streams, a bad one
GAUGES = ("cb_engine_up", "cb_requests_running", "cb_requests_waiting", "cb_kv_cache_usage")
GATEWAY_GAUGES = ("nv_trt_llm_request_metrics", "nv_trt_llm_kv_cache_block_metrics")
IDLE_WAIT_S = 60.0  # gauges are published twice a second; a busy machine may stop for a while
OTHERS_WAIT_S = 5.0  # the same where other clients' requests run, so that it may never be idle


class CheckError(Exception):
    """What was expected, what came, and where to look."""


class Deployment:
    def __init__(self, http_url: str, metrics_url: str, model: str, timeout: float) -> None:
        self._model_url = f"{http_url.rstrip('/')}/v2/models/{model}"
        self._metrics_url = f"{metrics_url.rstrip('/')}/metrics"
        self._timeout = timeout
        self.before: dict[str, float] = {}  # metrics as they were before the checks; empty: not published yet

    def wait_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            try:
                with urllib.request.urlopen(f"{self._model_url}/ready", timeout=5):
                    return
            except (OSError, http.client.HTTPException) as error:
                if time.monotonic() > deadline:
                    raise CheckError(f"{self._model_url} is not ready after {timeout:.0f} s: {error}") from None
            time.sleep(0.5)

    def generate(self, **body: object) -> str:
        with self._post("generate", body) as response:
            return str(json.load(response)["text_output"])

    def stream(self, **body: object) -> list[str]:
        """The pieces of a streamed answer."""
        with self._post("generate_stream", {**body, "stream": True}) as response:
            return [str(event["text_output"]) for event in self._events(response)]

    def metrics(self) -> dict[str, float]:
        """Sums over labels, by name."""
        with urllib.request.urlopen(self._metrics_url, timeout=self._timeout) as response:
            text = response.read().decode()
        sums: dict[str, float] = {}
        for name, value in re.findall(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
            sums[name] = sums.get(name, 0.0) + float(value)
        return sums

    def look_before(self) -> None:
        """Note what other clients are doing. Never fails: what is wrong with the metrics is for their check to say."""
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            self.before = self.metrics()

    def has_other_clients(self, values: dict[str, float]) -> bool:
        """Whether requests ran before the checks, or more have ended since than the checks sent."""
        num_ended = values["cb_requests_total"] - self.before.get("cb_requests_total", 0.0)
        return self.before.get("cb_requests_running", 0.0) > 0 or num_ended > NUM_REQUESTS

    def _post(self, verb: str, body: dict[str, object]) -> http.client.HTTPResponse:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._model_url}/{verb}", json.dumps(body).encode(), headers)
        response = urllib.request.urlopen(request, timeout=self._timeout)
        assert isinstance(response, http.client.HTTPResponse)
        return response

    @staticmethod
    def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, object]]:
        for line in response:
            if line.startswith(b"data:"):
                event = json.loads(line[5:])
                if "error" in event:
                    raise CheckError(f"a stream ended with: {event['error']}")
                yield event


def check_answers(deployment: Deployment) -> str:
    body = {"text_input": PROMPT, "max_tokens": 16, "temperature": 0}
    whole = deployment.generate(**body, exclude_input_in_output=True)
    pieces = deployment.stream(**body)
    if not whole:
        raise CheckError("an empty answer; is the checkpoint the right one?")
    if "".join(pieces) != whole:
        raise CheckError(f"streamed, the answer is {''.join(pieces)!r}, but whole it is {whole!r}")
    return f"{PROMPT!r} -> {whole!r}, whole and in {len(pieces)} pieces"


def check_streams(deployment: Deployment) -> str:
    bodies = [{"text_input": f"{i}. {PROMPT}", "max_tokens": 32, "temperature": 0} for i in range(NUM_STREAMS)]
    with concurrent.futures.ThreadPoolExecutor(NUM_STREAMS) as pool:
        together = list(pool.map(lambda body: "".join(deployment.stream(**body)), bodies))
    if not all(together):
        raise CheckError(f"{sum(not text for text in together)} of {NUM_STREAMS} streams brought no text")
    return f"{NUM_STREAMS} streams at once, all complete"


def check_refusal(deployment: Deployment) -> str:
    try:
        text = deployment.generate(text_input=PROMPT, max_tokens=-1)
    except urllib.error.HTTPError as error:
        message = error.read().decode(errors="replace")
        if error.code != 400 or "max_tokens" not in message:
            raise CheckError(
                f"max_tokens -1 should be refused with 400 and its name, not {error.code}: {message}"
            ) from None
        return "a bad request gets 400 with the reason"
    raise CheckError(f"max_tokens -1 was accepted and answered with {text!r}")


def check_metrics(deployment: Deployment) -> str:
    begin = time.monotonic()
    deadline = begin + IDLE_WAIT_S
    while True:
        values = deployment.metrics()
        missing = [name for name in GAUGES + GATEWAY_GAUGES if name not in values]
        if missing and time.monotonic() > deadline:
            raise CheckError(f"/metrics lacks {', '.join(missing)}; was the server started with --allow-metrics=false?")
        if missing:
            time.sleep(0.2)
            continue
        if values["cb_engine_up"] < 1:
            raise CheckError("cb_engine_up is 0: the engine has just died; the server's log says why")
        if values["cb_requests_total"] >= NUM_STREAMS + 2 and values["cb_requests_running"] == 0:
            return f"{len(values)} metrics; {values['cb_requests_total']:.0f} requests counted, none running"
        running, total = values["cb_requests_running"], values["cb_requests_total"]
        if running > 0 and deployment.has_other_clients(values) and time.monotonic() > begin + OTHERS_WAIT_S:
            return f"{len(values)} metrics; {total:.0f} requests counted, {running:.0f} running, of other clients"
        if time.monotonic() > deadline:
            raise CheckError(
                f"{running:.0f} requests still running, {total:.0f} counted (another client? then try again)"
            )
        time.sleep(0.2)


CHECKS: dict[str, Callable[[Deployment], str]] = {
    "answers": check_answers,
    "streams": check_streams,
    "refusal": check_refusal,
    "metrics": check_metrics,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--http", default="http://localhost:8000", metavar="URL")
    parser.add_argument("--metrics", default="http://localhost:8002", metavar="URL")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--wait", type=float, default=600.0, metavar="S", help="for the model to be ready (600)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="for one request (120)")
    args = parser.parse_args()
    deployment = Deployment(args.http, args.metrics, args.model, args.timeout)
    failed = 0
    try:
        deployment.wait_ready(args.wait)
    except CheckError as error:
        print(f"FAILED  ready    {error}")
        return 1
    deployment.look_before()
    for name, check in CHECKS.items():
        try:
            print(f"ok      {name:8} {check(deployment)}", flush=True)
        except (CheckError, OSError, http.client.HTTPException, ValueError, KeyError) as error:
            failed += 1
            print(f"FAILED  {name:8} {type(error).__name__}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
