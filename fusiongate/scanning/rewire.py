"""Rewiring: gates in the place of a model's own chains, for as long as a ``with`` block lasts.

While a model is rewired, the functions of its classes run other code, which holds every statement of their own and asks
at each chain whether a gate is meant: only for the very modules of that model, and only while the block lasts. Nothing
is put into modules and nothing into classes, so that copies, replicas and pickles are what they always were, and a
wrapper around a bound ``forward`` has none of ours beneath it afterwards.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._device import DeviceContext

from fusiongate.comparison.contracts import Exact
from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.judging import fell_back

from .bodies import Body, bodies_of
from .chains import Chain
from .codegen import SITES, reference_of
from .listing import FoundSite, describe, norm_in
from .norms import FoldableNorm
from .patterns import KINDS
from .proofs import is_proven
from .purity import is_plain
from .sources import original_code

__all__ = ["RewireReport", "RewiredSite", "enter", "exact_ops", "rewired"]


@dataclass(slots=True, eq=False)
class Place:
    """Where a rewritten function finds the gate of one chain."""

    fusion: Fusion
    """The gate, with the site's own expression as its reference."""
    operands: tuple[str, ...]
    """The names of the operands, in the order in which the gate takes them."""
    norm: FoldableNorm | None
    """The norm that is folded in; its eps, weight and the like are read at every call and come last."""
    call: Callable[..., Any]
    """What is called: the gate. A test puts a faulty one here."""
    missed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls that did not come to the gate, by (path, reason)."""

    def miss(self, reason: str) -> bool:
        """Count a call that runs as it was written."""
        fell_back(self.fusion.name, reason)
        with _lock:
            self.missed["reference", reason] += 1
        return False


@dataclass(frozen=True, slots=True)
class RewiredSite:
    """One chain of one module."""

    name: str
    """``transformer_blocks.0:transformer_ltx2.py:636``: the module's path, the file and the line."""
    found: FoundSite
    """The chain, as a scan of this module alone reports it."""
    kind: str
    """The kernel that is mounted, or the one that would fit."""
    reason: str | None
    """Why none is."""
    place: Place | None
    """Where the gate is found; ``None`` where there is none."""

    @property
    def fusion(self) -> Fusion | None:
        """The gate that stands there; ``None`` where none does."""
        return None if self.place is None else self.place.fusion

    @property
    def counters(self) -> Counter[tuple[str, str]]:
        """The site's calls by (path, reason)."""
        if self.place is None:
            return Counter()
        # A plain Counter: the fusion's own knows no reason of a norm's that ran as itself.
        return Counter(self.place.fusion.counters) + self.place.missed


@dataclass(frozen=True, slots=True)
class RewireReport:
    """Every chain of a model, and what became of it."""

    sites: tuple[RewiredSite, ...]
    """In the order of modules and lines."""
    unsearched: tuple[str, ...]
    """The functions that could not be searched, each with the reason."""

    @property
    def mounted(self) -> tuple[RewiredSite, ...]:
        """The sites at which a gate stands."""
        return tuple(site for site in self.sites if site.place is not None)

    @property
    def counters(self) -> Counter[tuple[str, str]]:
        """The calls of all sites by (path, reason)."""
        return sum((site.counters for site in self.sites), Counter())

    def __str__(self) -> str:
        calls = self.counters
        fused = sum(count for (path, _), count in calls.items() if path == "fused")
        without = [site for site in self.sites if site.reason == _without_op(site.kind)]
        of = f"{len(self.mounted)} of {len(self.sites) - len(without)} sites mounted"
        kinds = ", ".join(sorted({site.kind for site in without}))
        more = f", and {len(without)} for which no op was given ({kinds})" if without else ""
        lines = [f"{of}{more}; {fused} of {calls.total()} calls fused"]
        for site in self.sites:
            told = ", ".join(f"{count} {path} ({reason})" for (path, reason), count in sorted(site.counters.items()))
            lines.append(f"  {site.name}  {site.kind}: {site.reason or told or 'not called'}")
        return "\n".join([*lines, *(f"  {told}" for told in self.unsearched)])


# -- what rewritten functions call -------------------------------------------------------------------------------------


class Gates:
    """The gates of one function, for one module; a rewritten function asks for everything through them."""

    def __init__(self, owner: object) -> None:
        self.kind = type(owner)
        self.owner = owner
        self.places: dict[int, Place] = {}
        self.helpers: dict[str, tuple[FunctionType, FunctionType]] = {}
        self.active = True

    MISSING = (NameError, AttributeError)

    def stands(self, number: int, *_evaluated: object) -> bool:
        """Whether a gate stands somewhere; what the chain begins with has been evaluated by then."""
        return number in self.places and self.active

    def takes(
        self,
        number: int,
        values: Sequence[object],
        called: Sequence[object],
        norm: Sequence[Any] = (),
        summed: Sequence[object] = (),
    ) -> bool:
        """Whether a chain may go to its gate: what its proof goes by is plain or proven, and its norm what it was."""
        place = self.places[number]
        if bool(norm) is (place.norm is None):
            return False
        reason = place.norm.changed(norm[0]) if place.norm is not None else None
        # Nobody is to tell in which order operations run.
        reason = reason or _observer([*called, *norm[:1]], [*values, *norm[1:]])
        try:
            plain = all(type(x) is Tensor or type(x) is nn.Parameter for x in norm[1:]) and all(map(is_plain, values))
            if reason is None and not (plain and all(map(is_proven, called))):
                reason = "operands"
        except RecursionError:
            reason = "operands"
        if reason is None and not all(map(_dense, summed)):
            reason = "strided-sum"
        return reason is None or place.miss(reason)

    def call(self, number: int, norm: Any = None, x: object = None, /, **operands: object) -> Any:
        """The chain by its gate, with the norm in front where one is given."""
        place = self.places[number]
        given = [operands.get(name, x) for name in place.operands]
        return place.call(*given, *(place.norm.arguments(norm) if place.norm is not None else ()))

    def helper(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """What stands for a module-level function, if it is still the same."""
        known, made = self.helpers.get(name, (None, None))
        return made if made is not None and known is function and self.active else function


def _dense(rows: object) -> bool:
    """Whether a sum with these rows can be viewed like the rows: in memory its dimensions come in their own order."""
    if not isinstance(rows, Tensor) or rows.layout is not torch.strided:
        return False
    strides = [stride for size, stride in zip(rows.shape, rows.stride(), strict=True) if size != 1]
    return all(one > other for one, other in zip(strides, [*strides[1:], 0], strict=True))


def _observer(called: Sequence[object], values: Sequence[object]) -> str | None:
    """Who would notice that operations run in another order: a mode of torch, or a gradient's sums."""
    if torch._C._len_torch_dispatch_stack() or any(
        type(torch._C._get_function_stack_at(place)) is not DeviceContext
        for place in range(torch._C._len_torch_function_stack())
    ):
        return "tracing"
    if torch.is_grad_enabled():
        owners = [getattr(each, "__self__", each) for each in called]
        tensors = [parameter for owner in owners if isinstance(owner, nn.Module) for parameter in owner.parameters()]
        if any(isinstance(value, Tensor) and value.requires_grad for value in (*values, *tensors)):
            return "autograd"
    return None


_NOTHING = Gates(None)
_lock = threading.RLock()
_entered: dict[int, tuple[dict[int, Gates], ...]] = {}
"""For each function that runs with gates, by its number: the gates of each block that is open, by their modules' ids,
the newest block first. A block keeps its modules alive, so that no id is given twice."""


def enter(number: int, owner: object) -> Gates:
    """The gates of a module, for a function of it that is called."""
    # What is compiled is the model's own expressions, with nothing of ours in the graph.
    if not torch.compiler.is_compiling():
        for block in _entered.get(number, ()):
            gates = block.get(id(owner))
            if gates is not None and gates.kind is type(owner):
                return gates
    return _NOTHING


# -- mounting ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def rewired(model: nn.Module, ops: Iterable[Fusion] | Mapping[str, Fusion] | None = None) -> Iterator[RewireReport]:
    """Put gates in the place of a model's chains; afterwards, also after an exception, all is as it was.

    Each gate's reference is the site's own expression, with its own norm where that is folded in. Only this model's
    modules go by gates: others of the same classes, and copies made inside, run as they were written. Blocks may be
    nested and may overlap, in threads and tasks too: calls go by the gates of the one that was entered last.

    Parameters
    ----------
    model
        The model.
    ops
        The fusions to mount, told by their names, of which ``KINDS`` is the list (a host build's ``.host`` left aside);
        or a mapping from these kinds. A norm is folded in only where its kernel is among them; ``modulate`` serves the
        site otherwise. By default, all exact kernels for the model's device.

    Raises
    ------
    UsageError
        If an op is of no known kind, or two are of the same.
    """
    if ops is None:
        tensors = (tensor for tensors in (model.parameters(), model.buffers()) for tensor in tensors)
        ops = exact_ops(next(tensors, torch.empty(0)).device)
    block = _Block(_by_kind(ops))
    for path, module in model.named_modules():
        block.add(module, path or type(model).__name__)
    try:
        with _lock:
            block.open()
        yield RewireReport(tuple(block.sites), tuple(dict.fromkeys(block.unsearched)))
    finally:
        with _lock:
            block.close()


def exact_ops(device: torch.device) -> tuple[Fusion, ...]:
    """The exact kernels for a device.

    For a CPU these are the host builds of the modulations. The host builds of the norms repeat a GPU's order of
    summation, which is not the CPU's: their gates would rightly refuse all of them.
    """
    from fusiongate import kernels

    if device.type == "cpu":
        hosts = (kernels.modulate.host, kernels.modulate_fp32.host)
        return tuple(op for op in hosts if op is not None)
    return tuple(op for op in kernels.FUSIONS if isinstance(op.contract, Exact))


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


def _without_op(kind: str) -> str:
    return f"no op of the kind {kind} was given"


def _kind_of(op: object) -> str:
    if not isinstance(op, Fusion):
        raise UsageError(f"rewired: {op!r} is no Fusion: expected ops such as fusiongate.kernels.modulate")
    return op.name.partition(".")[0]


class _Block:
    """One ``with rewired(…)``."""

    def __init__(self, ops: Mapping[str, Fusion]) -> None:
        self.ops = ops
        self.sites: list[RewiredSite] = []
        self.unsearched: list[str] = []
        self.gates: list[Gates] = []
        self.tables: dict[Body, dict[int, Gates]] = {}

    def add(self, module: nn.Module, path: str) -> None:
        """Make the gates of a module."""
        for body in bodies_of(type(module)):
            if isinstance(body, str):
                self.unsearched.append(body)
                continue
            before = len(self.sites)
            gates = self.gates_of(body, module, path, body.obstacle)
            self.sites[before:] = sorted(self.sites[before:], key=lambda s: (str(s.found.file), s.found.line))
            if gates.places or gates.helpers:
                self.tables.setdefault(body, {})[id(module)] = gates

    def gates_of(self, body: Body, module: nn.Module, path: str, obstacle: str | None) -> Gates:
        gates = Gates(module)
        self.gates.append(gates)
        for number, chain in enumerate(body.chains):
            found = describe(body, chain, chain.reason or obstacle, module, path)
            name = f"{path}:{found.file.name}:{found.line}"
            kind, reason = found.kind, found.reason
            if reason is None:
                kind = found.kind if found.kind in self.ops else chain.kind
                if kind in self.ops:
                    gates.places[number] = self.place(body, module, chain, kind, name)
                else:
                    reason = _without_op(kind)
            self.sites.append(RewiredSite(name, found, kind, reason, gates.places.get(number)))
        for called, helper in body.helpers.items():
            inner = self.gates_of(helper, module, path, obstacle or helper.obstacle)
            if inner.places or inner.helpers:
                original = helper.source.function
                made = FunctionType(
                    helper.code, original.__globals__, original.__name__, original.__defaults__, original.__closure__
                )
                made.__kwdefaults__ = {**(original.__kwdefaults__ or {}), SITES: inner}
                gates.helpers[called] = (original, made)
        return gates

    def place(self, body: Body, module: nn.Module, chain: Chain, kind: str, name: str) -> Place:
        op, norm = self.ops[kind], None
        if kind != chain.kind:
            found = norm_in(body, module, chain)
            assert isinstance(found, FoldableNorm)
            norm = found
        # A norm was told by what it computes, so that the op's witness of the reduction speaks for it too.
        witness = op.witness if norm is not None else None
        fusion = op.with_reference(reference_of(chain, body.source, norm), name=name, witness=witness)
        return Place(fusion, tuple(chain.operands), norm, fusion)

    def open(self) -> None:
        """Let the functions run with gates."""
        for body, table in self.tables.items():
            assert body.number is not None
            _entered[body.number] = (table, *_entered.get(body.number, ()))
            function = body.source.function
            if function not in original_code:
                original_code[function] = function.__code__
                function.__code__ = body.code

    def close(self) -> None:
        """Let them run as they were written, unless another block needs them."""
        for gates in self.gates:
            gates.active = False
        for body, table in self.tables.items():
            assert body.number is not None
            rest = tuple(other for other in _entered.get(body.number, ()) if other is not table)
            _entered[body.number] = rest
            function = body.source.function
            if not rest and function in original_code:
                del _entered[body.number]
                own = original_code.pop(function)
                # Code that somebody else has put there since is theirs.
                if function.__code__ is body.code:
                    function.__code__ = own
