"""What a comparison found. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynaserve.bench.capacity import Repetition, is_least, median_rate
from dynaserve.bench.course import Course
from dynaserve.bench.measures import Slo
from dynaserve.bench.ratios import Ratio, paired_ratio
from dynaserve.bench.trial import Trial


@dataclass(frozen=True)
class Turn:
    """One search of one system. cut_share: of the requests of all its runs, and of the client's probes, one or two a run and server, those
    handed over; None: the server counts no cuts.
    course: of the run at the rate that was found; None: no rate passed, or an earlier version measured the turn and has not kept it."""

    repetition: Repetition
    cut_share: float | None
    course: Course | None = None


@dataclass(frozen=True)
class Kept:
    """What a comparison that ended early has left, by system; runs without their requests."""

    turns: Mapping[str, Sequence[Turn]] = field(default_factory=dict)
    saturation_per_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """turns: by system, the baseline first, in the order of their seeds. side_by_side: a run of each at the baseline's capacity, if there
    was one. saturation_per_s: what each does when all requests are sent at once, if that was measured."""

    workload: str
    slo: Slo
    turns: Mapping[str, Sequence[Turn]]
    side_by_side: Mapping[str, Trial]
    saturation_per_s: Mapping[str, float]

    @property
    def is_side_by_side(self) -> bool:
        """Whether every system had its run at the baseline's capacity."""
        return self.side_by_side.keys() == self.turns.keys()

    @property
    def courses(self) -> dict[str, Course]:
        """By system: of its run side by side, if all had theirs, else of the sustained run at the highest rate of those whose courses
        are kept; a system without one is left out."""
        if self.is_side_by_side:
            return {system: Course.of(run.rate_per_s, run.records, self.slo) for system, run in self.side_by_side.items()}
        kept = {system: [turn.course for turn in turns if turn.course is not None] for system, turns in self.turns.items()}
        return {system: max(found, key=lambda course: course.rate_per_s) for system, found in kept.items() if found}

    def rates(self, system: str) -> list[float | None]:
        """Requests per second, by repetition."""
        return [turn.repetition.passed_per_s for turn in self.turns[system]]

    def capacity_per_s(self, system: str) -> float | None:
        return median_rate([turn.repetition for turn in self.turns[system]])

    def is_least(self, system: str) -> bool:
        """As `capacity.is_least`."""
        return is_least(turn.repetition for turn in self.turns[system])

    def ratio(self, system: str) -> Ratio | None:
        """To the baseline, over the seeds that both have; None: there is none, one of the two was not servable, or of one the capacity is
        not known but for what it is at least."""
        baseline = next(iter(self.turns))
        if self.is_least(system) or self.is_least(baseline):
            return None
        own, base = self._rates_by_seed(system), self._rates_by_seed(baseline)
        both = own.keys() & base.keys()
        return paired_ratio([own[seed] for seed in both], [base[seed] for seed in both]) if both else None

    def cut_share(self, system: str) -> float | None:
        shares = [turn.cut_share for turn in self.turns[system] if turn.cut_share is not None]
        return sum(shares) / len(shares) if shares else None

    def _rates_by_seed(self, system: str) -> dict[int, float | None]:
        return {turn.repetition.seed: turn.repetition.passed_per_s for turn in self.turns[system]}

    def at_capacity(self, system: str) -> Trial | None:
        """The sustained run at the capacity; of the repetitions that found the same, the first one's."""
        if not self.turns[system]:
            return None
        capacity_per_s = self.capacity_per_s(system)
        runs = (run for turn in self.turns[system] for run in turn.repetition.trials if run.not_sustained is None)
        return next((run for run in runs if run.rate_per_s == capacity_per_s), None)

    def client_lag_p99_ms(self, system: str) -> float | None:
        """The greatest of all runs that count, of which those of a client that was too late are none; None: there is none."""
        trials = [run for turn in self.turns[system] for run in turn.repetition.trials]
        lags_ms = [summary.client_lag_p99_ms for run in trials for summary in (run.summary, *run.others)]
        return max((lag_ms for lag_ms in lags_ms if lag_ms is not None), default=None)
