"""How the processes of a server end, told by those that wait for them.

Only a process's parent learns its exit status, and the parents here are the server and its front ends. So a library in
front of their libc writes down every status that `waitpid` gives them. (Needs a C compiler and no privileges.)
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

LOG = "CB_TEST_EXIT_LOG"
CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS})
_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>
static void note(pid_t pid, int status) {
  int before = errno, code = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
  const char *path = getenv("CB_TEST_EXIT_LOG");
  int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
  if (file >= 0) {
    char line[48];
    int length = snprintf(line, sizeof line, "%d %d\n", (int)pid, code);
    if (write(file, line, length) != length) { }
    close(file);
  }
  errno = before;
}
pid_t waitpid(pid_t pid, int *status, int options) {
  static pid_t (*real)(pid_t, int *, int);
  int found = 0;
  if (!real) real = dlsym(RTLD_NEXT, "waitpid");
  pid_t ended = real(pid, &found, options);
  if (ended > 0 && status) *status = found;
  if (ended > 0 && (WIFEXITED(found) || WIFSIGNALED(found))) note(ended, found);
  return ended;
}
"""


@functools.cache
def library() -> Path:
    """Compiled once a test run. Raises `AssertionError` without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "tests that start a server need a C compiler (cc): it builds what sees how processes end"
    folder = Path(tempfile.mkdtemp(prefix="cb-exit-watch-"))
    (folder / "exit_watch.c").write_text(_SOURCE)
    library = folder / "exit_watch.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "exit_watch.c", "-ldl"], check=True)
    return library


@dataclass(frozen=True, slots=True)
class Exit:
    """`code`: the exit code, or the negative number of the signal that ended the process."""

    pid: int
    code: int

    @property
    def is_crash(self) -> bool:
        return -self.code in CRASHES

    def __str__(self) -> str:
        return f"process {self.pid} ended with {describe(self.code)}"


def describe(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class ExitWatch:
    """Of one server: start it with `environment`, then read `exits`, of everything below it."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "exits"

    @property
    def environment(self) -> dict[str, str]:
        preload = filter(None, [str(library()), os.environ.get("LD_PRELOAD")])
        return {"LD_PRELOAD": ":".join(preload), LOG: str(self._log)}

    def exits(self) -> list[Exit]:
        """In the order in which their parents have learned of them."""
        if not self._log.exists():
            return []
        return [Exit(*map(int, line.split())) for line in self._log.read_text().splitlines()]
