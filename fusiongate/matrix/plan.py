"""A subject's matrix: its axes, its cells, and each cell made ready to run."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.subjects import ADALN, Subject

from .cells import Cell, NotRun, Selected
from .check import PreparedCell
from .data import DATA, Draw, can_cancel, generator_for
from .devices import DEVICES, check_memory
from .expansion import axis_values, expand
from .inputs import HUGE_ELEMENTS, LARGE_ELEMENTS, Factory, Inputs, Size, dtypes_for, sizes_for
from .layouts import PLACES, aligned_copy, layouts_for, on_copies, realigned
from .lifecycles import LIFECYCLES
from .modes import MODES
from .operands import results_of

__all__ = ["Matrix"]

_LAUNCHABLE = ("bf16", "fp16", "fp32")
_PLAIN = frozenset({"layout", "dtype", "size"})


class Matrix:
    """All cells of one subject.

    Parameters
    ----------
    subject
        A `Subject`, or a fusion.
    inputs
        A mapping of argument names, in positional order, to symbolic shapes such as ``"B S D"`` or to live values; or a
        callable ``f(size, dtype, device, generator) -> args``.
    sizes
        The extents of the symbols; the one with the fewest elements is the base. Default: those of adaLN.
    must_fuse
        Layouts, or beginnings of their names, that have to launch at every size in bf16, fp16 and fp32, whatever
        ``declines`` says. Default: ``row-broadcast`` and ``strided-unbind``, or the base where there are no rows.
    may_decline
        Layouts, dtypes and sizes, by the name that stands in a cell's id, that are documented to be declined although
        ``must_fuse`` covers them, each with the reason.
    only
        The dtypes, sizes and layouts that the kernel is for, by the name that stands in a cell's id: on an axis of
        which one is named, ``must_fuse`` covers those alone, and the first dtype named is the base. What ``declines``
        says decides elsewhere.
    pairs
        Whether axes are crossed too. A sibling of a subject that goes through everything needs each axis alone.

    Raises
    ------
    UsageError
        One of them cannot be read, or names what is not there.
    """

    def __init__(
        self,
        subject: Subject | Fusion,
        inputs: Mapping[str, Any] | Factory = ADALN,
        sizes: Iterable[Mapping[str, int]] | None = None,
        must_fuse: Iterable[str] | None = None,
        may_decline: Mapping[str, str] | None = None,
        only: Iterable[str] | None = None,
        pairs: bool = True,
    ) -> None:
        if not isinstance(subject, (Subject, Fusion)):
            raise UsageError(f"subject {subject!r}: expected a fusiongate.Fusion or a fusiongate.Subject")
        self.subject = subject if isinstance(subject, Subject) else Subject.of(subject)
        self.inputs = Inputs.of(inputs)
        self._check_parameters()
        self.sizes = {size.name: size for size in sizes_for(self.inputs, sizes)}
        self._layouts = {layout.name: layout for layout in layouts_for(self.inputs)}
        self._dtypes = {plan.name: plan for plan in dtypes_for(self.inputs)}
        base_layout = next(iter(self._layouts))
        defaults = ("row-broadcast", "strided-unbind") if self.inputs.having("row") else (base_layout,)
        self.must_fuse = defaults if must_fuse is None else tuple(must_fuse)
        self.may_decline = dict(may_decline or {})
        self.only = (only,) if isinstance(only, str) else tuple(only or ())
        self.pairs = pairs
        self._check_names()
        first = next((name for name in self.only if name in self._dtypes), next(iter(self._dtypes)))
        self._dtypes = {first: self._dtypes[first], **self._dtypes}

    def __repr__(self) -> str:
        return f"Matrix({self.subject.name!r})"

    def _check_parameters(self) -> None:
        # Arguments that do not fit would look like a reference that raises: in every cell, and nowhere said.
        if self.inputs.factory is None:
            function, given = self.subject.reference, [name for name, _ in self.inputs.arguments]
        else:
            function, given = self.inputs.factory, ["size", "dtype", "device", "generator"]
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):
            return  # of what is written in C, some tell no parameters
        try:
            signature.bind(*given)
        except TypeError as error:
            whose = "the reference of " * (self.inputs.factory is None) + self.subject.name
            raise UsageError(
                f"inputs: {whose} takes {signature} and is called with {', '.join(given)}: {error}; give inputs={{...}}"
            ) from error

    def _check_names(self) -> None:
        for beginning in self.must_fuse:
            if not any(name.startswith(beginning) for name in self._layouts):
                raise UsageError(
                    f"must_fuse={list(self.must_fuse)!r}: no layout of {self.subject.name} begins with {beginning!r}; "
                    f"its layouts are {', '.join(self._layouts)}"
                )
        known = {*self._layouts, *self._dtypes, *self.sizes}
        for argument, names in (("may_decline", self.may_decline), ("only", self.only)):
            for name in (name for name in names if name not in known):
                raise UsageError(
                    f"{argument}={names!r}: {self.subject.name} has no layout, dtype or size {name!r}; "
                    f"it has {', '.join(sorted(known))}"
                )

    def cells(self) -> tuple[Cell, ...]:
        """The cells, in the order of their ids, the base first: the same on every machine.

        Nothing is asked of any device, so that all workers of a parallel run collect the same.
        """
        axes = {
            "layout": tuple(self._layouts),
            "dtype": tuple(self._dtypes),
            "size": tuple(self.sizes),
            **axis_values(),
        }
        if self.subject.fusion is None:
            axes["lifecycle"] = tuple(name for name, lifecycle in LIFECYCLES.items() if lifecycle.foreign)
        if self.inputs.factory is not None or not self.inputs.plain:
            axes["data"] = axes["data"][:1]
        elif not can_cancel(self._draw(self._base, 0)):
            axes["data"] = tuple(name for name in axes["data"] if name != "cancellation")
        points = expand(axes, unpaired=self._unpaired(), pairs=self.pairs)
        cells = {cell.id: cell for cell in (self._cell(**point) for point in points) if self._exists(cell)}
        return tuple(sorted(cells.values(), key=lambda cell: (bool(cell.away), cell.id)))

    @property
    def _base(self) -> Cell:
        return self._cell(next(iter(self._layouts)), next(iter(self._dtypes)), next(iter(self.sizes)))

    def _cell(self, layout: str, dtype: str, size: str, **others: str) -> Cell:
        bases = {"base_size": next(iter(self.sizes)), "base_dtype": next(iter(self._dtypes))}
        return Cell(self.subject.name, layout, dtype, size, **bases, **others)

    def _unpaired(self) -> frozenset[str]:
        return frozenset(name for name, size in self.sizes.items() if size.elements >= LARGE_ELEMENTS)

    def _exists(self, cell: Cell) -> bool:
        """Whether the cell makes sense for these operands.

        The special kinds of data are drawn for the specified shapes, and nothing but a floating tensor has a gradient.
        """
        if MODES[cell.mode].differentiates and not self.inputs.differentiable:
            return False
        return cell.data == "normal" or self._layouts[cell.layout].keeps_shape

    def fills_memory(self, cell: Cell) -> bool:
        """Whether this cell takes a large part of a GPU's memory, and no CPU will do."""
        return self.sizes[cell.size].elements >= HUGE_ELEMENTS

    def must_launch(self, cell: Cell) -> bool:
        """Whether this cell has to launch, whatever ``declines`` says."""
        return self._covered(cell) and self._declared_reason(cell) is None

    def _covered(self, cell: Cell) -> bool:
        return (
            set(cell.away) <= _PLAIN
            and self._is_for(cell)
            and any(cell.layout.startswith(beginning) for beginning in self.must_fuse)
        )

    def _is_for(self, cell: Cell) -> bool:
        only = set(self.only)
        if not only & set(self._dtypes):
            only.update(_LAUNCHABLE)
        axes = ((self._layouts, cell.layout), (self._dtypes, cell.dtype), (self.sizes, cell.size))
        return all(value in only for names, value in axes if only & set(names))

    def _declared_reason(self, cell: Cell) -> str | None:
        names = (cell.layout, cell.dtype, cell.size)
        return next((self.may_decline[name] for name in names if name in self.may_decline), None)

    def prepare(self, cell: Cell, device: Selected) -> PreparedCell:
        """Make the operands of a cell's first call, and work out what has to come of them.

        Raises
        ------
        NotRun
            This machine lacks what the cell needs, which the text names.
        """
        placement = DEVICES[cell.device]
        subject = self._running(cell, device)
        mode = MODES[cell.mode].seen_by(subject)
        if device.kind == "host" and mode.needs_gpu:
            raise NotRun("needs a GPU")
        where = placement.device(device)
        if self.fills_memory(cell):
            elements = self.sizes[cell.size].elements
            if where.type == "cpu":
                raise NotRun(f"needs a GPU: {elements:,} elements")
            check_memory(where, elements, self._dtypes[cell.dtype].main.itemsize)  # only on a GPU: huge cells
        prepared = PreparedCell(
            cell,
            subject,
            mode,
            LIFECYCLES[cell.lifecycle],
            where,
            draw=lambda call: placement.placed(self._arguments(cell, call, where)),
            elsewhere=lambda: placement.placed(self._arguments(cell, 0, where, self._another(cell))),
            layout_forces=self._layouts[cell.layout].forces,
            must_launch=self.must_launch(cell),
            may_decline=self._declared_reason(cell) if self._covered(cell) else None,
        )
        if device.kind == "host" and prepared.reason == "cpu" and cell.device != "cpu":
            raise NotRun(f"{subject.name} declines cpu and has no host build")
        return prepared

    def _running(self, cell: Cell, device: Selected) -> Subject:
        """The host build on the host; the device's own on a GPU, and where a cell is about CPU tensors."""
        fusion = self.subject.fusion
        if device.kind == "cuda" or cell.device == "cpu" or fusion is None or fusion.host is None:
            return self.subject
        return Subject.of(fusion.host)

    def _another(self, cell: Cell) -> Size:
        """A size of another signature: twice the channels, since kernels may share a verdict among numbers of rows."""
        extents = dict(self.sizes[cell.size].extents)
        full = self.inputs.having("full")
        channels = full[0].dims[-1] if full else list(extents)[-1]
        return Size.of(extents | {channels: 2 * extents[channels]})

    def _arguments(self, cell: Cell, call: int, where: torch.device, another: Size | None = None) -> tuple[Any, ...]:
        plan, layout = self._dtypes[cell.dtype], self._layouts[cell.layout]
        size = another or self.sizes[cell.size]
        if self.inputs.factory is not None:
            made = self.inputs.factory(dict(size.extents), plan.main, where, generator_for(cell.id, call))
            if not isinstance(made, (list, tuple)):
                raise UsageError(f"inputs of {self.subject.name} made {made!r}; expected a tuple of arguments")
            return tuple(realigned(value) if isinstance(value, torch.Tensor) else value for value in made)
        draw = self._draw(cell, call, size)
        values = DATA[cell.data].draw(draw) | draw.others()
        if layout.constant:
            first = DATA[cell.data].draw(self._draw(cell, 0, size))
            values |= {name: first[name] for name in layout.constant}
        values = {name: aligned_copy(value, where) for name, value in values.items()}
        placed = dict(layout.place(self.inputs, values))
        for operand in self.inputs.operands:
            if operand.layout is not None and placed[operand.name] is values[operand.name]:
                placed[operand.name] = PLACES[operand.layout](values[operand.name])
        return self.inputs.positional(placed, where)

    def _first_output(self, *args: Any) -> Any:
        return results_of(on_copies(self.subject.reference, self.subject.written)(*args))[0]

    def _draw(self, cell: Cell, call: int, another: Size | None = None) -> Draw:
        size = another or self.sizes[cell.size]
        return Draw(
            inputs=self.inputs,
            shapes=self._layouts[cell.layout].shapes(self.inputs, size),
            dtypes=self._dtypes[cell.dtype].assign(self.inputs),
            size=size,
            reference=self._first_output,
            call=call,
            generator=generator_for(cell.id, call),
        )
