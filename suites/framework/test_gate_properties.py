"""Random kernels of a small grammar: wrong ones never get past first sight or the matrix, right ones always do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusiongate.comparison.bits import integer_view
from fusiongate.gate.fusion import Fusion
from fusiongate.matrix import ADALN, CellFailure, Matrix, Selected

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale) + shift


@dataclass(frozen=True)
class Wrong:
    """A kernel that is wrong in one way."""

    where: str
    """In words, for the example that is told."""
    elements: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    """Which elements are wrong, by the number of the launch and the operands: a mask that fits the result."""

    def kernel(self) -> Callable[..., Tensor]:
        """It, with a count of launches of its own."""
        launches = iter(range(1, 1 << 30))

        def launch(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            mask = self.elements(next(launches), x, scale, shift)
            result = modulate(x, scale, shift)
            bits = integer_view(result)
            # The bit behind the sign: no zero, no NaN and no infinity stays what it is.
            bits.copy_(torch.where(mask, bits ^ (1 << (8 * result.element_size() - 2)), bits))
            return result

        return launch


def everywhere(x: Tensor, *, wrong: bool) -> Tensor:
    return torch.full(x.shape, wrong)


@st.composite
def magnitudes(draw: st.DrawFn) -> Wrong:
    """A band of four binades at least, of one operand."""
    # Within what fp16 holds.
    low = draw(st.floats(-22, 12))
    width = draw(st.floats(2, 8))
    operand = draw(st.sampled_from(["x", "scale", "shift"]))

    def elements(_launch: int, *args: Tensor) -> Tensor:
        values = args[["x", "scale", "shift"].index(operand)].double().abs()
        mask: Tensor = (values >= 2.0**low) & (values < 2.0 ** (low + width))
        return mask.expand_as(args[0])

    return Wrong(f"2**{low:.1f} <= |{operand}| < 2**{low + width:.1f}", elements)


@st.composite
def value_classes(draw: st.DrawFn) -> Wrong:
    """One kind of special number, of one operand that is given whole."""
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "NaN": torch.isnan,
        "infinity": torch.isinf,
        "zero": lambda x: (x == 0) & ~x.signbit(),
        "negative zero": lambda x: (x == 0) & x.signbit(),
        "subnormal": lambda x: (x != 0) & (x.abs() < torch.finfo(x.dtype).smallest_normal),
        "the largest": lambda x: x.abs() == torch.finfo(x.dtype).max,
    }
    kind = draw(st.sampled_from(sorted(kinds)))
    return Wrong(f"x is {kind}", lambda _launch, x, scale, shift: kinds[kind](x))


@st.composite
def row_counts(draw: st.DrawFn) -> Wrong:
    """A number of rows, or a remainder of it, that the live call has."""
    step = draw(st.sampled_from([2, 3, 8, 64]))
    return Wrong(f"rows % {step} != 0", lambda _launch, x, *_: everywhere(x, wrong=x.shape[1] % step != 0))


@st.composite
def strides(draw: st.DrawFn) -> Wrong:
    """Rows that are read as if they were packed."""
    row = draw(st.sampled_from([1, 2]))
    return Wrong(
        f"row {row} is strided", lambda _launch, *args: everywhere(args[0], wrong=not args[row].is_contiguous())
    )


@st.composite
def calls(draw: st.DrawFn) -> Wrong:
    """One launch of the first few."""
    number = draw(st.integers(1, 6))
    return Wrong(f"launch {number}", lambda launch, x, *_: everywhere(x, wrong=launch == number))


WRONG = st.one_of(magnitudes(), value_classes(), row_counts(), strides(), calls())


def block_by_block(size: int) -> Callable[..., Tensor]:
    def launch(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for start in range(0, x.shape[1], size):
            part = slice(start, start + size)
            out[:, part] = x[:, part] * (1 + scale) + shift
        return out

    return launch


def column_by_column(size: int) -> Callable[..., Tensor]:
    def launch(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        parts = zip(*(tensor.split(size, dim=-1) for tensor in (x, scale, shift)), strict=True)
        return torch.cat([modulate(*part) for part in parts], dim=-1)

    return launch


def from_the_end(_size: int) -> Callable[..., Tensor]:
    return lambda *args: modulate(*(tensor.flip(-1) for tensor in args)).flip(-1)


def part_of_a_buffer(size: int) -> Callable[..., Tensor]:
    def launch(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        buffer = torch.empty(size + x.numel(), dtype=x.dtype)
        out = buffer[size:].view(x.shape)
        return out.copy_(modulate(x, scale, shift))

    return launch


def with_scratch(size: int) -> Callable[..., Tensor]:
    scratch: list[Tensor] = []

    def launch(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        scratch[:] = [torch.zeros(size), torch.empty(x.shape[-1], dtype=x.dtype).copy_(1 + scale[0, 0])]
        return torch.addcmul(shift.expand_as(x), x, 1 + scale) if size < 0 else modulate(x, scale, shift)

    return launch


def packed_first(_size: int) -> Callable[..., Tensor]:
    return lambda *args: modulate(*(tensor.contiguous() for tensor in args))


RIGHT = [block_by_block, column_by_column, from_the_end, part_of_a_buffer, with_scratch, packed_first]


@st.composite
def operands(draw: st.DrawFn) -> tuple[Tensor, ...]:
    """x (B, S, D) and two rows (B, 1, D), packed or views of one tensor, of numbers that may all be alike."""
    dtype = draw(st.sampled_from(DTYPES))
    batch, tokens, columns = draw(st.tuples(st.integers(1, 3), st.integers(1, 70), st.sampled_from([1, 4, 7, 64])))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(batch, tokens, columns, generator=generator).to(dtype)
    table = torch.randn(batch, 1, 6, columns, generator=generator).to(dtype)
    if draw(st.booleans()):
        table.zero_()
    rows = table[:, :, 1], table[:, :, 4]
    return (x, *(tuple(row.contiguous() for row in rows) if draw(st.booleans()) else rows))


def by_rows(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Any, ...]:
    return x.shape[0], x.shape[1].bit_length(), x.shape[2]


def matrix_catches(kernel: Callable[[], Callable[..., Tensor]]) -> bool:
    """Whether a cell of the shortest matrix is red."""
    sizes = [{"B": 2, "S": 33, "D": 64}]
    for cell in Matrix(Fusion("drawn", reference=modulate, fused=kernel()), inputs=dict(ADALN), sizes=sizes).cells():
        if cell.id in ("base", "strided-unbind-4d", "nan-inf", "subnormals"):
            matrix = Matrix(Fusion("drawn", reference=modulate, fused=kernel()), inputs=dict(ADALN), sizes=sizes)
            try:
                matrix.prepare(cell, Selected("host")).check()
            except CellFailure:
                return True
    return False


@settings(max_examples=40, deadline=None)
@given(wrong=WRONG, args=operands(), bucket=st.sampled_from([None, by_rows]))
def test_a_wrong_kernel_is_refused_at_first_sight_or_by_the_matrix(
    wrong: Wrong, args: tuple[Tensor, ...], bucket: Any
) -> None:
    op = Fusion("drawn", reference=modulate, fused=wrong.kernel(), signature=bucket)
    op(*args)
    if op.explain(*args).path == "reference":
        return
    # What the operands of this call and those of its signature never show, another cell does.
    assert wrong.where.startswith(("rows %", "row ", "launch")), wrong.where
    assert matrix_catches(wrong.kernel) or not shows(wrong, args), wrong.where


def shows(wrong: Wrong, args: tuple[Tensor, ...]) -> bool:
    """Whether a later call of the signature may be wrong."""
    return any(bool(wrong.elements(launch, *args).any()) for launch in range(1, 7))


@settings(max_examples=40, deadline=None)
@given(
    make=st.sampled_from(RIGHT),
    size=st.sampled_from([1, 3, 8, 64]),
    args=operands(),
    bucket=st.sampled_from([None, by_rows]),
)
def test_a_right_kernel_is_never_refused(make: Any, size: int, args: tuple[Tensor, ...], bucket: Any) -> None:
    op = Fusion("drawn", reference=modulate, fused=make(size), signature=bucket)

    verdict = op.verify(*args)

    assert verdict.ok, f"{make.__name__}({size}): {verdict}"
