"""Sweeps, the choice of a setting, comparisons: pytest tests/study/test_sweep.py"""

from __future__ import annotations

from dataclasses import replace

import pytest

from cb_backend.study.advice import Study, advise, checks
from cb_backend.study.bench import RealBench, Setting, SimulatedBench, calibrate, first, fitted
from cb_backend.study.figures import figures
from cb_backend.study.replay import Progress
from cb_backend.study.sweep import Choice, Target, Trial, choose, compare, highest_rate, run_trial, sweep
from tests.study.made_up import ROW_S, STEP_S, config, mixed_traffic, scripted_engine, simulate, step_times, traffic

SAID: list[str] = []


def say(name: str) -> Progress:
    SAID.append(name)
    return lambda num_ended, num_requests: None


def bench(**arguments: object) -> SimulatedBench:
    return SimulatedBench(config(**arguments), step_times())


def trial(num_seqs: int, tokens_per_s: float, ttft_p99: float, itl_p99: float = 10.0, preempted: float = 0.0) -> Trial:
    some = figures(simulate(traffic([4], [2])))
    saturated = replace(some, output_tokens_per_s=tokens_per_s, preemption_rate=preempted)
    loaded = replace(some, ttft_ms={"p99": ttft_p99}, itl_ms={"p99": itl_p99})
    return Trial(Setting(num_seqs, 512), saturated, loaded)


def test_the_smallest_setting_that_is_about_as_fast_is_chosen() -> None:
    trials = [trial(8, 500, 90), trial(16, 980, 90), trial(32, 1000, 90)]
    assert choose(trials, Target()) == Choice(trials[1], [])


def test_targets_and_preemptions_rule_settings_out() -> None:
    fast_but_late = trial(64, 4000, 900)
    fast_but_rough = trial(64, 3000, 90, itl_p99=80)
    fast_but_preempting = trial(128, 2000, 90, preempted=0.02)
    good = trial(16, 1000, 90, preempted=0.019)
    everyone = [fast_but_late, fast_but_rough, fast_but_preempting, good]
    assert choose(everyone, Target(ttft_ms=100, itl_ms=50)) == Choice(good, [])
    assert choose(everyone, Target()).trial == fast_but_late


def test_what_cannot_be_kept_is_said_and_the_least_excess_wins() -> None:
    trials = [trial(8, 500, 400), trial(16, 900, 300), trial(32, 1000, 90, preempted=0.5)]
    choice = choose(trials, Target(ttft_ms=100))
    assert choice.trial == trials[1]
    assert choice.broken == ["no setting reaches TTFT p99 at most 100 ms at this load"]
    preempting = [trial(8, 500, 50, preempted=0.3), trial(16, 900, 50, preempted=0.1)]
    choice = choose(preempting, Target(ttft_ms=100))
    assert choice.trial == preempting[1]
    assert choice.broken == ["every setting preempts 2% of the requests or more"]


def test_a_simulated_sweep_tries_the_grid_and_a_real_one_two_lines() -> None:
    load = mixed_traffic(6)
    grid: list[Trial] = []
    sweep(bench(), load, 10.0, (1, 2, 4), (2, 16), 16, Target(), say, grid)
    assert [one.setting for one in grid] == [
        Setting(1, 2),
        Setting(1, 16),
        Setting(2, 2),
        Setting(2, 16),
        Setting(4, 16),
    ]
    real: list[Trial] = []
    sweep(RealBench(scripted_engine(1000)), load, 1000.0, (1, 4), (4, 16, 64), 16, Target(), say, real)
    settings = {one.setting for one in real}
    best = choose(real, Target()).trial.setting.max_num_seqs
    assert {Setting(1, 16), Setting(4, 16)} < settings
    assert len(settings) == 4
    assert {Setting(best, 4), Setting(best, 64)} & settings


def test_a_larger_batch_is_faster_and_slower_for_each() -> None:
    """By hand: n requests of one prompt token and 11 tokens in n slots take a prompt step and ten decode steps."""
    load = traffic([1] * 8, [11] * 8, [i * 0.001 for i in range(8)])
    few, many = (run_trial(bench(), load, 20.0, Setting(n, 64), say) for n in (1, 8))
    step = STEP_S + 8 * 0.0001
    assert many.saturated.seconds == pytest.approx(step + 10 * (STEP_S + 8 * ROW_S))
    assert few.saturated.seconds == pytest.approx(8 * (STEP_S + 0.0001 + 10 * (STEP_S + ROW_S)))
    assert many.saturated.itl_ms["p50"] > few.saturated.itl_ms["p50"]
    assert many.loaded.ttft_ms["p99"] < few.loaded.ttft_ms["p99"]


def test_the_highest_rate_is_where_the_target_breaks() -> None:
    """One request at a time, evenly spaced: with gaps of its duration nobody waits, with less they queue."""
    seconds = STEP_S + 0.001 + 8 * (STEP_S + ROW_S)  # 10 prompt tokens, 9 answer tokens
    load = traffic([10] * 20, [9] * 20, [i * 1.0 for i in range(20)])
    one = run_trial(bench(), load, 1.0, Setting(1, 64), say)
    target = Target(ttft_ms=20)
    found = highest_rate(bench(), load, one, target, say)
    assert found == pytest.approx(1 / seconds, rel=0.05)
    assert target.is_met(figures(bench().run(load.at_rate(found), Setting(1, 64))))
    assert highest_rate(bench(), load, one, Target(ttft_ms=1), say) == 0
    assert highest_rate(bench(), load, one, Target(), say) == one.saturated.requests_per_s


def a_study(load: object, **changes: object) -> Study:
    made = Study(
        traffic_name="made up",
        traffic=load,
        conditions={"card": "none"},
        cache="1,000 KV blocks of 4 tokens",
        target=Target(),
        rate=5.0,
        is_simulated=True,
    )  # type: ignore[arg-type]
    made.trials = [run_trial(bench(), made.traffic, 5.0, Setting(4, 64), say)]
    made.choice = choose(made.trials, made.target)
    made.comparison = compare(bench(), made.traffic, 5.0, Setting(4, 64), say)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_uniform_and_prefill_dominated_traffic_is_warned_of() -> None:
    uniform = a_study(traffic([10] * 8, [20] * 8, [float(i) for i in range(8)]), prompt_share=0.2)
    assert uniform.comparison is not None
    assert uniform.comparison.gain == pytest.approx(1.0)
    found = " ".join(advise(uniform))
    assert "nearly the same length" in found
    assert "gain over static batches is small: 1.00 times" in found
    assert "prefill-dominated" not in found
    assert "prompts take 80% of the time" in " ".join(advise(replace_share(uniform, 0.8)))


def replace_share(study: Study, share: float) -> Study:
    study.prompt_share = share
    return study


def test_mixed_lengths_gain_and_are_not_warned_of() -> None:
    lengths = [2, 2, 2, 60] * 4
    mixed = a_study(traffic([4] * 16, lengths, [0.01 * i for i in range(16)]))
    assert mixed.comparison is not None
    assert mixed.comparison.gain > 2
    for which in (0, 1):
        assert mixed.comparison.continuous[which].e2e_ms["p50"] < mixed.comparison.static[which].e2e_ms["p50"]
    assert mixed.comparison.continuous[0].e2e_ms["p99"] < mixed.comparison.static[0].e2e_ms["p99"]
    assert advise(mixed) == []


def test_a_load_that_says_nothing_of_the_settings_is_told() -> None:
    idle = a_study(traffic([4] * 16, [2, 2, 2, 60] * 4, [0.01 * i for i in range(16)]), rate=0.1)
    (found,) = advise(idle)
    assert "of what the engine does at best" in found
    assert "--rate tries a heavier load" in found


def test_a_sample_of_one_batch_is_said_to_show_no_gain() -> None:
    few = a_study(traffic([4] * 7, [2, 2, 2, 60, 2, 2, 2], [0.01 * i for i in range(7)]))
    assert "7 requests are less than 2 batches of 4" in advise(few)[0]
    enough = a_study(traffic([4] * 8, [2, 2, 2, 60] * 2, [0.01 * i for i in range(8)]))
    assert "batches of 4" not in " ".join(advise(enough))


def test_a_loss_is_not_called_a_small_gain() -> None:
    lost = a_study(traffic([4] * 16, [2, 2, 2, 60] * 4, [0.01 * i for i in range(16)]))
    assert lost.comparison is not None
    at_once, at_load = lost.comparison.static
    faster = replace(at_once, output_tokens_per_s=10 * at_once.output_tokens_per_s)
    lost.comparison = replace(lost.comparison, static=(faster, at_load))
    (found,) = advise(lost)
    assert "static batches do more tokens/s here: in flight does 0." in found


def test_uncertain_figures_are_said_to_be_uncertain() -> None:
    study = a_study(traffic([4] * 16, [2, 2, 2, 60] * 4, [0.01 * i for i in range(16)]), fit_error=0.44)
    assert "fit with a median error of 44%" in " ".join(advise(study))
    study.fit_error = 0.03
    assert study.comparison is not None
    at_once, at_load = study.comparison.continuous
    other = replace(at_once, output_tokens_per_s=1.1 * at_once.output_tokens_per_s)
    study.comparison = replace(study.comparison, continuous=(other, at_load))
    assert advise(study) == [], "a simulation gives the same figure twice"
    study.is_simulated = False
    (found,) = advise(study)
    assert "every figure is of one run: 4 seqs, 64 tokens did" in found


def test_overload_is_said() -> None:
    busy = a_study(traffic([4] * 16, [2, 2, 2, 60] * 4, [0.01 * i for i in range(16)]), rate=1e4)
    assert "load of 1e+04 requests/s is more than the engine does" in " ".join(advise(busy))


def test_checks_hold_predictions_against_measurements() -> None:
    some = figures(simulate(traffic([4, 4], [3, 3])))
    other = replace(some, output_tokens_per_s=some.output_tokens_per_s / 1.1)
    slower, faster = (replace(other, output_tokens_per_s=other.output_tokens_per_s * factor) for factor in (0.5, 3.0))
    found = {check.name: check for check in checks((some, some), [(slower, some), (faster, some), (other, some)])}
    rate = found["output tokens/s, all at once"]
    assert rate.error == pytest.approx(0.1)  # of the middle run
    assert (rate.lowest, rate.highest) == (slower.output_tokens_per_s, faster.output_tokens_per_s)
    assert found["TTFT p99, ms"].error == 0


def test_calibration_covers_batches_and_budgets_and_can_be_fitted() -> None:
    engine = scripted_engine(1000, max_num_seqs=8, max_num_batched_tokens=64)
    said: list[str] = []

    def listen(name: str) -> Progress:
        said.append(name)
        return lambda num_ended, num_requests: said.append(f"{num_requests} requests")

    replays = calibrate(RealBench(engine), mixed_traffic(20), [Setting(8, 16), Setting(8, 64)], 60.0, listen)
    named = [name for name in said if name.startswith("calibrating")]
    assert len(named) == 1 + 2 * len(replays), "who waits is told of each, also of those that are not returned"
    assert len(said) > len(named), "and how far it is"
    assert [result.num_slots for result in replays] == [1, 4, 8, 8, 8]  # of the second pass alone
    assert max(result.steps.num_rows.max() for result in replays) == 8
    assert max(result.steps.shapes[:, 2].max() for result in replays) > 16
    times = fitted(engine, replays, {"card": "none"})
    assert (times.num_blocks, times.block_size, times.max_num_seqs) == (1000, 4, 8)
    assert times.num_steps == sum(len(result.steps.ends) for result in replays)
    assert times.seconds((4.0, 100.0, 0.0, 0.0, 0.0)) > 0
    assert len(first(mixed_traffic(20), 5)) == 5


def test_a_queue_longer_than_the_engine_allows_is_no_obstacle() -> None:
    load = traffic([5] * 30, [2] * 30)
    waits = SimulatedBench(config(max_queue_size=3, max_queue_tokens=8), step_times())
    assert figures(waits.run(load, Setting(2, 64))).ttft_ms["max"] > 0
