"""fg.rewired on models that were written to break it: eager's bits, or an obstacle with its line."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fusiongate as fg

from .scanned_adversaries import (
    AHEAD,
    IN_PLACE,
    NORMS,
    OBJECTS,
    ORDER,
    REGIONS,
    BufferNorm,
    CallDefined,
    GammaNorm,
    Normed,
    NormedBefore,
    NormedUnderIf,
)
from .scanned_models import CompositeNorm, D


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def modulated_in_fp32(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)


def rms(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    return modulated(F.rms_norm(x, (x.shape[-1],), weight, eps), scale, shift)


def composite(x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    y = (x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return modulated(y if weight is None else y * weight, scale, shift)


def layer(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, weight: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    return modulated(F.layer_norm(x, (x.shape[-1],), weight, bias, eps), scale, shift)


EAGER: dict[str, Callable[..., Tensor]] = {
    "modulate": modulated,
    "modulate_fp32": modulated_in_fp32,
    "rms_norm_modulate": rms,
    "composite_rms_norm_modulate": composite,
    "layer_norm_modulate": layer,
    "scale": lambda x, scale: x * (1 + scale),
    "gated_residual": lambda residual, update, gate: residual + update * gate,
}


def fused() -> list[fg.Fusion]:
    """Eager itself in the part of each kernel, so that whatever differs is the rewiring's."""
    return [fg.Fusion(name, reference=function, fused=function) for name, function in EAGER.items()]


def refused() -> list[fg.Fusion]:
    """Kernels that are wrong, so that their gates refuse them."""
    return [fg.Fusion(n, reference=f, fused=lambda *args, f=f: f(*args) + 1) for n, f in EAGER.items()]


def declined() -> list[fg.Fusion]:
    """Kernels that decline everything."""
    return [fg.Fusion(n, reference=f, fused=f, declines=lambda *args: "never") for n, f in EAGER.items()]


def modulation_only() -> list[fg.Fusion]:
    return fused()[:1]


ARMS = [fused, refused, declined, modulation_only]


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (2, 6, D), s and t (2, 1, D)."""
    generator = torch.Generator().manual_seed(seed)
    x, s, t = (torch.randn(2, rows, D, generator=generator) for rows in (6, 1, 1))
    return x.bfloat16(), s.bfloat16(), t.bfloat16()


def outcome(model: nn.Module, seed: int) -> tuple[Any, ...]:
    """What a call gives: bits, layouts, what became of the operands, and the next number of the generator."""
    args = inputs(seed)
    torch.manual_seed(seed)
    try:
        result = model(*args)
    except Exception as error:
        return type(error), bits(args)
    return bits([result]), bits(args), float(torch.rand(()))


def bits(tensors: Any) -> list[tuple[Any, ...]]:
    return [(t.dtype, t.shape, t.stride(), t.contiguous().view(torch.uint8).numpy().tobytes()) for t in tensors]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


def named(kind: type) -> str:
    return kind.__name__


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.__name__)
@pytest.mark.parametrize("kind", [*IN_PLACE, *ORDER, *REGIONS, *OBJECTS, *AHEAD], ids=named)
def test_a_rewired_model_gives_eagers_bits(kind: type[nn.Module], arm: Callable[[], list[Any]]) -> None:
    model, other = kind().eval(), kind().eval()
    expected = [outcome(other, seed) for seed in range(3)]

    with fg.rewired(model, arm()):
        assert expected == [outcome(model, seed) for seed in range(3)]
    assert [outcome(other, 4)] == [outcome(model, 4)]


@pytest.mark.parametrize("norm", NORMS, ids=named)
@pytest.mark.parametrize("site", [Normed, NormedBefore, NormedUnderIf], ids=named)
def test_a_gain_that_no_kernel_is_given_counts_whenever_it_changes(norm: type[nn.Module], site: type[Normed]) -> None:
    """First sight sees ones, and the weights come later."""
    model, other = site(norm()).eval(), site(norm()).eval()
    with fg.rewired(model, fused()):
        for gain in (1.0, 1.0, 2.5, 0.5):
            for each in (model, other):
                if isinstance(each.norm.gamma, Tensor):
                    each.norm.gamma.fill_(gain)
                elif isinstance(each.norm.gamma, list):
                    each.norm.gamma[0] = gain
                else:
                    each.norm.gamma = gain
            assert outcome(other, 1) == outcome(model, 1)


# -- copies ------------------------------------------------------------------------------------------------------------


def _shallow(model: nn.Module) -> nn.Module:
    """A copy that has a norm of its own."""
    copied = copy.copy(model)
    copied._modules = {name: copy.deepcopy(module) for name, module in model._modules.items()}
    return copied


def _replica(model: nn.Module) -> nn.Module:
    """As DataParallel makes them: shallow, and their parameters are put in place later."""
    copied: nn.Module = model._replicate_for_data_parallel()
    copied._modules = {name: copy.deepcopy(module) for name, module in model._modules.items()}
    return copied


COPIES = [copy.deepcopy, _shallow, _replica]


@pytest.mark.parametrize("copied_by", COPIES, ids=lambda function: function.__name__.strip("_"))
@pytest.mark.parametrize("site", [Normed, NormedBefore, NormedUnderIf], ids=named)
def test_a_copy_computes_with_its_own_weights_inside_and_after_the_block(
    site: type[Normed], copied_by: Callable[[nn.Module], nn.Module]
) -> None:
    model = site().eval()
    ops = fused()
    with fg.rewired(model, ops) as report:
        outcome(model, 1)
        copied = copied_by(model)
        copied.norm.weight.fill_(3.0)
        other = site().eval()
        other.norm.weight.fill_(3.0)
        assert outcome(other, 1) == outcome(copied, 1)
        assert outcome(site().eval(), 1) == outcome(model, 1)
    calls = report.counters.total()
    assert outcome(other, 2) == outcome(copied, 2)
    assert calls == report.counters.total()
    assert vars(site().eval()).keys() == vars(copied).keys() - {"_is_replica", "_former_parameters"}
    with fg.rewired(copied, fused()) as again:
        outcome(copied, 1)
    assert [None] == [site.reason for site in again.sites]
    assert again.counters.total()


PICKLED = """
import copyreg, io, pickle
import torch
import fusiongate as fg
from fusiongate.suites.framework import scanned_adversaries, test_scan_adversaries as tests

model = scanned_adversaries.NormedBefore().eval()
with torch.no_grad(), fg.rewired(model, tests.fused()) as report:
    tests.outcome(model, 1)
    copied = pickle.loads(pickle.dumps(model))
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (copied, torch.load(saved, weights_only=False)):
        other.norm.weight.fill_(3.0)
        expected = scanned_adversaries.NormedBefore().eval()
        expected.norm.weight.fill_(3.0)
        assert tests.outcome(expected, 2) == tests.outcome(other, 2)
    assert 1 == report.counters.total()
"""


def test_a_pickled_model_computes_with_its_own_weights() -> None:
    """In a process of its own: nothing here has a way to a pickle."""
    subprocess.run([sys.executable, "-P", "-c", PICKLED], check=True)


def test_copies_of_a_copy_and_of_its_blocks_are_as_free() -> None:
    model = nn.Sequential(Normed().eval())
    with fg.rewired(model, fused()) as report:
        block = copy.deepcopy(model[0])
        block.norm.weight.fill_(2.0)
        other = Normed().eval()
        other.norm.weight.fill_(2.0)
        assert outcome(other, 1) == outcome(copy.copy(block), 1)
    calls = report.counters.total()
    outcome(block, 1)
    assert calls == report.counters.total()


def test_a_block_that_is_swapped_inside_is_the_block_that_runs() -> None:
    model = Normed().eval()
    with fg.rewired(model, fused()):
        outcome(model, 1)
        model.norm = CompositeNorm(eps=0.5)
        assert outcome(Normed(CompositeNorm(eps=0.5)).eval(), 1) == outcome(model, 1)


# -- hooks, wrappers, other objects ------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.eps = 1e-6
        self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def _hook(model: Normed) -> None:
    model.norm.register_forward_hook(lambda module, args, result: 2 * result)


def _pre_hook(model: Normed) -> None:
    model.norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def _global_hook(model: Normed) -> None:
    norm = model.norm

    def hook(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return 2 * result if type(module) is type(norm) else result

    REMOVED.append(torch.nn.modules.module.register_module_forward_hook(hook))


def _global_pre_hook(model: Normed) -> None:
    norm = model.norm

    def hook(module: nn.Module, args: Any) -> Any:
        return (args[0] + 1,) if type(module) is type(norm) else None

    REMOVED.append(torch.nn.modules.module.register_module_forward_pre_hook(hook))


def _wrapped(model: Normed) -> None:
    model.norm = Wrapper(model.norm)


def _other_class(model: Normed) -> None:
    model.norm = nn.Identity()


def _other_eps(model: Normed) -> None:
    model.norm.eps = 0.25


def _other_weight(model: Normed) -> None:
    model.norm.weight = nn.Parameter(torch.full((D,), 3.0, dtype=torch.bfloat16))


def _no_weight(model: Normed) -> None:
    model.norm.weight = None


def _parametrized(model: Normed) -> None:
    parametrize.register_parametrization(model.norm, "weight", Doubled())


def _own_forward(model: Normed) -> None:
    forward = model.norm.forward
    model.norm.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]


def _class_forward(model: Normed) -> None:
    before = CompositeNorm.forward
    REMOVED.append(_Undo(lambda: setattr(CompositeNorm, "forward", before)))
    CompositeNorm.forward = lambda self, x: 2 * before(self, x)  # type: ignore[method-assign]


def _function(model: Normed) -> None:
    norm = model._modules.pop("norm")
    assert norm is not None
    model.__dict__["norm"] = lambda x: 2 * norm(x)


def _training(model: Normed) -> None:
    model.train()


class _Undo:
    def __init__(self, undo: Callable[[], None]) -> None:
        self.remove = undo


REMOVED: list[Any] = []
CHANGES = [
    *(_hook, _pre_hook, _global_hook, _global_pre_hook, _wrapped, _other_class, _other_eps, _other_weight, _no_weight),
    *(_parametrized, _own_forward, _class_forward, _function, _training),
]


@pytest.fixture(autouse=True)
def _removed() -> Iterator[None]:
    yield
    while REMOVED:
        REMOVED.pop().remove()


@pytest.mark.parametrize("change", CHANGES, ids=lambda function: function.__name__.strip("_"))
@pytest.mark.parametrize("site", [Normed, NormedBefore, NormedUnderIf], ids=named)
@pytest.mark.parametrize("norm", [lambda: None, lambda: nn.RMSNorm(D, eps=1e-6).bfloat16()], ids=["composite", "rms"])
def test_what_becomes_of_a_norm_inside_the_block_counts(
    site: type[Normed], norm: Callable[[], nn.Module | None], change: Callable[[Normed], None]
) -> None:
    model, other = site(norm()).eval(), site(norm()).eval()
    with fg.rewired(model, fused()):
        assert outcome(other, 1) == outcome(model, 1)
        change(other)
        expected = [outcome(other, seed) for seed in (1, 2, 3)]
        while REMOVED:
            REMOVED.pop().remove()
        change(model)
        assert expected == [outcome(model, seed) for seed in (1, 2, 3)]


@pytest.mark.parametrize("site", [Normed, NormedBefore, NormedUnderIf], ids=named)
def test_autocast_around_the_whole_call_counts(site: type[Normed]) -> None:
    model, other = site(nn.RMSNorm(D, eps=1e-6)).eval(), site(nn.RMSNorm(D, eps=1e-6)).eval()
    with fg.rewired(model, fused()):
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                expected = outcome(other, 1)
                assert expected == outcome(model, 1)
            assert outcome(other, 1) == outcome(model, 1)


def _partial(model: nn.Module) -> None:
    """As accelerate's hooks do it."""
    before = model.forward

    def called(module: nn.Module, *args: Any) -> Any:
        return before(*args)

    model._old_forward = before
    model.forward = functools.update_wrapper(functools.partial(called, model), before)  # type: ignore[method-assign]


def _closure(model: nn.Module) -> None:
    before = model.forward
    calls: list[int] = []
    model.forward = lambda *args: (before(*args), calls.append(1))[0]  # type: ignore[method-assign, func-returns-value]


def _itself(model: nn.Module) -> None:
    model.forward = model.forward  # type: ignore[method-assign]


WRAPS = [_partial, _closure, _itself]


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda function: function.__name__.strip("_"))
@pytest.mark.parametrize("site", [Normed, NormedBefore], ids=named)
def test_somebodys_wrapper_stays_and_has_no_gates_beneath_it_afterwards(
    site: type[Normed], wrap: Callable[[nn.Module], None]
) -> None:
    model = site().eval()
    with fg.rewired(model, fused()) as report:
        wrap(model)
        theirs = vars(model)["forward"]
        assert outcome(site().eval(), 1) == outcome(model, 1)
    assert theirs is vars(model)["forward"]
    calls = report.counters.total()
    assert outcome(site().eval(), 2) == outcome(model, 2)
    assert calls == report.counters.total()


@pytest.mark.parametrize("wrap", WRAPS, ids=lambda function: function.__name__.strip("_"))
def test_a_model_that_somebody_wrapped_before_gives_eagers_bits(wrap: Callable[[nn.Module], None]) -> None:
    model = Normed().eval()
    wrap(model)
    theirs = vars(model)["forward"]
    with fg.rewired(model, fused()) as report:
        assert outcome(Normed().eval(), 1) == outcome(model, 1)
        assert report.counters.total() or [site.reason for site in report.sites if site.reason]
    assert theirs is vars(model)["forward"]


# -- silence -----------------------------------------------------------------------------------------------------------


class WithAssert(nn.Module):
    """In a test file, so that pytest has rewritten its assert."""

    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        assert x.ndim == 3
        return x * (1 + s) + t


def _executed() -> type[nn.Module]:
    namespace: dict[str, Any] = {"nn": nn}
    text = "class Executed(nn.Module):\n    def forward(self, x, s, t):\n        return x * (1 + s) + t\n"
    exec(text, namespace)
    made: type[nn.Module] = namespace["Executed"]
    return made


def _without_wraps(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator that forgets functools.wraps."""

    def called(*args: Any) -> Tensor:
        return function(*args)

    return called


class HiddenByDecorator(nn.Module):
    @_without_wraps
    def forward(self, x: Tensor, s: Tensor, t: Tensor) -> Tensor:
        return x * (1 + s) + t


@pytest.mark.parametrize("kind", [WithAssert, CallDefined, HiddenByDecorator, _executed()], ids=named)
def test_a_site_is_found_and_runs_its_gate_or_the_report_says_why_not(kind: type[nn.Module]) -> None:
    model = kind().eval()
    with fg.rewired(model, fused()) as report:
        assert [outcome(kind().eval(), seed) for seed in (1, 2)] == [outcome(model, seed) for seed in (1, 2)]
    if report.mounted:
        assert 2 == report.counters.total()
    else:
        assert kind.__name__ in str(report)


def test_the_command_can_import_a_files_neighbours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fusiongate.cli import main

    (tmp_path / "the_neighbour_of_it.py").write_text("ONE = 1\n")
    text = "from the_neighbour_of_it import ONE\ndef modulate(x, scale, shift):\n    return x * (1 + scale) + shift\n"
    (tmp_path / "test_more.py").write_text(text)
    before = list(sys.path)
    assert 0 == main(["scan", str(tmp_path / "test_more.py")])
    assert before == sys.path


def test_the_command_can_import_a_file_of_a_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fusiongate.cli import main

    package = tmp_path / "their_models" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package.parent / "ones.py").write_text("ONE = 1\n")
    text = "from ..ones import ONE\ndef modulate(x, scale, shift):\n    return x * (1 + scale) + shift\n"
    (package / "model.py").write_text(text)
    assert 0 == main(["scan", str(package / "model.py")])


# -- several at a time -------------------------------------------------------------------------------------------------


def test_two_threads_may_rewire_one_model() -> None:
    model = Normed().eval()
    expected = [outcome(Normed().eval(), seed) for seed in range(20)]
    barrier = threading.Barrier(2)
    found: list[Any] = []

    def work() -> None:
        try:
            with torch.no_grad():
                for _ in range(5):
                    barrier.wait()
                    with fg.rewired(model, fused()):
                        args = [inputs(seed) for seed in range(20)]
                        found.append([bits([model(*each)]) for each in args])
        except Exception as error:
            barrier.abort()
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[each[0] for each in expected]] * 10 == found
    assert outcome(Normed().eval(), 1) == outcome(model, 1)


def test_blocks_may_overlap_and_end_in_any_order() -> None:
    model = Normed().eval()
    expected = outcome(Normed().eval(), 1)
    first, second = fg.rewired(model, fused()), fg.rewired(model, modulation_only())
    one = first.__enter__()
    assert expected == outcome(model, 1)
    two = second.__enter__()
    assert expected == outcome(model, 1)
    first.__exit__(None, None, None)
    assert expected == outcome(model, 1)
    assert [1, 2] == [one.counters.total(), two.counters.total()]
    second.__exit__(None, None, None)
    assert expected == outcome(model, 1)
    assert [1, 2] == [one.counters.total(), two.counters.total()]


def test_buffers_and_parameters_that_are_loaded_later_count() -> None:
    """The whole state, by load_state_dict and by assignment."""
    for norm in (CompositeNorm(weighted=True), GammaNorm(), BufferNorm(), nn.RMSNorm(D, eps=1e-6).bfloat16()):
        model, other = Normed(norm).eval(), Normed(copy.deepcopy(norm)).eval()
        state = {name: torch.full_like(tensor, 2.0) for name, tensor in model.state_dict().items()}
        for assign in (False, True):
            with fg.rewired(model, fused()):
                assert outcome(other, 1) == outcome(model, 1)
                for each in (model, other):
                    each.load_state_dict(state, assign=assign)
                assert outcome(other, 1) == outcome(model, 1)
