"""The bars: their lengths are the figures."""

from __future__ import annotations

import math

import pytest

from fusiongate.report.charts import bar, scale_of
from fusiongate.timing.recorded import Bounds

from .reported import Page


def drawn(ratio: Bounds, scale: float) -> tuple[float, list[tuple[str | None, float, float]]]:
    """The share of the width that the bar takes, and each line's class and ends as shares of it."""
    tags = Page(bar(ratio, scale, emphasised=True)).tags
    width = float(tags[0][1]["width"] or "nan")
    lines = [
        (one.get("class"), float(one["x1"] or "nan") / width, float(one["x2"] or "nan") / width)
        for tag, one in tags
        if tag == "line"
    ]
    (length,) = [float(one["width"] or "nan") / width for tag, one in tags if tag == "rect"]
    return length, lines


def test_bar_interval_and_mark_stand_where_the_figures_say() -> None:
    length, ((one, *mark), (_, *interval), (_, *low), (_, *high)) = drawn(Bounds(0.5, 0.25, 1.5), 2.0)

    assert (0.25, "one", [0.5, 0.5]) == (length, one, mark)
    assert ([0.125, 0.75], [0.125, 0.125], [0.75, 0.75]) == (interval, low, high)


def test_an_interval_without_an_end_goes_to_the_edge_and_shows_none() -> None:
    _, (_, interval, *ends) = drawn(Bounds(0.5, 0.25, math.inf), 1.0)

    assert ("interval", 0.25, 1.0) == interval
    assert [("interval", 0.25, 0.25)] == ends


@pytest.mark.parametrize(
    "ratios, scale",
    [([], 1.05), ([Bounds(0.2, 0.1, 0.3)], 1.05), ([Bounds(2, 1, 3)], 3.15), ([Bounds(2, 1, math.inf)], 4.2)],
)
def test_the_scale_holds_the_reference_and_all_ratios(ratios: list[Bounds], scale: float) -> None:
    assert scale == pytest.approx(scale_of(ratios))


def test_the_picture_is_hidden_from_readers_that_have_the_figures() -> None:
    assert "true" == Page(bar(Bounds(1, 1, 1), 1.0, emphasised=False)).tags[0][1]["aria-hidden"]
