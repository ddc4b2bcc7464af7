"""Random messages through a plan ring, to slow readers and to one that dies.

    python -m tests.parallel.fuzz_ring --messages 1000000 --readers 3

Readers are processes. Each checks that message i is the one that the seed says, and naps now and then; when all have
read all, one of them is killed, and the writer must find out. Exits with 1 and says what was wrong.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from cb_backend.parallel.plan_ring import ReaderBehindError, RingReader, RingWriter

SLOT_BYTES, NUM_SLOTS = 256, 8
ROOM = (SLOT_BYTES - 16) * NUM_SLOTS
READ_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Report:
    """Of a run in which every message arrived."""

    num_messages: int
    num_longer_than_ring: int
    end: str  # what the writer was told once a reader was dead


def message(source: random.Random) -> bytes:
    """Mostly as short as the plan of a decode step; some longer than a slot, few longer than the ring."""
    kind = source.random()
    longest = 200 if kind < 0.9 else 2000 if kind < 0.995 else 2 * ROOM
    return source.randbytes(source.randrange(longest))


def read_all(path: Path, reader: int, num_readers: int, num_messages: int, seed: int) -> None:
    """The reader's process: it says "all" when all have come, and then waits to be killed."""
    ring = RingReader(path, reader, num_readers, slot_bytes=SLOT_BYTES, num_slots=NUM_SLOTS)
    source, naps = random.Random(seed), random.Random(reader)
    for index in range(num_messages):
        if naps.random() < 0.002 * reader:
            time.sleep(0.002)
        found = ring.next(0)  # a look that may find nothing, or a part of the message, which must not be lost
        if found is None:
            found = ring.next(READ_TIMEOUT_S)
        if found != message(source):
            sys.exit(f"reader {reader}: message {index} is another one, or has not come")
    print("all", flush=True)
    sys.stdin.read()


def fuzz(path: Path, num_readers: int, num_messages: int, seed: int) -> Report:
    """Raises `RuntimeError` where a reader was given anything but the messages in order."""
    writer = RingWriter(path, num_readers, slot_bytes=SLOT_BYTES, num_slots=NUM_SLOTS)
    arguments = [f"--path={path}", f"--readers={num_readers}", f"--messages={num_messages}", f"--seed={seed}"]
    readers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.parallel.fuzz_ring", *arguments, f"--reader={reader}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for reader in range(num_readers)
    ]
    try:
        source, num_longer = random.Random(seed), 0
        for _ in range(num_messages):
            each = message(source)
            num_longer += len(each) > ROOM
            writer.publish(each, READ_TIMEOUT_S)
        for process in readers:
            assert process.stdout is not None
            if process.stdout.readline() != b"all\n":
                raise RuntimeError("a reader has not got all messages in order; it says why above")
        return Report(num_messages, num_longer, end_of_reader(writer, readers[-1]))
    finally:
        for process in readers:
            process.kill()
            process.communicate()
        writer.close()


def end_of_reader(writer: RingWriter, reader: subprocess.Popen[bytes]) -> str:
    """What the writer is told when this reader is dead."""
    reader.kill()
    reader.wait()
    try:
        for _ in range(NUM_SLOTS + 1):
            writer.publish(b"to nobody", timeout_s=0.1)
    except ReaderBehindError as error:
        return str(error)
    raise RuntimeError("the writer has not found out that a reader is dead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--readers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--path", type=Path, help="of a ring that exists: be one of its readers")
    parser.add_argument("--reader", type=int)
    options = parser.parse_args()
    if options.path is not None:
        read_all(options.path, options.reader, options.readers, options.messages, options.seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        report = fuzz(Path(folder) / "ring", options.readers, options.messages, options.seed)
    print(f"{report.num_messages} messages ({report.num_longer_than_ring} longer than the ring): {report.end}")


if __name__ == "__main__":
    main()
