"""Run vllm_backend's own test suite, from its own files, against our backend on a real server.

    python tests/peers/run_vllm_backend.py --repo DIR [--only WORD]

DIR is a clone (or a bare copy) of triton-inference-server/vllm_backend. Its files are checked out into a temporary
folder and run as they are; the server runs their untouched model directories, with our package installed as the backend
`vllm` and small stand-in weights (`stand_in.py`). The suites insist on ports 8000, 8001 and 8002. Exit code 0: every
failure has a reason that lies in weights or in vLLM itself (`suites.py`).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from stand_in import WORDS_OF_ADAPTERS, write_embedding, write_stand_in
from stand_in_adapters import write_adapters
from suites import NOT_RUN, SUITES, Models, Suite

from cb_backend.cli.paths import CliError
from cb_backend.cli.server.backend_folder import install_backend
from cb_backend.cli.server.local_server import find_server
from cb_backend.cli.server.server_process import ServerOptions, ServerProcess

START_TIMEOUT_S = 120.0
SUITE_TIMEOUT_S = 3600.0
Outcomes = dict[str, str]  # of each test: "" for a pass, else why not


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", type=Path, required=True, metavar="DIR", help="git directory of vllm_backend")
    parser.add_argument("--only", default="", metavar="WORD", help="suites whose title has this word")
    args = parser.parse_args()
    chosen = [suite for suite in SUITES if args.only in suite.title]
    results: list[tuple[Suite, Outcomes]] = []
    with tempfile.TemporaryDirectory(prefix="cb_backend-peers-") as name:
        folder = Path(name)
        commit = check_out(args.repo, folder / "checkout")
        checkout = folder / "checkout"
        checkpoint = write_stand_in(folder / "stand_in")
        adapted = functools.cache(lambda: write_adapted(folder / "adapted"))
        embedding = functools.cache(lambda: write_embedding(folder / "embedding"))
        models = Models(checkout, checkpoint, folder / "models", adapted, embedding)
        for suite in chosen:
            if suite.is_newer and not (checkout / suite.file).is_file():
                print(f"left out, because this commit of vllm_backend does not have it: {suite.title}", flush=True)
                continue
            print(f"running {suite.title}", flush=True)
            try:
                results.append((suite, run_suite(suite, models)))
            except (CliError, TimeoutError, subprocess.TimeoutExpired) as error:
                results.append((suite, {"the suite": str(error)}))
    return print_results(results, commit)


def check_out(repo: Path, target: Path) -> str:
    """Write the files of the repository's HEAD to `target`; returns the commit."""
    git = ["git", "-C", str(repo)]
    target.mkdir()
    archive = subprocess.run([*git, "archive", "HEAD", "ci", "samples"], capture_output=True, check=False)
    if archive.returncode != 0:
        sys.exit(f"error: {repo} is no git directory of vllm_backend: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(target)], input=archive.stdout, check=True)
    return subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def write_adapted(folder: Path) -> tuple[Path, dict[str, Path]]:
    """Other stand-in weights, and adapters that say what the peer's say."""
    checkpoint = write_stand_in(folder / "stand_in", WORDS_OF_ADAPTERS)
    return checkpoint, write_adapters(checkpoint, folder)


def run_suite(suite: Suite, models: Models) -> Outcomes:
    """Start a server on the suite's models, run the suite's file in its own folder."""
    shutil.rmtree(models.repository, ignore_errors=True)
    models.repository.mkdir()
    suite.prepare(models)
    file = models.checkout / suite.file
    installation = find_server()
    backends = installation.backend_dir
    if not (backends / "vllm").exists():
        install_backend(backends, "vllm")
    options = ServerOptions(
        models.repository,
        exit_timeout_secs=10,
        extra_arguments=suite.server_arguments,
        extra_environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    with (file.parent / suite.log_name).open("w") as log:
        server = ServerProcess(installation, options, lambda line: print(line, file=log, flush=True))
        server.start()
        try:
            server.wait_ready(START_TIMEOUT_S)
            return RUNNERS[suite.runner](suite, file)
        finally:
            server.stop()


# ---- runners ------------------------------------------------------------------------------------------------------


def run_unittest(suite: Suite, file: Path) -> Outcomes:
    report = file.with_suffix(".outcomes.json")
    report.unlink(missing_ok=True)
    script = Path(__file__).resolve().with_name("unittest_report.py")
    return _read_json(report, _run([str(script), file.name, str(report), *suite.tests], file.parent, suite))


def _read_json(report: Path, output: str) -> Outcomes:
    return json.loads(report.read_text()) if report.is_file() else {"the file": _last_line(output)}


def run_pytest(suite: Suite, file: Path) -> Outcomes:
    report = file.with_suffix(".outcomes.xml")
    report.unlink(missing_ok=True)
    targets = [f"{file.name}::{test}" for test in suite.tests] or [file.name]
    output = _run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *targets], file.parent, suite
    )
    if not report.is_file():
        return {"the file": _last_line(output)}
    outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        trouble = [child.get("message", child.tag) for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[case.get("name", "")] = trouble[0] if trouble else ""
    return outcomes


def run_script(suite: Suite, file: Path) -> Outcomes:
    """The sample client says PASS itself; it must also have got an answer for each prompt."""
    output = _run([file.name, *suite.arguments], file.parent, suite)
    answers = (file.parent / "results.txt").read_text() if (file.parent / "results.txt").is_file() else ""
    num_answers = sum(bool(answer.strip()) for answer in answers.split("\n=========\n"))
    num_prompts = len((file.parent / "prompts.txt").read_text().splitlines())
    if "PASS" in output and num_answers == num_prompts:
        return {"PASS": ""}
    return {"PASS": f"{num_answers} answers to {num_prompts} prompts: {_last_line(output)}"}


RUNNERS = {"unittest": run_unittest, "pytest": run_pytest, "script": run_script}


def _run(arguments: list[str], folder: Path, suite: Suite) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **suite.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SUITE_TIMEOUT_S,
        check=False,
    )
    return done.stdout


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


# ---- the table ----------------------------------------------------------------------------------------------------


def print_results(results: list[tuple[Suite, Outcomes]], commit: str) -> int:
    print(f"\nvllm_backend {commit}, its own files\n{'suite':<42}{'passed':>8}{'of':>8}")
    num_unexcused = 0
    for suite, outcomes in results:
        failed = {test: why for test, why in outcomes.items() if why}
        print(f"{suite.title:<42}{len(outcomes) - len(failed):>8}{len(outcomes):>8}")
        num_unexcused += sum(test not in suite.excused for test in failed) + (not outcomes)
        for why, count in Counter(_reason(suite, test, text) for test, text in failed.items()).most_common(8):
            print(f"    {count} x {why}")
    print("not run:")
    for name, why in NOT_RUN.items():
        print(f"    {name}: {why}")
    return 1 if num_unexcused else 0


def _reason(suite: Suite, test: str, text: str) -> str:
    first_line = text.strip().splitlines()[0][:200]
    return f"{test} {suite.excused[test]} ({first_line})" if test in suite.excused else f"{first_line} [{test[:60]}]"


if __name__ == "__main__":
    sys.exit(main())
