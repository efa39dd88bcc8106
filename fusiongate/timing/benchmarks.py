"""A subject's benchmark: its kernel, its reference, a copy of the same bytes and further arms, as rows to record."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fusiongate.errors import TimingError, UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.subjects import Subject

from .cold_cache import bytes_moved, cache_bytes, copies_needed
from .intervals import Ratio
from .measuring import Measurement, Timer, host_seconds, measure
from .pairing import Settings
from .recorded import SCHEMA, TimedRow
from .stopwatches import Arm

__all__ = ["Benchmark", "DeviceBenchmark", "benchmark"]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What came of benchmarking a subject on one set of arguments."""

    rows: tuple[TimedRow, ...]
    """One for each arm."""
    ratio: Ratio
    """The kernel's time over its reference's, or over the baseline's."""
    measurement: Measurement
    """The measurement itself."""


class DeviceBenchmark(Protocol):
    """What the fixture ``device_benchmark`` gives a test."""

    def __call__(
        self,
        op: Fusion | Subject,
        *args: Any,
        arms: Mapping[str, Callable[..., Any]] | None = None,
        baseline: Fusion | None = None,
        label: str | None = None,
        hot: bool = False,
        timer: Timer = "auto",
        seconds: float = 1.0,
        margin: float = 0.005,
        precision: float | None = 0.0025,
    ) -> Ratio:
        """Measure ``op`` beside its reference and a copy of the same bytes, record each arm, and give the ratio.

        Parameters
        ----------
        op
            A fusion, or a subject; its kernel has to be launched on these arguments.
        args
            Its arguments; the device of its tensors is the one that is measured.
        arms
            Further callables of the same arguments, by the name of their row.
        baseline
            Another build of the same kernel: the ratio is then to that, and its arm is called ``base``.
        label
            Stands for the shape in the rows' names, where two cases share one.
        hot
            Leave the caches warm.
        timer
            ``graph``, ``events``, or ``auto``.
        seconds, margin, precision
            As :class:`fusiongate.timing.pairing.Settings` takes them.

        Raises
        ------
        TimingError
            The kernel was not launched, or its result is not the reference's.
        """


@dataclass(frozen=True, slots=True)
class _Trial:
    name: str
    kernel: Arm
    reference: Callable[..., Any]
    counts: Callable[[], Mapping[tuple[str, str], int] | None]


def benchmark(
    op: Fusion | Subject,
    args: tuple[Any, ...],
    *,
    arms: Mapping[str, Callable[..., Any]] | None = None,
    baseline: Fusion | None = None,
    settings: Settings | None = None,
    hot: bool = False,
    timer: Timer = "auto",
    label: str | None = None,
) -> Benchmark:
    """Measure a fusion, or somebody else's gated function, beside its reference and a copy of the same bytes.

    Parameters
    ----------
    op
        What is measured, behind a fresh gate. On CPU tensors, a fusion that declines them gives way to its host build.
    args
        Its arguments, positionally; the kernel has to be launched on them.
    arms
        Further callables of the same arguments, by name.
    baseline
        Another build of the same kernel, to hold this one against in the place of the reference, as arm ``base``.
    settings, hot, timer
        As :func:`fusiongate.timing.measuring.measure` takes them.
    label
        Stands for the shape in the rows' names.

    Raises
    ------
    UsageError
        No kernel may be launched on these arguments, or an arm's name is taken.
    TimingError
        The kernel's result is not its reference's, or it was not launched.
    """
    first = next((arg for arg in args if isinstance(arg, Tensor)), None)
    if first is None:
        raise UsageError("a benchmark needs a tensor among its arguments")
    with contextlib.ExitStack() as stack:
        trial = stack.enter_context(_trial(op, args))
        if baseline is None:
            reference = Arm("eager", trial.reference)
        else:
            base = stack.enter_context(_trial(baseline, args)).kernel
            reference = Arm("base", base.call, launches=base.launches)
        with torch.no_grad():
            copy, copied = _copy(args, trial.reference(*args), first.device, hot=hot)
        chosen = [reference, trial.kernel, *(Arm(name, call) for name, call in (arms or {}).items()), copy]
        measurement = measure(chosen, args, settings=settings, timer=timer, hot=hot)
        host = {} if first.device.type == "cpu" else {arm.name: host_seconds(arm, args) for arm in chosen[:2]}
        counts = trial.counts()
    shape, dtype = label or "x".join(map(str, first.shape)), str(first.dtype).removeprefix("torch.")
    sources = (op if isinstance(op, Subject) else Subject.of(op)).sources()
    paths = None if counts is None else {f"{path} {reason}": count for (path, reason), count in counts.items()}
    rows = []
    for name, times in measurement.arms.items():
        info = {
            **_info(measurement, name, copied),
            "sources": sources,
            "paths": paths if name == "kernel" else None,
            "host_s": host.get(name),
        }
        rows.append(TimedRow(trial.name, shape, dtype, name, times.seconds, times.calls, info))
    return Benchmark(tuple(rows), measurement.ratios["kernel"], measurement)


@contextlib.contextmanager
def _trial(op: Fusion | Subject, args: tuple[Any, ...]) -> Iterator[_Trial]:
    if isinstance(op, Subject) and op.fusion is not None:
        op = op.fusion
    if isinstance(op, Subject):
        with op.trial() as trial:
            kernel = Arm("kernel", trial.call, launches=lambda: trial.launches, contract=op.contract)
            yield _Trial(op.name, kernel, op.reference, lambda: trial.counts)
        return
    if op.host is not None and op.declines(*args) == "cpu":
        op = op.host
    with op.isolated() as fresh, torch.no_grad():
        verdict = fresh.verify(*args)
        if not verdict.ok:
            raise TimingError(f"{op.name}: a kernel that is wrong is not timed: {verdict}")
        kernel = Arm("kernel", fresh, launches=lambda: fresh.launches, contract=fresh.contract)
        first_sight = fresh.counters
        yield _Trial(op.name, kernel, fresh.reference, lambda: fresh.counters - first_sight)


def _copy(args: tuple[Any, ...], result: Any, device: torch.device, *, hot: bool) -> tuple[Arm, int]:
    """A kernel that reads and writes as many bytes as a call has to, and how many they are.

    Torch's elementwise one and no memcpy: as a node of a graph, a memcpy can be slower than a kernel that copies as
    much. The bytes are random, as activations are: a memory moves zeros with less power.
    """
    moved = bytes_moved(args, result)
    copies = 1 if hot else copies_needed(moved, cache_bytes(device))
    words = max(1, moved // 4)
    sets = [
        tuple(torch.empty(words, dtype=torch.int16, device=device).random_() for _ in range(2)) for _ in range(copies)
    ]
    return Arm("copy", lambda source, target: torch.neg(source, out=target), inputs=sets), 4 * words


def _info(measurement: Measurement, name: str, copied: int) -> dict[str, Any]:
    times = measurement.arms[name]
    moved = copied if name == "copy" else measurement.bytes_moved
    rate = moved / times.median.value
    ratio = measurement.ratios.get(name)
    return {
        "fusiongate": SCHEMA,
        "median_s": times.median.to_json(),
        "ratio": None if ratio is None else ratio.to_json(),
        "reference": next(iter(measurement.arms)),
        "bytes_moved": moved,
        "bytes_per_second": rate,
        "share_of_copy_bandwidth": rate / (copied / measurement.arms["copy"].median.value),
        "launches": times.launches,
        "timer": measurement.timer,
        "cache": "hot" if measurement.hot else "cold",
        "copies": measurement.copies,
        "attempts": measurement.attempts,
        "notes": list(measurement.notes),
        "clocks": [reading.to_json() for reading in measurement.clocks],
    }
