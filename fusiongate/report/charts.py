"""Ratios as bars: small inline SVG, whose numbers stand beside it in the table."""

from __future__ import annotations

from collections.abc import Iterable

from fusiongate.timing.recorded import Bounds

from .text import templates

__all__ = ["bar", "scale_of"]

_WIDTH = 280
_HEIGHT = 16


def scale_of(ratios: Iterable[Bounds]) -> float:
    """The ratio at the right end of bars that are to be compared: never less than 1.

    An interval counts up to twice its ratio, so that one without an end does not make all others short.
    """
    return max([1.0, *(min(ratio.high, 2 * ratio.value) for ratio in ratios)]) * 1.05


def bar(ratio: Bounds, scale: float, *, emphasised: bool) -> str:
    """A bar from nought to the ratio, its interval as a line over it, and a mark at 1, the reference's time.

    Parameters
    ----------
    ratio
        The ratio and its interval; one that reaches beyond the scale is cut off there, and shows no end.
    scale
        The ratio at the right end, see :func:`scale_of`.
    emphasised
        Whether it is the kernel's, and not one to compare that with.
    """
    value, low, high = (round(min(end / scale, 1) * _WIDTH, 2) for end in (ratio.value, ratio.low, ratio.high))
    module = (
        templates(html=True)
        .get_template("bar.svg.j2")
        .make_module(
            {
                "width": _WIDTH,
                "height": _HEIGHT,
                "value": value,
                "low": low,
                "high": high,
                "one": round(_WIDTH / scale, 2),
                "ends": [end for end in (low, high) if end < _WIDTH],
                "emphasised": emphasised,
            }
        )
    )
    return module.__html__()
