"""ATen calls written as the expression that a reference's author wrote, or close to it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ATOM", "Expression", "expression_of", "shortened"]

_SUM, _PRODUCT, _SIGN, _POWER, ATOM = range(1, 6)
"""How tightly each kind of expression binds."""

_INFIX = {
    "add": ("+", _SUM),
    "sub": ("-", _SUM),
    "mul": ("*", _PRODUCT),
    "div": ("/", _PRODUCT),
    "pow": ("**", _POWER),
}

# Operators that only move values: the author's indexing or copying says nothing about a rounding.
_SILENT = {
    *(
        "alias",
        "as_strided",
        "clone",
        "contiguous",
        "detach",
        "expand",
        "expand_as",
        "lift_fresh",
        "permute",
        "reshape",
    ),
    *("reshape", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze"),
    *("unsafe_split", "view", "_reshape_alias", "_unsafe_view"),
}

_LONGEST = 100
_LONGEST_KEPT = 2000


@dataclass(frozen=True, slots=True)
class Expression:
    """A piece of source text and how tightly it binds."""

    text: str
    """The source text."""
    binding: int
    """How tightly its outermost operator binds."""

    def __post_init__(self) -> None:
        # A value that is used several times multiplies in the text: a long reduction's would grow without bound.
        if len(self.text) > _LONGEST_KEPT:
            object.__setattr__(self, "text", shortened(self.text))

    def in_brackets(self, at_least: int = ATOM) -> str:
        """The text, in brackets where it binds less tightly than needed."""
        return self.text if self.binding >= at_least else f"({self.text})"


def shortened(text: str) -> str:
    """The text cut in its middle where it is too long for one line of a message."""
    if len(text) <= _LONGEST:
        return text
    half = (_LONGEST - 3) // 2
    return f"{text[:half]} … {text[-half:]}"


def _indexed(source: Expression, name: str, dimension: int = 0, *bounds: int | None) -> Expression:
    """A selected place or range along one dimension; the whole of it is not worth a word."""
    if name == "select":
        index = str(bounds[0])
    else:
        start, stop, step = [*bounds, None, None, None][:3]
        index = f"{start or ''}:{'' if stop is None or stop == sys.maxsize else stop}" + (f":{step}" if step else "")
    if index == ":":
        return source
    before = "..., " if dimension < 0 else ":, " * dimension
    return Expression(f"{source.in_brackets()}[{before}{index}]", ATOM)


_SAID = ("alpha", "rounding_mode")
"""The keywords that change what an operator of these chains computes."""


def expression_of(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], numbers: Mapping[float, str]
) -> Expression:
    """One call as source text.

    ``args`` hold an :class:`Expression` in the place of each tensor. A number is put before a tensor in sums and
    products, because that is how these chains are written and the two orders cannot be told apart afterwards.
    """

    def shown(value: Any) -> Expression:
        if isinstance(value, Expression):
            return value
        if isinstance(value, (list, tuple)):
            return Expression("[" + ", ".join(shown(v).text for v in value) + "]", ATOM)
        if isinstance(value, float):
            named = numbers.get(value)
            # The author's `1` arrives as 1 or 1.0, depending on the operator.
            return Expression(named or (str(int(value)) if value.is_integer() else repr(value)), ATOM)
        return Expression(repr(value).removeprefix("torch."), ATOM)

    if name in _SILENT:
        return shown(args[0])
    if name == "_to_copy":
        dtype = kwargs.get("dtype")
        if dtype is None:
            return shown(args[0])
        suffix = ".float()" if dtype == torch.float32 else f".to({str(dtype).removeprefix('torch.')})"
        return Expression(shown(args[0]).in_brackets() + suffix, ATOM)
    if name in {"select", "slice"}:
        return _indexed(shown(args[0]), name, *args[1:])
    if name == "neg":
        return Expression("-" + shown(args[0]).in_brackets(_SIGN), _SIGN)
    left, right = (args[1], args[0]) if name == "rsub" else (args[0], args[1] if len(args) > 1 else None)
    symbol, binding = _INFIX.get("sub" if name == "rsub" else name, ("", 0))
    if symbol and right is not None and kwargs.get("alpha", 1) == 1 and not kwargs.get("rounding_mode"):
        if name in {"add", "mul"} and not isinstance(right, Expression):
            left, right = right, left
        # Floating sums and products are not associative, so that brackets on the right are never left out.
        outer = ATOM if name == "pow" else binding
        return Expression(f"{shown(left).in_brackets(outer)} {symbol} {shown(right).in_brackets(binding + 1)}", binding)
    said = [f"{key}={shown(kwargs[key]).text}" for key in _SAID if kwargs.get(key) not in (1, None)]
    return Expression(f"{name.lstrip('_')}({', '.join([*(shown(a).text for a in args), *said])})", ATOM)
