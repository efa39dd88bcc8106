"""Layouts: how the operands of a cell lie in memory.

A layout first says which shapes to draw values for, then places the drawn values. Placing never changes a value, so
that a failure of one layout alone is a fault of reading or writing memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusiongate.gate.spec import returned

from .inputs import Inputs, Role, Size
from .operands import Operand, Place

__all__ = ["PLACES", "Layout", "aligned_copy", "copied", "layouts_for", "on_copies", "realigned"]

Shapes = dict[str, tuple[int, ...]]
Tensors = dict[str, torch.Tensor]

UNBOUND_ROWS = 6
"""Rows in one modulation table: LTX-2 and PixArt blocks unbind six from it."""

FRAMES = 3
"""Frames of the ``frame-rows`` layout."""

_ALIGNMENT = 256
"""Bytes. CUDA's allocator gives no less; the CPU's gives 64, and whatever more chance has it."""

_LINE = 64
"""Bytes: what every allocator gives."""


def _as_specified(inputs: Inputs, size: Size) -> Shapes:
    return {operand.name: operand.shape(size) for operand in inputs.operands}


def _as_drawn(_inputs: Inputs, values: Tensors) -> Mapping[str, Any]:
    return values


@dataclass(frozen=True, slots=True)
class Layout:
    """One way for the operands to lie in memory."""

    name: str
    """The layout as it stands in a cell's id; never renamed."""
    applies: Callable[[Inputs], bool]
    """Whether these inputs have an operand that the layout can be given to."""
    shapes: Callable[[Inputs, Size], Shapes] = _as_specified
    """The shape of the values to draw for each operand."""
    place: Callable[[Inputs, Tensors], Mapping[str, Any]] = _as_drawn
    """The drawn values, laid out; a `scalar` layout gives a Python number for a tensor."""
    constant: tuple[str, ...] = ()
    """Operands whose values stay the same over a cell's calls, because a value is part of the signature."""
    forces: str | None = None
    """The reason for which no gate may launch on it: a kernel reads memory, and the memory holds other values."""

    @property
    def keeps_shape(self) -> bool:
        """Whether the operands keep the shapes that the inputs give them."""
        return self.shapes is _as_specified


def layouts_for(inputs: Inputs) -> tuple[Layout, ...]:
    """The layouts for these inputs, the base first.

    Operands with a literal 1 get the row layouts, operands with symbols only the activation layouts, and each operand
    one ``offset`` layout of its own. A factory's arguments lie as it made them.
    """
    if inputs.factory is not None:
        return (Layout("as-given", lambda _: True),)
    base = Layout("row-broadcast" if inputs.having("row") else "contiguous", lambda _: True)
    offsets = (
        Layout(f"offset-{operand.name}", lambda _: True, place=_offset(operand.name)) for operand in inputs.operands
    )
    fixed = (layout for layout in _LAYOUTS if layout.applies(inputs))
    absent = (
        Layout(f"without-{operand.name}", lambda _: True, place=_without(operand.name))
        for operand in inputs.operands
        if operand.optional
    )
    scalars = (
        Layout("scalar", lambda _: True, place=_scalar, constant=tuple(row.name for row in inputs.having("row"))),
    )
    return (base, *fixed, *(scalars if inputs.having("row") else ()), *offsets, *absent)


def _has(role: Role, dims: int = 1) -> Callable[[Inputs], bool]:
    """Whether there is an operand of that role, and the full ones have at least so many dimensions."""
    return lambda inputs: (
        bool(inputs.having(role)) and all(len(operand.dims) >= dims for operand in inputs.having("full"))
    )


def _changeable(dimension: int, dims: int) -> Callable[[Inputs], bool]:
    """Whether the full operands have so many dimensions, and no value has to be below the extent of this one."""
    return lambda inputs: _has("full", dims)(inputs) and inputs.having("full")[0].dims[dimension] not in inputs.bounds


def _batched(inputs: Inputs) -> bool:
    """Whether every operand begins with the batch: a new or changed first dimension then means the same to all."""
    ranks = {len(operand.dims) for operand in inputs.operands}
    return len(ranks) == 1 and len({operand.dims[0] for operand in inputs.operands}) == 1


def _batched_rows(inputs: Inputs) -> bool:
    return _batched(inputs) and bool(inputs.having("row")) and bool(inputs.having("full"))


def _unbindable(inputs: Inputs) -> bool:
    """Whether the rows are alike, so that one table can hold them all."""
    rows = {operand.dims for operand in inputs.having("row")}
    return len(rows) == 1 and len(min(rows)) >= 2


def _each(role: Role, place: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs, Tensors], Mapping[str, Any]]:
    """Place every operand of a role by the same function."""

    def placed(inputs: Inputs, values: Tensors) -> Mapping[str, Any]:
        return values | {operand.name: place(values[operand.name]) for operand in inputs.having(role)}

    return placed


def _resized(change: Callable[[Operand, Size], tuple[int, ...]]) -> Callable[[Inputs, Size], Shapes]:
    return lambda inputs, size: {operand.name: change(operand, size) for operand in inputs.operands}


# Shapes -------------------------------------------------------------------------------------------------------------


def _per_token(inputs: Inputs, size: Size) -> Shapes:
    """Rows that have the full operand's symbol wherever a literal 1 stood, aligned at the last dimension."""
    dims = inputs.having("full")[0].dims
    shapes = _as_specified(inputs, size)
    for operand in inputs.having("row"):
        aligned = dims[len(dims) - len(operand.dims) :]
        shapes[operand.name] = tuple(size[dim] for dim in aligned)
    return shapes


def _frames(operand: Operand, size: Size) -> tuple[int, ...]:
    first, *rest = operand.shape(size)
    return (first, FRAMES, *rest)


def _without_batch(operand: Operand, size: Size) -> tuple[int, ...]:
    return operand.shape(size)[1:]


def _one_batch_row(operand: Operand, size: Size) -> tuple[int, ...]:
    shape = operand.shape(size)
    return (1, *shape[1:]) if "1" in operand.dims else shape


def _one_batch_of_full(inputs: Inputs, size: Size) -> Shapes:
    shapes = _as_specified(inputs, size)
    return shapes | {operand.name: (1, *shapes[operand.name][1:]) for operand in inputs.having("full")}


def _one_channel_row(operand: Operand, size: Size) -> tuple[int, ...]:
    shape = operand.shape(size)
    return (*shape[:-1], 1) if "1" in operand.dims else shape


def _single_value(operand: Operand, size: Size) -> tuple[int, ...]:
    return () if "1" in operand.dims else operand.shape(size)


def _with_extent(dimension: int, extent: int) -> Callable[[Inputs, Size], Shapes]:
    """Give the symbol at one dimension of the first full operand another extent, everywhere."""

    def shapes(inputs: Inputs, size: Size) -> Shapes:
        symbol = inputs.having("full")[0].dims[dimension]
        return {
            operand.name: tuple(
                extent if dim == symbol else length
                for dim, length in zip(operand.dims, operand.shape(size), strict=True)
            )
            for operand in inputs.operands
        }

    return shapes


# Places -------------------------------------------------------------------------------------------------------------


def _junk(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Memory around an operand: who reads it gets sevens."""
    return aligned(shape, like, fill=7.0)


def _unbind_of_four(inputs: Inputs, values: Tensors) -> Mapping[str, Any]:
    """Views of one (B, 1, K, D) table, as a block unbinds ``table + temb.reshape(B, 1, K, D)``."""
    rows = inputs.having("row")
    first = values[rows[0].name]
    table = _junk((*first.shape[:-1], max(UNBOUND_ROWS, len(rows)), first.shape[-1]), first)
    return values | _copied(rows, table.unbind(dim=-2), values)


def _chunk_of_three(inputs: Inputs, values: Tensors) -> Mapping[str, Any]:
    """Views of one (B, K, D) table, as a block slices ``temb.reshape(B, K, D)``."""
    rows = inputs.having("row")
    first = values[rows[0].name]
    length = first.shape[-2]
    table = _junk((*first.shape[:-2], max(UNBOUND_ROWS, len(rows)) * length, first.shape[-1]), first)
    return values | _copied(rows, table.split(length, dim=-2), values)


def _copied(rows: tuple[Operand, ...], views: tuple[torch.Tensor, ...], values: Tensors) -> Tensors:
    return {row.name: view.copy_(values[row.name]) for row, view in zip(rows, views, strict=False)}


def _expand_rows(inputs: Inputs, values: Tensors) -> Mapping[str, Any]:
    """Rows with stride 0 over the batch: one table entry for a whole batch."""
    batch = values[inputs.having("full")[0].name].shape[0]
    return _each("row", lambda row: row.expand(batch, *row.shape[1:]))(inputs, values)


def _expand_channels(inputs: Inputs, values: Tensors) -> Mapping[str, Any]:
    """Rows with stride 0 over the channels: one number for each batch entry."""
    channels = values[inputs.having("full")[0].name].shape[-1]
    return _each("row", lambda row: row.expand(*row.shape[:-1], channels))(inputs, values)


def _expand_full(inputs: Inputs, values: Tensors) -> Mapping[str, Any]:
    """Activations with stride 0 over the batch, as guidance repeats its latents."""
    rows = [values[operand.name].shape[0] for operand in inputs.having("row")]
    batch = max([2, *rows])
    return _each("full", lambda full: full.expand(batch, *full.shape[1:]))(inputs, values)


def _scalar(inputs: Inputs, values: Tensors) -> Mapping[str, Any]:
    return values | {operand.name: float(values[operand.name].flatten()[0]) for operand in inputs.having("row")}


def _padded_batch(row: torch.Tensor) -> torch.Tensor:
    return _junk((row.shape[0], 3, *row.shape[1:]), row)[:, 0].copy_(row)


def _junk_strides(row: torch.Tensor) -> torch.Tensor:
    """Strides of size-1 dimensions that no allocator gives: they address nothing, so nothing may read them."""
    strides = (7 if length == 1 else stride for length, stride in zip(row.shape, row.stride(), strict=True))
    return row.as_strided(row.shape, tuple(strides))


def _every_second_channel(tensor: torch.Tensor) -> torch.Tensor:
    return _junk((*tensor.shape[:-1], 2 * tensor.shape[-1]), tensor)[..., ::2].copy_(tensor)


def _permuted(full: torch.Tensor) -> torch.Tensor:
    return aligned_copy(full.transpose(-1, -2)).transpose(-1, -2)


def _sliced(full: torch.Tensor) -> torch.Tensor:
    return _junk((full.shape[0], full.shape[1] + 1, *full.shape[2:]), full)[:, 1:].copy_(full)


def _every_second_batch(full: torch.Tensor) -> torch.Tensor:
    return _junk((2 * full.shape[0], *full.shape[1:]), full)[::2].copy_(full)


def _negated(tensor: torch.Tensor) -> torch.Tensor:
    """A view with torch's negative bit: its memory holds the negated values."""
    return torch._neg_view(aligned_copy(torch.neg(tensor)))


def _misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that begins one element after an aligned address."""
    return _junk((tensor.numel() + 1,), tensor)[1:].view(tensor.shape).copy_(tensor)


def _offset(name: str) -> Callable[[Inputs, Tensors], Mapping[str, Any]]:
    return lambda _inputs, values: values | {name: _misaligned(values[name])}


def _without(name: str) -> Callable[[Inputs, Tensors], Mapping[str, Any]]:
    return lambda _inputs, values: {**values, name: None}


PLACES: dict[str, Place] = {
    "permuted": _permuted,
    "sliced": _sliced,
    "strided-channels": _every_second_channel,
    "offset": _misaligned,
}
"""How one operand can lie, by the layout's name: see :func:`fusiongate.matrix.operands.operand`."""


# Only the base, the scalars and the offsets depend on the inputs; these don't.
_LAYOUTS = (
    Layout("strided-unbind-4d", _unbindable, place=_unbind_of_four),
    Layout("strided-unbind-3d", _unbindable, place=_chunk_of_three),
    Layout("padded-rows", _has("row"), place=_each("row", _padded_batch)),
    Layout("junk-strides", _has("row"), place=_each("row", _junk_strides)),
    Layout("strided-channels-rows", _has("row"), place=_each("row", _every_second_channel)),
    Layout("per-token", _batched_rows, shapes=_per_token),
    Layout("frame-rows", lambda inputs: _batched_rows(inputs) and _has("full", 3)(inputs), shapes=_resized(_frames)),
    Layout("batch-broadcast-rows", _batched_rows, shapes=_resized(_one_batch_row)),
    Layout("expanded-rows", _batched_rows, shapes=_resized(_one_batch_row), place=_expand_rows),
    Layout("expanded-channels", _batched_rows, shapes=_resized(_one_channel_row), place=_expand_channels),
    Layout("zero-dim", _has("row"), shapes=_resized(_single_value)),
    Layout("rank-2", lambda inputs: _batched(inputs) and _has("full", 3)(inputs), shapes=_resized(_without_batch)),
    Layout("one-token", _changeable(1, 3), shapes=_with_extent(1, 1)),
    Layout(
        "expanded-full",
        lambda inputs: _batched(inputs) and _has("full", 2)(inputs),
        shapes=_one_batch_of_full,
        place=_expand_full,
    ),
    Layout("permuted", _has("full", 2), place=_each("full", _permuted)),
    Layout("sliced", _has("full", 2), place=_each("full", _sliced)),
    Layout("sliced-batch", _has("full", 2), place=_each("full", _every_second_batch)),
    Layout("strided-channels", _has("full"), place=_each("full", _every_second_channel)),
    Layout("negated", _has("full"), place=_each("full", _negated), forces="tracing"),
    Layout("empty-batch", _changeable(0, 2), shapes=_with_extent(0, 0)),
    Layout("empty-tokens", _changeable(1, 3), shapes=_with_extent(1, 0)),
)


# Memory -------------------------------------------------------------------------------------------------------------


def aligned(shape: tuple[int, ...], like: torch.Tensor, fill: float | None = None) -> torch.Tensor:
    """A dense tensor of that shape, of another's dtype and device, at an aligned address.

    Parameters
    ----------
    shape
        Its shape.
    like
        Gives dtype and device.
    fill
        What it holds, for memory that no view of it should read; None: anything.
    """
    elements = torch.Size(shape).numel()
    slack = _ALIGNMENT // like.element_size()
    memory = torch.empty(elements + slack, dtype=like.dtype, device=like.device)
    start = -memory.data_ptr() % _ALIGNMENT // like.element_size()
    tensor = memory[start : start + elements].view(shape)
    return tensor if fill is None else tensor.fill_(fill)


def aligned_copy(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """A dense copy at an aligned address, on another device if one is given."""
    source = tensor if device is None else tensor.to(device)
    return aligned(tuple(source.shape), source).copy_(source)


def realigned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is laid out, moved if need be so that chance has no part in its alignment."""
    if not tensor.numel() or tensor.data_ptr() % _ALIGNMENT == tensor.data_ptr() % _LINE:
        return tensor
    return _moved(tensor)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies as the tensor does, strides and alignment, and has a gradient if it has one."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta or not tensor.numel():
        return tensor.clone()
    source = tensor.detach()
    copy = torch._neg_view(_moved(torch._neg_view(source))) if tensor.is_neg() else _moved(source)
    return copy.requires_grad_(tensor.requires_grad)


def on_copies(function: Callable[..., Any], written: Sequence[int]) -> Callable[..., Any]:
    """A function that writes some of its arguments, as one that gives what it wrote after what it returned.

    Its caller's arguments stay as they are, so that it can be called again on the same.
    """
    if not written:
        return function

    def called(*args: Any) -> tuple[Any, ...]:
        given = [copied(one) if place in written and _is_tensor(one) else one for place, one in enumerate(args)]
        result = function(*given)
        return (*returned(result), *(given[place] for place in written if _is_tensor(given[place])))

    return called


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as it is laid out; what is left of its address after whole lines is kept: that much somebody chose."""
    offset = tensor.data_ptr() % _LINE
    span = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    before = offset // tensor.element_size()
    memory = aligned((before + span,), tensor)[before:]
    memory.copy_(tensor.as_strided((span,), (1,)))
    return memory.as_strided(tensor.shape, tensor.stride(), memory.storage_offset())
