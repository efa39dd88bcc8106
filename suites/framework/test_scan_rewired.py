"""fg.rewired: gates in the place of a model's own chains, and everything as it was afterwards."""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusiongate import kernels
from fusiongate.errors import FallbackError, UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.gate.judging import require_fused
from fusiongate.scanning import rewired

from . import scanned_models
from .scanned_models import FORMS, NOT_MOUNTABLE, Layered, Normed, NormedBefore, inputs


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def modulated_in_fp32(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)


def rms(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    return modulated(F.rms_norm(x, (x.shape[-1],), weight, eps), scale, shift)


def composite(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    y = (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return modulated(y if weight is None else y * weight, scale, shift)


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale)


def layer(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    return modulated(F.layer_norm(x, (x.shape[-1],), weight, bias, eps), scale, shift)


def gated(residual: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    return residual + update * gate


def ops() -> list[Fusion]:
    """Fusions without a kernel to build: torch in the part of a kernel that keeps every rounding."""
    functions: dict[str, Callable[..., Tensor]] = {
        "modulate": modulated,
        "modulate_fp32": modulated_in_fp32,
        "rms_norm_modulate": rms,
        "composite_rms_norm_modulate": composite,
        "layer_norm_modulate": layer,
        "scale": scaled,
        "gated_residual": gated,
    }
    return [Fusion(name, reference=function, fused=function) for name, function in functions.items()]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_rewired_module_gives_the_same_bits_and_runs_its_gate(form: type[nn.Module]) -> None:
    model = form().eval()
    args = inputs()
    expected = model(*args)

    with rewired(model, ops()) as report:
        first, second = model(*args), model(*args)

    assert torch.equal(expected, first)
    assert torch.equal(expected, second)
    assert report.mounted
    assert all(site.counters["reference", "first-sight"] >= 1 for site in report.mounted)
    assert {"first-sight", "verified"} >= {reason for _, reason in report.counters}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_what_a_gate_returns_is_what_the_module_goes_on_with(form: type[nn.Module]) -> None:
    """A gate that nobody listens to would pass every comparison."""
    model = form().eval()
    args = inputs()
    expected = model(*args)

    with rewired(model, ops()) as report:
        for site in report.mounted:
            assert site.place is not None
            right = site.place.call
            site.place.call = lambda *operands, right=right: right(*operands) + 1
            assert not torch.equal(expected, model(*args))
            site.place.call = right


@pytest.mark.parametrize("module", NOT_MOUNTABLE, ids=lambda module: module.__name__)
def test_a_module_where_no_gate_can_stand_runs_as_it_did(module: type[nn.Module]) -> None:
    model = module()
    args = inputs()
    expected = model(*args)

    with rewired(model, ops()) as report:
        assert torch.equal(expected, model(*args))

    assert [site for site in report.sites if site.fusion is None and site.reason]


def test_everything_is_restored_afterwards_also_after_an_exception() -> None:
    model = Layered()
    code = NormedBefore.forward.__code__

    with rewired(model, ops()):
        assert code is not NormedBefore.forward.__code__
    assert code is NormedBefore.forward.__code__

    with pytest.raises(KeyError), rewired(model, ops()):
        raise KeyError
    assert code is NormedBefore.forward.__code__


def test_nothing_is_put_into_modules_or_classes() -> None:
    model = Layered()
    before = [dict(vars(module)) for module in model.modules()]
    functions = dict(vars(NormedBefore))

    with rewired(model, ops()):
        assert before == [dict(vars(module)) for module in model.modules()]
        assert functions == dict(vars(NormedBefore))


def test_code_that_somebody_else_puts_into_a_function_inside_stays() -> None:
    model, code = scanned_models.Plain(), scanned_models.Plain.forward.__code__
    theirs = (lambda self, x, scale, shift: shift).__code__
    try:
        with rewired(model, ops()):
            scanned_models.Plain.forward.__code__ = theirs
        assert theirs is scanned_models.Plain.forward.__code__
    finally:
        scanned_models.Plain.forward.__code__ = code


def test_other_modules_of_the_same_class_do_not_go_by_its_gates() -> None:
    model, other = Normed().eval(), Normed().eval()

    with rewired(model, ops()) as report:
        other(*inputs())
        assert 0 == report.counters.total()
        model(*inputs())
    assert 1 == report.counters.total()


def test_each_site_has_a_name_and_counters_of_its_own() -> None:
    model = Layered().eval()

    with rewired(model, ops()) as report:
        model(*inputs())
        model.first(*inputs())

    lines = {site.found.line for site in report.sites}
    assert 1 == len(lines)
    assert [f"{name}:scanned_models.py:{lines.copy().pop()}" for name in ("first", "second", "third")] == [
        site.name for site in report.sites
    ]
    assert [2, 1, 1] == [site.counters.total() for site in report.sites]
    kinds = ["rms_norm_modulate", "composite_rms_norm_modulate", "layer_norm_modulate"]
    assert kinds == [site.kind for site in report.sites]


def test_the_reference_is_the_sites_own_expression_and_norm() -> None:
    """The gate refuses a kernel that fits another norm, because it is held against the module's own."""
    model = Normed(nn.RMSNorm(16, eps=0.5).bfloat16())
    args = inputs()
    expected = model(*args)
    ignores_eps = Fusion("rms_norm_modulate", reference=rms, fused=lambda x, s, c, eps, w=None: rms(x, s, c, 1e-6, w))

    with rewired(model, [ignores_eps]) as report:
        assert torch.equal(expected, model(*args))
        assert torch.equal(expected, model(*args))

    assert ("fused", "verified") not in report.counters


def test_a_folded_norm_is_not_called_unless_somebody_hooks_it() -> None:
    calls: list[int] = []
    model = Normed().eval()
    args = inputs()
    with rewired(model, ops()) as report:
        model(*args)
        model.norm.register_forward_hook(lambda *args: calls.append(1))
        model(*args)
        assert [1] == calls
        model.norm._forward_hooks.clear()
        model(*args)
        assert [1] == calls

    assert {
        ("reference", "first-sight"): 1,
        ("reference", "norm-hooks"): 1,
        ("fused", "verified"): 1,
    } == report.counters


def test_the_norms_weight_and_eps_are_read_at_each_call() -> None:
    norm = scanned_models.CompositeNorm(weighted=True)
    assert norm.weight is not None
    model = Normed(norm).eval()
    args = inputs()

    with rewired(model, ops()):
        model(*args)
        norm.weight.mul_(2)
        norm.eps = 0.25
        actual = model(*args)

    assert torch.equal(model(*args), actual)


def test_without_the_norms_kernel_the_modulation_alone_is_mounted() -> None:
    model = Normed()
    args = inputs()
    expected = model(*args)

    with rewired(model, ops()[:1]) as report:
        assert torch.equal(expected, model(*args))

    assert ["modulate"] == [site.kind for site in report.mounted]


def test_a_site_whose_op_was_not_given_says_so() -> None:
    with rewired(scanned_models.InFp32(), ops()[:1]) as report:
        pass

    assert ["no op of the kind modulate_fp32 was given"] == [site.reason for site in report.sites]
    assert "no op of the kind modulate_fp32 was given" in str(report)


def test_an_op_of_another_name_is_given_by_its_kind() -> None:
    mine = Fusion("my_kernel", reference=modulated, fused=modulated)

    with rewired(scanned_models.Plain(), {"modulate": mine}) as report:
        assert 1 == len(report.mounted)
    with pytest.raises(UsageError, match="'my_kernel' is no kind of site"), rewired(scanned_models.Plain(), [mine]):
        pass


def test_two_ops_for_one_kind_are_refused() -> None:
    with (
        pytest.raises(UsageError, match="are both for modulate"),
        rewired(scanned_models.Plain(), [ops()[0], ops()[0]]),
    ):
        pass


def test_blocks_may_be_nested_and_the_inner_one_counts() -> None:
    model = nn.ModuleList([scanned_models.Plain(), scanned_models.Plain()])
    args = inputs()

    with rewired(model[1], ops()) as outer:
        with rewired(model, ops()) as inner:
            model[0](*args)
            model[1](*args)
        assert [0, 2] == [outer.counters.total(), inner.counters.total()]
        model[0](*args)
        model[1](*args)
    assert [1, 2] == [outer.counters.total(), inner.counters.total()]


def test_a_forward_that_somebody_else_replaced_stays_theirs() -> None:
    model = scanned_models.Plain()
    model.forward = lambda *args: "theirs"  # type: ignore[method-assign, assignment]

    with rewired(model, ops()) as report:
        assert "theirs" == model(*inputs())

    assert 0 == report.counters.total()
    assert "theirs" == model(*inputs())


def test_an_error_in_a_rewired_forward_points_at_the_models_own_line() -> None:
    model = scanned_models.OverStatements()
    x, scale, shift = inputs()

    with rewired(model, ops()) as report, pytest.raises(RuntimeError) as raised:
        model(x, scale, shift[:, :3])

    frames = traceback.extract_tb(raised.value.__traceback__)
    own = [frame for frame in frames if frame.filename.endswith("scanned_models.py")]
    assert own[0].lineno == report.sites[0].found.line
    assert own[0].line == "x = x + shift[:, None]"


def test_a_training_step_takes_the_references_and_has_its_gradients() -> None:
    with torch.inference_mode(False):
        norm = scanned_models.CompositeNorm(weighted=True)
        model = Normed(norm).eval()
        x, scale, shift = (tensor.clone() for tensor in inputs())

        def gradient() -> Tensor:
            model.zero_grad()
            model(x, scale, shift).float().square().sum().backward()
            assert norm.weight is not None
            assert norm.weight.grad is not None
            return norm.weight.grad.clone()

        expected = gradient()
        with rewired(model, ops()) as report:
            assert torch.equal(expected, gradient())
    assert {("reference", "autograd")} == set(report.counters)


def test_a_rewired_model_can_be_compiled_without_a_graph_break() -> None:
    model = Layered()
    args = inputs()
    expected = torch.compile(model, backend="eager", fullgraph=True)(*args)

    torch.compiler.reset()
    with rewired(model, ops()) as report:
        actual = torch.compile(model, backend="eager", fullgraph=True)(*args)

    assert torch.equal(expected, actual)
    assert {} == report.counters


def test_a_copy_of_a_rewired_model_runs() -> None:
    model = Layered()
    args = inputs()
    expected = model(*args)

    with rewired(model, ops()):
        assert torch.equal(expected, copy.deepcopy(model)(*args))


def test_a_fall_back_inside_a_rewired_model_can_be_forbidden() -> None:
    """The error names the site."""
    declining = Fusion("modulate", reference=modulated, fused=modulated, declines=lambda *args: "never")
    model = scanned_models.Plain()

    with rewired(model, [declining]), require_fused(), pytest.raises(FallbackError, match=r"Plain:scanned_models\.py"):
        model(*inputs())


def test_what_is_no_fusion_cannot_be_mounted() -> None:
    refused = pytest.raises(UsageError, match=r"rewired: 3 is no Fusion: expected ops such as fusiongate\.kernels\.")
    with refused, rewired(scanned_models.Normed(), [3]):  # type: ignore[list-item]
        pass


def tabled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorates with a function that keeps the other in a table."""
    table = [function]

    @functools.wraps(function)
    def called(*args: Any) -> Tensor:
        return table[0](*args)

    return called


class OfATable(nn.Module):
    @tabled
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return x * (1 + scale) + shift


def test_a_decorator_may_keep_its_function_wherever_it_likes() -> None:
    model = OfATable()
    with rewired(model, ops()) as report:
        (site,) = report.sites
        assert torch.equal(torch.tensor([7.0]), model(*(torch.tensor([value]) for value in (2.0, 2.0, 1.0))))
        assert 1 == site.counters.total()


class OwnClass(nn.Module):
    """Names its own class in a method, and closes over nothing."""

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return OwnClass.made(x * (1 + scale[:, None]) + shift[:, None])

    @staticmethod
    def made(x: Tensor) -> Tensor:
        return x


def test_a_method_may_name_its_own_class() -> None:
    model, args = OwnClass(), inputs()
    expected = model(*args)
    with rewired(model, ops()) as report:
        assert torch.equal(expected, model(*args))
    assert 1 == len(report.mounted)


def enclosed(factor: int) -> nn.Module:
    class Enclosed(nn.Module):
        """Closes over a variable and over its own class."""

        def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            y = x * (1 + scale[:, None]) + shift[:, None]
            return factor * y if isinstance(self, Enclosed) else y

    return Enclosed()


def test_a_method_may_close_over_variables() -> None:
    for factor in (2, 3):
        model, args = enclosed(factor), inputs()
        expected = model(*args)
        with rewired(model, ops()) as report:
            assert torch.equal(expected, model(*args))
        assert 1 == len(report.mounted)


def test_the_default_are_the_exact_kernels_for_the_models_device() -> None:
    model, args = scanned_models.Plain(), inputs()
    expected = model(*args)
    with rewired(model) as report:
        assert torch.equal(expected, model(*args))
        assert torch.equal(expected, model(*args))
    assert {("reference", "first-sight"): 1, ("fused", "verified"): 1} == report.counters


def test_gradients_sum_in_eagers_order() -> None:
    """What is evaluated earlier is summed up later."""
    with torch.inference_mode(False):
        model = SeveralSums()

        def gradients() -> list[Tensor]:
            args = [tensor.float().clone().requires_grad_() for tensor in inputs()]
            model(*args).square().sum().backward()
            return [arg.grad for arg in args if arg.grad is not None]

        expected = gradients()
        with rewired(model, ops()) as report:
            actual = gradients()
    assert all(map(torch.equal, expected, actual))
    assert {("reference", "autograd")} == set(report.counters)


class SeveralSums(nn.Module):
    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        s = scale[:, None]
        y = s * 3
        x = x * (1 + s) + (s * shift[:, None] + y)
        return x * s.exp()


@pytest.mark.parametrize("affine", [False, True])
def test_a_layer_norm_is_taken_in_by_its_kernel(affine: bool) -> None:
    """With its weight and its bias, as they are at each call."""
    norm = nn.LayerNorm(16, eps=1e-6, elementwise_affine=affine).bfloat16()
    model, args = Normed(norm).eval(), inputs()
    with rewired(model, ops()) as report:
        for number in range(3):
            for parameter in norm.parameters():
                parameter.data.fill_(0.5 + number)
            assert torch.equal(layer_normed(norm, args), model(*args))
    assert ["layer_norm_modulate"] == [site.kind for site in report.mounted]
    assert 2 == report.counters["fused", "verified"]


def layer_normed(norm: nn.LayerNorm, args: tuple[Tensor, ...]) -> Tensor:
    x, scale, shift = args
    return modulated(norm(x), scale[:, None], shift[:, None])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_by_default_all_exact_kernels_for_the_models_device_are_mounted(device: str) -> None:
    """A model on no CPU gets the device's kernels, its folded norm's among them; a CPU the modulations' host builds."""
    model = Normed(nn.RMSNorm(16, eps=1e-6)).eval().to(device)
    with rewired(model) as report:
        (site,) = report.mounted
    expected = {"cpu": "modulate", "meta": "rms_norm_modulate"}[device]
    assert expected == site.kind
    shipped = getattr(kernels, expected)
    assert site.fusion is not None
    assert (shipped.host if device == "cpu" else shipped).spec.fused is site.fusion.spec.fused
