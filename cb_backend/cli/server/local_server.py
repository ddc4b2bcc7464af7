"""Find a Triton Inference Server on this machine and say how to start it.

Looked for in this order: `tritonserver` on PATH, the container's `/opt/tritonserver`, the `nvidia-pytriton` wheel. The
wheel holds a real server (24.10) with its Python backend, one stub a Python version; a folder of links in the cache
gives them the layout that the server expects, with this package installed as the backends `cb_backend` and `vllm`. This
module starts nothing and knows no model.

Facts behind the checks: the Python backend's stub is linked against one libpython; it takes its packages from the
`python3` that is first on PATH and ignores PYTHONPATH; the stub of 24.10 aborts when it meets numpy 2.
"""

from __future__ import annotations

import filecmp
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cb_backend.cli.paths import CliError
from cb_backend.cli.server.backend_folder import BACKEND_NAME, PEER_NAME, install_backend
from cb_backend.cli.server.model_repository import odd_characters
from cb_backend.models.checkpoint import writable_cache

CONTAINER_ROOT = Path("/opt/tritonserver")
WHEEL_MIN_GLIBC = (2, 35)
WHEEL_SERVERS = {"0.7.0": (2, 51)}  # version of the wheel -> of the server in it
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"

Version = tuple[int, int]  # of the server: 2.51 is release 24.10


@dataclass(frozen=True, slots=True)
class ServerInstallation:
    """A server that can be started here."""

    binary: Path
    backend_dir: Path
    environment: dict[str, str]  # the whole environment of the server process
    origin: str  # for messages: where it was found
    version: Version | None = None  # None: not known


def find_server() -> ServerInstallation:
    """The first usable server. Raises `CliError` with the remedy if there is none or it cannot work here."""
    installed = _installed_binary()
    if installed is not None:
        return _from_installation(installed)
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise CliError(
            "no Triton server found: not on PATH, not in /opt/tritonserver, and nvidia-pytriton is not installed; "
            "run in NVIDIA's container or `pip install -e '.[local-server]'` (x86-64 Linux, Python 3.10 to 3.12)"
        )
    return _from_wheel(Path(next(iter(spec.submodule_search_locations))))


def _installed_binary() -> Path | None:
    on_path = shutil.which("tritonserver")
    if on_path is not None:
        return Path(on_path).resolve()
    in_container = CONTAINER_ROOT / "bin" / "tritonserver"
    return in_container if in_container.is_file() else None


def _from_installation(binary: Path) -> ServerInstallation:
    """A server that someone installed: use it as it is, after checking that its stub can import this package."""
    backend_dir = binary.parent.parent / "backends"
    stub = backend_dir / "python" / "triton_python_backend_stub"
    if not stub.is_file():
        raise CliError(f"{binary} has no Python backend ({stub} is missing); use an image that has it ('-py3')")
    version = stub_python_version(stub)
    if version not in (None, PYTHON_VERSION):
        raise CliError(
            f"the server's Python stub is for Python {version}, this is {PYTHON_VERSION}; use python{version}"
        )
    environment = _environment([])
    check_stub_python(environment)
    return ServerInstallation(binary, backend_dir, environment, str(binary), read_version(binary.parent.parent))


def read_version(root: Path) -> Version | None:
    """Of the server that is installed in `root`, from its file TRITON_VERSION; None where that does not say it."""
    try:
        major, minor = (root / "TRITON_VERSION").read_text().split(".")[:2]
        return int(major), int(minor)
    except (OSError, ValueError):
        return None


def stub_python_version(stub: Path) -> str | None:
    """The Python version that a stub is linked against ("3.12"), read from the name of its libpython."""
    match = re.search(rb"libpython3(?:-[0-9a-f]+)?\.(\d+)\.so", stub.read_bytes())
    return f"3.{match.group(1).decode()}" if match else None


def _from_wheel(package: Path) -> ServerInstallation:
    """The server inside the nvidia-pytriton wheel."""
    root = package / "tritonserver"
    libs = package.parent / "nvidia_pytriton.libs"
    stub = root / "python_backend_stubs" / PYTHON_VERSION / "triton_python_backend_stub"
    check_glibc(os.confstr("CS_GNU_LIBC_VERSION"))
    if not (root / "bin" / "tritonserver").is_file() or not libs.is_dir():
        raise CliError(
            "the nvidia-pytriton wheel is incomplete: `pip install --force-reinstall nvidia-pytriton==0.7.0`"
        )
    if not stub.is_file():
        versions = ", ".join(sorted(p.name for p in (root / "python_backend_stubs").glob("3.*")))
        raise CliError(f"nvidia-pytriton has no stub for Python {PYTHON_VERSION} (it has {versions}); use one of these")
    check_numpy(importlib.metadata.version("numpy"))
    library_dirs = [libs]
    if stub_needs_libpython(stub):
        library_dirs.append(find_libpython())
    environment = _environment(library_dirs)
    check_stub_python(environment)
    cache = writable_cache("server")
    if odd := odd_characters(str(cache)):
        raise CliError(
            f"the server cannot start Python models from {cache}, whose name holds {odd}; set CB_BACKEND_CACHE to a "
            "folder whose path is of letters, digits, '_', '-' and '.'"
        )
    folder = link_wheel(root, stub, cache / f"pytriton-{PYTHON_VERSION}")
    version = WHEEL_SERVERS.get(importlib.metadata.version("nvidia-pytriton"))
    binary = folder / "bin" / "tritonserver"
    return ServerInstallation(binary, folder / "backends", environment, "nvidia-pytriton", version)


def check_glibc(version: str | None) -> None:
    """`version` as `confstr` gives it ("glibc 2.36"). Raises `CliError` if the wheel's server cannot run on it."""
    numbers = re.findall(r"\d+", version or "")
    if version is None or not version.startswith("glibc") or tuple(map(int, numbers[:2])) < WHEEL_MIN_GLIBC:
        needed = ".".join(map(str, WHEEL_MIN_GLIBC))
        raise CliError(
            f"nvidia-pytriton's server needs glibc {needed} or newer, found {version or 'another C library'}; "
            "use Debian 12, Ubuntu 22.04 or newer, or NVIDIA's container"
        )


def check_numpy(version: str) -> None:
    """Raises `CliError` for a numpy with which the stub of 24.10 aborts."""
    if int(version.split(".")[0]) >= 2:
        raise CliError(
            f"numpy {version} is installed, but nvidia-pytriton's Python stub (24.10) aborts with numpy 2; "
            "`pip install 'numpy<2'` (an engine that needs numpy 2 can run under another `engine_python`)"
        )


def stub_needs_libpython(stub: Path) -> bool:
    """Stubs up to 3.12 want the system's libpython; the 3.13 stub brings its own."""
    return f"libpython{PYTHON_VERSION}.so.1.0".encode() in stub.read_bytes()


def find_libpython() -> Path:
    """The folder of this interpreter's shared library. Raises `CliError` if the interpreter was built without one."""
    name = f"libpython{PYTHON_VERSION}.so.1.0"
    lib = sysconfig.get_config_var("LIBDIR") or ""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    candidates = [Path(lib), Path(sys.base_prefix) / "lib", Path(lib) / multiarch, Path("/usr/lib") / multiarch]
    for folder in [*candidates, Path("/usr/lib64")]:
        if (folder / name).is_file():
            return folder
    raise CliError(
        f"{name} was not found, and the server's Python stub needs it; `apt install libpython{PYTHON_VERSION}`, "
        "or use an interpreter that was built with --enable-shared"
    )


def check_stub_python(environment: dict[str, str]) -> None:
    """Ask the interpreter whose packages the stub will see for this package. Raises `CliError` if it is not there."""
    python = shutil.which("python3", path=environment["PATH"])
    if python is None:
        raise CliError("there is no python3 on PATH, where the server's Python stub looks for its packages; add one")
    # -I: like the stub, without PYTHONPATH and without the current folder.
    asked = subprocess.run([python, "-I", "-c", "import cb_backend"], env=environment, capture_output=True, check=False)
    if asked.returncode != 0:
        raise CliError(f"cb_backend is not installed for {python}, where the server looks for it; `pip install -e .`")


def _environment(library_dirs: list[Path]) -> dict[str, str]:
    environment = dict(os.environ)
    # Not resolve(): in a virtual environment the link is the environment.
    path = [str(Path(sys.executable).parent), environment.get("PATH", "")]
    environment["PATH"] = os.pathsep.join(part for part in path if part)
    libraries = [*map(str, library_dirs), environment.get("LD_LIBRARY_PATH", "")]
    if any(libraries):
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(part for part in libraries if part)
    return environment


def link_wheel(root: Path, stub: Path, folder: Path) -> Path:
    """Put the server's layout together in `folder`: links, renewed where they point elsewhere, and one copy."""
    python_backend = root / "backends" / "python"
    links = {
        "bin/tritonserver": root / "bin" / "tritonserver",
        "backends/python/triton_python_backend_utils.py": python_backend / "triton_python_backend_utils.py",
        "backends/python/triton_python_backend_stub": stub,
    }
    for name, target in links.items():
        link = folder / name
        if not (link.is_symlink() and Path(os.readlink(link)) == target):
            _replace(link, partial(os.symlink, target))
        if not os.access(target, os.R_OK):
            raise CliError(f"{target} cannot be read; `pip install --force-reinstall nvidia-pytriton==0.7.0`")
    # NOTE: for a Python-based backend the server follows links and refuses a library outside of its folder.
    source = python_backend / "libtriton_python.so"
    library = folder / "backends" / "python" / "libtriton_python.so"
    if library.is_symlink() or not library.is_file() or not filecmp.cmp(source, library):
        _replace(library, partial(shutil.copy2, source))
    for backend in (BACKEND_NAME, PEER_NAME):
        install_backend(folder / "backends", backend)
    return folder


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    """Make a file under another name and move it into place: a server that starts now finds the old one or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    make(fresh)
    fresh.replace(path)
