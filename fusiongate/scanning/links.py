"""What an adaLN chain in a syntax tree consists of: its operands, the norm in front, and the readings in between."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field

from .def_use import Definition

__all__ = ["Chain", "NormCall", "Operand"]


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One operand of a chain, as the kernel is to get it."""

    expression: ast.expr
    """The expression that computes it."""
    home: Definition | None
    """The earlier assignment in which the expression stands; ``None`` when it stands in the chain itself."""
    views: tuple[ast.expr, ...] = ()
    """Indexing and view calls that the source applies to the sum ``1 + b``, from the inside out."""


@dataclass(frozen=True, slots=True, eq=False)
class NormCall:
    """The norm whose result a chain modulates."""

    call: ast.Call
    """The call."""
    argument: Operand
    """What is normalised."""
    home: Definition | None
    """The assignment that holds its result; ``None`` where the call stands in the chain."""
    obstacle: str | None
    """Why it cannot be folded into the chain, ``None`` where it can."""

    @property
    def text(self) -> str:
        """The norm as the source calls it, without its argument: ``self.norm1``."""
        return ast.unparse(self.call.func)

    @property
    def path(self) -> tuple[str, ...] | None:
        """The attributes that lead from ``self`` to the norm; ``None`` where it is a plain function."""
        names: list[str] = []
        node: ast.expr = self.call.func
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id == "self" and names:
            return tuple(reversed(names))
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """One adaLN chain of a function."""

    root: ast.expr
    """The expression that it is the value of."""
    kind: str
    """``modulate``, ``modulate_fp32`` or ``scale``."""
    x: Operand
    """What is modulated."""
    scale: Operand
    """What is added to one."""
    shift: Operand | None
    """What is added last; ``None`` for a scale alone."""
    norm: NormCall | None
    """The norm that gives ``x``, if one does."""
    reason: str | None = None
    """Why no gate can stand here, ``None`` where one can."""
    consumed: Mapping[ast.AST, Definition] = field(default_factory=dict)
    """The readings through which the chain goes, and what each of them reads: needless when the chain is replaced."""
    like: ast.expr | None = None
    """A second place where ``x`` stands: in the cast of the result to its dtype."""

    @property
    def line(self) -> int:
        """The line that the chain's last operation begins on."""
        return self.root.lineno
