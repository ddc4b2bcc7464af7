"""`cb-backend study --gpus N`: the plan's table first, then a study of each number of GPUs that the model fits.

Of every number of GPUs that hold the model together, as many engines are studied as there are GPUs for: fewer do no
more. Without `--simulate` each is run for real; with it the one whose step times were measured, and the others as these
times and the plan's proportions foretell.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cb_backend.cli.check_cards import CARDS
from cb_backend.cli.gpu_ways import Planned, plan_ways, table
from cb_backend.cli.study_session import Session
from cb_backend.contracts.errors import ConfigError
from cb_backend.study.advice import Study
from cb_backend.study.gpu_plan import Traffic, Way
from cb_backend.study.rank_times import on_ranks
from cb_backend.study.step_times import StepTimes
from cb_backend.study.ways import TriedWay, Ways


@dataclass(slots=True)
class WaysSession:
    """Studies of all ways; `session` is that of a single engine, which is asked for each way with what differs."""

    session: Session
    num_gpus: int
    card: str
    times: StepTimes | None = None  # that were used, once it has run

    def plan(self) -> Planned:
        """Of requests of the sample's mean lengths. Raises `ConfigError` where nothing can be planned of the model, or
        it fits in no way."""
        session, requests = self.session, self.session.sample.requests
        input_len, output_len = (
            max(1, round(float(np.mean(lengths))))
            for lengths in (
                [request.num_prompt_tokens for request in requests],
                [request.num_output_tokens for request in requests],
            )
        )
        target = None if session.target.itl_ms is None else session.target.itl_ms / 1e3
        planned = plan_ways(session.config, CARDS[self.card], self.num_gpus, Traffic(input_len, output_len, target))
        if planned.best is None:
            raise ConfigError(f"the model fits up to {self.num_gpus} of {self.card} in no way: {planned.lack}")
        return planned

    def lines(self, planned: Planned) -> Iterator[str]:
        """The first table of the report."""
        yield "Ways to spread the model, for requests of the sample's mean lengths:"
        yield from table(planned)

    def run(self, planned: Planned) -> Study:
        """The study of the best way's engine, which knows the others, and which of them could not be studied. Raises
        what `Session.run` raises where none could."""
        tried: list[TriedWay] = []
        failed: dict[int, Exception] = {}  # by `tensor_parallel_size`
        studies: list[Study] = []
        rate = self.session.rate if self.session.rate is not None else self.session.sample.rate  # of all engines
        self.times = self.session.times
        for way in self._in_order(planned):
            one = self._session(planned, way, rate)
            num_ranks = way.tensor_parallel_size
            self.session.note(f"tensor_parallel_size {num_ranks}, of {way.data_parallel_size} engines one")
            try:
                study = one.run()
            except KeyboardInterrupt:
                if not studies:
                    raise
                studies[-1].was_interrupted = True
                break
            except Exception as error:  # a start that fails, a rank that ends: what others showed, in hours, stays
                _let_go(error)
                failed[num_ranks] = error
                self.session.note(f"tensor_parallel_size {num_ranks} could not be studied: {error}")
                continue
            if self.times is None:
                self.times = one.times
            is_reckoned = self.session.is_simulated and one.times is not self.times
            trial, is_kept = study.recommended, study.is_kept
            tried.append(TriedWay(num_ranks, way.data_parallel_size, trial, is_kept, study.rate, is_reckoned))
            studies.append(study)
            rate = rate if rate is not None else way.data_parallel_size * study.rate
            if study.was_interrupted:
                break
        if not studies:
            raise next(iter(failed.values()))
        ways = Ways(tried, tuple(failed))
        study = studies[tried.index(ways.best)]
        study.ways, study.was_interrupted = ways, studies[-1].was_interrupted
        return study

    def _in_order(self, planned: Planned) -> list[Way]:
        """The largest of each `tensor_parallel_size` that fits; first the one whose step times are known."""
        largest = {way.tensor_parallel_size: way for way in planned.ways if way.num_streams}
        known = None if self.session.times is None else self.session.times.tensor_parallel_size
        return sorted(largest.values(), key=lambda way: (way.tensor_parallel_size != known, way.tensor_parallel_size))

    def _session(self, planned: Planned, way: Way, rate: float | None) -> Session:
        """Of one engine of the way, with its share of the requests."""
        whole, num_engines = self.session, way.data_parallel_size
        config = replace(whole.config, tensor_parallel_size=way.tensor_parallel_size)
        one = replace(
            whole,
            config=config,
            sample=whole.sample.share(num_engines),
            rate=None if rate is None else rate / num_engines,
        )
        if whole.is_simulated and self.times is not None:
            one.times = self._times_of(self.times, planned, way)
            one.is_confirmed = whole.is_confirmed and one.times is self.times
        return one

    def _times_of(self, times: StepTimes, planned: Planned, way: Way) -> StepTimes:
        rooms = {other.tensor_parallel_size: other.room for other in planned.ways}
        measured = rooms.get(times.tensor_parallel_size)
        if times.tensor_parallel_size == way.tensor_parallel_size:
            return times
        if measured is None or not measured.cache_tokens:
            fault = "that is more than there are" if measured is None else measured.fault
            raise ConfigError(
                f"the step times are of tensor_parallel_size {times.tensor_parallel_size}: {fault}; raise --gpus, or"
                " name the --card that they were measured on"
            )
        num_blocks = times.num_blocks * way.room.cache_tokens // measured.cache_tokens
        return on_ranks(times, planned.shape, planned.card.rates, way.tensor_parallel_size, num_blocks)


def _let_go(error: BaseException | None) -> None:
    """Clear the frames of an error, and of those behind it: a start that failed may hold a device's memory there, which
    the next engine needs."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
