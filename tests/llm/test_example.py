"""The example of the library's page, run as its reader runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.server.tiny_checkpoint import Reference

EXAMPLE = Path(__file__).parents[2] / "client" / "library_example.py"


def command(*arguments: str) -> list[str]:
    return [sys.executable, str(EXAMPLE), *arguments]


def test_the_example_answers_and_streams(checkpoint: Path) -> None:
    done = subprocess.run(
        command(str(checkpoint), "jumps", "seven wizards", "--max-tokens", "8", "--max-model-len", "64"),
        capture_output=True,
        timeout=300,
        check=True,
    )
    reference = Reference(checkpoint)
    first, second = (reference.greedy_text(prompt, 8) for prompt in ("jumps", "seven wizards"))
    output = done.stdout.decode()
    assert f"'jumps' -> {first!r}" in output
    assert f"'seven wizards' -> {second!r}" in output
    assert output.endswith(first + "\n")


def test_a_wrong_folder_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(command(str(tmp_path / "none"), "x"), capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_leaves_with_130_and_nothing_behind(checkpoint: Path) -> None:
    many = ["x"] * 4000
    process = subprocess.Popen(
        command(str(checkpoint), *many, "--max-tokens", "200", "--max-model-len", "256"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background jobs have Ctrl-C ignored, and their children as well.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "100%" in line:
            break
    time.sleep(1)  # into the answers; whenever it comes, the end is the same
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130
    assert stderr.strip().splitlines()[-1:] == ["interrupted"], stderr
    assert not group_members(process.pid)


def group_members(group: int) -> list[int]:
    """Processes of a session that are still there."""
    members = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == group:
                members.append(int(entry.name))
        except ProcessLookupError:
            continue
    return members
