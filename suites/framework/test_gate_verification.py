"""First sight refuses every wrong kernel, whatever the live data are, and lets right ones pass."""

from __future__ import annotations

import logging
import re
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusiongate
from fusiongate import Exact, Ulp
from fusiongate.errors import BuildError
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.states import State

from .planted import FAULTS, Fault, chain, fusion, right, rows, same_bits, state_of, wrong_at_two


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_kernel_is_refused(fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    """The caller gets the reference's bits, inputs and random state as they were, and one warning that reads well."""
    op, args = fusion(fault.fused), rows()
    before = [tensor.clone() for tensor in args]
    expected = chain(*args)
    torch.manual_seed(1)
    random_state = torch.get_rng_state()

    results = [op(*args) for _ in range(3)]

    assert all(same_bits(result, expected) for result in results)
    assert all(map(same_bits, args, before))
    assert torch.equal(random_state, torch.get_rng_state())
    assert State.REFUSED == state_of(op, *args)
    assert {("reference", "first-sight"): 1, ("reference", "refused"): 2} == op.counters
    assert ["refused"] == [event.kind for event in op.gate.events]
    (record,) = caplog.records
    assert ("fusiongate", logging.WARNING) == (record.name, record.levelno)
    message = record.getMessage()
    assert message.startswith("planted: ")
    assert fault.tells in message
    assert "called with x=bfloat16[2, 5, 64], scale=bfloat16[2, 1, 64] strides (384, 64, 1), shift=" in message
    assert f"on {fusiongate.environment('cpu').platform}" in message
    assert f"torch {torch.__version__}" in message
    assert "this signature takes the reference from now on" in message
    assert "Report it with these lines; FUSIONGATE_DISABLE=1 switches all kernels off." in message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 64), (1, 1, 8), (1, 1, 1), (3, 1, 130), (1, 700, 128)], ids=str)
def test_a_right_kernel_is_verified(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    op, args = fusion(), rows(*shape, dtype=dtype)

    results = [op(*args) for _ in range(2)]

    assert all(same_bits(result, chain(*args)) for result in results)
    assert State.VERIFIED == state_of(op, *args)
    assert {("reference", "first-sight"): 1, ("fused", "verified"): 1} == op.counters


def all_fp32(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)


@pytest.mark.parametrize(
    "args",
    [
        (rows()[0], torch.zeros(2, 1, 64).bfloat16(), torch.zeros(2, 1, 64).bfloat16()),
        (torch.zeros(2, 5, 64).bfloat16(), *rows()[1:]),
        rows(1, 1, 8),
        rows(1, 1, 1),
        tuple(tensor.double().transpose(1, 2).bfloat16() for tensor in rows(1, 1, 8)),
    ],
    ids=["zero-rows", "zero-x", "one-row-of-8", "one-element", "transposed-row"],
)
def test_live_data_that_prove_nothing_do_not_verify_an_all_fp32_chain(args: tuple[Tensor, ...]) -> None:
    """On these the wrong chain's results are bit-equal, or nearly always so."""
    op = fusion(all_fp32)

    op(*args)

    assert State.REFUSED == state_of(op, *args)


def test_live_data_count_beside_the_probes() -> None:
    """A kernel that is wrong only where x is exactly 12345 passes every probe."""

    def wrong_on_live(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        out = right(x, scale, shift)
        return torch.where(x == 12345.0, torch.zeros_like(out), out)

    op, (x, scale, shift) = fusion(wrong_on_live), rows(dtype=torch.float32)
    x[1, 2, 3] = 12345.0

    assert same_bits(op(x, scale, shift), chain(x, scale, shift))
    assert State.REFUSED == state_of(op, x, scale, shift)
    assert "first at (1, 2, 3)" in op.gate.events[-1].message


def test_one_nan_in_x_does_not_refuse_a_right_kernel() -> None:
    op, args = fusion(), rows()
    args[0][0, 3, 5] = float("nan")

    results = [op(*args) for _ in range(2)]

    assert all(same_bits(result, chain(*args)) for result in results)
    assert State.VERIFIED == state_of(op, *args)


def test_a_kernel_that_goes_wrong_at_a_batch_of_two_is_refused_there() -> None:
    op = fusion(wrong_at_two)
    for batch in (1, 2, 3):
        for _ in range(2):
            assert same_bits(op(*rows(batch)), chain(*rows(batch)))

    states = [state_of(op, *rows(batch)) for batch in (1, 2, 3)]
    assert [State.VERIFIED, State.REFUSED, State.VERIFIED] == states


def test_a_batch_of_one_already_shows_a_kernel_that_takes_the_first_row_for_all() -> None:
    """The probe is taller than the call."""

    def first_row(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return right(x, scale[:1], shift[:1])

    op, args = fusion(first_row), rows(1)
    op(*args)

    assert State.REFUSED == state_of(op, *args)


def mean_square(x: Tensor) -> Tensor:
    return x.float().pow(2).mean(-1).reshape(-1)


def other_order(x: Tensor) -> Tensor:
    """The same sum, added up one by one."""
    total = torch.zeros(x.shape[:-1])
    for column in x.float().unbind(-1):
        total = total + column * column
    return (total / x.shape[-1]).reshape(-1)


def normalized(statistic: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: (x * torch.rsqrt(statistic(x) + 1e-6).reshape(*x.shape[:-1], 1)).to(x.dtype)


@pytest.mark.parametrize("witness, state", [(None, State.VERIFIED), ((mean_square, other_order), State.REFUSED)])
def test_a_wrong_order_of_summation_needs_a_witness_to_be_seen(witness: Any, state: State) -> None:
    """One row of 16: equal outputs are weak evidence about a reduction."""
    reference, kernel = normalized(mean_square), normalized(other_order)
    x = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(4)).bfloat16()
    op = fusion(kernel, reference=reference, witness=witness)

    op(x)

    told = op.gate.events[-1].message
    assert state == state_of(op, x), told
    if witness is not None:
        assert "the witness differs" in told


def test_wrong_outputs_are_blamed_on_the_statistic_where_that_is_wrong() -> None:
    """A few outputs in their last bit can look like any rounding; the statistic says what is wrong."""

    def root_mean_square(x: Tensor, eps: float) -> Tensor:
        return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)

    def reference(x: Tensor, eps: float) -> Tensor:
        return (x * root_mean_square(x, eps)).to(x.dtype)

    op = fusiongate.Fusion(
        "forgets-eps",
        reference=reference,
        fused=lambda x, eps: reference(x, 0.0),
        witness=(root_mean_square, lambda x, eps: root_mean_square(x, 0.0)),
    )
    verdict = op.verify(torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(0)).bfloat16(), 0.1)

    assert "witness" == verdict.reason
    assert verdict.hint is not None
    assert "`eps` is taken as 0" in verdict.hint


def test_a_witness_that_is_not_written_is_refused_as_such() -> None:
    """Memory that the reference's statistic has just left would pass otherwise."""

    def unwritten(x: Tensor) -> Tensor:
        return torch.empty(x.shape[0] * x.shape[1])

    reference = normalized(mean_square)
    x = torch.randn(2, 40, 64)
    op = fusion(reference, reference=reference, witness=(mean_square, unwritten))
    verdict = op.verify(x)

    assert "witness" == verdict.reason
    assert "unwritten output: 80 elements hold what the buffer held before the launch" == verdict.hint


def test_a_witness_sees_thousands_of_rows_whatever_the_live_shape() -> None:
    seen: list[int] = []

    def counted(x: Tensor) -> Tensor:
        seen.append(x.shape[0] * x.shape[1])
        return mean_square(x)

    reference = normalized(mean_square)
    for shape in ((1, 1, 8), (2, 3, 512), (3, 5, 16)):
        seen.clear()
        op = fusion(reference, reference=reference, witness=(mean_square, counted))
        op(torch.randn(shape))
        assert sum(seen) >= 4096


def test_few_rows_may_be_summed_in_an_order_that_many_do_not_show() -> None:
    """As by ATen's mean: only the height of the live call tells."""

    def by_height(x: Tensor) -> Tensor:
        return other_order(x) if x.shape[0] * x.shape[1] < 8 else mean_square(x)

    reference, kernel = normalized(mean_square), normalized(by_height)
    x = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(4)).bfloat16()
    fixed = fusion(kernel, reference=reference, witness=(mean_square, by_height), grows=False)
    with fixed.isolated() as copied:
        copied(x)

    assert State.REFUSED == state_of(copied, x)
    assert "the witness differs" in copied.gate.events[-1].message


def test_small_calls_are_compared_many_times_in_a_layout_that_cannot_grow() -> None:
    """One element in one dimension: nothing to make taller."""
    right_op = fusion(lambda x: x * 2 + 1, reference=lambda x: 2 * x + 1)
    wrong_op = fusion(
        lambda x: (x.float() * 1.2 + 1).to(x.dtype), reference=lambda x: x * torch.tensor(1.2).bfloat16() + 1
    )
    x = torch.ones(1, dtype=torch.bfloat16)

    right_op(x)
    wrong_op(x)

    assert State.VERIFIED == state_of(right_op, x)
    assert right_op.launches > 65_536
    assert State.REFUSED == state_of(wrong_op, x)


def test_a_witness_is_compared_many_times_too() -> None:
    reference, kernel = normalized(mean_square), normalized(other_order)
    x = torch.randn(64, generator=torch.Generator().manual_seed(4)).bfloat16()
    op = fusion(kernel, reference=reference, witness=(mean_square, other_order))

    op(x)

    assert State.REFUSED == state_of(op, x)


def test_integers_stay_live() -> None:
    """A gather by a redrawn index would read anywhere."""

    def gathered(table: Tensor, index: Tensor) -> Tensor:
        assert int(index.max()) < len(table)
        return table[index] * 2

    op = fusion(lambda table, index: table.index_select(0, index) * 2, reference=gathered)
    table, index = torch.randn(10, 16), torch.tensor([9, 0, 3])
    op(table, index)

    assert State.VERIFIED == state_of(op, table, index)


def test_a_probe_of_the_user_s_replaces_the_redrawn_operands() -> None:
    """Its operands are guarded as others are, and no integer is redrawn."""
    calls: list[int] = []

    def probe(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        calls.append(1)
        return rows(4, 40, 64, seed=len(calls))

    op = fusion(FAULTS[0].fused, probe=probe)
    op(*rows())
    assert "the kernel changed its input `shift`" in op.gate.events[-1].message

    op = fusion(probe=probe)
    calls.clear()
    op(*rows())
    assert State.VERIFIED == state_of(op, *rows())
    assert -(-65_536 // (4 * 40 * 64)) == len(calls)


def empty_rows(*args: Tensor) -> tuple[Tensor, ...]:
    return torch.zeros(2, 0, 4), torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)


def fails(*args: Any) -> Any:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    "options, tells",
    [
        ({"probe": fails}, "probe= raised ValueError: no such thing"),
        ({"probe": empty_rows}, "probe= raised UsageError: an operand has no elements"),
        (
            {"probe": lambda *args: rows(2, 4, 6), "declines": lambda x, *_: "rank" if x.shape[-1] == 6 else None},
            "probe= raised UsageError: declines refuses the operands: rank",
        ),
        ({"witness": (fails, fails)}, "the reference's witness raised ValueError: no such thing"),
        ({"witness": (lambda *args: torch.zeros(3), fails)}, "the kernel's witness raised ValueError: no such thing"),
    ],
    ids=["probe-raises", "probe-empty", "probe-declined", "witness-raises", "kernel-witness-raises"],
)
def test_a_fault_beside_the_kernel_is_told_as_such(options: Any, tells: str) -> None:
    op, args = fusion(**options), rows()

    assert same_bits(op(*args), chain(*args))
    assert State.REFUSED == state_of(op, *args)
    assert tells in op.gate.events[-1].message


def test_a_reference_that_fails_on_fresh_numbers_is_no_fault_of_the_kernel() -> None:
    def picky(x: Tensor) -> Tensor:
        if bool((x != 1).any()):
            raise ValueError("only ones")
        return x * 2

    op = fusion(lambda x: x * 2, reference=picky)
    op(torch.ones(4, 4))

    assert "the reference, on fresh operands, raised ValueError: only ones" in op.gate.events[-1].message


@pytest.mark.parametrize(
    "result", [lambda x: (x + 1, 3), lambda x: x[:0], lambda x: x.to_sparse()], ids=["number", "empty", "sparse"]
)
def test_a_reference_with_nothing_to_compare_is_refused(result: Callable[[Tensor], Any]) -> None:
    op = fusion(result, reference=result)
    op(torch.ones(4, 4))

    assert "the reference does not return dense tensors" in op.gate.events[-1].message


def test_an_output_that_shares_memory_with_an_input_is_refused() -> None:
    """The identity, where a view has the right bits."""
    op = fusion(lambda x: x.view_as(x), reference=lambda x: x * 1)
    x = torch.randn(4, 4)
    result = op(x)

    assert "the kernel's output shares memory with an input" in op.gate.events[-1].message
    assert result.data_ptr() != x.data_ptr()


def test_an_output_that_shares_memory_with_the_live_input_is_refused() -> None:
    live = torch.randn(4, 4)
    op = fusion(lambda x: live.copy_(x * 1), reference=lambda x: x * 1)
    op(live)

    assert "the kernel's output shares memory with an input" in op.gate.events[-1].message


def test_complex_operands_are_put_through_the_same() -> None:
    z = torch.randn(4, 16, dtype=torch.complex64)
    good = fusion(lambda z: z * 2 + 1, reference=lambda z: 2 * z + 1)
    bad = fusion(lambda z: (z * 2).conj() + 1, reference=lambda z: 2 * z + 1)

    good(z)
    bad(z)

    assert (State.VERIFIED, State.REFUSED) == (state_of(good, z), state_of(bad, z))


def test_a_contract_in_ulps_lets_near_results_pass() -> None:
    def near(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        out = right(x, scale, shift)
        return torch.where(out.isfinite() & (out != 0), (out.view(torch.int16) ^ 1).view(out.dtype), out)

    args = rows()
    within, exact = fusion(near, contract=Ulp(1)), fusion(near, contract=Exact())
    within(*args)
    exact(*args)

    assert (State.VERIFIED, State.REFUSED) == (state_of(within, *args), state_of(exact, *args))
    assert str(within.gate.events[-1]).startswith("verified: within 1 ULP")


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no"), MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate")],
    ids=["device", "python", "host"],
)
def test_out_of_memory_is_no_verdict(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """The reference is returned, nothing is stored, and the next call tries again."""
    failing = [error, error]

    def short_of_memory(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        if failing:
            raise failing.pop()
        return right(x, scale, shift)

    op, args = fusion(short_of_memory), rows()
    states = []
    for _ in range(4):
        assert same_bits(op(*args), chain(*args))
        states.append(state_of(op, *args))

    assert [State.UNSEEN, State.UNSEEN, State.VERIFIED, State.VERIFIED] == states
    counted = {("reference", "out-of-memory"): 2, ("reference", "first-sight"): 1, ("fused", "verified"): 1}
    assert counted == op.counters
    assert ["out-of-memory", "out-of-memory", "verified"] == [event.kind for event in op.gate.events]
    assert [] == caplog.records


def test_a_kernel_that_cannot_be_built_is_no_kernel(caplog: pytest.LogCaptureFixture) -> None:
    def unbuilt(*args: Any) -> Tensor:
        raise BuildError("no compiler for sm_90: install nvcc")

    op = fusion(unbuilt)
    for batch in (1, 2):
        for _ in range(2):
            assert same_bits(op(*rows(batch)), chain(*rows(batch)))

    assert {("reference", "no-kernel"): 4} == op.counters
    assert "no-kernel" == op.explain(*rows()).reason
    (message,) = caplog.messages
    assert "no kernel: no compiler for sm_90: install nvcc; the reference runs instead" in message
    assert 0 == op.launches


def test_a_default_random_generator_keeps_its_stream() -> None:
    """A reference that draws moves it as it does in eager, once."""

    def dropped(x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape) > 0.5)

    x = torch.randn(8, 8)
    op = fusion(dropped, reference=dropped)
    torch.manual_seed(0)
    expected, next_draw = dropped(x), torch.rand(1)
    torch.manual_seed(0)
    actual = op(x)

    assert torch.equal(expected, actual)
    assert torch.equal(next_draw, torch.rand(1))
    assert "the reference draws random numbers" in op.gate.events[-1].message


# Several outputs, and arguments that are written ----------------------------------------------------------------------


def norm_and_residual(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, total * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


def added(x: Tensor, residual: Tensor) -> Tensor:
    """Writes the sum into the residual, and gives twice as much back."""
    residual.add_(x)
    return residual * 2


def pair() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return tuple(torch.randn(2, 33, 64, generator=generator).bfloat16() for _ in range(2))  # type: ignore[return-value]


def in_place(kernel: Callable[..., Any], **options: Any) -> Fusion:
    return fusion(kernel, reference=added, mutates_args=("residual",), **options)


def test_several_outputs_are_all_compared() -> None:
    op, args = fusion(norm_and_residual, reference=norm_and_residual), pair()
    results = [op(*args) for _ in range(2)]

    assert State.VERIFIED == state_of(op, *args)
    assert all(map(same_bits, results[0], results[1]))
    assert {("reference", "first-sight"): 1, ("fused", "verified"): 1} == op.counters


def _one_memory(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, total


TUPLES: dict[str, tuple[Callable[..., Any], str]] = {
    "second wrong": (
        lambda x, r: (x + r, norm_and_residual(x, r)[1] + 1),
        "output 2 of 2: ",
    ),
    "first wrong": (lambda x, r: (x + r + 1, norm_and_residual(x, r)[1]), "output 1 of 2: "),
    "exchanged": (lambda x, r: norm_and_residual(x, r)[::-1], "output 1 of 2: "),
    "one only": (lambda x, r: norm_and_residual(x, r)[0], "the kernel gives 1 output, the reference 2 outputs"),
    "nothing": (lambda x, r: None, "the kernel gives 1 output, the reference 2 outputs"),
    "a list": (lambda x, r: list(norm_and_residual(x, r)), "the kernel gives 1 output, the reference 2 outputs"),
    "one memory for both": (_one_memory, "two outputs of the kernel share memory"),
    "second unwritten": (lambda x, r: (x + r, torch.empty_like(x)), "output 2 of 2: "),
    "second of another dtype": (
        lambda x, r: (x + r, norm_and_residual(x, r)[1].float()),
        "output 2 of 2: dtype differs",
    ),
    "an input handed back": (lambda x, r: (r.add_(x), norm_and_residual(x, r)[1]), "changed its input `residual`"),
}


@pytest.mark.parametrize("what", TUPLES)
def test_a_wrong_output_among_several_is_named(what: str) -> None:
    kernel, tells = TUPLES[what]
    op, args = fusion(kernel, reference=norm_and_residual), pair()
    expected = norm_and_residual(*args)

    assert all(map(same_bits, op(*args), expected))
    assert tells in op.gate.events[-1].message
    assert all(map(same_bits, op(*args), expected))


def test_each_output_may_have_a_contract_of_its_own() -> None:
    def near(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total, normed = norm_and_residual(x, residual)
        return total, (normed.view(torch.int16) ^ 1).view(normed.dtype)

    loose = fusion(near, reference=norm_and_residual, contract=(Exact(), Ulp(2)), probe=lambda *args: args)
    strict = fusion(near, reference=norm_and_residual, probe=lambda *args: args)

    assert loose.verify(*pair()).ok
    assert "output 2 of 2: " in str(strict.verify(*pair()))


def views_of_one_result(x: Tensor) -> tuple[Tensor, ...]:
    return (x * 2).chunk(2, dim=-1)


def test_outputs_may_be_parts_of_one_memory_where_the_reference_s_are_or_lie_apart_in_it() -> None:
    def parts(x: Tensor) -> tuple[Tensor, ...]:
        both = torch.empty(2, *x.shape[:-1], x.shape[-1] // 2)
        for half, part in zip(both, x.chunk(2, dim=-1), strict=True):
            half.copy_(part * 2)
        return tuple(both)

    def separate(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in views_of_one_result(x))

    assert fusion(views_of_one_result, reference=views_of_one_result).verify(torch.randn(4, 8)).ok
    assert fusion(parts, reference=separate).verify(torch.randn(4, 8)).ok


def test_a_written_argument_is_compared_as_an_output_and_written_once() -> None:
    op, (x, residual) = in_place(added), pair()
    expected = residual + x

    results = []
    for _ in range(3):
        live = residual.clone()
        results.append(op(x, live))
        assert same_bits(live, expected)

    assert State.VERIFIED == state_of(op, x, residual)
    assert all(same_bits(result, expected * 2) for result in results)
    assert {("reference", "first-sight"): 1, ("fused", "verified"): 2} == op.counters


def _written_wrong(x: Tensor, residual: Tensor) -> Tensor:
    result = (residual + x) * 2
    residual.add_(x + 1)
    return result


def _not_written(x: Tensor, residual: Tensor) -> Tensor:
    return (residual + x) * 2


def _another_written(x: Tensor, residual: Tensor) -> Tensor:
    result = added(x, residual)
    x.zero_()
    return result


def _gap_written(x: Tensor, residual: Tensor) -> Tensor:
    result = added(x, residual)
    residual.as_strided((1,), (1,), residual.storage_offset() + residual.shape[-1]).fill_(7)
    return result


def _returns_the_written(x: Tensor, residual: Tensor) -> Tensor:
    added(x, residual)
    return residual


WRITERS: dict[str, tuple[Callable[..., Any], str]] = {
    "written wrong": (_written_wrong, "`residual`, which is written: "),
    "not written": (_not_written, "`residual`, which is written: "),
    "another written": (_another_written, "the kernel changed its input `x`"),
    "returned wrong": (_returns_the_written, "the kernel's output shares memory with an input"),
}


@pytest.mark.parametrize("what", WRITERS)
def test_a_kernel_that_writes_wrong_is_refused_and_the_caller_s_memory_is_right(what: str) -> None:
    kernel, tells = WRITERS[what]
    op, (x, residual) = in_place(kernel), pair()
    expected, before = residual + x, x.clone()

    for _ in range(2):
        live = residual.clone()
        assert same_bits(op(x, live), expected * 2)
        assert same_bits(live, expected)
        assert same_bits(x, before)
    assert tells in op.gate.events[-1].message


def test_what_lies_between_the_elements_of_a_written_argument_is_left_alone() -> None:
    op, (x, residual) = in_place(_gap_written), pair()
    padded = torch.zeros(2, 33, 72, dtype=residual.dtype)[..., :64]

    op(x, padded)
    assert "the kernel wrote between the elements of `residual`" in op.gate.events[-1].message
    assert in_place(added).verify(x, padded).ok


def test_a_kernel_may_only_write() -> None:
    def adds(x: Tensor, out: Tensor) -> None:
        torch.add(x, 1, out=out)

    def adds_two(x: Tensor, out: Tensor) -> None:
        torch.add(x, 2, out=out)

    x = torch.randn(8, 16)
    right = fusion(adds, reference=adds, mutates_args=("out",))
    out = torch.empty_like(x)

    assert right(x, out) is None
    assert right.verify(x, out).ok
    assert same_bits(out, x + 1)
    assert "`out`, which is written: " in str(
        fusion(adds_two, reference=adds, mutates_args=("out",)).verify(x, torch.empty_like(x))
    )


def test_a_reference_that_writes_what_is_not_named_is_told_so() -> None:
    op, (x, residual) = fusion(added, reference=added), pair()

    assert same_bits(op(x, residual.clone()), (residual + x) * 2)
    assert (
        "the reference writes its argument `residual`: expected mutates_args= to name it" in op.gate.events[-1].message
    )


def test_a_written_argument_that_another_one_overlaps_takes_the_reference() -> None:
    memory = torch.randn(2, 33, 64).bfloat16()
    op = in_place(added)
    op(memory, memory)

    assert {("reference", "overlapping"): 1} == op.counters


# What the gate cannot compare, and memory -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        torch.complex128,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.float4_e2m1fn_x2,
        torch.bool,
        torch.uint16,
    ],
    ids=str,
)
def test_any_dtype_is_compared(dtype: torch.dtype) -> None:
    width = dtype.itemsize
    memory = (torch.arange(64 * width) // 3).to(torch.uint8) & (1 if dtype is torch.bool else 0x3F)
    x = memory.view(dtype).reshape(8, 8)
    right = fusion(lambda x: x.clone(), reference=lambda x: x.clone())

    assert right.verify(x).ok
    assert not fusion(lambda x: x.flip(0), reference=lambda x: x.clone()).verify(x).ok


def test_the_gate_s_own_failure_is_not_the_kernel_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_bits(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("'index_put' not implemented for 'Float8'")

    monkeypatch.setattr("fusiongate.gate.launch_checks.compared", no_bits)
    op, x = fusion(lambda x: x * 2, reference=lambda x: x * 2), torch.ones(4)
    op(x)
    op(x)

    assert {("reference", "first-sight"): 1, ("reference", "not-comparable"): 1} == op.counters
    assert (
        "the gate cannot compare results of this kind, which is no fault of the kernel's" in op.gate.events[-1].message
    )


@pytest.mark.parametrize("strides", [(1 << 26,), (1 << 25, 1), (1, 1 << 25)], ids=str)
def test_a_view_of_few_elements_far_apart_takes_little_memory_and_time(strides: tuple[int, ...]) -> None:
    """What lies between them is neither copied nor filled: its pages stay untouched."""
    shape = (4,) if len(strides) == 1 else (2, 2)
    x = torch.empty(1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))
    x = x.as_strided(shape, strides).fill_(1.5)
    op = fusion(lambda x: x * 2, reference=lambda x: x * 2)
    op.verify(torch.ones(4, 4))
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()

    assert op.verify(x).ok
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
    assert time.thread_time() - started < 5.0


def test_an_element_far_apart_is_guarded_all_the_same() -> None:
    def changes(x: Tensor) -> Tensor:
        result = x * 2
        x[1] = 0.0
        return result

    x = torch.empty(1 << 26).as_strided((2,), (1 << 25,)).fill_(1.5)

    assert "changed its input" in str(fusion(changes, reference=lambda x: x * 2).verify(x))


# Buckets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [129, 131, 200, 255], ids=str)
@pytest.mark.parametrize("live", [128, 150, 255], ids=str)
def test_what_another_call_of_the_bucket_would_meet_is_met_at_first_sight(live: int, wrong: int) -> None:
    """A remainder, as of a loop that takes several rows at a time: every bucket has calls with one."""

    def leaves_out(x: Tensor) -> Tensor:
        result = x * 2
        if x.shape[1] % 128 >= wrong % 128:
            result[:, -1] = 0
        return result

    op = fusion(leaves_out, reference=lambda x: x * 2, signature=lambda x: (x.shape[0], x.shape[1].bit_length()))

    assert not op.verify(torch.randn(2, live, 64)).ok


@pytest.mark.parametrize("rows", [1, 2, 3, 127, 128, 129, 255, 256], ids=str)
def test_a_right_kernel_is_verified_in_any_bucket(rows: int) -> None:
    op = fusion(lambda x: x * 2, reference=lambda x: x * 2, signature=lambda x: x.shape[1].bit_length())

    assert op.verify(torch.randn(2, rows, 64)).ok


def test_a_bucket_that_reads_its_arguments_is_taken_as_it_is() -> None:
    op = fusion(lambda x: x * 2, reference=lambda x: x * 2, signature=lambda x: bool(x.sum() > 0))

    assert op.verify(torch.ones(2, 8, 8)).ok


def test_rows_that_the_kernel_declines_are_not_tried() -> None:
    def even(x: Tensor) -> Tensor:
        assert x.shape[1] % 2 == 0
        return x * 2

    op = fusion(
        even,
        reference=lambda x: x * 2,
        declines=lambda x: "odd" if x.shape[1] % 2 else None,
        signature=lambda x: x.shape[1].bit_length(),
    )

    assert op.verify(torch.ones(2, 8, 8)).ok


def test_a_kernel_that_writes_is_tried_on_many_small_probes_in_the_same_memory() -> None:
    """Each probe's written operand is compared as it was then, and not as the last one left it."""

    def added(x: Tensor, residual: Tensor) -> Tensor:
        return residual.add_(x).mul(2)

    op = Fusion("added", reference=added, fused=added, mutates_args=("residual",), grows=False)
    assert op.verify(torch.randn(2, 8), torch.randn(2, 8)).ok

    late = []

    def late_wrong(x: Tensor, residual: Tensor) -> Tensor:
        late.append(1)
        return residual.add_(x).add_(len(late) > 5).mul(2)

    op = Fusion("added", reference=added, fused=late_wrong, mutates_args=("residual",), grows=False)
    assert not op.verify(torch.randn(2, 8), torch.randn(2, 8)).ok


def test_a_first_sight_says_what_it_cost() -> None:
    op = fusion(lambda x: x * 2, reference=lambda x: x * 2)
    op(torch.ones(4, 4))

    assert re.search(r"equal bit for bit: [\d,]+ elements; first sight took \d+\.\d ms", op.gate.events[-1].message)
