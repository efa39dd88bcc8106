"""Rewiring: gates in the place of a model's own chains, for as long as a ``with`` block lasts."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion

from .bodies import Body, bodies_of
from .found import FoundSite, describe, norm_in
from .links import Chain
from .norms import FoldableNorm, own_norm
from .references import Placement, reference_of
from .rewriting import Rewritten, is_rewritten, rewrite, with_inner

__all__ = ["KINDS", "RewireReport", "RewiredSite", "rewired"]

KINDS = ("modulate", "modulate_fp32", "rms_norm_modulate", "composite_rms_norm_modulate")
"""What a site can ask for; an op is told by its name."""


@dataclass(frozen=True, slots=True)
class RewiredSite:
    """One chain of one module."""

    name: str
    """``transformer_blocks.0:transformer_ltx2.py:636``: the module's path, the file and the line."""
    found: FoundSite
    """The chain, as a scan of this module alone reports it."""
    kind: str
    """The kernel that is mounted, or the one that would fit."""
    fusion: Fusion | None
    """The gate that stands there, with the site's own expression as its reference; ``None`` where none does."""
    reason: str | None
    """Why none does."""
    cell: CellType | None
    """Where the rewritten function finds what it calls: a test puts a faulty gate there."""

    @property
    def counters(self) -> Counter[tuple[str, str]]:
        """The site's calls by (path, reason)."""
        return Counter() if self.fusion is None else self.fusion.counters


@dataclass(frozen=True, slots=True)
class RewireReport:
    """Every chain of a model, and what became of it."""

    sites: tuple[RewiredSite, ...]
    """In the order of modules and lines."""

    @property
    def mounted(self) -> tuple[RewiredSite, ...]:
        """The sites at which a gate stands."""
        return tuple(site for site in self.sites if site.fusion is not None)

    @property
    def counters(self) -> Counter[tuple[str, str]]:
        """The calls of all sites by (path, reason)."""
        return sum((site.counters for site in self.sites), Counter())

    def __str__(self) -> str:
        calls = self.counters
        fused = sum(count for (path, _), count in calls.items() if path == "fused")
        lines = [f"{len(self.mounted)} of {len(self.sites)} sites mounted; {fused} of {calls.total()} calls fused"]
        for site in self.sites:
            told = ", ".join(f"{count} {path} ({reason})" for (path, reason), count in sorted(site.counters.items()))
            lines.append(f"  {site.name}  {site.kind}: {site.reason or told or 'not called'}")
        return "\n".join(lines)


@contextlib.contextmanager
def rewired(model: nn.Module, ops: Iterable[Fusion] | Mapping[str, Fusion]) -> Iterator[RewireReport]:
    """Put gates in the place of a model's adaLN chains; afterwards, also after an exception, all is as it was.

    Each gate's reference is the site's own expression, with its own norm where that is folded in. The functions are
    rewritten for the modules of this model only, and compiled at their own lines: classes and files stay as they are.

    Parameters
    ----------
    model
        The model. Nothing else may run it while it is being rewired or restored.
    ops
        The fusions to mount, told by their names, of which ``KINDS`` is the list (a host build's ``.host`` left aside);
        or a mapping from these kinds. A norm is folded in only where its kernel is among them; ``modulate`` serves the
        site otherwise.

    Raises
    ------
    UsageError
        If an op is of no known kind, or two are of the same, or the model is rewired already.
    """
    by_kind = _by_kind(ops)
    sites: list[RewiredSite] = []
    bindings: list[tuple[nn.Module, str, MethodType]] = []
    make = functools.cache(_rewrite)
    for path, module in model.named_modules():
        for body in bodies_of(type(module)):
            rewriter = _Rewriter(module, path or type(model).__name__, body, by_kind, make)
            method = rewriter.method(_obstacle(module, body))
            sites += sorted(rewriter.sites, key=lambda site: (str(site.found.file), site.found.line))
            if method is not None:
                bindings.append((module, body.name, method))
    bound: list[tuple[nn.Module, str]] = []
    try:
        for module, name, method in bindings:
            # Past nn.Module's own bookkeeping, which is for parameters and submodules.
            vars(module)[name] = method
            bound.append((module, name))
        yield RewireReport(tuple(sites))
    finally:
        for module, name in bound:
            vars(module).pop(name, None)


def _by_kind(ops: Iterable[Fusion] | Mapping[str, Fusion]) -> dict[str, Fusion]:
    given = list(ops.items()) if isinstance(ops, Mapping) else [(_kind_of(op), op) for op in ops]
    by_kind: dict[str, Fusion] = {}
    for kind, op in given:
        if kind not in KINDS:
            raise UsageError(
                f"rewired: {kind!r} is no kind of site: expected one of {', '.join(KINDS)}; "
                f"give an op of another name as a mapping from its kind"
            )
        if kind in by_kind:
            raise UsageError(f"rewired: {by_kind[kind].name} and {op.name} are both for {kind}: give one of them")
        by_kind[kind] = op
    return by_kind


def _kind_of(op: object) -> str:
    if not isinstance(op, Fusion):
        raise UsageError(f"rewired: {op!r} is no Fusion: expected ops such as fusiongate.kernels.modulate")
    return op.name.partition(".")[0]


def _obstacle(module: nn.Module, body: Body) -> str | None:
    """Why a module's function cannot be replaced."""
    if body.obstacle is not None:
        return body.obstacle
    replaced = vars(module).get(body.name)
    if replaced is not None:
        if is_rewritten(getattr(replaced, "__func__", replaced)):
            where = f"{type(module).__name__}.{body.name}"
            raise UsageError(f"rewired: {where} is rewired already: leave the first block before another")
        return f"somebody else has replaced {body.name} on this module"
    function = body.source.function
    if with_inner(_attribute(module, body.name), function, function) is None:
        return "its decorator keeps the function where it cannot be replaced"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """A gate at its place."""

    placement: Placement
    """The place."""
    kind: str
    """The kernel."""
    fusion: Fusion
    """The gate."""
    call: Callable[..., Any]
    """What the function calls: the gate, or what gives it the norm's eps and weight as well."""


def _rewrite(body: Body, placements: tuple[tuple[Chain, bool], ...], helpers: frozenset[str]) -> Rewritten:
    placed = [Placement(chain, folds) for chain, folds in placements]
    return rewrite(body.source, body.findings.flow, placed, helpers)


_Make = Callable[[Body, tuple[tuple[Chain, bool], ...], frozenset[str]], Rewritten]


class _Rewriter:
    """The functions of one module, each with gates of its own."""

    def __init__(self, module: nn.Module, path: str, body: Body, ops: Mapping[str, Fusion], make: _Make) -> None:
        self.module = module
        self.path = path
        self.body = body
        self.ops = ops
        self.make = make
        self.sites: list[RewiredSite] = []

    def method(self, obstacle: str | None) -> MethodType | None:
        """The module's own method with gates in it; ``None`` where none could be placed."""
        inner = self.function(self.body, obstacle)
        if inner is None:
            return None
        outer = with_inner(_attribute(self.module, self.body.name), self.body.source.function, inner)
        assert outer is not None
        return MethodType(outer, self.module)

    def function(self, holder: Body, obstacle: str | None) -> FunctionType | None:
        """A function, the module's or a helper of it, with gates in it; ``None`` where none could be placed."""
        placed: list[_Placed] = []
        sites: list[tuple[FoundSite, str | None, _Placed | None]] = []
        for chain in holder.findings.chains:
            found = describe(self.body, holder, chain, self.module, self.path)
            reason, gate = found.reason or obstacle, None
            if reason is None:
                gate = self.placed(chain, found, holder)
                if gate is None:
                    reason = f"no op of the kind {chain.kind} was given"
                else:
                    placed.append(gate)
            sites.append((found, reason, gate))
        helpers: dict[str, FunctionType] = {}
        for name, helper in holder.helpers.items():
            rewritten = self.function(helper, obstacle or helper.obstacle)
            if rewritten is not None:
                helpers[name] = rewritten
        made = None
        cells: dict[_Placed, CellType] = {}
        if placed or helpers:
            chosen = tuple((gate.placement.chain, gate.placement.folds_norm) for gate in placed)
            code = self.make(holder, chosen, frozenset(helpers))
            made, made_cells = code.function([gate.call for gate in placed], helpers)
            cells = dict(zip(placed, made_cells, strict=True))
        for found, reason, gate in sites:
            name = f"{self.path}:{found.file.name}:{found.line}"
            if gate is None:
                self.sites.append(RewiredSite(name, found, found.kind, None, reason, None))
            else:
                self.sites.append(RewiredSite(name, found, gate.kind, gate.fusion, None, cells[gate]))
        return made

    def placed(self, chain: Chain, found: FoundSite, holder: Body) -> _Placed | None:
        """The gate for a chain; ``None`` where there is no op for it."""
        name = f"{self.path}:{found.file.name}:{found.line}"
        # A kind that is not the chain's own is that of the chain with its norm.
        if found.kind != chain.kind and found.kind in self.ops:
            norm = norm_in(self.module, chain)
            assert isinstance(norm, FoldableNorm)
            return _folded(self.ops[found.kind], found.kind, chain, norm, holder, name)
        op = self.ops.get(chain.kind)
        if op is None:
            return None
        placement = Placement(chain, folds_norm=False)
        fusion = op.with_reference(reference_of(placement, holder.source), name=name)
        return _Placed(placement, chain.kind, fusion, fusion)


def _folded(op: Fusion, kind: str, chain: Chain, norm: FoldableNorm, holder: Body, name: str) -> _Placed:
    placement = Placement(chain, folds_norm=True)
    reference = reference_of(placement, holder.source)(own_norm(norm.module))
    # The norm was told by what it computes, so that the op's witness of the reduction speaks for it too.
    fusion = op.with_reference(reference, name=name, witness=op.witness)
    arguments = norm.arguments

    def call(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return fusion(x, scale, shift, *arguments())

    return _Placed(placement, kind, fusion, call)


def _attribute(module: nn.Module, name: str) -> Any:
    return next(vars(base)[name] for base in type(module).__mro__ if name in vars(base))
