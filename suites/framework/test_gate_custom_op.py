"""A fusion that torch.compile calls as one custom op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from fusiongate.comparison.contracts import Ulp
from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.states import State

from .planted import FAULTS, chain, fusion, right, rows, same_bits

# Inductor and forward mode load torch's own uses of it.
pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

WRONG = FAULTS[3].fused


def as_op(fused: Any = right, **options: Any) -> Fusion:
    return fusion(fused, compile="op", **options)


def compiled_with(op: Fusion, backend: str = "eager") -> tuple[Any, Any]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(lambda *args: op(*args) * 2, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize("fused", [right, WRONG], ids=["right", "wrong"])
def test_a_compiler_sees_one_op_and_no_break(fused: Any) -> None:
    """It is gated where it runs: a wrong kernel is refused there, and nothing has to be compiled again."""
    op = as_op(fused)
    compiled, counter = compiled_with(op)

    results = [compiled(*rows()) for _ in range(3)]

    assert all(same_bits(result, chain(*rows()) * 2) for result in results)
    assert 1 == counter.frame_count
    names = [str(node.target) for node in counter.graphs[0].graph.nodes if node.op == "call_function"]
    assert 1 == sum("fusiongate.planted" in name for name in names)
    assert (State.VERIFIED if fused is right else State.REFUSED) == op.standing(*rows())
    assert 1 == op.counters["reference", "first-sight"]


def test_eager_calls_go_past_the_op() -> None:
    op = as_op()
    op(*rows())

    assert {("reference", "first-sight"): 1} == op.counters


def test_inductor_calls_it() -> None:
    op = as_op()
    compiled, _ = compiled_with(op, "inductor")

    assert all(same_bits(compiled(*rows()), chain(*rows()) * 2) for _ in range(2))
    assert {("reference", "first-sight"): 1, ("fused", "verified"): 1} == op.counters


def test_named_arguments_reach_the_op() -> None:
    op = as_op()
    compiled = torch.compile(lambda x, a, b: op(x, shift=b, scale=a), fullgraph=True, backend="eager")

    assert same_bits(compiled(*rows()), chain(*rows()))


def test_where_gradients_are_needed_a_compiler_sees_the_expression() -> None:
    """The op has none."""
    op = as_op()
    compiled, _ = compiled_with(op, "aot_eager")
    x, scale, shift = rows(dtype=torch.float32)
    shift.requires_grad_()

    compiled(x, scale, shift).sum().backward()

    assert torch.equal(torch.full_like(shift, 2.0 * 5), shift.grad)  # type: ignore[arg-type]
    assert {} == op.counters


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fused", [right, WRONG], ids=["right", "wrong"])
def test_the_op_passes_torch_s_own_check(dtype: torch.dtype, fused: Any) -> None:
    """Its metadata are the reference's, whatever the verdict."""
    op = as_op(fused)
    assert op._registered is not None

    torch.library.opcheck(op._registered.op, rows(dtype=dtype))
    torch.library.opcheck(op._registered.op, rows(dtype=dtype))


def test_each_gate_has_an_op_of_its_own() -> None:
    op = as_op(contract=Ulp(1))
    with op.isolated() as fresh:
        compiled, _ = compiled_with(fresh)
        compiled(*rows())

        assert 1 == fresh.counters["reference", "first-sight"]
    assert {} == op.counters


def test_a_reference_without_annotations_gives_no_schema() -> None:
    def bare(x, scale, shift):  # type: ignore[no-untyped-def]
        return chain(x, scale, shift)

    with pytest.raises(
        UsageError, match=r"compile='op'\): the reference \(x, scale, shift\) gives no schema: annotate"
    ):
        as_op(reference=bare)


def test_any_name_makes_an_op() -> None:
    def reference(x: Tensor, eps: float = 1e-6, weight: Tensor | None = None) -> Tensor:
        return x + eps

    op = Fusion("ltx2.norm-high (v2)", reference=reference, fused=lambda x, *rest: x + 1e-6, compile="op")

    x = torch.randn(2, 64)
    assert torch.equal(x + 1e-6, torch.compile(op, fullgraph=True, backend="eager")(x))
