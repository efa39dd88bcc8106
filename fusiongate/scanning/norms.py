"""What a norm module computes, as far as a kernel can repeat it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from .proofs import obstacle_of_call, proof_of, unreadable
from .purity import Obstacle, is_fixed
from .sources import source_of

__all__ = ["FAMILIES", "FoldableNorm", "recognise"]

_EPSILONS = ("eps", "variance_epsilon")
_GIVEN = (Tensor, nn.Parameter, type(None))

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "rms_norm": ("weight",),
    "composite_rms_norm": ("weight",),
    "layer_norm": ("weight", "bias"),
}
"""The norms that kernels repeat, each with what its kernels are given behind eps. A kernel of a norm and the chain
behind it is called by both their names: ``rms_norm`` and ``modulate`` give ``rms_norm_modulate``."""


@dataclass(frozen=True, slots=True)
class FoldableNorm:
    """A norm that a kernel can take over together with the chain behind it: its whole class is known."""

    family: str
    """One of ``FAMILIES``."""
    forward: FunctionType
    """Its class's forward, which computes with its argument, eps, what the family names, and ``constants``."""
    kind: type[nn.Module]
    """Its class."""
    epsilon: str
    """The attribute that holds its eps."""
    given: tuple[str | None, ...]
    """The attributes that are read for what the family names; ``None`` for what the class does without."""
    constants: Mapping[str, object]
    """The other attributes that its forward reads, which never change."""

    def changed(self, norm: object) -> str | None:
        """Why a norm must run as itself now; ``None`` where it is what it was, whatever its numbers are."""
        if type(norm) is not self.kind or self.kind.forward is not self.forward:
            return "norm-replaced"
        assert isinstance(norm, nn.Module)
        obstacle = obstacle_of_call(norm)
        if obstacle is not None:
            return f"norm-{obstacle}"
        if norm.training:
            return "norm-training"
        if torch._C._is_any_autocast_enabled():
            return "norm-autocast"
        for name, value in self.constants.items():
            now = getattr(norm, name)
            if type(now) is not type(value) or now != value:
                return "norm-changed"
        eps, *given = self.arguments(norm)
        known = type(eps) is float and all(type(tensor) in _GIVEN for tensor in given)
        return None if known else "norm-changed"

    def arguments(self, norm: nn.Module) -> list[Any]:
        """The norm's eps, and what its family names, as they are now."""
        return [getattr(norm, self.epsilon), *(name and getattr(norm, name) for name in self.given)]

    def __call__(self, x: Tensor, eps: float, *given: Tensor | None) -> Tensor:
        """The norm as a function of its input and of everything else that it computes with."""
        double = self.kind.__new__(self.kind)
        values = {name: value for name, value in zip(self.given, given, strict=True) if name is not None}
        vars(double).update({**self.constants, **values, self.epsilon: eps})
        normed: Tensor = self.forward(double, x)
        return normed


def recognise(norm: object) -> FoldableNorm | str:
    """Tell which kernels repeat a norm, or why none does.

    Whether one really does, bit for bit, is for the gate to find out: its reference is the norm itself.
    """
    if not isinstance(norm, nn.Module):
        return "it is no module"
    kind = type(norm)
    forward: object = kind.forward
    proof = proof_of(forward, method=True) if isinstance(forward, FunctionType) else None
    if proof is None or not isinstance(forward, FunctionType):
        return f"no kernel repeats a {kind.__name__}"
    if isinstance(proof, Obstacle):
        return f"no kernel repeats a {kind.__name__}: {proof}"
    wrong = unreadable(kind, proof.reads | proof.calls)
    if wrong is not None or proof.calls:
        return wrong or f"{kind.__name__}.forward calls {', '.join(sorted(proof.calls))}, which no kernel does"
    family = _family(forward)
    if family is None:
        return f"no kernel repeats a {kind.__name__}"
    epsilon = next((name for name in _EPSILONS if isinstance(getattr(norm, name, None), float)), None)
    if epsilon is None:
        return f"no kernel repeats a {kind.__name__} without an explicit eps"
    constants = {name: getattr(norm, name, ...) for name in proof.reads - {epsilon, *FAMILIES[family]}}
    for name, value in sorted(constants.items()):
        if name == "bias" and value is not None:
            return f"no kernel repeats a {kind.__name__} with a bias"
        if not is_fixed(value):
            return f"{kind.__name__}.forward reads self.{name}, which no kernel is given"
    if len(getattr(norm, "normalized_shape", (0,))) != 1:
        return "no kernel normalises over several dimensions"
    given = tuple(name if name in proof.reads else None for name in FAMILIES[family])
    found = FoldableNorm(family, forward, kind, epsilon, given, constants)
    return _OBSTACLES.get(found.changed(norm) or "", found)


_OBSTACLES = {
    "norm-hooks": "the norm carries hooks, which a kernel would not run",
    "norm-wrapped": "the norm does not run its class's own forward",
    "norm-unproven": "the norm keeps something that is no plain value",
}
"""What is already wrong with a norm when it is looked at first; in training it may not be later."""


def _family(forward: FunctionType) -> str | None:
    own: dict[Callable[..., Any], str] = {nn.RMSNorm.forward: "rms_norm", nn.LayerNorm.forward: "layer_norm"}
    if forward in own:
        return own[forward]
    nodes = list(ast.walk(source_of(forward).node))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    squares = "pow" in names or "square" in names or any(isinstance(node, ast.Pow) for node in nodes)
    return "composite_rms_norm" if "rsqrt" in names and "mean" in names and squares else None
