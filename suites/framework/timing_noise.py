"""Simulated clocks for the tests of timings: a sample depends on when it is taken, and on the ratio of its arm."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from fusiongate.timing.pairing import Paired, Schedule, Settings, pair

__all__ = ["NOISES", "Simulated", "measured"]

Noise = Callable[[np.random.Generator, int], NDArray[np.float64]]
"""Gives the logarithm of what each of a number of consecutive samples is multiplied by."""

_SPREAD = 0.003
"""The relative spread of samples of a millisecond that the suite's own calibration shows on a GPU."""


def _normal(generator: np.random.Generator, number: int) -> NDArray[np.float64]:
    return generator.normal(0, _SPREAD, number)


def _heavy(generator: np.random.Generator, number: int) -> NDArray[np.float64]:
    spikes = generator.random(number) < 0.03
    return generator.standard_t(2, number) * _SPREAD / 2 + spikes * generator.exponential(0.2, number)


def _drifting(generator: np.random.Generator, number: int) -> NDArray[np.float64]:
    return np.linspace(0, 0.05, number) + np.cumsum(generator.normal(0, _SPREAD, number))


def _autocorrelated(generator: np.random.Generator, number: int) -> NDArray[np.float64]:
    values = generator.normal(0, _SPREAD, number)
    for place in range(1, number):
        values[place] += 0.9 * values[place - 1]
    return values


def _switching(generator: np.random.Generator, number: int) -> NDArray[np.float64]:
    clock = np.where(np.arange(number) < generator.integers(0, number), 0.0, 0.08)
    return clock + generator.normal(0, _SPREAD, number)


NOISES: dict[str, Noise] = {
    "normal": _normal,
    "heavy-tailed": _heavy,
    "drifting": _drifting,
    "autocorrelated": _autocorrelated,
    "clock-switching": _switching,
}


class Simulated:
    """A sampler whose noise belongs to the moment, as on a device, and not to the arm.

    Parameters
    ----------
    ratios
        Each arm's true time over the first one's, which takes a millisecond a sample.
    noise
        One of ``NOISES``.
    seed
        Seeds the noise.
    tick_s
        The clock's resolution in seconds, 0 for none.
    """

    def __init__(self, ratios: Sequence[float], noise: str, seed: int, tick_s: float = 0.0) -> None:
        self._ratios = ratios
        self._logs = NOISES[noise](np.random.default_rng(seed), 4000)
        self._tick_s = tick_s
        self._taken = 0

    def sample(self, order: Sequence[int]) -> list[float]:
        moments = self._logs[self._taken : self._taken + len(order)]
        self._taken += len(order)
        seconds = 1e-3 * np.asarray([self._ratios[arm] for arm in order]) * np.exp(moments)
        if self._tick_s:
            seconds = np.round(seconds / self._tick_s) * self._tick_s
        return [float(second) for second in seconds]


def measured(
    ratios: Sequence[float],
    noise: str,
    seed: int,
    settings: Settings,
    *,
    looks: tuple[int, ...] = (16, 31, 63),
    tick_s: float = 0.0,
) -> Paired:
    """Pair simulated arms; by default with the looks of 0.3 s of millisecond samples."""
    return pair(
        Simulated(ratios, noise, seed, tick_s),
        len(ratios),
        Schedule(looks, (1 - settings.confidence) / len(looks)),
        settings,
        resolution=lambda: [tick_s / 1e-3] * len(ratios),
        coin=random.Random(seed),
    )
