"""kernels/adapter_places.py: what few places for many adapters leave, by the real scheduler."""

from __future__ import annotations

from types import ModuleType

import pytest

from cb_backend.cli.paths import checkout_path
from cb_backend.study.adapter_mix import AdapterMix


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(checkout_path("kernels")))
    import adapter_places

    return adapter_places


def mix(num_places: int) -> AdapterMix:
    return AdapterMix(num_names=8, skew=1.0, num_slots=num_places, num_bytes=1.0, bytes_per_s=1e3)


def test_tokens_are_those_of_the_streams_in_the_steps_time(places: ModuleType) -> None:
    """8 streams in steps of 5 ms, of which each answer has one of its prompt alone."""
    load = places.Load(streams=8, input_len=32, output_len=100, requests=80)
    found = places.simulate(load, places.step_times(0.005, 0.0, 0.0, 32), None)
    assert found.tokens_per_s == pytest.approx(8 / 0.005, rel=0.03)
    assert found.num_loads == 0
    assert found.first_token_s[0] == pytest.approx(0.005, rel=0.5)
    longer = places.simulate(load, places.step_times(0.005, 0.001, 0.0, 32), None)
    assert longer.tokens_per_s == pytest.approx(8 / 0.013, rel=0.05)


def test_fewer_places_leave_less_and_each_load_is_counted(places: ModuleType) -> None:
    load = places.Load(streams=16, input_len=32, output_len=40, requests=160)
    times = places.step_times(0.005, 0.0, 0.002, 32)
    found = {number: places.simulate(load, times, mix(number)) for number in (1, 4, 8)}
    assert found[8].num_loads == 8
    assert found[1].num_loads > found[4].num_loads > 8
    assert found[1].tokens_per_s < 0.6 * found[4].tokens_per_s < 0.6 * found[8].tokens_per_s
    assert found[8].tokens_per_s == pytest.approx(places.simulate(load, times, None).tokens_per_s, rel=0.03)
    assert found[1].first_token_s[-1] > found[8].first_token_s[-1]


def test_the_table_says_what_was_simulated(
    places: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--places 2,8 --streams 8 --names 8 --requests 60 --output-len 20 --input-len 16"
    monkeypatch.setattr("sys.argv", ["adapter_places.py", *options.split()])
    assert places.main() == 0
    first, _, two, eight = capsys.readouterr().out.splitlines()
    assert first.startswith("8 streams, 8 names; without adapters")
    assert (two.split()[0], eight.split()[0]) == ("2", "8")
    assert float(two.split()[1].replace(",", "")) < float(eight.split()[1].replace(",", ""))


@pytest.mark.parametrize("wrong", [
    "--places 0", "--places 4,x", "--names 0", "--streams 0", "--requests 100", "--output-len 1", "--input-len 9000",
    "--zipf -1", "--cost -2", "--load-ms -5", "--step-ms 0", "--row-us nan",
])  # fmt: skip
def test_what_cannot_be_simulated_is_told_before_anything_is(
    wrong: str, places: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["adapter_places.py", *wrong.split()])
    with pytest.raises(SystemExit) as ended:
        places.main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert wrong.split()[1] in printed.err or "8192" in printed.err
    assert not printed.out
