"""What a norm module computes, as far as a kernel can repeat it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .sources import NoSource, innermost, source_of

__all__ = ["FoldableNorm", "own_norm", "recognise"]

_EPSILONS = ("eps", "variance_epsilon")


@dataclass(frozen=True, slots=True)
class FoldableNorm:
    """A norm module that a kernel can take over together with the modulation."""

    kind: str
    """The kernel: ``rms_norm_modulate`` or ``composite_rms_norm_modulate``."""
    module: nn.Module
    """The norm."""
    epsilon: str
    """The attribute that holds its eps."""

    def arguments(self) -> tuple[float, Any]:
        """The norm's eps and weight as they are now."""
        return getattr(self.module, self.epsilon), self.module._parameters.get("weight")


def recognise(norm: nn.Module) -> FoldableNorm | str:
    """Tell which kernel repeats a norm, or why none does.

    Whether it really does, bit for bit, is for the gate to find out: its reference is the norm itself.
    """
    kind = type(norm).__name__
    if norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or "forward" in vars(norm):
        return "the norm carries hooks, which a kernel would not run"
    epsilon = next((name for name in _EPSILONS if isinstance(getattr(norm, name, None), float)), None)
    if epsilon is None:
        return f"no kernel repeats a {kind} without an explicit eps"
    if getattr(norm, "bias", None) is not None:
        return f"no kernel repeats a {kind} with a bias"
    if type(norm) is nn.RMSNorm:
        if len(norm.normalized_shape) != 1:
            return "no kernel normalises over several dimensions"
        return FoldableNorm("rms_norm_modulate", norm, epsilon)
    if _writes_out_rms(type(norm)):
        return FoldableNorm("composite_rms_norm_modulate", norm, epsilon)
    return f"no kernel repeats a {kind}"


def own_norm(norm: nn.Module) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The norm as a function of its input and its weight, whatever numbers the weight is given.

    A probe redraws the weight together with the activations; the module's own parameter is left alone by that.
    """

    def normalised(x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is norm._parameters.get("weight"):
            result: Tensor = norm(x)
            return result
        double = norm.__new__(type(norm))
        vars(double).update(vars(norm))
        # No Parameter, which would ask for gradients: a tensor in its place serves the forward pass just as well.
        vars(double)["_parameters"] = {**norm._parameters, "weight": weight}
        redrawn: Tensor = double(x)
        return redrawn

    return normalised


def _writes_out_rms(norm: type[nn.Module]) -> bool:
    """Whether a forward pass computes the reciprocal root of a mean of squares."""
    forward = innermost(norm.forward)
    if forward is None:
        return False
    try:
        tree = source_of(forward).node
    except NoSource:
        return False
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    squares = "pow" in names or "square" in names or any(isinstance(node, ast.Pow) for node in ast.walk(tree))
    return "rsqrt" in names and "mean" in names and squares
