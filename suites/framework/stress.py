"""Many threads on shared and separate gates, some of which draw random numbers: ``python -m
fusiongate.suites.framework.stress --seconds 600``."""

from __future__ import annotations

import argparse
import itertools
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from fusiongate.comparison.verdicts import bits_differ
from fusiongate.gate.fusion import Fusion

__all__ = ["Outcome", "stress"]

THREADS, DRAWING = 32, 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROWS = itertools.count(1)
"""Gives every operand of the run a height of its own now and then, so that first sights never end."""


@dataclass
class Outcome:
    """What came of a run."""

    calls: int = 0
    fused: int = 0
    draws: int = 0
    faults: list[str] = field(default_factory=list)
    """Refusals, wrong results and repeated draws, in words."""


def chain(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def kernel(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.add(x * (1 + scale), shift, out=torch.empty_like(x))


def _operands(random: Random) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    batch, columns, dtype = random.choice([1, 2]), random.choice([8, 64]), random.choice(DTYPES)
    tokens = next(_ROWS) % 4093 if random.random() < 0.05 else random.choice([1, 7, 33])
    shapes = (batch, tokens, columns), (batch, 1, columns), (batch, 1, columns)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def stress(seconds: float) -> Outcome:
    """Let threads call for so long.

    Returns
    -------
    What they saw; a run without faults is right.
    """
    outcome, lock, until = Outcome(), threading.Lock(), time.monotonic() + seconds
    shared = Fusion("shared", reference=chain, fused=kernel)
    drawn: list[list[float]] = [[] for _ in range(DRAWING)]

    def calls(number: int) -> None:
        random = Random(number)
        own = Fusion(f"own {number}", reference=chain, fused=kernel)
        done = wrong = 0
        while time.monotonic() < until:
            op, args = random.choice([shared, own]), _operands(random)
            wrong += bool(bits_differ(op(*args), chain(*args)))
            done += 1
        with lock:
            outcome.calls += done
            outcome.fused += own.counters["fused", "verified"]
            outcome.faults += [f"{own.name}: {event}" for event in own.gate.events if event.kind == "refused"]
            outcome.faults += [f"thread {number}: {wrong} wrong results"] if wrong else []

    def draws(number: int) -> None:
        while time.monotonic() < until:
            # In double precision, so that two equal draws are one draw given twice; a pause, or nothing else runs.
            drawn[number] += torch.rand(16, dtype=torch.float64).tolist()
            time.sleep(0.001)

    threads = [_Thread(draws, number) for number in range(DRAWING)]
    threads += [_Thread(calls, number) for number in range(THREADS - DRAWING)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = list(itertools.chain.from_iterable(drawn))
    outcome.draws = len(every)
    outcome.fused += shared.counters["fused", "verified"]
    outcome.faults += [f"shared: {event}" for event in shared.gate.events if event.kind == "refused"]
    outcome.faults += [f"{len(every) - len(set(every))} draws came twice"] if len(every) != len(set(every)) else []
    outcome.faults += [f"a thread ended with {thread.error!r}" for thread in threads if thread.error is not None]
    return outcome


class _Thread(threading.Thread):
    def __init__(self, body: Callable[[int], None], number: int) -> None:
        super().__init__()
        self._body, self._number = body, number
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._body(self._number)
        except BaseException as error:  # told at the end, with the other faults
            self.error = error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    torch.set_num_threads(1)
    outcome = stress(parser.parse_args().seconds)
    told = [f"{outcome.calls:,} calls, {outcome.fused:,} of them fused, beside {outcome.draws:,} draws"]
    sys.stdout.write("\n".join([*told, *(outcome.faults[:20] or ["no fault"]), ""]))
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
