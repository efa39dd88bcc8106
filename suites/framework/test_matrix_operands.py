"""Operands that are more than a shape: indices, masks, tables, and what may be left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusiongate as fg
from fusiongate.errors import UsageError
from fusiongate.matrix import CellFailure, Matrix, Selected
from fusiongate.matrix.inputs import Inputs, dtypes_for

HOST = Selected("host")
SIZES = [{"V": 7, "B": 2, "S": 5, "D": 16}]


def taken(table: Tensor, index: Tensor, factor: float) -> Tensor:
    return table[index] * factor


GATHER = {"table": "V D", "index": fg.operand("B S", dtype=torch.int64, high="V"), "factor": 0.3}


def matrix(
    reference: Callable[..., Any], inputs: dict[str, Any], sizes: Any = SIZES, fused: Any = None, **more: Any
) -> Matrix:
    return Matrix(fg.Fusion("op", reference=reference, fused=fused or reference), inputs, sizes, **more)


def cell(matrix: Matrix, name: str) -> Any:
    return next(each for each in matrix.cells() if each.id == name)


def arguments(matrix: Matrix, name: str) -> tuple[Any, ...]:
    return matrix.prepare(cell(matrix, name), HOST).args


@pytest.mark.parametrize("name", ["base", "fp16", "nan-inf", "permuted", "threads", "grad", "refused"])
def test_an_index_is_drawn_within_its_table_in_every_cell(name: str) -> None:
    gather = matrix(taken, GATHER)
    table, index, factor = arguments(gather, name)

    assert (torch.int64, (2, 5), 0.3) == (index.dtype, tuple(index.shape), factor)
    assert 0 <= int(index.min()) <= int(index.max()) < len(table) == 7
    assert len(index.unique()) > 3
    gather.prepare(cell(gather, name), HOST).check()


def test_the_same_index_comes_on_every_machine() -> None:
    _, index, _ = arguments(matrix(taken, GATHER), "base")
    assert [5, 5, 1, 3, 4, 2] == index.flatten().tolist()[:6]


def test_a_table_that_an_index_reaches_into_is_never_emptied() -> None:
    names = {each.id for each in matrix(taken, GATHER).cells()}
    assert "empty-batch" not in names
    assert {"offset-index", "offset-table", "sliced", "grad", "functorch-grad"} < names


def test_what_has_no_gradient_has_no_cell_for_one() -> None:
    def count(mask: Tensor) -> Tensor:
        return mask.sum(-1)

    whole = matrix(count, {"mask": fg.operand("B S", dtype=torch.bool)}, [{"B": 2, "S": 64}])
    cells = {each.id: each for each in whole.cells()}
    assert not {"grad", "grad-rows", "functorch-grad", "fp16", "nan-inf"} & set(cells)
    assert {False, True} == set(arguments(whole, "base")[0].unique().tolist())
    for name in ("base", "offset-mask", "vmap", "compiling-patched", "unseen"):
        whole.prepare(cells[name], HOST).check()


def test_a_dtype_of_its_own_stays_in_every_plan() -> None:
    inputs = Inputs.of({"x": "B S D", "table": fg.operand("S D", dtype=torch.float32), "y": "B S D"})
    dtypes = {plan.name: list(plan.assign(inputs).values()) for plan in dtypes_for(inputs)}
    assert [torch.float16, torch.float32, torch.float16] == dtypes["fp16"]
    assert [torch.bfloat16, torch.float32, torch.float32] == dtypes["mixed-last"]


def test_a_range_a_value_and_a_layout_are_kept() -> None:
    def scaled(x: Tensor, low: Tensor, ones: Tensor) -> Tensor:
        return x * low + ones

    inputs = {
        "x": fg.operand("B D", layout="permuted"),
        "low": fg.operand("B D", low=2.0, high=3.0),
        "ones": fg.operand("B D", value=1.0),
    }
    ranged = matrix(scaled, inputs, [{"B": 4, "D": 8}])
    for name in ("base", "nan-inf", "fp32"):
        x, low, ones = arguments(ranged, name)
        assert (1, 4) == x.stride()
        assert 2 <= low.min() <= low.max() <= 3
        assert ones.eq(1).all()
    assert (8, 1) == arguments(ranged, "offset-x")[0].stride()


def test_an_optional_operand_is_left_out_in_a_layout_of_its_own() -> None:
    def weighted(x: Tensor, weight: Tensor | None) -> Tensor:
        return x * x if weight is None else x * weight

    both = matrix(weighted, {"x": "B D", "weight": fg.operand("D", optional=True)}, [{"B": 4, "D": 8}])
    assert arguments(both, "without-weight")[1] is None
    both.prepare(cell(both, "without-weight"), HOST).check()

    def forgets(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else x.mul(weight)

    wrong = matrix(weighted, {"x": "B D", "weight": fg.operand("D", optional=True)}, [{"B": 4, "D": 8}], forgets)
    wrong.prepare(cell(wrong, "base"), HOST).check()
    with pytest.raises(CellFailure):
        wrong.prepare(cell(wrong, "without-weight"), HOST).check()


def test_a_live_tensor_is_copied_for_each_call_and_an_integer_has_no_gradient() -> None:
    def added(x: Tensor, index: Tensor) -> Tensor:
        return x[:, index]

    index = torch.tensor([2, 0, 1])
    live = matrix(added, {"x": "B D", "index": index}, [{"B": 4, "D": 8}])
    for name in ("base", "grad", "grad-rows", "no-grad-parameters", "functorch-grad"):
        given = arguments(live, name)[1]
        assert given is not index
        assert given.equal(index)
        live.prepare(cell(live, name), HOST).check()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtype": torch.int64}, "give high=, a number or the symbol that it indexes"),
        ({"dtype": torch.bool, "high": 1}, "a bool has no range"),
        ({"value": 1.0, "high": 2.0}, "a value and a range exclude each other"),
        ({"layout": "upside-down"}, "expected permuted, sliced, strided-channels, offset"),
        ({"low": 3, "high": 3}, "nothing lies between low=3 and high=3"),
        ({"high": "V 1"}, "the bound 'V 1' is no symbol"),
    ],
)
def test_what_does_not_go_together_is_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=r'operand\("B S"\): ') as caught:
        fg.operand("B S", **options)
    assert told in str(caught.value)


def halves(x: Tensor, y: Tensor) -> str | None:
    return None if x.dtype is y.dtype is torch.float16 else "dtype"


def test_a_kernel_is_for_what_only_names_and_nothing_else_must_fuse() -> None:
    op = fg.Fusion("half", reference=lambda x, y: x * y, fused=lambda x, y: x.mul(y), declines=halves)
    inputs = {"x": "B D", "y": "B D"}
    whole = Matrix(op, inputs, [{"B": 4, "D": 8}])
    with pytest.raises(CellFailure) as caught:
        whole.prepare(cell(whole, "fp32"), HOST).check()
    assert "must fuse, but declined: dtype" in str(caught.value)
    assert "the kernel is not for this dtype, the marker says so: may_decline={'fp32': 'dtype'}, or only=[" in str(
        caught.value
    )

    meant = Matrix(op, inputs, [{"B": 4, "D": 8}], only=["fp16"])
    assert "fp16" == cell(meant, "base").dtype
    assert {"fp16"} == {each.dtype for each in meant.cells() if meant.must_launch(each)}
    for name, outcome in (("base", "fused"), ("fp32", "reference"), ("bf16", "reference"), ("nan-inf", "fused")):
        assert outcome == meant.prepare(cell(meant, name), HOST).check().outcome

    with pytest.raises(UsageError, match=r"only=\('fp8',\): half has no layout, dtype or size 'fp8'"):
        Matrix(op, inputs, [{"B": 4, "D": 8}], only=["fp8"])


def test_what_a_kernel_raised_stands_in_the_failure_with_what_to_do() -> None:
    def picky(x: Tensor, y: Tensor) -> Tensor:
        if x.data_ptr() % 16:
            raise RuntimeError("requires 16-byte aligned tensors")
        return x.mul(y)

    misled = matrix(lambda x, y: x * y, {"x": "B D", "y": "B D"}, [{"B": 4, "D": 8}], picky)
    with pytest.raises(CellFailure) as caught:
        misled.prepare(cell(misled, "offset-x"), HOST).check()
    assert "no launch: the kernel raised RuntimeError: requires 16-byte aligned tensors\n" in str(caught.value)
    assert "add 'alignment' to what declines gives" in str(caught.value)


def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * y + 1, x + y


def writing(x: Tensor, y: Tensor) -> Tensor:
    y.add_(x)
    return y * y + 1


TELLING = ("base", "fp32", "threads-cold", "make-fx", "jit-trace", "vmap", "refused", "inference", "meta", "offset-y")


@pytest.mark.parametrize("name", [*TELLING, "grad", "functorch-grad", "no-grad-parameters"])
@pytest.mark.parametrize("written", [(), ("y",)], ids=["several outputs", "a written argument"])
def test_each_output_and_each_written_argument_is_held_in_every_cell(name: str, written: tuple[str, ...]) -> None:
    reference: Callable[..., Any] = writing if written else both
    op = fg.Fusion("op", reference=reference, fused=reference, mutates_args=written)
    whole = Matrix(op, {"x": "B D", "y": "B D"}, [{"B": 4, "D": 8}])
    prepared = whole.prepare(cell(whole, name), HOST)
    before = [argument.clone() for argument in prepared.args]

    prepared.check()
    if name != "meta":
        assert all(one.equal(other) for one, other in zip(before, prepared.args, strict=True))


@pytest.mark.parametrize(
    ("reference", "fused", "written", "told"),
    [
        (both, lambda x, y: (x * y + 1, x - y), (), "output 2 of 2"),
        (both, lambda x, y: (torch.addcmul(torch.ones_like(x), x, y), x + y), (), "output 1 of 2"),
        (writing, lambda x, y: (x + y) * (x + y) + 1, ("y",), "`y`, which is written"),
        (writing, lambda x, y: y.add_(x) * y, ("y",), "not equal bit for bit"),
    ],
    ids=["second output", "first output", "not written", "result of a writer"],
)
def test_the_output_that_differs_is_named(reference: Any, fused: Any, written: tuple[str, ...], told: str) -> None:
    op = fg.Fusion("op", reference=reference, fused=fused, mutates_args=written)
    whole = Matrix(op, {"x": "B D", "y": "B D"}, [{"B": 4, "D": 8}])
    with pytest.raises(CellFailure) as caught:
        whole.prepare(cell(whole, "base"), HOST).check()
    assert told in str(caught.value)


def test_a_hint_calls_operands_by_their_names_whichever_output_it_is_about() -> None:
    def chained(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x * y + 1

    def unrounded(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, (x.float() * y.float() + 1).to(x.dtype)

    whole = matrix(chained, {"x": "B D", "y": "B D"}, [{"B": 64, "D": 64}], unrounded)
    with pytest.raises(CellFailure) as caught:
        whole.prepare(cell(whole, "base"), HOST).check()
    assert "output 2 of 2" in str(caught.value)
    assert "given" not in str(caught.value)
