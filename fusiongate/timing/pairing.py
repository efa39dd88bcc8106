"""Arms measured in pairs: in which order, how often, when to stop, and what the ratio is.

One *unit* measures every arm twice: in a random order and then in the reverse of it. Whatever drifts linearly cancels
within a unit. Each unit draws its order anew, so that between two arms that are the same it is a fair coin which of
them came first: exchanging them turns the sign of the unit's log ratio and changes nothing else. The signed-rank
interval over units therefore holds its level by our own coin, whatever the noise: drifting, autocorrelated,
heavy-tailed or quantised.

How often the data are looked at is fixed before the first sample, and the level is divided among the looks, so that all
of them together hold the stated confidence and stopping early costs nothing of it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fusiongate.errors import UsageError

from .intervals import Interval, Outcome, Ratio, fewest_values, signed_rank_interval

__all__ = ["Paired", "Sampler", "Schedule", "Settings", "orders", "pair"]

_SHARES = (0.25, 0.5, 1.0)
"""The looks, as shares of the units that the time allows."""

_FILLED = 0.85
"""The share of the time that is planned for, so that what looking costs fits into the rest."""

_OVERRUN = 1.1
_FEWEST_UNITS = 16
_MOST_UNITS = 400
"""A look sorts all pairs of units: more of them would take longer to sort than to measure."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How long to measure and what to decide."""

    seconds: float = 1.0
    """A cap on the time that sampling takes; only 16 units, the fewest that make an interval, may take longer."""
    margin: float = 0.005
    """The difference in the ratio that does not matter."""
    confidence: float = 0.99
    """The probability with which an interval holds the true ratio."""
    precision: float | None = 0.0025
    """Measure on until the interval reaches no farther than that to either side; None stops once a verdict stands."""
    retries: int = 2
    """How often a measurement is begun again when the device was throttled during it."""

    def __post_init__(self) -> None:
        for name in ("seconds", "margin"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)!r}: expected a positive number")
        if not 0.5 <= self.confidence < 1:
            raise UsageError(f"confidence={self.confidence!r}: expected at least 0.5 and less than 1, such as 0.99")
        if self.precision is not None and not 0 < self.precision < math.inf:
            raise UsageError(f"precision={self.precision!r}: expected a positive number or None")
        if self.retries < 0:
            raise UsageError(f"retries={self.retries!r}: expected 0 or more")


@dataclass(frozen=True, slots=True)
class Schedule:
    """When the data are looked at, fixed before the first of them."""

    looks: tuple[int, ...]
    """The numbers of units after which the interval is looked at, ascending."""
    level: float
    """What each look may miss: the whole level divided by the number of looks."""

    @classmethod
    def plan(cls, settings: Settings, unit_s: float) -> Schedule:
        """The looks that fit into the settings' time.

        Parameters
        ----------
        settings
            Time and confidence.
        unit_s
            What one unit takes, in seconds, as far as the warm-up tells.
        """
        least = max(_FEWEST_UNITS, fewest_values((1 - settings.confidence) / len(_SHARES)))
        most = max(least, min(_MOST_UNITS, int(_FILLED * settings.seconds / unit_s)))
        looks = tuple(sorted({max(least, int(most * share)) for share in _SHARES}))
        return cls(looks, (1 - settings.confidence) / len(looks))


class Sampler(Protocol):
    """What takes samples: a stopwatch, or a simulation."""

    def sample(self, order: Sequence[int]) -> Sequence[float]:
        """Run the arms of a unit one after another and give the seconds of one call in each sample."""


@dataclass(frozen=True, slots=True)
class Paired:
    """What a paired measurement gave."""

    seconds: NDArray[np.float64]
    """Seconds a call, of shape (units, 2, arms)."""
    ratios: Mapping[int, Ratio]
    """The ratio of every arm but the reference, by its number."""
    elapsed_s: float
    """The time that sampling took, in seconds."""


def orders(arms: int, units: int, coin: random.Random) -> Iterator[tuple[int, ...]]:
    """For each unit, the arms in a random order and then in the reverse of it."""
    for _ in range(units):
        order = list(range(arms))
        coin.shuffle(order)
        yield (*order, *reversed(order))


def pair(
    sampler: Sampler,
    arms: int,
    schedule: Schedule,
    settings: Settings,
    *,
    resolution: Callable[[], Sequence[float]],
    coin: random.Random | None = None,
    between_looks: Callable[[], bool] = lambda: True,
) -> Paired:
    """Measure arms against the first of them until the verdicts stand or the schedule ends.

    Parameters
    ----------
    sampler
        Takes the samples.
    arms
        How many there are; number 0 is the reference.
    schedule
        The looks.
    settings
        Margin, confidence and precision.
    resolution
        Gives, for each arm, one tick of the clock as a share of a sample: what rounding may have moved every sample
        alike. An interval is widened by it, or samples that all round to the same tick would give one of width zero.
    coin
        Draws the orders; by default one that nobody has seeded.
    between_looks
        Called after each look; False ends the measurement.
    """
    coin = random.Random() if coin is None else coin
    started = time.perf_counter()
    taken: list[NDArray[np.float64]] = []
    ratios: dict[int, Ratio] = {}
    for number, units in enumerate(schedule.looks, start=1):
        if taken and (time.perf_counter() - started) * units / len(taken) > _OVERRUN * settings.seconds:
            # The device has become slower than the plan: the cap holds, and the level was divided among all looks.
            break
        for order in orders(arms, units - len(taken), coin):
            passes = np.empty((2, arms))
            for place, (arm, sample) in enumerate(zip(order, sampler.sample(order), strict=True)):
                passes[place // arms, arm] = sample
            taken.append(passes)
        logs = np.log(np.asarray(taken)).mean(axis=1)
        ticks = resolution()
        for arm in range(1, arms):
            interval = signed_rank_interval(logs[:, arm] - logs[:, 0], schedule.level)
            ratios[arm] = _ratio(interval, max(ticks[0], ticks[arm]), settings, pairs=2 * units, looks=number)
        if not between_looks() or all(_is_settled(ratio, settings) for ratio in ratios.values()):
            break
    return Paired(np.asarray(taken), ratios, time.perf_counter() - started)


def _ratio(interval: Interval, tick: float, settings: Settings, *, pairs: int, looks: int) -> Ratio:
    return Ratio(
        value=math.exp(interval.value),
        low=math.exp(interval.low) * (1 - tick),
        high=math.exp(interval.high) * (1 + tick),
        margin=settings.margin,
        confidence=settings.confidence,
        pairs=pairs,
        looks=looks,
    )


def _is_settled(ratio: Ratio, settings: Settings) -> bool:
    if ratio.outcome is Outcome.INCONCLUSIVE:
        return False
    return settings.precision is None or (ratio.high - ratio.low) / (2 * ratio.value) <= settings.precision
