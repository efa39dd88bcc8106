"""Compilers, tracers and transforms see the reference: its expression, and nothing of the gate."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusiongate.gate.fusion import Fusion
from fusiongate.gate.judging import require_fused
from fusiongate.gate.states import State

from .allocations import Allocations
from .planted import FAULTS, chain, fusion, right, rows, same_bits

pytestmark = pytest.mark.usefixtures("fresh_compiler")

WRONG = FAULTS[3].fused


class Block(nn.Module):
    """A module that calls a gated op between ops of its own."""

    def __init__(self, op: Fusion) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        result: Tensor = self.op(x + x, scale, shift=shift)
        return result * 2


def eager(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return chain(x + x, scale, shift) * 2


def never(*args: Any) -> Tensor:
    raise AssertionError("launched")


def targets(counter: Any) -> list[str]:
    return [str(node.target) for graph in counter.graphs for node in graph.graph.nodes if node.op.startswith("call_")]


@pytest.mark.parametrize("warmth", ["cold", "verified", "refused"])
def test_a_compiler_sees_a_plain_expression(warmth: str) -> None:
    """No graph break, no custom op, nothing of the gate touched, whatever the gate knows."""
    op = fusion(WRONG if warmth == "refused" else right)
    if warmth != "cold":
        op(rows()[0] * 2, *rows()[1:])
    before = op.counters, op.launches, op.gate.events
    counter = CompileCounterWithBackend("eager")

    explained = torch._dynamo.explain(Block(op))(*rows())
    result = torch.compile(Block(op), fullgraph=True, backend=counter)(*rows())

    assert (1, 0) == (explained.graph_count, explained.graph_break_count)
    assert same_bits(result, eager(*rows()))
    assert 1 == counter.frame_count
    assert not [target for target in targets(counter) if "fusiongate" in target]
    assert 5 == len(targets(counter))
    assert before == (op.counters, op.launches, op.gate.events)


def test_a_verdict_that_changes_recompiles_nothing() -> None:
    kernel: list[Callable[..., Tensor]] = [right]

    def switched(*args: Tensor) -> Tensor:
        return kernel[0](*args)

    op = fusion(switched)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(Block(op), fullgraph=True, backend=counter)
    live = rows()[0] * 2, *rows()[1:]

    compiled(*rows())
    op(*live)
    compiled(*rows())
    kernel[0] = WRONG
    op.verify(*live)
    assert State.REFUSED == op.standing(*live)
    compiled(*rows())

    assert 1 == counter.frame_count


def test_inductor_compiles_it() -> None:
    """Its result is the compiled reference's: between fused ops Inductor keeps fp32, as for any expression."""
    op, args = fusion(never), rows()

    result = torch.compile(Block(op), fullgraph=True)(*args)

    torch._dynamo.reset()
    assert same_bits(result, torch.compile(eager, fullgraph=True)(*args))
    assert {} == op.counters


def test_gradients_flow_through_a_compiled_call() -> None:
    op = fusion(never)
    x, scale, shift = rows(dtype=torch.float32)
    x.requires_grad_()

    torch.compile(Block(op), fullgraph=True, backend="aot_eager")(x, scale, shift).sum().backward()

    assert torch.allclose(x.grad, (4 * (1 + scale)).expand_as(x))  # type: ignore[arg-type]


def test_the_branch_alone_for_a_patched_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    op = fusion(never)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    assert same_bits(op(*rows()), chain(*rows()))
    assert "compiling" == op.explain(*rows()).reason
    assert {} == op.counters


def test_require_fused_lets_compiled_calls_pass() -> None:
    with require_fused():
        result = torch.compile(Block(fusion(never)), fullgraph=True, backend="eager")(*rows())

    assert same_bits(result, eager(*rows()))


def by_make_fx(op: Callable[..., Tensor], args: Any) -> Tensor:
    graph = make_fx(op)(*(tensor + 1 for tensor in args))
    result: Tensor = graph(*args)
    return result


def by_make_fx_before_dispatch(op: Callable[..., Tensor], args: Any) -> Tensor:
    graph = make_fx(op, pre_dispatch=True)(*(tensor + 1 for tensor in args))
    result: Tensor = graph(*args)
    return result


def by_symbolic_make_fx(op: Callable[..., Tensor], args: Any) -> Tensor:
    graph = make_fx(op, tracing_mode="symbolic")(*(tensor + 1 for tensor in args))
    result: Tensor = graph(*args)
    return result


def by_jit(op: Callable[..., Tensor], args: Any) -> Tensor:
    with warnings.catch_warnings():
        # Deprecated, and still in use.
        warnings.simplefilter("ignore")
        # It asks a function for its name; a fusion has none, or pytest would take one in a mark for a test.
        named = lambda *operands: op(*operands)  # noqa: PLW0108
        graph = torch.jit.trace(named, tuple(tensor + 1 for tensor in args), check_trace=False)
    result: Tensor = graph(*args)
    return result


def by_vmap(op: Callable[..., Tensor], args: Any) -> Tensor:
    mapped: Tensor = torch.func.vmap(op)(*(tensor.unsqueeze(0) for tensor in args))
    return mapped.squeeze(0)


def by_functionalize(op: Callable[..., Tensor], args: Any) -> Tensor:
    result: Tensor = torch.func.functionalize(op)(*args)
    return result


def by_jvp(op: Callable[..., Tensor], args: Any) -> Tensor:
    result: Tensor = torch.func.jvp(op, args, args)[0]
    return result


def by_forward_mode(op: Callable[..., Tensor], args: Any) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(args[0], args[0])
        result: Tensor = torch.autograd.forward_ad.unpack_dual(op(dual, *args[1:])).primal
    return result


def by_dispatch_mode(op: Callable[..., Tensor], args: Any) -> Tensor:
    with Allocations():
        return op(*args)


def by_function_mode(op: Callable[..., Tensor], args: Any) -> Tensor:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode():
        return op(*args)


class Subclass(Tensor):
    """Somebody's tensor."""


def by_subclass(op: Callable[..., Tensor], args: Any) -> Tensor:
    result = op(*(tensor.as_subclass(Subclass) for tensor in args))
    assert isinstance(result, Subclass)
    return result.as_subclass(Tensor)


WAYS = [
    *(by_make_fx, by_make_fx_before_dispatch, by_symbolic_make_fx, by_jit, by_vmap, by_functionalize, by_jvp),
    *(by_forward_mode, by_dispatch_mode, by_function_mode, by_subclass),
]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_tracer_gets_eager_s_result(way: Callable[..., Tensor], warm: bool) -> None:
    """A launch in there would be baked in as a constant: the graph runs on other numbers than it was traced with."""
    op = fusion()
    if warm:
        op(*rows())
    launched, fused = op.launches, op.counters["fused", "verified"]

    result = way(op, rows())

    assert same_bits(result, chain(*rows()))
    assert op.counters["reference", "tracing"] >= 1
    assert (launched, fused) == (op.launches, op.counters["fused", "verified"])


def test_a_gradient_by_functorch_is_eager_s() -> None:
    op, args = fusion(), rows(dtype=torch.float32)
    gradient = torch.func.grad(lambda x: op(x, *args[1:]).sum())(args[0])

    assert torch.equal((1 + args[1]).expand_as(args[0]), gradient)
    assert {("reference", "tracing"): 1} == op.counters


def test_fake_tensors_get_fake_results() -> None:
    op, mode = fusion(), FakeTensorMode()
    fake = op(*map(mode.from_tensor, rows()))

    assert (torch.Size([2, 5, 64]), torch.bfloat16) == (fake.shape, fake.dtype)
    assert {("reference", "tracing"): 1} == op.counters


def test_an_active_fake_mode_is_enough() -> None:
    op, args = fusion(), rows()
    op(*args)
    with FakeTensorMode(allow_non_fake_inputs=True):
        op(*args)

    assert 1 == op.counters["reference", "tracing"]


def test_numbers_and_none_are_no_obstacle() -> None:
    def reference(x: Tensor, eps: float, weight: Tensor | None, exact: bool) -> Tensor:
        return x + eps if exact else x

    op = fusion(lambda x, eps, weight, exact: torch.add(x, eps), reference=reference)
    for _ in range(2):
        op(torch.randn(4, 64), 1e-3, None, True)

    assert 1 == op.counters["fused", "verified"]
