"""Installing the package as a backend of a server: pytest tests/cli/test_install.py"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from cb_backend.cli.main import main
from cb_backend.cli.paths import CliError
from cb_backend.cli.server.backend_folder import install_backend, our_backends
from cb_backend.cli.server.model_repository import check_model_repository, served_checkpoints


@pytest.mark.parametrize("name", ["cb_backend", "vllm"])
def test_the_door_is_one_import(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["install", "--backends-dir", str(tmp_path)] + (["--as", name] if name != "cb_backend" else [])
    for _ in range(2):  # again: renewed, no error
        assert main(arguments) == 0
    assert [path.name for path in (tmp_path / name).iterdir()] == ["model.py"]
    imports = [node for node in ast.parse((tmp_path / name / "model.py").read_text()).body if not is_plain(node)]
    (door,) = imports
    assert isinstance(door, ast.ImportFrom)
    assert (door.module, [alias.name for alias in door.names]) == (
        "cb_backend.serving.backend",
        ["TritonPythonModel"],
    )
    assert our_backends(tmp_path) == {name}
    printed = capsys.readouterr()
    assert f'backend: "{name}"' in printed.out
    assert "has no Python backend" in printed.err


def is_plain(node: ast.stmt) -> bool:
    """A docstring, or __all__."""
    return isinstance(node, (ast.Expr, ast.Assign))


def test_another_backend_is_left_alone(tmp_path: Path) -> None:
    for name, file, content in (("vllm", "model.py", "import vllm\n"), ("onnx", "libtriton_onnx.so", "\x7fELF")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(content)
        with pytest.raises(CliError, match=f"{name} is another backend; choose another name with --as"):
            install_backend(tmp_path, name)
        assert [(path.name, path.read_text()) for path in (tmp_path / name).iterdir()] == [(file, content)]
    assert our_backends(tmp_path) == set()


def test_missing_folder_and_bad_name(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="does not exist; name the server's with --backends-dir"):
        install_backend(tmp_path / "nowhere", "vllm")
    for name in ("", "..", "a/b", "x" * 65):
        with pytest.raises(CliError, match="cannot be a backend's name"):
            install_backend(tmp_path, name)


def test_a_folder_that_cannot_be_written() -> None:
    with pytest.raises(CliError, match=r"/proc/self/vllm cannot be written \(.+\); run as its owner"):
        install_backend(Path("/proc/self"), "vllm")  # nobody, not even root, can make a folder there


def make_model(repository: Path, backend: str, arguments: dict[str, object]) -> None:
    version = repository / "m" / "1"
    version.mkdir(parents=True)
    (repository / "m" / "config.pbtxt").write_text(f'backend: "{backend}"\n')
    (version / "model.json").write_text(json.dumps(arguments))


def test_a_directory_without_a_door_is_checked_by_its_backends_name(tmp_path: Path) -> None:
    make_model(tmp_path, "vllm", {"model": "some/model", "invalid_attribute": True})
    with pytest.raises(CliError, match="model 'm': unknown engine argument 'invalid_attribute'"):
        check_model_repository(tmp_path, {"vllm"})
    assert check_model_repository(tmp_path, {"cb_backend"}) == ["m"]  # vLLM's own backend: not ours to judge
    (tmp_path / "m" / "1" / "model.json").write_text('{"model": "some/model", "enforce_eager": true}')
    assert check_model_repository(tmp_path, {"vllm"}) == ["m"]
    assert served_checkpoints(tmp_path, {"vllm"}) == {"some/model"}
    assert served_checkpoints(tmp_path) == set()
