"""What a reference depends on beside its arguments is seen: tensors that it holds, and switches that move bits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusiongate.gate.fusion import Fusion
from fusiongate.gate.hidden_inputs import watched

from .planted import chain, fusion, rows

pytestmark = pytest.mark.usefixtures("quiet_gates")


def matrix() -> tuple[Tensor, Tensor]:
    """Operands of a product."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 96, generator=generator), torch.randn(96, 32, generator=generator)


# Gradients ------------------------------------------------------------------------------------------------------------

WEIGHT = nn.Parameter(torch.randn(64))


def of_a_global(x: Tensor) -> Tensor:
    return x * WEIGHT


class Scaled(nn.Module):
    """A module whose method is a reference."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Scale."""
        return x * self.weight


def multiplied(weight: Tensor, x: Tensor) -> Tensor:
    return x * weight


def through_a_helper(x: Tensor) -> Tensor:
    return of_a_global(x) + 1


HOLDERS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "closure": lambda: lambda x: x * WEIGHT,
    "global": lambda: of_a_global,
    "helper": lambda: through_a_helper,
    "method": lambda: Scaled(WEIGHT).forward,
    "module": lambda: Scaled(WEIGHT),
    "partial": lambda: functools.partial(multiplied, WEIGHT),
}


def detached(reference: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel: it knows nothing of gradients."""

    def kernel(*args: Any) -> Tensor:
        with torch.no_grad():
            return reference(*args)

    return kernel


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_tensor_that_the_reference_holds_keeps_its_gradient(holder: str) -> None:
    """Verified where no gradient is needed, called where one is."""
    reference, x = HOLDERS[holder](), torch.randn(2, 3, 64)
    op = Fusion("held", reference=reference, fused=detached(reference))
    with torch.no_grad():
        op(x)
        op(x)
    result = op(x)

    assert result.grad_fn is not None
    assert {("reference", "first-sight"): 1, ("fused", "verified"): 1, ("reference", "autograd"): 1} == op.counters
    assert "autograd" == op.explain(x).reason
    with torch.no_grad():
        assert "verified" == op.explain(x).reason
        assert op(x).grad_fn is None


def test_a_weight_that_is_unfrozen_later_keeps_its_gradient() -> None:
    weight = nn.Parameter(torch.randn(64), requires_grad=False)
    op = Fusion("held", reference=lambda x: x * weight, fused=lambda x: x * weight.detach())
    x = torch.randn(2, 3, 64)
    for _ in range(2):
        assert op(x).grad_fn is None
    assert 1 == op.counters["fused", "verified"]

    weight.requires_grad_()
    assert op(x).grad_fn is not None
    weight.requires_grad_(False)
    assert op(x).grad_fn is None
    assert {("reference", "first-sight"): 1, ("fused", "verified"): 2, ("reference", "autograd"): 1} == op.counters


def test_a_weight_that_is_replaced_is_no_longer_known() -> None:
    """Under gradients the reference runs then; without them nothing changes."""
    module = Scaled(nn.Parameter(torch.randn(64), requires_grad=False))
    op = Fusion("held", reference=module.forward, fused=detached(module.forward))
    x = torch.randn(2, 3, 64)
    op(x)
    module.weight = nn.Parameter(torch.randn(64))

    assert op(x).grad_fn is not None
    with torch.no_grad():
        op(x)
    assert 1 == op.counters["fused", "verified"]


def test_a_reference_that_holds_nothing_is_fused_in_either_mode() -> None:
    """A warm-up under `no_grad` counts for calls with grad: a capture may follow."""
    op = fusion()
    with torch.no_grad():
        op(*rows())
    op(*rows())

    assert {("reference", "first-sight"): 1, ("fused", "verified"): 1} == op.counters
    assert () == watched(chain, rows()).held


def test_constants_made_on_the_way_are_held_by_nobody() -> None:
    assert () == watched(lambda x: x * torch.tensor(2.0) + torch.ones(64), (torch.randn(64),)).held


# Switches -------------------------------------------------------------------------------------------------------------


BACKEND: Any = torch.backends.mkldnn


def _mkldnn() -> None:
    BACKEND.enabled = not BACKEND.enabled


def _threads() -> None:
    torch.set_num_threads(torch.get_num_threads() % 2 + 1)


def _deterministic() -> None:
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())


def _precision() -> None:
    matmul = BACKEND.matmul
    matmul.fp32_precision = "bf16" if matmul.fp32_precision == "none" else "none"


def _default_dtype() -> None:
    torch.set_default_dtype(torch.float64 if torch.get_default_dtype() == torch.float32 else torch.float32)


SWITCHES = (_mkldnn, _threads, _deterministic, _precision, _default_dtype)
"""Each throws a switch, and throws it back when it is called again."""


@pytest.fixture(params=SWITCHES, ids=lambda switch: switch.__name__[1:])
def switch(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """A switch, which is as before after the test."""
    thrown = [0]

    def throw() -> None:
        thrown[0] += 1
        request.param()

    yield throw
    if thrown[0] % 2:
        request.param()


@contextlib.contextmanager
def mkldnn(enabled: bool) -> Iterator[None]:
    """With oneDNN or without."""
    before = BACKEND.enabled
    BACKEND.enabled = enabled
    try:
        yield
    finally:
        BACKEND.enabled = before


def product(**options: Any) -> Fusion:
    """A fusion whose reference heeds switches."""
    return Fusion("product", reference=torch.mm, fused=torch.matmul, **options)


def test_a_verdict_holds_for_the_switches_under_which_it_was_made(switch: Callable[[], None]) -> None:
    op = product()
    for _ in range(2):
        op(*matrix())
    switch()
    assert "first-sight" == op.explain(*matrix()).reason
    for _ in range(2):
        op(*matrix())
    switch()
    op(*matrix())

    assert {("reference", "first-sight"): 2, ("fused", "verified"): 3} == op.counters


def test_a_reference_that_moves_with_a_switch_is_not_replaced_by_a_kernel_that_does_not() -> None:
    """Not simulated: without oneDNN a product of 16-bit matrices is added up in another order."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(shape, generator=generator).bfloat16() for shape in ((33, 517), (517, 65)))
    results = {}
    for enabled in (True, False):
        with mkldnn(enabled):
            results[enabled] = torch.mm(x, y)
    if torch.equal(results[True], results[False]):
        pytest.skip("not run: this CPU's products are the same with and without oneDNN")

    def pinned(a: Tensor, b: Tensor) -> Tensor:
        with mkldnn(True):
            return torch.mm(a, b)

    op = Fusion("product", reference=torch.mm, fused=pinned)
    op(x, y)
    op(x, y)
    with mkldnn(False):
        assert torch.equal(results[False], op(x, y))
        assert torch.equal(results[False], op(x, y))
    assert {("reference", "first-sight"): 2, ("fused", "verified"): 1, ("reference", "refused"): 1} == op.counters


def test_a_chain_of_elementwise_ops_does_not_look_at_switches(switch: Callable[[], None]) -> None:
    op = fusion()
    op(*rows())
    switch()
    op(*rows())

    assert {("reference", "first-sight"): 1, ("fused", "verified"): 1} == op.counters


def test_flushing_subnormal_numbers_is_looked_at_by_every_reference() -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("not run: this CPU cannot flush subnormal numbers")
    op = fusion()
    op(*rows())
    torch.set_flush_denormal(True)
    try:
        op(*rows())
        op(*rows())
    finally:
        torch.set_flush_denormal(False)
    op(*rows())

    assert {("reference", "first-sight"): 2, ("fused", "verified"): 2} == op.counters


@pytest.mark.parametrize(
    "reference, heeds",
    [
        (lambda x: torch.nn.functional.linear(x, x), True),
        (lambda x: torch.nn.functional.conv1d(x[None], x[:, None, :3], groups=8), True),
        (lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]), True),
        (lambda x: x.cumsum(0), True),
        (lambda x: x + torch.zeros(8), True),
        (lambda x: x.long() / 3, True),
        (lambda x: x.expand(8192, 8, 8).sum(), True),
        (lambda x: torch.nn.functional.rms_norm(x, (8,), None, 1e-6), False),
        (lambda x: torch.nn.functional.layer_norm(x, (8,)), False),
        (lambda x: torch.softmax(x, -1), False),
        (lambda x: x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * x, False),
        (lambda x: torch.cat(x.chunk(2, -1), -1).sum(), False),
        (lambda x: torch.where(x > 0, x, 0.0).to(torch.bfloat16), False),
    ],
    ids=str.split(
        "linear convolution attention cumulated zeros quotient-of-integers long-sum "
        "rms-norm layer-norm softmax composite-norm short-sum cast"
    ),
)
def test_what_heeds_a_switch_is_told_by_its_ops(reference: Callable[[Tensor], Tensor], heeds: bool) -> None:
    assert heeds == watched(reference, (torch.randn(8, 8),)).switched


def test_verdicts_from_before_a_reference_was_seen_to_heed_switches_are_made_again() -> None:
    """It multiplies matrices for some shapes only."""

    def reference(x: Tensor) -> Tensor:
        return x * 2 if len(x) == 1 else x @ x

    op = Fusion("sometimes", reference=reference, fused=lambda x: reference(x).clone())
    for size in (1, 1, 4, 4, 1, 1):
        op(torch.ones(size, size))

    assert {("reference", "first-sight"): 3, ("fused", "verified"): 3} == op.counters


def test_a_reference_that_cannot_be_watched_is_taken_for_one_that_depends_on_everything() -> None:
    def reference(x: Tensor) -> Tensor:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise NotImplementedError("no modes here")
        return x * 2

    op = Fusion("shy", reference=reference, fused=lambda x: torch.mul(x, 2))
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        op(x)
        op(x)
    op(x)

    assert {("reference", "first-sight"): 1, ("fused", "verified"): 1, ("reference", "autograd"): 1} == op.counters


def test_a_reference_that_draws_is_not_made_to_draw_for_this() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with pytest.raises(Exception, match=r"^$"):
        watched(lambda x: x * torch.rand(3), (torch.ones(3),))

    assert torch.equal(expected, torch.rand(3))


class Admission:
    """Notes what is admitted, and recognises none of it."""

    def __init__(self) -> None:
        self.admitted: list[tuple[Any, ...]] = []

    def __call__(self, args: tuple[Any, ...]) -> None:
        return None

    def admit(self, args: tuple[Any, ...]) -> None:
        """Note it."""
        self.admitted.append(args)

    def forget(self) -> None:
        """Drop all."""
        self.admitted.clear()


class Offering:
    """A launcher that can recognise verified calls."""

    def __init__(self, kernel: Callable[..., Tensor]) -> None:
        self.kernel = kernel
        self.given = Admission()

    def __call__(self, *args: Any) -> Tensor:
        return self.kernel(*args)

    def admission(self) -> Admission:
        """The only one."""
        return self.given


@pytest.mark.parametrize(
    "reference, args, admitted",
    [(chain, rows(), 1), (lambda x: x * WEIGHT, (torch.randn(3, 64),), 0), (torch.mm, matrix(), 0)],
    ids=["neither", "holds-a-tensor", "heeds-switches"],
)
def test_a_launcher_recognises_calls_only_where_nothing_hidden_can_matter(
    reference: Callable[..., Tensor], args: tuple[Any, ...], admitted: int
) -> None:
    launcher = Offering(detached(reference))
    op = Fusion("offering", reference=reference, fused=launcher)
    with torch.no_grad():
        op(*args)
        op(*args)

    assert 1 == op.counters["fused", "verified"]
    assert admitted == len(launcher.given.admitted)
