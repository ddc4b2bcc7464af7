"""The faults of the server and its machine, F6 and F11 to F20. (F14, of adapters, is in `adapter_injections`.)"""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.faults.injections import INTERNAL, RESTART, Fault, restart_window, window
from tests.faults.world import World
from tests.server.conftest import START_TIMEOUT_S, marked_processes

SHARED_MEMORY = Path("/dev/shm")
GOING = RESTART | {"CONNECTION", "NOT_READY"}
BY_HAND = ("--model-control-mode=explicit", "--load-model=llm")
CLOCK_FILE = "CB_TEST_CLOCK_OFFSET"


def kill_stub(world: World, number: int) -> None:
    """F6. Its streams are silent and end by their deadline; the model is unloaded and loaded by hand.

    NOTE: a stub that dies with a lock of its shared memory in its hands takes server 24.10 along (boost's
    lock_exception). Then front ends and engine must end by themselves, and the server is started again, as a
    supervisor does.
    """
    victim, begin = world.rng.choice(world.stubs()), time.monotonic()
    regions = [entry for entry in SHARED_MEMORY.iterdir() if str(entry) in Path(f"/proc/{victim}/maps").read_text()]
    os.kill(victim, signal.SIGKILL)
    time.sleep(3.0)
    try:
        for verb in ("unload", "load"):
            _ask(world, verb)
    except (OSError, http.client.HTTPException):  # the server has ended over it
        restart_aborted(world)
    window(world, begin, codes=GOING | {"NOT_HEALTHY"}, recovery_limit_s=60.0, may_give_up=True)
    world.wait_for_canary(world.windows[-1].end)
    world.load.stop()
    world.server.process.stop()
    if left := [str(region) for region in regions if region.exists()]:
        world.notes.append(f"shared memory left behind: {left}")


def _ask(world: World, verb: str) -> None:
    """To load or unload the model, by hand. Raises `OSError` or `HTTPException` if there is no answer."""
    status, text = world.server.post(f"/v2/repository/models/llm/{verb}", {})
    if status != 200:
        world.notes.append(f"{verb}: {status} {text}")


def restart_aborted(world: World) -> None:
    """Start a server again that has aborted. Raises `TimeoutError` if it has not, or if a process of its is left."""
    process = world.server.process
    world.wait(lambda: process.poll() is not None, 10, "a server that does not answer has ended")
    if process.poll() != -signal.SIGABRT:
        world.notes.append(f"the server ended with {process.poll()}")
    world.num_aborts += 1
    world.wait(lambda: marked_processes(world.server.mark) == [], 30, "front ends and engine of an aborted server end")
    process.start()
    process.wait_ready(START_TIMEOUT_S)


def large_requests(world: World, number: int) -> None:
    """F11. 16 MB of shared memory for the server and its stubs, and requests of 3 MB, 8 at a time, for 5 s."""
    begin = time.monotonic()
    options = ("--streams", "8", "--bad-fraction", "1", "--bad-bytes", str(3 << 20), "--seed", str(number))
    client = world.client(f"large{number}", *options)
    time.sleep(5.0)
    client.stop()
    window(world, begin, codes=INTERNAL | {"INVALID_ARGUMENT"}, recovery_limit_s=10.0)


def little_memory(world: World, number: int) -> None:
    """F12. The engine may not get a page more, for 5 s, while its batch changes."""
    pid, begin = world.engine(), time.monotonic()
    status = Path(f"/proc/{pid}/status").read_text()
    size = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmSize"))
    before = resource.prlimit(pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
    time.sleep(5.0)
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_AS, before)
    restart_window(world, begin, codes=INTERNAL | RESTART)
    world.wait_for_canary(begin)


def full_log(world: World, number: int) -> None:
    """F13. Nothing can be written to the log, and there is something to write: the engine is killed."""
    begin = time.monotonic()
    os.kill(world.engine(), signal.SIGKILL)
    restart_window(world, begin, codes=RESTART)
    world.wait_for_canary(begin)


def end_server(world: World, number: int) -> None:
    """F15. SIGTERM with 32 streams: what runs ends well or with a final error, and all is over in time."""
    more = world.client("more", "--streams", "16", "--seed", str(number))
    world.wait(lambda: sum(e.kind == "delta" for e in more.read()) > 16, 60, "32 streams run")
    begin = time.monotonic()
    world.server.process.terminate()
    time.sleep(0.5)
    for client in (world.load, more):
        client.stop()
    code = world.server.process.wait(timeout=30)
    window(world, begin, codes=GOING, is_end=True)
    if code != 0:
        world.notes.append(f"the server ended with {code}")
    world.wait(lambda: marked_processes(world.server.mark) == [], 10, "every process of the server has ended")


def reload_model(world: World, number: int) -> None:
    """F16. The model is unloaded and loaded again under load."""
    begin = time.monotonic()
    _ask(world, "unload")
    world.wait(lambda: world.server.engine_pids() == [], 40, "the engine has ended with its model")
    _ask(world, "load")
    restart_window(world, begin, codes=GOING)
    world.wait_for_canary(world.windows[-1].end)


def jump_clock(world: World, number: int) -> None:
    """F17. The engine's wall clock jumps an hour on, then an hour back.

    NOTE: the engine's alone. Server 24.10 measures by the wall clock whether its stubs are well: when that jumps, it
    takes them for dead and was seen to abort.
    """
    begin = time.monotonic()
    offset = Path(os.environ[CLOCK_FILE])
    offset.write_text("3600" if number % 2 == 0 else "-3600")
    time.sleep(3.0)
    window(world, begin, recovery_limit_s=5.0)


def delayed_responses(world: World, number: int) -> None:
    """F18. The server's own delays around responses are on.

    NOTE: nothing is cancelled. With these delays and cancelled streams server 24.10 soon crashes, or a thread of it
    waits for a lock that it holds (InferHandlerState::Context::IsCancelled) and no gRPC stream gets anything any more.
    """
    begin = time.monotonic()
    time.sleep(5.0)
    window(world, begin, recovery_limit_s=10.0)


def busy_cores(world: World, number: int) -> None:
    """F19. Two processes that only compute, for 5 s."""
    begin = time.monotonic()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    time.sleep(5.0)
    for process in busy:
        process.kill()
        process.wait()
    window(world, begin, recovery_limit_s=15.0)


def without_metrics(world: World, number: int) -> None:
    """F20. The server has no metrics; serving goes on."""
    begin = time.monotonic()
    time.sleep(3.0)
    window(world, begin, recovery_limit_s=10.0)


_CLOCK_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static time_t offset(void) {
  const char *path = getenv("CB_TEST_CLOCK_OFFSET");
  FILE *file = path ? fopen(path, "r") : NULL;
  long value = 0;
  if (file) { if (fscanf(file, "%ld", &value) != 1) value = 0; fclose(file); }
  return value;
}
int clock_gettime(clockid_t id, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int status = real(id, now);
  if (id == CLOCK_REALTIME && status == 0) now->tv_sec += offset();
  return status;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec fine;
  clock_gettime(CLOCK_REALTIME, &fine);
  now->tv_sec = fine.tv_sec;
  now->tv_usec = fine.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *out) {
  struct timespec fine;
  clock_gettime(CLOCK_REALTIME, &fine);
  if (out) *out = fine.tv_sec;
  return fine.tv_sec;
}
"""


def own_clock(folder: Path) -> dict[str, Any]:
    """Engine arguments under which the engine's wall clock follows a file: a library in front of its libc."""
    library, source, python = folder / "clock.so", folder / "clock.c", folder / "python-with-clock"
    source.write_text(_CLOCK_SOURCE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    os.environ[CLOCK_FILE] = str(folder / "clock-offset")
    python.write_text(f'#!/bin/sh\nLD_PRELOAD={library} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return {"engine_python": str(python), "environment": {CLOCK_FILE: os.environ[CLOCK_FILE]}}


_SMALL_SHM = """exec unshare -m sh -c 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$0" "$@"' "$@\""""
_DELAYS = {
    f"TRITONSERVER_DELAY_{name}": "2"  # ms, on the server's few threads: more is an overload and no race
    for name in ("GRPC_RESPONSE", "GRPC_NOTIFICATION", "GRPC_ENQUEUE", "GRPC_COMPLETE", "RESPONSE_COMPLETION")
}

FAULTS = (
    Fault(
        "F6", "kill -9 of a stub, then unload and load", kill_stub, {"server_arguments": BY_HAND},
        load=("--deadline", "20"), is_last=True,
    ),
    Fault("F11", "16 MB of shared memory, requests of 3 MB", large_requests, {"through": _SMALL_SHM}),
    Fault("F12", "the engine gets no more memory, 5 s", little_memory),
    Fault("F13", "a log that cannot be written", full_log, {"through": 'exec "$@" >/dev/full 2>&1'}),
    Fault("F15", "SIGTERM with 32 streams", end_server, {"exit_timeout_secs": 15}, is_last=True),
    Fault("F16", "unload and load under load", reload_model, {"server_arguments": BY_HAND}),
    Fault("F17", "the engine's wall clock jumps by an hour", jump_clock, prepare=own_clock),
    Fault("F18", "the server delays its responses", delayed_responses, {"environment": _DELAYS}),
    Fault("F19", "two busy processes beside the server, 5 s", busy_cores),
    Fault("F20", "a server without metrics", without_metrics, {"server_arguments": ("--allow-metrics=false",)}),
)  # fmt: skip
