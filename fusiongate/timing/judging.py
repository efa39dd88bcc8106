"""The judgement on two recorded runs: has a kernel become slower, by its ratio to its reference and by its time?

The ratio was measured in pairs, so that a device that runs slower on another day moves both its halves. The time is
judged beside it: a ratio hides what slows the kernel and its reference alike. Both intervals come from separate runs;
that of a change is the widest that they allow together, which holds at least as often as both of them do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusiongate.errors import EnvironmentMismatch, UsageError

from .intervals import Outcome, outcome_of
from .recorded import Bounds, RecordedRow, Run, environment_differences

__all__ = ["Change", "FailOn", "Judged", "Judgement", "judge"]


@dataclass(frozen=True, slots=True)
class FailOn:
    """Which outcome fails a judgement, and from which change on."""

    outcome: Outcome
    """``slower``, ``faster`` or ``inconclusive``."""
    margin: float
    """The change that does not matter, such as 0.01."""

    @classmethod
    def parse(cls, text: str) -> FailOn:
        """Read ``slower:1%``.

        Raises
        ------
        UsageError
            The text is no such condition.
        """
        match = re.fullmatch(r"(slower|faster|inconclusive):(\d+(?:\.\d+)?)%", text)
        if match is None or not 0 < float(match[2]) < 100:
            raise UsageError(f"--fail-on {text}: expected an outcome and a margin such as slower:1%")
        return cls(Outcome(match[1]), float(match[2]) / 100)


@dataclass(frozen=True, slots=True)
class Change:
    """What became of one quantity from the base run to the new one."""

    value: float
    """New over base."""
    low: float
    """The least that both intervals allow."""
    high: float
    """The most that both intervals allow."""

    def outcome(self, margin: float) -> Outcome:
        """What the change says against a margin."""
        return outcome_of(self.low, self.high, margin)

    def __str__(self) -> str:
        return f"{self.value - 1:+.2%} ({self.low - 1:+.2%} to {self.high - 1:+.2%})"


@dataclass(frozen=True, slots=True)
class Judged:
    """One kernel in two runs."""

    name: str
    """The row's name."""
    base_s: float
    """The median time of a call in the base run, in seconds."""
    new_s: float
    """The median time of a call in the new run, in seconds."""
    ratio: Change
    """The change of its ratio to its reference."""
    time: Change
    """The change of its time."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Every kernel of two runs."""

    rows: tuple[Judged, ...]
    """The kernels, in the order of the base run."""
    added: tuple[str, ...]
    """Rows that the new run has and the base run lacks: nothing to hold them against."""
    environments: tuple[str, ...]
    """What differs between the environments, where that was allowed."""
    fail_on: tuple[FailOn, ...]
    """The conditions."""
    margin: float
    """The change that does not matter for the words of the table."""

    @property
    def failures(self) -> tuple[str, ...]:
        """What meets a condition, in words; empty where nothing does."""
        return tuple(
            f"{row.name}: {what} {change} is {condition.outcome}, margin {condition.margin:.1%}"
            for row in self.rows
            for condition in self.fail_on
            for what, change in (("ratio", row.ratio), ("time", row.time))
            if change.outcome(condition.margin) is condition.outcome
        )

    def lines(self) -> Iterator[str]:
        """The judgement as lines of text."""
        for row in self.rows:
            ratio, time = (change.outcome(self.margin) for change in (row.ratio, row.time))
            yield f"{row.name}: ratio {ratio} {row.ratio}, time {time} {row.time}{_remark(ratio, time)}"
        yield from self._closing()

    def markdown(self) -> Iterator[str]:
        """The judgement as a table for a pull request."""
        yield f"| kernel | base µs | new µs | ratio to its reference (margin ±{self.margin:.1%}) | time |"
        yield "| --- | ---: | ---: | --- | --- |"
        for row in self.rows:
            changes = (f"{change.outcome(self.margin)} {change}" for change in (row.ratio, row.time))
            yield f"| `{row.name}` | {row.base_s * 1e6:.2f} | {row.new_s * 1e6:.2f} | {' | '.join(changes)} |"
        closing = list(self._closing())
        if closing:
            yield ""
            yield from (f"- {line}" for line in closing)

    def _closing(self) -> Iterator[str]:
        yield from (f"new, nothing to hold it against: {name}" for name in self.added)
        if self.environments:
            yield f"the environments differ, as allowed: {'; '.join(self.environments)}"
        yield from (f"failed: {failure}" for failure in self.failures)


def _remark(ratio: Outcome, time: Outcome) -> str:
    if time is Outcome.SLOWER and ratio is Outcome.SAME:
        return ": its reference has become slower alike, so look at the device or at torch first"
    if ratio is Outcome.SLOWER and time is Outcome.SAME:
        return ": its reference has become faster"
    return ""


def judge(
    base: Run, new: Run, fail_on: Sequence[FailOn] = (), *, allow_environment: bool = False, margin: float = 0.01
) -> Judgement:
    """Hold the kernels of a new run against those of a base run.

    Parameters
    ----------
    base, new
        Recorded runs.
    fail_on
        The conditions under which :attr:`Judgement.failures` is not empty.
    allow_environment
        Judge runs of different environments all the same.
    margin
        The change that does not matter; the smallest of the conditions' where there are any.

    Raises
    ------
    EnvironmentMismatch
        The runs were made in different environments, and that was not allowed.
    UsageError
        A row of the base run is missing in the new one, or is held against another reference there.
    """
    different = environment_differences(base.machines, new.machines)
    if different and not allow_environment:
        raise EnvironmentMismatch(
            f"{base.path} and {new.path} were measured in different environments: {'; '.join(different)}; "
            f"measure both in one, or say --allow-environment"
        )
    missing = [name for name in base.rows if name not in new.rows]
    added = tuple(name for name in new.rows if name not in base.rows)
    if missing:
        instead = f", which has {added[0]} instead" if added else ""
        raise UsageError(
            f"{missing[0]} of {base.path} is missing in {new.path}{instead} ({len(missing)} missing, {len(added)} "
            f"new): a row is judged by its name, so record the base again after renaming"
        )
    rows = tuple(_judged(row, new.rows[row.name]) for row in base.rows.values() if row.arm == "kernel")
    if not rows:
        raise UsageError(f"{base.path}: no row of a kernel, so nothing to judge")
    return Judgement(
        rows=rows,
        added=added,
        environments=tuple(different),
        fail_on=tuple(fail_on),
        margin=min((condition.margin for condition in fail_on), default=margin),
    )


def _judged(base: RecordedRow, new: RecordedRow) -> Judged:
    if base.ratio is None or new.ratio is None or base.reference != new.reference:
        raise UsageError(
            f"{base.name} is held against {base.reference} in one run and {new.reference} in the other: "
            f"record both in the same way"
        )
    if base == new:
        # One measurement, not two that agree: nothing can have changed.
        same = Change(1.0, 1.0, 1.0)
        return Judged(base.name, base.median_s.value, new.median_s.value, same, same)
    return Judged(
        name=base.name,
        base_s=base.median_s.value,
        new_s=new.median_s.value,
        ratio=_change(base.ratio, new.ratio),
        time=_change(base.median_s, new.median_s),
    )


def _change(base: Bounds, new: Bounds) -> Change:
    most = new.high / base.low if base.low > 0 else float("inf")
    return Change(new.value / base.value, new.low / base.high, most)
