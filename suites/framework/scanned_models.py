"""Modules that write the adaLN chain in every way that the scan has to know, and in some that it must leave alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "FORMS",
    "LEFT_ALONE",
    "NOT_MOUNTABLE",
    "CompositeNorm",
    "Layered",
    "ReadTwice",
    "inputs",
]

D = 16


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """x (2, 6, D), and rows of shape (2, D)."""
    generator = torch.Generator().manual_seed(7)
    x, scale, shift = (torch.randn(*shape, generator=generator) for shape in [(2, 6, D), (2, D), (2, D)])
    return x.to(dtype), scale.to(dtype), shift.to(dtype)


class CompositeNorm(nn.Module):
    """RMSNorm written out, as most models have it."""

    def __init__(self, size: int = D, eps: float = 1e-6, weighted: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size).bfloat16()) if weighted else None

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        y = (x * torch.rsqrt(variance + self.eps)).to(x.dtype)
        return y if self.weight is None else y * self.weight


class Plain(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x * (1 + scale[:, None]) + shift[:, None]


class FloatOne(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x * (1.0 + scale[:, None]) + shift[:, None]


class Reversed(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return shift[:, None] + (scale[:, None] + 1) * x


class IndexedSum(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x * (1 + scale)[:, None, :] + shift[:, None, :]


class ViewedSum(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x * (1 + scale).unsqueeze(1) + shift.unsqueeze(1)


class OverLines(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return (
            x
            # the gain
            * (1 + scale[:, None])
            + shift[:, None]
        )


class OverStatements(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        gain = 1 + scale[:, None]
        x = x * gain
        x = x + shift[:, None]
        return F.relu(x)


class SharedSum(nn.Module):
    """One ``1 + scale`` for a chain and one more reader, so that it has to be kept."""

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        scale = 1.0 + scale[:, None]
        return (x * scale + shift[:, None]) * scale


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.modulated = True

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y = x
        if self.modulated:
            y = y * (1 + scale[:, None]) + shift[:, None]
        else:
            y = y + 1
        return y


class InComprehension(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return torch.cat([part * (1 + scale[:, None]) + shift[:, None] for part in x.chunk(2, dim=1)], dim=1)


class InMethod(nn.Module):
    def _modulate(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale = rows.chunk(2, dim=-1)
        return x * (1 + scale) + shift, shift

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y, _ = self._modulate(x, torch.cat([shift, scale], dim=-1)[:, None])
        return y


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class InHelper(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return modulate(x, shift, scale)


def _twice(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        return 2 * function(*args, **kwargs)

    return wrapper


class Decorated(nn.Module):
    @_twice
    @torch.no_grad()
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x * (1 + scale[:, None]) + shift[:, None]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.__gain = 2

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor, *, offset: int = 3) -> Tensor:
        y = x * (1 + scale[:, None]) + shift[:, None]
        return y * self.__gain + offset


class Inherited(Base):
    """Private names, keyword-only defaults and a forward of the base class."""

    def __init__(self) -> None:
        super().__init__()


class WithSuper(Base):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor, *, offset: int = 5) -> Tensor:
        x = x * (1 + scale[:, None]) + shift[:, None]
        return super().forward(x, scale, shift, offset=offset)


class InFp32(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        scale, shift = scale[:, None], shift[:, None]
        return (x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)


class Normed(nn.Module):
    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm if norm is not None else CompositeNorm()

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None]


class NormedBefore(Normed):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        x = self.norm(x)
        x = x * (1 + scale[:, None]) + shift[:, None]
        return F.relu(x)


class NormedAndSplit(Normed):
    """The same name three times over."""

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        x = self.norm(x)
        x = x * (1 + scale[:, None])
        x = x + shift[:, None]
        return F.relu(x)


class ReadTwice(Normed):
    """The norm's result goes somewhere else too, so that it cannot be folded in."""

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y = self.norm(x)
        z = y * (1 + scale[:, None]) + shift[:, None]
        return z + y


class Layered(nn.Module):
    """Shared layers inside a model, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = NormedBefore(nn.RMSNorm(D, eps=1e-6).bfloat16())
        self.second = NormedBefore(CompositeNorm(weighted=True))
        self.third = NormedBefore(nn.LayerNorm(D, elementwise_affine=False).bfloat16())

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third):
            x = layer(x, scale, shift)
        return x


class ScaleAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = CompositeNorm()

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.norm(x) * (1 + scale[:, None])


class Gated(nn.Module):
    def forward(self, x: Tensor, gate: Tensor, update: Tensor) -> Tensor:
        return x + gate[:, None] * update[:, None].expand_as(x)


class GatedOverStatements(nn.Module):
    def forward(self, h: Tensor, a: Tensor, g: Tensor) -> Tensor:
        a = a[:, None].expand_as(h) * g[:, None]
        h = a + h
        return F.relu(h)


FORMS: tuple[type[nn.Module], ...] = (
    *(Plain, FloatOne, Reversed, IndexedSum, ViewedSum, OverLines, OverStatements, Branches, WithSuper),
    *(InComprehension, InMethod, InHelper, Decorated, Inherited, InFp32, Normed, NormedBefore, NormedAndSplit),
    *(ReadTwice, ScaleAlone, Gated, GatedOverStatements),
)


class InPlace(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        x = x.clone()
        x *= 1 + scale[:, None]
        x += shift[:, None]
        return x


class ProductReadTwice(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        product = x * (1 + scale[:, None])
        return (product + shift[:, None]) * product


class WrittenBetween(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        x = x.clone()
        product = x * (1 + scale[:, None])
        x.zero_()
        return product + shift[:, None] + x


class InNestedFunction(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return y * (1 + scale[:, None]) + shift[:, None]

        return inner(x)


class InLambda(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        inner = lambda y: y * (1 + scale[:, None]) + shift[:, None]
        return inner(x)


class Static(nn.Module):
    @staticmethod
    def _modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x * (1 + scale) + shift

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self._modulate(x, scale[:, None], shift[:, None])


NOT_MOUNTABLE: dict[type[nn.Module], str] = {
    InPlace: "it writes in place",
    SharedSum: "reads `scale` of line",
    ProductReadTwice: "reads `product` of line",
    WrittenBetween: "`x.zero_()` stands in between; move it out of lines",
    InNestedFunction: "the chain stands in a function inside the function; make that a method",
    InLambda: "the chain stands in a function inside the function; make that a method",
    Static: "it is no method of the instance",
}
"""Modules with a chain that no gate can stand at, and a part of the reason."""


class Residual(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x + scale[:, None] * x


class TwoPlus(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x * (2 + scale[:, None]) + shift[:, None]


class OneMinus(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x * (1 - scale[:, None]) + shift[:, None]


class Rebound(nn.Module):
    """The factor is ``1 + scale`` on one of two ways only."""

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        factor = 1 + scale[:, None]
        if x.shape[0] > 1:
            factor = F.silu(factor)
        return x * factor + shift[:, None]


class Looped(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        factor = 1 + scale[:, None]
        for _ in range(2):
            x = x * factor + shift[:, None]
            factor = factor * 2
        return x


class Constants(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x * (1 + scale[:, None]) + 3


LEFT_ALONE: tuple[type[nn.Module], ...] = (Residual, TwoPlus, OneMinus, Rebound, Looped, Constants)
"""Modules without the chain, however much they look like it."""
