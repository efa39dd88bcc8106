"""Counts that many threads add to at once, without a lock."""

from __future__ import annotations

import threading
from collections import Counter

__all__ = ["Tallies"]

_Counts = Counter[tuple[str, str]]


class Tallies:
    """Counts by key that any number of threads add to without a lock: each has a Counter of its own."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._living: list[tuple[threading.Thread, _Counts]] = []
        self._ended: _Counts = Counter()
        self._lock = threading.Lock()

    def add(self, key: tuple[str, str]) -> None:
        """Count one."""
        try:
            self._local.counter[key] += 1
        except AttributeError:
            self._local.counter = self._enter(Counter({key: 1}))

    def _enter(self, counter: _Counts) -> _Counts:
        """Take in a thread's counter, and add up those of ended threads: a server makes a thread a request."""
        with self._lock:
            living = [(thread, counts) for thread, counts in self._living if thread.is_alive()]
            for thread, counts in self._living:
                if not thread.is_alive():
                    self._ended.update(counts)
            self._living = [*living, (threading.current_thread(), counter)]
        return counter

    def total(self) -> _Counts:
        """The sum over all threads."""
        with self._lock:
            counters = [self._ended, *(counts for _, counts in self._living)]
            # dict(...) copies in one step, so that a thread that is counting does not disturb the sum.
            return sum((Counter(dict(counter)) for counter in counters), Counter())
