"""Counts that many threads add to at once, without a lock; and what is read of them, which knows its names."""

from __future__ import annotations

import difflib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .states import Reason, free_after_fork

__all__ = ["Counts", "Tallies"]

_Counts = Counter[tuple[str, str]]

_OF_REFERENCE = tuple(str(reason) for reason in Reason if reason is not Reason.VERIFIED)
_REASONS = {"fused": (str(Reason.VERIFIED),), "reference": _OF_REFERENCE}

_SLIP = 0.81
"""How alike two words are, at least, if one is the other with a slip in it: `training` is not `tracing`."""


class Counts(_Counts):
    """Calls by (path, reason): a Counter in which a name that cannot be counted is an error, and not 0.

    A test that asks for ``("fuse", "verified")`` would pass for ever on a kernel that is never launched. The paths are
    ``fused``, always for the reason ``verified``, and ``reference``, for any other reason of
    :class:`~fusiongate.gate.states.Reason` or one that ``declines`` gives. What a predicate may give nobody knows:
    such a reason counts 0, unless it reads like a known one with a slip in it. ``get`` never raises; ``Counter(…)``
    makes a plain one of it, for arithmetic with another gate's.

    Parameters
    ----------
    counts
        The calls by (path, reason).
    name
        The fusion's, for messages.
    given
        Tells the reasons that ``declines`` has given, whether a call was counted for them or not.
    declines
        Whether the predicate may give any.
    """

    def __init__(
        self,
        counts: Mapping[tuple[str, str], int] | Iterable[tuple[str, str]] = (),
        /,
        *,
        name: str = "counters",
        given: Callable[[], Iterable[str]] = tuple,
        declines: bool = True,
    ) -> None:
        super().__init__(counts)
        self._name = name
        self._given = given
        self._declines = declines

    # A Counter's own asks either side for the other's keys, and another gate's may be none of this one's.
    __eq__ = dict.__eq__
    __ne__ = dict.__ne__
    __hash__ = None  # type: ignore[assignment]  # as of any Counter

    def __missing__(self, key: tuple[str, str]) -> int:
        """No call yet; or an error where there cannot be one.

        Raises
        ------
        KeyError
            The key is no pair, or names a path or a reason that there is not.
        """
        fault = self._fault(key)
        if fault is not None:
            raise KeyError(f"{self._name}: counters asked for {key!r}: {fault}")
        return 0

    def _fault(self, key: object) -> str | None:
        if not (isinstance(key, tuple) and len(key) == 2):
            return "expected a pair (path, reason), such as ('fused', 'verified')"
        path, reason = key
        if path not in _REASONS:
            return f"no path is called {path!r}; there are {', '.join(_REASONS)}"
        known = [*_REASONS[path]]
        if path == "reference":
            known += sorted({*map(str, self._given()), *(reason for name, reason in self if name == path)} - {*known})
        if reason in known:
            return None
        open_ended = path == "reference" and self._declines and isinstance(reason, str)
        if open_ended and not difflib.get_close_matches(reason, known, 1, _SLIP):
            return None
        more = " and what else declines gives" if open_ended else ""
        return f"{path} has no reason {reason!r}; there are {', '.join(known)}{more}"

    def __reduce__(self) -> tuple[Any, ...]:
        # What it knows beside its counts belongs to a gate that stays here.
        return Counter, (dict(self),)


class Tallies:
    """Counts by key that any number of threads add to without a lock: each has a Counter of its own."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._living: list[tuple[threading.Thread, _Counts]] = []
        self._ended: _Counts = Counter()
        self.lock = threading.RLock()
        free_after_fork(self)

    def add(self, key: tuple[str, str]) -> None:
        """Count one."""
        try:
            self._local.counter[key] += 1
        except AttributeError:
            self._local.counter = self._enter(Counter({key: 1}))

    def _enter(self, counter: _Counts) -> _Counts:
        """Take in a thread's counter, and add up those of ended threads: a server makes a thread a request."""
        with self.lock:
            living = [(thread, counts) for thread, counts in self._living if thread.is_alive()]
            for thread, counts in self._living:
                if not thread.is_alive():
                    self._ended.update(counts)
            self._living = [*living, (threading.current_thread(), counter)]
        return counter

    def total(self) -> _Counts:
        """The sum over all threads."""
        with self.lock:
            counters = [self._ended, *(counts for _, counts in self._living)]
            # dict(...) copies in one step, so that a thread that is counting does not disturb the sum.
            return sum((Counter(dict(counter)) for counter in counters), Counter())
