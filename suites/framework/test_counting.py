"""Counts from many threads add up, and threads that have ended cost nothing."""

from __future__ import annotations

import threading
from collections import Counter

from fusiongate.counting import Tallies


def in_threads(count: int, tallies: Tallies, key: tuple[str, str], times: int) -> None:
    def count_up() -> None:
        for _ in range(times):
            tallies.add(key)

    threads = [threading.Thread(target=count_up) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_counts_of_all_threads_add_up() -> None:
    tallies = Tallies()
    tallies.add(("a", ""))

    in_threads(32, tallies, ("a", ""), 1000)
    in_threads(2, tallies, ("b", ""), 3)

    assert Counter({("a", ""): 32_001, ("b", ""): 6}) == tallies.total()


def test_a_total_is_a_copy() -> None:
    tallies = Tallies()
    tallies.add(("a", ""))
    tallies.total().clear()

    assert 1 == tallies.total()["a", ""]


def test_ended_threads_leave_their_counts_and_nothing_else() -> None:
    """A server that makes a thread a request would keep a counter a request otherwise."""
    tallies = Tallies()
    for _ in range(200):
        in_threads(1, tallies, ("a", ""), 1)

    assert 200 == tallies.total()["a", ""]
    assert len(tallies._living) <= 2
