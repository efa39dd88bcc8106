"""Counts from many threads add up, threads that have ended cost nothing, and no count is asked for by a wrong name."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from fusiongate.gate.counters import Counts, Tallies
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.states import Reason


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


# Names ----------------------------------------------------------------------------------------------------------------


def doubled(x: Tensor) -> Tensor:
    return x * 2


def picky(x: Tensor) -> str | None:
    return "stride" if not x.is_contiguous() else None


def called(declines: Any = None) -> Fusion:
    """A fusion after three calls."""
    options = {} if declines is None else {"declines": declines}
    op = Fusion("doubled", reference=doubled, fused=doubled, **options)
    for _ in range(3):
        op(torch.ones(2, 3))
    return op


def asked(op: Fusion, key: Any) -> str:
    """What the error says."""
    with pytest.raises(KeyError) as caught:
        op.counters[key]
    (message,) = caught.value.args
    assert "\n" not in message
    return str(message)


def test_a_misspelt_path_is_an_error_that_says_which_there_are() -> None:
    assert (
        "doubled: counters asked for ('fuse', 'verified'): no path is called 'fuse'; there are fused, reference"
        == asked(called(), ("fuse", "verified"))
    )


@pytest.mark.parametrize("key", ["fused", ("fused",), ("fused", "verified", 1), 3], ids=str)
def test_a_key_that_is_no_pair_is_an_error(key: Any) -> None:
    assert asked(called(), key).endswith("expected a pair (path, reason), such as ('fused', 'verified')")


@pytest.mark.parametrize("reason", ["verifed", "first-sight", "stride"])
def test_a_kernel_runs_for_one_reason_only(reason: str) -> None:
    assert f"fused has no reason {reason!r}; there are verified" in asked(called(picky), ("fused", reason))


@pytest.mark.parametrize("reason", [str(reason) for reason in Reason if reason is not Reason.VERIFIED])
def test_what_may_still_come_counts_zero(reason: str) -> None:
    assert called().counters["reference", reason] in {0, 1}


def test_without_a_predicate_all_reasons_are_known() -> None:
    told = asked(called(), ("reference", "stride"))
    assert "reference has no reason 'stride'; there are first-sight, recheck, disabled, " in told
    assert told.endswith("declines-raised, unsupported-argument")


@pytest.mark.parametrize(
    "reason",
    ["frist-sight", "first_sight", "First sight", "firstsight", "out_of-memory", "disable", "refuseed", 3],
)
def test_a_published_reason_with_a_slip_in_it_is_an_error(reason: Any) -> None:
    told = asked(called(picky), ("reference", reason))
    assert f"reference has no reason {reason!r}; there are first-sight, " in told


@pytest.mark.parametrize("reason", ["strides", "stirde", "Stride"])
def test_a_reason_that_declines_has_given_is_known_too(reason: str) -> None:
    """Even if nobody counted the call: it was asked about only. Before that, it might be any."""
    op = called(picky)
    assert 0 == op.counters["reference", reason]
    assert op.standing(torch.ones(3, 2).t()) is None
    assert asked(op, ("reference", reason)).endswith("unsupported-argument, stride and what else declines gives")
    assert 0 == op.counters["reference", "stride"]


@pytest.mark.parametrize("reason", ["training", "capability", "gpu", "rows", "per-token"])
def test_what_a_predicate_may_still_give_counts_zero(reason: str) -> None:
    op = called(lambda x: "cpu" if x.dim() == 1 else None)
    assert "cpu" == op.explain(torch.ones(3)).reason
    op(torch.ones(3))
    assert 0 == op.counters["reference", reason]


def test_get_never_raises() -> None:
    counters = called().counters
    assert (None, 0, 2) == (
        counters.get(("fuse", "verified")),
        counters.get(("fused", "x"), 0),
        counters.get(("fused", "verified")),
    )


COUNTED = {("reference", "first-sight"): 1, ("fused", "verified"): 2}
ELSEWHERE = Counter({("reference", "never heard of"): 1})


def test_counts_are_equal_to_a_counters_and_to_no_other_gates() -> None:
    """Although another gate's reasons are none of this one's."""
    counters = called().counters
    assert isinstance(counters, Counter)
    assert COUNTED == counters
    assert Counter(COUNTED) == counters
    assert counters == called().counters
    assert ELSEWHERE != counters
    assert counters != ELSEWHERE
    assert Counter() == counters - called().counters
    assert Counter(COUNTED) + ELSEWHERE == Counter(counters) + ELSEWHERE


def test_counts_are_printed_and_copied_like_a_counter() -> None:
    counters = called().counters
    assert "Counts({('fused', 'verified'): 2, ('reference', 'first-sight'): 1})" == str(counters)
    for copied in (copy.copy(counters), copy.deepcopy(counters)):
        assert Counter is type(copied)
        assert COUNTED == copied
    with pytest.raises(TypeError, match="unhashable"):
        hash(counters)


def test_counts_of_nobody_know_what_is_published() -> None:
    assert 0 == Counts()["fused", "verified"]
    with pytest.raises(KeyError, match=r"counters asked for \('fast', 'verified'\)"):
        Counts()["fast", "verified"]
