"""Where long work is: a bar on a terminal, and elsewhere a line at least every ten seconds.

Work that is done sooner says nothing. What is said goes to the standard error stream, so that results can be piped.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

__all__ = ["Progress", "Ticker", "track"]

_INTERVAL_S: Final = 9.0
"""Less than ten seconds: what is to be said has to be written too."""
_FRAMES_PER_S: Final = 2.0
"""Each frame takes the interpreter from whatever is being timed."""

T = TypeVar("T")


class Ticker:
    """Calls a function from a thread of its own, again and again, for as long as the block lasts.

    Parameters
    ----------
    tell
        What is called, before ten seconds have passed since it was last.
    """

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell = tell
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fusiongate-progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._tell()


class Progress:
    """Work of several steps.

    Parameters
    ----------
    what
        The work, in a few words.
    steps
        The steps in their order, a few words each; or only how many they are.
    """

    def __init__(self, what: str, steps: Sequence[str] | int) -> None:
        self._what = what
        self._names: Sequence[str] = () if isinstance(steps, int) else steps
        self._total = steps if isinstance(steps, int) else len(steps)
        self._done = 0
        self._started = time.monotonic()
        self._shown: Bar | Ticker = _bar(str(self), self._total) if sys.stderr.isatty() else Ticker(self._say)

    def advance(self) -> None:
        """Count a step as done."""
        self._done += 1
        if not isinstance(self._shown, Ticker):
            self._shown.update(self._shown.task_ids[0], description=str(self), completed=self._done)

    def __str__(self) -> str:
        return ": ".join([self._what, *self._names[self._done : self._done + 1]])

    def __enter__(self) -> Self:
        self._shown.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, traceback)

    def _say(self) -> None:
        seconds = time.monotonic() - self._started
        sys.stderr.write(f"{self} ({self._done} of {self._total} done, {seconds:.0f} s)\n")
        sys.stderr.flush()


def track(items: Iterable[T], what: str, steps: Sequence[str] | int) -> Iterator[T]:
    """Pass items on, and tell which one is being made or worked on.

    Parameters
    ----------
    items
        The items; making one, or working on it, is a step.
    what, steps
        As for `Progress`.
    """
    with Progress(what, steps) as progress:
        for item in items:
            yield item
            progress.advance()


def _bar(what: str, total: int) -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # No markup: a step's words may hold brackets.
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(
        *columns,
        console=Console(stderr=True, highlight=False, soft_wrap=True),
        transient=True,
        refresh_per_second=_FRAMES_PER_S,
        # What is printed goes above the bar; but what is piped stays in the pipe.
        redirect_stdout=sys.stdout.isatty(),
    )
    bar.add_task(what, total=total)
    return bar
