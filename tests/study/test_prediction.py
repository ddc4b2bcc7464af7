"""From the calibration of a device to a prediction, and then its run: pytest tests/study/test_prediction.py"""

from __future__ import annotations

import pytest

from cb_backend.cli.study_session import CONFIRMATIONS
from cb_backend.study.advice import checks
from cb_backend.study.bench import Bench, Setting, SimulatedBench, calibrate, fitted
from cb_backend.study.figures import Figures, figures
from cb_backend.study.replay import Progress
from cb_backend.study.sample import sample_lengths
from cb_backend.study.traffic import Traffic
from tests.study.made_up_device import H100, DeviceBench

NUM_BLOCKS = 4095
LARGEST = Setting(64, 2048)


def chat(count: int, seed: int) -> Traffic:
    sample = sample_lengths("lognormal:245:1.0:1024", "lognormal:60:0.8:200", count, seed=seed)
    return sample.traffic(H100.vocab_size, H100.max_model_len, None, seed)[0]


def unheard(name: str) -> Progress:
    return lambda num_ended, num_requests: None


@pytest.mark.parametrize("seed", [0, 3])  # of the device's noise
def test_a_prediction_is_met_by_a_run_of_other_requests_on_a_device_with_slow_first_uses(seed: int) -> None:
    """Every figure within 15 %, though a shape's first step takes twice as long as a usual step, and a tenth of all is
    noise. The requests that are run are not those of the calibration."""
    device = DeviceBench(NUM_BLOCKS, LARGEST, seed)
    replays = calibrate(device, chat(250, seed=0), [Setting(64, 512), LARGEST], 15.0, unheard)
    times = fitted(device.engine, replays, {})
    load = chat(80, seed=1)
    simulator = SimulatedBench(device.engine.config, times)

    def run(bench: Bench) -> tuple[Figures, Figures]:
        return figures(bench.run(load.at_once(), LARGEST)), figures(bench.run(load.at_rate(60.0), LARGEST))

    measured = [run(device) for _ in range(CONFIRMATIONS)]
    found = {check.name: check.error for check in checks(run(simulator), measured)}
    assert len(found) == 7
    assert {name: error for name, error in found.items() if abs(error) > 0.15} == {}


def test_a_calibration_runs_twice_where_that_fits() -> None:
    """What comes for the first time is in the first pass, which is not returned."""
    traffic, settings = chat(20, seed=0), [Setting(16, 512)]
    for limit_s, num_passes in ((30.0, 2), (0.3, 1)):
        device = DeviceBench(NUM_BLOCKS, settings[0])
        replays = calibrate(device, traffic, settings, limit_s, unheard)
        assert device.num_runs == 1 + num_passes * len(replays)
