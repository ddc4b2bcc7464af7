"""kernels/measure.py: lanes, limits and what is told of commands, of plans that need no GPU; and the plans that do."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cb_backend.cli.paths import checkout_path
from cb_backend.support.process_watch import process_stat
from tests.docs.checks import ROOT, bad_commands
from tests.waiting import eventually

KERNELS = checkout_path("kernels")
Measure = Callable[..., int]


@pytest.fixture
def workshop(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(KERNELS))
    import measure
    import measuring_plan

    monkeypatch.setattr(measure, "about_host", lambda: "a host without any GPU")
    monkeypatch.setattr(measure, "GRACE_S", 0.3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")  # commands are told so; no one looks for them
    return SimpleNamespace(measure=measure, plan=measuring_plan)


@pytest.fixture
def measure(workshop: SimpleNamespace, tmp_path: Path) -> Measure:
    def run(plan: str, *options: str) -> int:
        (tmp_path / "a.plan").write_text(plan)
        return int(workshop.measure.main([str(tmp_path / "a.plan"), "--out", str(tmp_path / "out"), *options]))

    return run


def told(tmp_path: Path, name: str) -> str:
    return (tmp_path / "out" / f"{name}.txt").read_text()


def wait_until_dead(file: Path) -> None:
    """The process whose id is in the file."""
    pid = int(file.read_text())
    eventually(lambda: (process_stat(pid) or "Z")[0] == "Z", f"process {pid} has ended")


def test_a_plan_is_read_line_by_line(workshop: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "a.plan"
    path.write_text(
        "# what it shows\n\ngpu0 60 step 3: python a.py \\\n    --rows 1 \\\n\ncpu 5 seeds: $PEER/x ${OUT} $each\n"
    )
    step, seeds = workshop.plan.read_plans([path])
    assert step == workshop.plan.Line("gpu0", 60.0, "step", 3, "python a.py --rows 1")
    assert (seeds.lane, seeds.num_shown, seeds.variables()) == ("cpu", 1, ["PEER", "OUT"])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("gpu0 5 a: true\n\ngpu0 many a: true\n", "line 3: 'gpu0 many a: true' is not `lane seconds name"),
        ("gpu0 5 \\\n  a\nfoo\n", "line 1: 'gpu0 5 a' is not"),
        ("tpu 5 a: true\n", "line 1: 'tpu 5 a: true' is not"),
        ("gpu0 5 a/b: true\n", "line 1: .* is not"),
        ("gpu0 5 a: true\ngpu1 5 a: false\n", "line 2: 'a' is there already"),
    ],
)
def test_a_plan_that_cannot_be_run_is_told_with_its_line(
    text: str, complaint: str, workshop: SimpleNamespace, measure: Measure, tmp_path: Path
) -> None:
    (tmp_path / "a.plan").write_text(text)
    with pytest.raises(workshop.plan.PlanError, match=complaint):
        workshop.plan.read_plans([tmp_path / "a.plan"])
    with pytest.raises(SystemExit):
        measure(text)


@pytest.mark.parametrize(
    ("lanes", "num_gpus", "num_cores", "sizes"),
    [
        ("gpu0 gpu1", 2, 32, {"gpu0": 16, "gpu1": 16}),
        ("gpu0 gpu1 cpu", 2, 32, {"gpu0": 10, "gpu1": 10, "cpu": 12}),
        ("gpu1 gpus cpu0 cpu1", 2, 64, {"gpu1": 12, "gpus": 24, "cpu0": 20, "cpu1": 20}),
        ("gpu0 gpu1 cpu", 2, 9, {"gpu0": 3, "gpu1": 3, "cpu": 3}),
        ("cpu", 2, 32, {"cpu": 32}),
        ("gpu0 gpu1 cpu", 2, 2, {"gpu0": 2, "gpu1": 2, "cpu": 2}),
    ],
)
def test_lanes_share_the_cores(
    lanes: str, num_gpus: int, num_cores: int, sizes: dict[str, int], workshop: SimpleNamespace
) -> None:
    shares = workshop.plan.share_cores(lanes.split(), num_gpus, list(range(num_cores)))
    assert {name: len(cores) for name, cores in shares.items()} == sizes
    apart = [core for name, cores in shares.items() if name != "gpus" for core in cores]
    assert len(apart) == len(set(apart)) or num_cores < len(sizes), "two lanes have a core"


def test_a_gpus_share_of_the_cores_can_be_set(
    workshop: SimpleNamespace,
    measure: Measure,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(32)))
    plan = "gpu0 5 a: true\ngpu1 5 b: true\ncpu 5 c: true"
    (tmp_path / "a.plan").write_text(plan)
    lines = workshop.plan.read_plans([tmp_path / "a.plan"])
    for given, sizes in ((6, {"gpu0": 6, "gpu1": 6, "cpu": 20}), (16, {"gpu0": 10, "gpu1": 10, "cpu": 12})):
        made = workshop.measure.Measurements(lines, tmp_path, 60, ["0", "1"], gpu_cores=given)
        assert {name: len(cores) for name, cores in made.cores.items() if name != "gpus"} == sizes
    for plan, wrong in (("cpu 5 a: true", "at least 1"), ("gpu0 5 a: true", "no lane of cpu")):
        with pytest.raises(SystemExit):
            measure(plan, "--gpu-cores", "0" if "cpu 5" in plan else "6")
        assert wrong in capsys.readouterr().err


def test_lanes_run_side_by_side_and_all_gpus_alone(measure: Measure, tmp_path: Path) -> None:
    plan = """
        gpu0 60 a: until [ -e $OUT/b ]; do sleep 0.02; done; echo a >> $OUT/order; echo on $CUDA_VISIBLE_DEVICES
        gpu1 60 b: touch $OUT/b; until [ -e $OUT/c ]; do sleep 0.02; done; echo b >> $OUT/order; \\
            echo on $CUDA_VISIBLE_DEVICES
        gpus 60 both: echo both >> $OUT/order; echo on $CUDA_VISIBLE_DEVICES
        gpu1 60 after: echo after >> $OUT/order
        cpu 60 c: touch $OUT/c; python -c 'import sys; print(sys.executable)'; echo on none$CUDA_VISIBLE_DEVICES
    """
    assert measure(plan) == 0
    order = (tmp_path / "out" / "order").read_text().split()
    assert (sorted(order[:2]), order[2:]) == (["a", "b"], ["both", "after"])
    devices = {name: told(tmp_path, name).splitlines()[-1] for name in ("a", "b", "both", "c")}
    assert devices == {"a": "on 5", "b": "on 7", "both": "on 5,7", "c": "on none"}
    assert Path(told(tmp_path, "c").splitlines()[1]).parent == Path(sys.executable).parent


def test_a_command_ends_at_its_limit_with_all_that_it_started(measure: Measure, tmp_path: Path) -> None:
    plan = "gpu0 1 stubborn 2: trap 'echo not yet' TERM; sleep 600 & echo $! > $OUT/pid; while :; do sleep 0.1; done\n"
    assert measure(plan + "gpu0 60 next: sleep 600 & echo $! > $OUT/left; echo and on\n") == 1
    table = (tmp_path / "out" / "table.txt").read_text()
    assert "ended at its limit" in table
    assert "    not yet\n" in table
    assert table.endswith("exit 0\n    and on\n")
    for file in ("pid", "left"):
        wait_until_dead(tmp_path / "out" / file)


def test_what_cannot_run_is_told_and_the_rest_runs(
    measure: Measure, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = """
        gpu0 60 peer: bash $NO_SUCH_FOLDER/run.sh
        gpu2 60 third: true
        gpu0 9000 long: true
        gpu0 60 wrong 2: echo 1; echo 2; echo 3; exit 3
        gpu0 60 right: echo fine on $CORES
    """
    assert measure(plan, "--limit", "300") == 1
    table = capsys.readouterr().out.partition("\n\n")[2]
    assert "not run: $NO_SUCH_FOLDER is not set" in table
    assert "not run: there is no such GPU: 2 are visible" in table
    assert "not run: it may take 9000 s of 300" in table
    assert "exit 3\n    2\n    3\n" in table
    assert re.search(r"exit 0\n    fine on [1-9]\d*\n$", table)
    assert (tmp_path / "out" / "hosts.txt").read_text().endswith(": a host without any GPU\n")


def test_a_plan_goes_on_where_it_was(measure: Measure, tmp_path: Path) -> None:
    def runs() -> list[str]:
        return (tmp_path / "out" / "runs").read_text().split()

    plan = "cpu 60 a: echo a >> $OUT/runs\ncpu 60 b: echo b >> $OUT/runs; false\n"
    assert measure(plan) == 1
    assert measure(plan + "cpu 60 c: echo c >> $OUT/runs\n") == 1
    assert runs() == ["a", "b", "c"]
    assert measure(plan.replace("; false", ""), "--again", "a") == 0, "a command that is another one is run"
    assert runs() == ["a", "b", "c", "a", "b"]
    with pytest.raises(SystemExit):
        measure(plan, "--again", "z")


def test_an_interrupt_ends_everything_and_what_ran_is_run_again(measure: Measure, tmp_path: Path) -> None:
    begun = "echo $$ > $OUT/pid; kill -TERM $(awk '/^PPid/ {print $2}' /proc/$$/status); exec sleep 600"
    plan = f"cpu0 60 done: echo 1\ncpu1 60 begun: {begun}\ncpu1 60 next: echo 2\n"
    (tmp_path / "a.plan").write_text(plan)
    code = f"import sys; sys.path.insert(0, {str(KERNELS)!r}); import measure; measure.about_host = str; measure.main()"
    command = [sys.executable, "-c", code, str(tmp_path / "a.plan"), "--out", str(tmp_path / "out")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed.count("not run: stopped before") >= 2
    wait_until_dead(tmp_path / "out" / "pid")
    assert measure(plan.replace(begun, "true")) == 0


def plan_lines(workshop: SimpleNamespace) -> list[Any]:
    """Of all plans, which can be run together: no name comes twice."""
    return list(workshop.plan.read_plans(sorted((KERNELS / "plans").glob("*.plan"))))


def test_a_plan_of_the_workshop_fits_into_ten_minutes(workshop: SimpleNamespace) -> None:
    assert plan_lines(workshop)
    for path in (KERNELS / "plans").glob("*.plan"):
        assert path.read_text().startswith("# "), f"{path.name} does not say what it shows"
        seconds: Counter[str] = Counter()
        for line in workshop.plan.read_plans([path]):
            seconds[line.lane] += line.seconds
        on_gpus = seconds.pop("gpus", 0)
        assert max(seconds.values(), default=0) + on_gpus < 570, path.name


def test_plans_call_what_there_is(workshop: SimpleNamespace) -> None:
    """Scripts, modules, tests and their options, as far as their text tells."""
    complaints = []
    for line in plan_lines(workshop):
        for call in re.split(r"&&|\|\|?|;|\$\(|\)|\bdo\b", line.command):
            complaints += [f"{line.name}: {complaint}" for complaint in call_complaints(call.split())]
    assert complaints == []


def call_complaints(words: list[str]) -> Iterator[str]:
    while words and "=" in words[0]:
        words = words[1:]
    if not words or words[0] not in ("python", "python3"):
        return
    target, rest = (words[2], words[3:]) if words[1] == "-m" else (words[1], words[2:])
    if target == "cb_backend.cli.main":
        yield from bad_commands(f"`cb-backend {' '.join(rest)}`")
        return
    if target == "pytest":
        paths = [word for word in rest if word.startswith("tests/")]
        yield from (f"there is no {path}" for path in [*paths] if not (ROOT / path).exists())
        return
    if target.startswith("$PEER"):
        return
    path = ROOT / (target if words[1] != "-m" else f"{target.replace('.', '/')}.py")
    text = path.read_text() if path.is_file() else None
    if text is None:
        yield f"there is no {path}"
    else:
        yield from (f"{path.name} has no {word}" for word in rest if word.startswith("--") and f'"{word}"' not in text)


def test_a_call_of_what_is_not_there_is_told() -> None:
    wrong = ["python kernels/none.py", "A=1 python kernels/bench_step.py --nothing 1", "python -m tests.none"]
    wrong += ["python -m cb_backend.cli.main bench embed --nothing 1", "python -m pytest -q tests/none.py"]
    assert [len(list(call_complaints(call.split()))) for call in wrong] == [1] * len(wrong)
