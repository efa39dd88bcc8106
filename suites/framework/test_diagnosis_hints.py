"""A hint names the rounding that was planted, for any reference, and names none where the fault is another."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusiongate.diagnosis import explanations
from fusiongate.diagnosis.hints import compare
from fusiongate.diagnosis.op_trace import Program, record
from fusiongate.diagnosis.roundings import Rounding, replay

HALVES = [torch.bfloat16, torch.float16]
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def modulate_fp32(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)


def residual_gate(residual: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    return residual + update * gate


def silu_mul(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def rms_norm_modulate(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    variance = x.float().pow(2).mean(-1, keepdim=True)
    return (x * torch.rsqrt(variance + eps)).to(x.dtype) * (1 + scale) + shift


def operands(reference: Callable[..., Tensor], dtype: torch.dtype, rows: int = 61, width: int = 96) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"scale": (2, 1, width), "shift": (2, 1, width), "gate": (2, 1, width)}
    names = inspect.signature(reference).parameters
    return [
        1e-6 if name == "eps" else torch.randn(shapes.get(name, (2, rows, width)), generator=generator).to(dtype)
        for name in names
    ]


def hint(actual: Tensor, reference: Callable[..., Tensor], args: Sequence[Any]) -> str | None:
    verdict = compare(actual, reference(*args), reference=reference, args=args)
    assert not verdict.ok
    return verdict.hint


def truncated(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Toward zero, by the definition: no value of the narrow type between the result and the argument is larger."""
    nearest = value.to(dtype)
    return torch.where(nearest.abs().double() > value.abs().double(), torch.nextafter(nearest, nearest * 0), nearest)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
class TestModulateInHalfPrecision:
    """Every rounding of `x * (1 + scale) + shift`, left out by hand."""

    def planted(self, dtype: torch.dtype, fused: Callable[..., Tensor]) -> str | None:
        args = operands(modulate, dtype)
        x, scale, shift = (a.float() for a in args)
        return hint(fused(x, scale, shift, lambda t: t.to(dtype).float()).to(dtype), modulate, args)

    def test_an_unrounded_scale(self, dtype: torch.dtype) -> None:
        told = self.planted(dtype, lambda x, scale, shift, r: r(x * (1 + scale)) + shift)

        assert told == f"`1 + scale` is not rounded to {str(dtype)[6:]} before it is used"

    def test_an_unrounded_product(self, dtype: torch.dtype) -> None:
        told = self.planted(dtype, lambda x, scale, shift, r: x * r(1 + scale) + shift)

        assert told == (
            f"`x * (1 + scale)` is not rounded to {str(dtype)[6:]} (or is contracted into the following add)"
        )

    def test_a_chain_without_roundings(self, dtype: torch.dtype) -> None:
        told = self.planted(dtype, lambda x, scale, shift, r: x * (1 + scale) + shift)

        assert told == f"no intermediate is rounded to {str(dtype)[6:]}: the whole chain runs in float32"

    def test_a_truncated_product(self, dtype: torch.dtype) -> None:
        told = self.planted(dtype, lambda x, scale, shift, r: truncated(x * r(1 + scale), dtype).float() + shift)

        assert told == "`x * (1 + scale)` is truncated toward zero, not rounded to nearest even"

    def test_a_truncated_scale(self, dtype: torch.dtype) -> None:
        told = self.planted(dtype, lambda x, scale, shift, r: r(x * truncated(1 + scale, dtype).float()) + shift)

        assert told == "`1 + scale` is truncated toward zero, not rounded to nearest even"

    def test_a_truncated_output(self, dtype: torch.dtype) -> None:
        told = self.planted(dtype, lambda x, scale, shift, r: truncated(r(x * r(1 + scale)) + shift, dtype))

        assert told == "`x * (1 + scale) + shift` is truncated toward zero, not rounded to nearest even"

    def test_a_fault_in_one_part_of_the_output(self, dtype: torch.dtype) -> None:
        def fused(x: Tensor, scale: Tensor, shift: Tensor, r: Callable[[Tensor], Tensor]) -> Tensor:
            product = x * r(1 + scale)
            product[:, :40] = r(product[:, :40])
            return product + shift

        assert (self.planted(dtype, fused) or "").endswith("following add), in a part of the output only")


def test_contraction_in_single_precision() -> None:
    args = operands(modulate, torch.float32)
    x, scale, shift = args
    fused = (x.double() * (1 + scale).double() + shift.double()).float()

    assert hint(fused, modulate, args) == (
        "`x * (1 + scale)` is not rounded to float32: it is contracted into the following add (fused multiply-add)"
    )


def test_ties_rounded_away_from_zero() -> None:
    """Adding half a unit and cutting off is right but for ties: a bfloat16 conversion that many have written."""
    x = torch.arange(1, 4097, dtype=torch.float32).view(64, 64)

    def doubled(x: Tensor) -> Tensor:
        return (x * 2).bfloat16()

    wrong = (((x * 2).view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)

    assert hint(wrong, doubled, [x]) == "`2 * x` is rounded with ties away from zero, not to even"


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_all_fp32_reference_in_a_kernel_that_rounds_each_operation(dtype: torch.dtype) -> None:
    args = operands(modulate_fp32, dtype)

    assert hint(modulate(*args), modulate_fp32, args) == (
        f"every intermediate is rounded to {str(dtype)[6:]}, where the reference keeps float32"
    )


def test_rows_downcast_before_use() -> None:
    x, scale, shift = operands(modulate_fp32, torch.float32)
    args = [x.bfloat16(), scale, shift]

    assert hint(modulate_fp32(x.bfloat16(), scale.bfloat16(), shift), modulate_fp32, args) == (
        "`scale` is rounded to bfloat16 before it is used"
    )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_product_of_a_gated_residual(dtype: torch.dtype) -> None:
    args = operands(residual_gate, dtype)
    residual, update, gate = (a.float() for a in args)

    assert hint((residual + update * gate).to(dtype), residual_gate, args) == (
        f"`update * gate` is not rounded to {str(dtype)[6:]} (or is contracted into the following add)"
    )
    assert hint((residual + truncated(update * gate, dtype).float()).to(dtype), residual_gate, args) == (
        "`update * gate` is truncated toward zero, not rounded to nearest even"
    )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_activation_of_a_gated_unit(dtype: torch.dtype) -> None:
    args = operands(silu_mul, dtype)
    x, y = (a.float() for a in args)

    assert hint((F.silu(x) * y).to(dtype), silu_mul, args) == (
        f"`silu(x)` is not rounded to {str(dtype)[6:]} before it is used"
    )


class TestRmsNormModulate:
    """A chain with a reduction, whose own rounding is never named."""

    args = operands(rms_norm_modulate, torch.bfloat16, rows=257)

    def normalised(self) -> Tensor:
        x: Tensor = self.args[0]
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.args[3])

    def test_a_norm_that_is_not_rounded(self) -> None:
        _, scale, shift, _ = self.args
        actual = ((self.normalised() * (1 + scale).float()).bfloat16() + shift).bfloat16()

        assert hint(actual, rms_norm_modulate, self.args) == (
            "`x * rsqrt(eps + mean(x.float() ** 2, [-1], True))` is not rounded to bfloat16 before it is used"
        )

    def test_a_product_that_is_not_rounded(self) -> None:
        _, scale, shift, _ = self.args
        actual = (self.normalised().bfloat16().float() * (1 + scale).float() + shift.float()).bfloat16()

        assert "is not rounded to bfloat16 (or is contracted" in (hint(actual, rms_norm_modulate, self.args) or "")

    def test_a_norm_and_a_product_that_are_not_rounded(self) -> None:
        _, scale, shift, _ = self.args
        actual = (self.normalised() * (1 + scale).float() + shift.float()).bfloat16()

        assert (hint(actual, rms_norm_modulate, self.args) or "").startswith("neither `x * rsqrt(")

    def test_another_eps_is_told_with_both_values(self) -> None:
        x, scale, shift, eps = self.args
        args = [0.01 * x, scale, shift, eps]

        assert (
            hint(rms_norm_modulate(0.01 * x, scale, shift, 1e-5), rms_norm_modulate, args)
            == "`eps` is taken as 1e-05, not 1e-06"
        )

    def test_another_order_of_the_sum_is_no_rounding(self) -> None:
        """Last-bit changes of some rows' rstd, as another summation order makes them."""
        x, scale, shift, eps = self.args
        mean = x.float().pow(2).mean(-1, keepdim=True)
        mean[:, ::2] = torch.nextafter(mean[:, ::2], torch.tensor(9.0)) * (1 + 2**-21)
        actual = (x * torch.rsqrt(mean + eps)).bfloat16() * (1 + scale) + shift

        told = hint(actual, rms_norm_modulate, self.args)

        assert told is None or "another order of the reduction in `mean(x.float() ** 2" in told


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def in_another_order(x: Tensor, eps: float) -> Tensor:
    total = torch.zeros(x.shape[:-1])
    for column in x.float().unbind(-1):
        total = total + column * column
    return torch.rsqrt(total / x.shape[-1] + eps)[..., None]


def one_ulp_lower(x: Tensor, eps: float) -> Tensor:
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return torch.nextafter(rstd, torch.zeros(()))


@pytest.mark.parametrize("statistic", [in_another_order, one_ulp_lower])
def test_a_few_last_bits_behind_a_reduction_are_no_rounding_and_no_eps(
    statistic: Callable[[Tensor, float], Tensor],
) -> None:
    """As few as five of 33,792 elements, which `truncated` or another eps explains by luck (Liger's RMSNorm)."""
    weight, told = torch.ones(512).bfloat16(), []
    for seed in range(24):
        x = torch.randn(2, 33, 512, generator=torch.Generator().manual_seed(seed)).bfloat16()
        args = (x, weight, 1e-6)
        actual = weight * (x.float() * statistic(x, 1e-6)).to(x.dtype)
        verdict = compare(actual, rms_norm(*args), reference=rms_norm, args=args)
        told += [] if verdict else [verdict.hint or "none, for a single element"]

    assert len(told) >= 2
    for words in told:
        order = "another order of the reduction in `mean(x.float() ** 2, [-1], True)` or another reciprocal square root"
        assert order in words or "none" in words


def test_behind_a_statistic_that_is_known_to_be_right_a_rounding_is_named() -> None:
    """Contraction behind a norm in float32: without a witness it might be the reduction's doing."""

    def chain(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + scale) + shift

    args = operands(modulate, torch.float32)
    x, scale, shift = args
    norm = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    actual = (norm.double() * (1 + scale).double() + shift.double()).float()

    verdicts = [compare(actual, chain(*args), reference=chain, args=args, witnessed=known) for known in (False, True)]
    assert ["contracted into the following add" in str(verdict.hint) for verdict in verdicts] == [False, True]


class TestFaultsThatAreNoRounding:
    """Nothing in these hints may speak of rounding."""

    @pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=str)
    def args(self, request: pytest.FixtureRequest) -> list[Tensor]:
        return operands(modulate, request.param)

    def test_one_element_off_by_one_ulp(self, args: list[Tensor]) -> None:
        actual = modulate(*args)
        actual[1, 3, 5] = torch.nextafter(actual[1, 3, 5], actual.new_tensor(9.0))

        assert hint(actual, modulate, args) is None

    def test_a_scatter_of_last_bits(self, args: list[Tensor]) -> None:
        expected = modulate(*args)
        chosen = torch.rand(expected.shape, generator=torch.Generator().manual_seed(1)) < 0.05
        actual = torch.where(chosen, torch.nextafter(expected, expected.new_tensor(9.0)), expected)

        assert hint(actual, modulate, args) == "last-bit differences that no single rounding of the reference explains"

    @pytest.mark.parametrize("factor", [1.03, 0.5, -1.0])
    def test_a_scaled_result_is_explained_by_nothing(self, args: list[Tensor], factor: float) -> None:
        assert hint(modulate(*args) * factor, modulate, args) is None

    def test_noise_is_explained_by_nothing(self, args: list[Tensor]) -> None:
        assert hint(torch.randn_like(modulate(*args)), modulate, args) is None

    def test_a_row_operand_read_from_another_batch_row(self, args: list[Tensor]) -> None:
        x, scale, shift = args

        assert hint(modulate(x, scale.flip(0), shift), modulate, args) == "`scale` is read from another batch row"

    def test_the_first_batch_row_for_all(self, args: list[Tensor]) -> None:
        x, scale, shift = args

        assert hint(modulate(x, scale[:1], shift[:1]), modulate, args) == (
            "the first batch row of `scale` and `shift` is used for all"
        )

    def test_an_operand_left_out(self, args: list[Tensor]) -> None:
        x, scale, shift = args

        assert hint(modulate(x, scale, shift * 0), modulate, args) == (
            "`shift` is ignored: the result is as if it were zero"
        )

    def test_two_operands_that_are_exchanged_are_named(self, args: list[Tensor]) -> None:
        x, scale, shift = args

        assert hint(modulate(x, shift, scale), modulate, args) == "`scale` and `shift` are exchanged"

    def test_an_operand_whose_strides_are_ignored_is_named(self, args: list[Tensor]) -> None:
        """The rows are views of one packed tensor, as models make them; a kernel that ignores this reads neighbours."""
        x, scale, shift = args
        packed = torch.stack([scale, shift, scale], dim=2)
        strided = packed[:, :, 0]
        flat = packed.flatten()[: strided.numel()].view(strided.shape)

        assert hint(modulate(x, flat, shift), modulate, [x, strided, shift]) == (
            "the strides of `scale` are ignored: it is read as if it were contiguous"
        )

    def test_a_tail_that_differs(self, args: list[Tensor]) -> None:
        actual = modulate(*args)
        actual.view(-1)[-100:] = 3.0

        assert hint(actual, modulate, args) == (
            f"only the tail differs, from element {actual.numel() - 100:,} of {actual.numel():,} on:"
            f" it looks unwritten, or computed by another path"
        )

    def test_each_row_with_another_tail(self, args: list[Tensor]) -> None:
        actual = modulate(*args)
        actual[..., -2:] = 3.0

        assert hint(actual, modulate, args) == "only the last 2 of each row's 96 elements differ: the row's tail"


@pytest.mark.parametrize(
    ("actual", "expected", "told"),
    [
        ([1.0, 2.0], [1.0, torch.nan], "NaN is swallowed: the reference gives NaN there, the kernel a number"),
        ([1.0, torch.nan], [1.0, 2.0], "NaN is spread: the kernel gives NaN where the reference gives a number"),
        ([1.0, 0.0], [1.0, -0.0], "the sign of zero is lost: -0.0 is not 0.0"),
        ([1.0, 0.0], [1.0, 1e-39], "flush to zero: the reference gives subnormal numbers there, the kernel zero"),
        (
            [1.0, 3e38],
            [1.0, torch.inf],
            "overflow is 'improved': the reference overflows to infinity there, and that is the right result",
        ),
        ([1.0, 2.0], [1.0, 7.0], None),
        ([2.0, 1.0], [7.0, 1.0], None),
    ],
)
def test_values_that_show_their_fault_need_no_reference(
    actual: list[float], expected: list[float], told: str | None
) -> None:
    assert compare(torch.tensor(actual), torch.tensor(expected)).hint == told


def test_last_bits_without_a_reference_are_told_apart_by_nobody() -> None:
    expected = torch.rand(100) + 1

    told = compare(torch.where(torch.arange(100) % 7 == 0, torch.nextafter(expected, expected * 9), expected), expected)

    assert told.hint == "last-bit differences only: a rounding, or the order of a reduction"


def test_what_the_buffer_held_before_makes_unwritten_certain() -> None:
    expected = torch.randn(4, 100)
    poison = (~expected.view(torch.int32)).view(torch.float32)
    actual = torch.where(torch.arange(400).view(4, 100) < 320, expected, poison)

    assert compare(actual, expected, poison=poison).hint == (
        "unwritten output: 80 elements hold what the buffer held before the launch, from element 320 of 400 on"
    )
    assert compare(poison, expected, poison=poison).hint == (
        "unwritten output: 400 elements hold what the buffer held before the launch"
    )
    assert "unwritten output" not in (compare(-expected, expected, poison=poison).hint or "")


def test_metadata_have_hints_of_their_own() -> None:
    x = torch.zeros(2, 3)

    assert compare(x.bfloat16(), x).hint == (
        "the result is bfloat16 where the reference gives float32: mixed operands promote in eager"
    )
    assert compare(torch.zeros(3, 2).t(), x).hint == (
        "the output's strides: the result is strided, the reference's is contiguous"
    )
    assert compare(None, x).hint == "the kernel returns nothing; a fused function returns a new tensor"


def test_subnormal_intermediates_flushed_to_zero() -> None:
    def chain(x: Tensor, y: Tensor) -> Tensor:
        return (x * 2**-100) * y

    x = torch.rand(40, 40) * 2**-28
    product = x * 2**-100

    flushed = torch.where(product.abs() < 2**-126, 0.0, product) * 2.0**40

    assert hint(flushed, chain, [x, torch.full((40, 40), 2.0**40)]) == (
        "subnormal results are flushed to zero before they are used"
    )


def test_a_large_tensor_is_sampled_around_its_first_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanations, "_SAMPLE", 4 * 2 * 96)
    monkeypatch.setattr(explanations, "_WHOLE", 0)
    args = operands(modulate, torch.bfloat16)
    x, scale, shift = args
    actual = modulate(*args)
    actual[:, 30:] = (x.float() * (1 + scale).float() + shift.float()).bfloat16()[:, 30:]

    assert "`x * (1 + scale)` is not rounded" in (hint(actual, modulate, args) or "")


def test_a_large_tensor_whose_rows_cannot_be_taken_apart_is_replayed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shift that is laid out otherwise cannot be cut together with the rows; a vector has none."""

    def turned(x: Tensor, shift: Tensor) -> Tensor:
        return 2 * (x * x) + shift.reshape(x.shape)

    def planted(x: Tensor, shift: Tensor) -> Tensor:
        return (2 * (x.float() * x.float()) + shift.float().reshape(x.shape)).to(x.dtype)

    monkeypatch.setattr(explanations, "_SAMPLE", 256)
    generator = torch.Generator().manual_seed(9)
    for shapes in [((64, 32), (32, 64)), ((2048,), (2048,))]:
        monkeypatch.setattr(explanations, "_WHOLE", 2048)
        args = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
        assert "no intermediate is rounded to bfloat16" in (hint(planted(*args), turned, args) or "")
        monkeypatch.setattr(explanations, "_WHOLE", 2047)
        assert hint(planted(*args), turned, args) is None


def test_a_variant_that_gives_nearly_all_bits_is_named_where_none_gives_all() -> None:
    args = operands(modulate, torch.bfloat16)
    x, scale, shift = (a.float() for a in args)
    actual = (x * (1 + scale) + shift).bfloat16()
    wrong = (actual != modulate(*args)).flatten().nonzero()[0]
    actual.flatten()[wrong] = modulate(*args).flatten()[wrong]

    assert "no intermediate is rounded to bfloat16" in (hint(actual, modulate, args) or "")


def test_a_reference_that_does_not_give_the_expected_is_not_believed() -> None:
    args = operands(modulate, torch.bfloat16)
    x, scale, shift = (a.float() for a in args)
    actual = (x * (1 + scale) + shift).bfloat16()
    assert compare(actual, modulate(*args), reference=modulate, args=args).hint is not None

    verdict = compare(actual, modulate(*args), reference=residual_gate, args=args)

    assert verdict.hint is None


def failing(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    raise RuntimeError("no such thing")


def mutating(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x.mul_(1 + scale).add_(shift)


def branching(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return modulate(x, scale, shift) if x.sum().item() < 1e9 else x


@pytest.mark.parametrize("reference", [failing, mutating, branching, 3])
def test_a_reference_that_cannot_be_replayed_hides_no_mismatch(reference: Any) -> None:
    args = operands(modulate, torch.bfloat16)
    before = [a.clone() for a in args]
    expected = modulate(*args)

    verdict = compare(expected * 3, expected, reference=reference, args=args)

    assert (verdict.ok, verdict.hint) == (False, None)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True))


def test_a_part_of_the_output_is_named_only_where_it_has_a_place_of_its_own() -> None:
    """Elements here and there that a variant gets right, among others that it gets wrong, are luck."""
    args = operands(modulate, torch.bfloat16)
    x, scale, shift = (a.float() for a in args)
    wrong = (x * (1 + scale) + shift).bfloat16()
    here_and_there = torch.rand(wrong.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    by_column = (torch.arange(96) >= 32).expand(wrong.shape)

    scattered = hint(torch.where(here_and_there, wrong, modulate(*args)), modulate, args)
    placed = hint(torch.where(by_column, wrong, modulate(*args)), modulate, args)

    assert "rounded to bfloat16" not in (scattered or "")
    assert (placed or "").endswith(", in a part of the output only")


def test_the_random_state_is_as_before() -> None:
    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=True)

    before = torch.get_rng_state()
    compare(torch.ones(50), torch.zeros(50), reference=dropped, args=[torch.ones(50)])

    assert torch.equal(torch.get_rng_state(), before)


class TestPrograms:
    """Recording and replaying."""

    @pytest.mark.parametrize(
        "reference", [modulate, modulate_fp32, residual_gate, silu_mul, rms_norm_modulate], ids=lambda f: f.__name__
    )
    @pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
    def test_each_step_rounded_as_recorded_gives_the_reference(
        self, reference: Callable[..., Tensor], dtype: torch.dtype
    ) -> None:
        """Keeping the last result in the wider type changes nothing, because the output is converted to its dtype."""
        args = operands(reference, dtype)
        program = record(reference, args)
        last = max(p for p, step in enumerate(program.steps) if step.rounds)

        assert torch.equal(replay(program, {last: Rounding.KEPT}), reference(*args))
        assert torch.equal(replay(program, {}), reference(*args))

    @staticmethod
    def expressions(program: Program) -> list[str]:
        return [step.expression for step in program.steps if step.rounds]

    def test_expressions_use_the_parameters_names(self) -> None:
        def chain(x: Tensor, s: Tensor, eps: float) -> Tensor:
            return (1 - s)[:, None] * -((x / (x + eps)) ** 2)

        args = [torch.ones(2, 3, 4), torch.ones(2, 4), 1e-5]

        assert self.expressions(record(chain, args, {1e-5: "eps"})) == [
            "1 - s",
            "eps + x",
            "x / (eps + x)",
            "(x / (eps + x)) ** 2",
            "(1 - s) * -(x / (eps + x)) ** 2",
        ]

    def test_parts_are_written_as_indices(self) -> None:
        def chain(x: Tensor, rows: Tensor) -> Tensor:
            first, second = rows.unbind(1)
            return x * rows[:, 1, None] + rows[1:, 0] + first[:, 2:4].repeat(1, 2)[:, None] + 2 * second[:1]

        assert self.expressions(record(chain, [torch.ones(2, 3, 4), torch.ones(2, 2, 4)])) == [
            "x * rows[:, 1]",
            "x * rows[:, 1] + rows[1:][:, 0]",
            "x * rows[:, 1] + rows[1:][:, 0] + repeat(rows[0][:, 2:4], [1, 2])",
            "2 * rows[1][:1]",
            "x * rows[:, 1] + rows[1:][:, 0] + repeat(rows[0][:, 2:4], [1, 2]) + 2 * rows[1][:1]",
        ]

    def test_modules_name_their_parameters(self) -> None:
        class Scaled(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(4))

            def forward(self, x: Tensor) -> Tensor:
                return self.weight * x

        assert self.expressions(record(Scaled(), [torch.ones(2, 4)])) == ["weight * x"]

    def test_in_place_steps_are_recorded_as_what_they_write(self) -> None:
        def chain(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            product = x * (1 + scale)
            product += shift
            return product

        args = operands(modulate, torch.bfloat16)
        x, scale, shift = (a.float() for a in args)
        actual = (x * (1 + scale).bfloat16().float() + shift).bfloat16()

        assert self.expressions(record(chain, args))[-1] == "x * (1 + scale) + shift"
        assert "`x * (1 + scale)` is not rounded" in (hint(actual, chain, args) or "")

    def test_chunks_and_stacks_carry_values(self) -> None:
        def chain(x: Tensor, rows: Tensor) -> Tensor:
            scale, shift = rows.chunk(2, dim=-1)
            return torch.cat([x * (1 + scale) + shift], dim=0)

        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 33, 8, generator=generator).bfloat16()
        rows = torch.randn(2, 1, 16, generator=generator).bfloat16()
        scale, shift = rows.float().chunk(2, dim=-1)
        actual = ((x.float() * (1 + scale)).bfloat16().float() + shift).bfloat16()

        assert hint(actual, chain, [x, rows]) == "`1 + rows[0]` is not rounded to bfloat16 before it is used"
