"""Shows that the timings can be believed: ``python -m fusiongate.suites.timings.calibration``.

- A spin kernel of known length reads as long as it is, where a naive loop does not.
- The same kernel twice is called the same, hundreds of times over, and almost never anything else.
- One percent, planted in a kernel of 60 µs, is called slower.

Exits with 1, naming the figure, where one of them is not as it has to be.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fusiongate as fg
from fusiongate.timing.intervals import Outcome
from fusiongate.timing.measuring import Measurement, measure
from fusiongate.timing.pairing import Settings
from fusiongate.timing.stopwatches import Arm

from .spinning import copy_part, spin_cycles, spin_ns

__all__ = ["Plan", "main"]

_SPINS_NS = (50_000, 100_000, 200_000, 500_000, 2_000_000)
_JUDGED_FROM_NS = 200_000
"""Shorter ones are printed too, where the gap between two kernels of a graph, about a microsecond, shows."""

_READING_ERROR = 0.02
"""By how much the reading of a spin may be off, as a share of its length."""
_MOST_FALSE = 0.01
"""The share of trials that may call the same kernel slower or faster than itself."""
_MOST_INCONCLUSIVE = 0.10
"""The share of those trials that may decide nothing, on a GPU."""
_LEAST_FOUND = 0.99
"""The share of planted differences that has to be found."""
_PLANTED = 1.01
"""The ratio that is planted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run, and where."""

    device: torch.device
    """The device."""
    margin: float
    """The margin of the verdicts."""
    seconds: float
    """The cap on each trial's samples, in seconds."""
    same_trials: int
    """How often the same kernel is measured against itself."""
    planted_trials: int
    """How often a planted percent is looked for, in each of two kernels."""
    budget_s: float
    """When no further trial begins, in seconds from the start."""

    @property
    def settings(self) -> Settings:
        """The settings of every trial: one attempt, as long as the cap allows and no longer than the verdict needs."""
        return Settings(seconds=self.seconds, margin=self.margin, precision=None, retries=0)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def spins(plan: Plan) -> list[dict[str, Any]]:
    """Measure spins of known length, and the same with naive loops."""
    x = torch.zeros(1, dtype=torch.int64, device=plan.device)
    rows = []
    for ns in _SPINS_NS:
        arms = [Arm("spin", spin_ns), Arm("again", spin_ns)]
        taken = measure(arms, (x, ns), settings=plan.settings, hot=True)
        own_s = min(int(spin_ns(x, ns)) for _ in range(9)) * 1e-9
        measured = taken.arms["spin"].median.value
        loops = {name: loop(x, ns) for name, loop in _NAIVE.items()}
        row: dict[str, Any] = {"known_s": own_s, "measured_s": measured, "error": measured / own_s - 1, **loops}
        rows.append(row)
        told = ", ".join(f"{name} {loops[name] * 1e6:.2f} µs ({loops[name] / own_s - 1:+.1%})" for name in loops)
        say(f"spin of {own_s * 1e6:.2f} µs reads {measured * 1e6:.2f} µs ({row['error']:+.2%}); naive loops: {told}")
    return rows


def _naive(x: Tensor, ns: int) -> float:
    _wait(x)
    started = time.perf_counter()
    for _ in range(20):
        spin_ns(x, ns)
    elapsed = (time.perf_counter() - started) / 20
    _wait(x)
    return elapsed


def _naive_waiting(x: Tensor, ns: int) -> float:
    started = time.perf_counter()
    for _ in range(20):
        spin_ns(x, ns)
        _wait(x)
    return (time.perf_counter() - started) / 20


_NAIVE: dict[str, Callable[[Tensor, int], float]] = {"no_wait_s": _naive, "wait_each_s": _naive_waiting}


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def operands(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A modulate of about 60 µs on an H200, in LTX-2's video shape; a small one on a CPU."""
    batch, tokens, width = (1, 14592, 4096) if device.type == "cuda" else (1, 256, 512)
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, scale, shift = (
        torch.randn(batch, rows, width, generator=generator, device=device, dtype=torch.float32).to(dtype)
        for rows in (tokens, 1, 1)
    )
    return x, scale, shift


def trials(
    plan: Plan, number: int, arms: Sequence[Arm], args: tuple[Any, ...], deadline: float, *, hot: bool = False
) -> list[Measurement]:
    """Measure afresh, inputs, graphs and warm-up included, as often as asked and as the time allows."""
    taken: list[Measurement] = []
    while len(taken) < number and time.perf_counter() < deadline:
        taken.append(measure(arms, args, settings=plan.settings, hot=hot))
    return taken


def summary(name: str, taken: Sequence[Measurement], true_ratio: float | None = None) -> dict[str, Any]:
    """Count the verdicts of trials, and tell what their estimates were."""
    if not taken:
        say(f"{name}: no trial fitted the time")
        return {"trials": 0}
    ratios = [next(iter(trial.ratios.values())) for trial in taken]
    counted = Counter(str(ratio.outcome) for ratio in ratios)
    values = [ratio.value for ratio in ratios]
    median = statistics.median(values)
    truth = median if true_ratio is None else true_ratio
    row = {
        "trials": len(taken),
        **{str(outcome): counted[outcome] for outcome in Outcome},
        "estimate": {"median": median, "min": min(values), "max": max(values), "spread": statistics.pstdev(values)},
        "half_width_median": statistics.median((ratio.high - ratio.low) / 2 for ratio in ratios),
        "covered": sum(ratio.low <= truth <= ratio.high for ratio in ratios) / len(ratios),
        "looks": dict(Counter(ratio.looks for ratio in ratios)),
        "call_s": statistics.median(next(iter(trial.arms.values())).median.value for trial in taken),
        "sampling_s": {
            "median": statistics.median(trial.elapsed_s for trial in taken),
            "max": max(trial.elapsed_s for trial in taken),
        },
        "timer": taken[0].timer,
        "copies": taken[0].copies,
        "calls_a_sample": [times.calls for times in taken[0].arms.values()],
        "notes": dict(Counter(note for trial in taken for note in trial.notes).most_common(5)),
        "core_mhz": sorted({reading.core_mhz for trial in taken for reading in trial.clocks}),
    }
    say(f"{name}: {json.dumps(row)}")
    return row


def calibrate(plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """Run everything; give the figures, and what is not as it has to be."""
    started = time.perf_counter()
    results: dict[str, Any] = {
        "environment": fg.environment(plan.device).to_json(),
        "settings": {"margin": plan.margin, "seconds": plan.seconds, "confidence": plan.settings.confidence},
    }
    wrong: list[str] = []

    def part(name: str, run: Callable[[], list[Any]]) -> list[Any]:
        """Run one part; where it fails, the others still tell what they can."""
        try:
            return run()
        except Exception as error:
            traceback.print_exc()
            wrong.append(f"{name} failed: {type(error).__name__}: {error}")
            return []

    results["spins"] = part("spins", lambda: spins(plan))
    wrong += _wrong_about_spins(results["spins"])
    # The planted trials come first, with a part of the time: those of A/A are many and take what is left.
    if plan.device.type == "cuda":
        by_spinning = part("planted spins", lambda: _planted_spin(plan, started + plan.budget_s * 0.4))
        by_copying = part("planted copies", lambda: _planted_copy(plan, started + plan.budget_s * 0.5))
        results["planted"] = {
            "spin": summary("planted +1 %, spinning", by_spinning, true_ratio=_PLANTED),
            "copy": summary("planted +1 %, copying", by_copying),
        }
        wrong += _wrong_about_the_planted(results["planted"], plan)
    twice = part("the same kernel twice", lambda: _same_twice(plan, started + plan.budget_s))
    same = results["same"] = summary("the same kernel twice", twice, 1.0)
    results["total_s"] = time.perf_counter() - started
    wrong += _wrong_about_the_same(same, plan)
    return results, wrong


def _same_twice(plan: Plan, deadline: float) -> list[Measurement]:
    on_gpu = plan.device.type == "cuda"
    op = fg.kernels.modulate if on_gpu else fg.kernels.modulate.host
    assert op is not None  # every kernel of ours has a host build
    args = operands(plan.device)
    with op.isolated() as fresh:
        fresh.verify(*args)
        arms = [Arm("a", fresh), Arm("b", fresh, launches=lambda: fresh.launches, contract=fg.Exact())]
        return trials(plan, plan.same_trials, arms, args, deadline, hot=not on_gpu)


def _planted_spin(plan: Plan, deadline: float) -> list[Measurement]:
    x = torch.zeros(1, dtype=torch.int64, device=plan.device)
    probe = 1_000_000
    settings = Settings(seconds=0.05, margin=plan.margin, precision=None, retries=0)
    arms = [Arm("a", lambda x: spin_cycles(x, probe)), Arm("b", lambda x: spin_cycles(x, probe))]
    cycles = int(probe * 60e-6 / measure(arms, (x,), settings=settings, hot=True).arms["a"].median.value)
    planted = [Arm("a", lambda x: spin_cycles(x, cycles)), Arm("b", lambda x: spin_cycles(x, int(cycles * _PLANTED)))]
    return trials(plan, plan.planted_trials, planted, (x,), deadline, hot=True)


def _planted_copy(plan: Plan, deadline: float) -> list[Measurement]:
    x = operands(plan.device)[0]
    share = 0.95
    planted = [
        Arm("a", lambda x: copy_part(x, share)),
        Arm("b", lambda x: copy_part(x, share * _PLANTED)),
    ]
    return trials(plan, plan.planted_trials, planted, (x,), deadline)


def _wrong_about_spins(rows: Sequence[dict[str, Any]]) -> list[str]:
    return [
        f"a spin of {row['known_s'] * 1e6:.1f} µs reads {row['error']:+.2%} wrong: at most {_READING_ERROR:.0%}"
        for row in rows
        if row["known_s"] * 1e9 >= _JUDGED_FROM_NS * 0.9 and abs(row["error"]) > _READING_ERROR
    ]


def _wrong_about_the_planted(planted: dict[str, dict[str, Any]], plan: Plan) -> list[str]:
    wrong = []
    for name, row in planted.items():
        found = row.get("slower", 0)
        if row["trials"] < plan.planted_trials or found < _LEAST_FOUND * row["trials"]:
            wrong.append(
                f"a planted percent ({name}) was called slower in {found} of {row['trials']} trials: wanted "
                f"{_LEAST_FOUND:.0%} of {plan.planted_trials}"
            )
    return wrong


def _wrong_about_the_same(same: dict[str, Any], plan: Plan) -> list[str]:
    number = same["trials"]
    if number < plan.same_trials:
        return [f"the same kernel twice: {number} trials fitted the time, wanted {plan.same_trials}"]
    # Here: most who import this ask for its naive loops alone.
    from scipy.stats import binomtest

    wrong = []
    false = same["slower"] + same["faster"]
    bound = binomtest(false, number, alternative="less").proportion_ci(0.95).high
    same["false_rate"], same["false_rate_upper_95"] = false / number, bound
    say(f"called slower or faster: {false} of {number}, upper 95 % bound {bound:.3%}")
    if false > _MOST_FALSE * number:
        wrong.append(f"the same kernel twice was called slower or faster in {false} of {number} trials")
    if plan.device.type == "cuda" and same["inconclusive"] > _MOST_INCONCLUSIVE * number:
        wrong.append(f"the same kernel twice was inconclusive in {same['inconclusive']} of {number} trials")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate on this machine's GPU, or on its CPU where it has none."""
    parser = argparse.ArgumentParser(prog="python -m fusiongate.suites.timings.calibration", description=__doc__)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--margin", type=float, default=0.003 if on_gpu else 0.1, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.3, help="cap of a trial's samples, default: %(default)s")
    parser.add_argument("--trials", type=int, default=500 if on_gpu else 30, help="A/A trials, default: %(default)s")
    parser.add_argument("--planted", type=int, default=100, help="trials of a planted percent, default: %(default)s")
    parser.add_argument("--minutes", type=float, default=3.5, help="no trial begins later, default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    given = parser.parse_args(arguments)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    plan = Plan(device, given.margin, given.seconds, given.trials, given.planted, given.minutes * 60)
    results, wrong = calibrate(plan)
    text = json.dumps({**results, "wrong": wrong}, indent=2)
    say(text)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(text + "\n")
    say("\n".join(f"WRONG: {line}" for line in wrong) or "all figures are as they have to be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
