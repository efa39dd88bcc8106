"""Certificates: the operands that are tried, the stage that finds each fault, and the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusiongate.certificates import KERNELS, Certificate, certify, counterexample, device_named
from fusiongate.certificates.stages import all_values, chosen, fp32_from, on_ties
from fusiongate.certificates.trials import Trials, evidence
from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.platforms import environment

CPU = torch.device("cpu")
HALVES = [torch.bfloat16, torch.float16]


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def found_in(kernel: Callable[..., Tensor], dtype: str = "fp16", sample: int = 12) -> str | None:
    """The stage of modulate that has a counterexample to a kernel."""
    fusion = Fusion("modulate", reference=modulate, fused=kernel)
    found = counterexample("modulate", fusion, CPU, sample=sample, dtype=dtype)
    return None if found is None else found.stage


# Operands -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_all_values_are_all_bit_patterns(dtype: torch.dtype) -> None:
    assert set(range(-(1 << 15), 1 << 15)) == set(all_values(dtype, CPU).view(torch.int16).tolist())


@pytest.mark.parametrize("number", [1, 10, 500])
def test_a_sample_is_as_large_as_asked_for_and_begins_with_one(number: int) -> None:
    values = chosen(torch.bfloat16, CPU, number)
    assert (number, 1.0) == (len(values), values[0].item())


def test_fp32_patterns_come_from_every_lower_half() -> None:
    block = torch.tensor([1.0, -0.0], dtype=torch.bfloat16)
    patterns = fp32_from(block, CPU).view(torch.int32)
    assert (2, 1 << 16) == patterns.shape
    assert [0x3F800000, 0x3F80FFFF] == [patterns[0, 0].item(), patterns[0, -1].item()]
    assert -0x80000000 == patterns[1, 0].item()


@pytest.mark.parametrize("odd", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_ties_lie_half_way_between_neighbours(dtype: torch.dtype, odd: bool) -> None:
    """The next number above the sum is rounded one way, and the next below the other way."""
    values, addends = all_values(dtype, CPU), on_ties(dtype, CPU, odd=odd)
    total = values.float() + addends.float()
    assert ((total.double() == values.double() + addends.double()) | ~total.isfinite()).all()
    up, down = (torch.nextafter(total, torch.tensor(end)).to(dtype) for end in (torch.inf, -torch.inf))
    usable = values.isfinite() & (values != 0) & addends.isfinite() & total.to(dtype).isfinite()
    assert usable.double().mean() > 0.9
    assert ((up != down) | ~usable).double().mean() > 0.99


# Which stage finds what ---------------------------------------------------------------------------------------------


def test_a_right_kernel_has_no_counterexample() -> None:
    assert found_in(modulate) is None


def unrounded_scale(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (x.float() * (1 + scale.float())).to(x.dtype) + shift


def unrounded_product(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return (x.float() * (1 + scale).float() + shift.float()).to(x.dtype)


def unrounded_where_subnormal(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Keeps what a subnormal product has too little: less than the sum with its negative can show, and of its sign."""
    product = x * (1 + scale)
    kept = x.float() * (1 + scale).float()
    hidden = (product.abs() < torch.finfo(x.dtype).smallest_normal) & (kept > product.float())
    return torch.where(hidden, (kept + shift.float()).to(x.dtype), product + shift)


def flushed_sum(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A sum that is lost where the product is an odd number: only the stage of sums has all of them."""
    result = modulate(x, scale, shift)
    return torch.where((shift == 0.333251953125) & (scale == 0), 0.0, result)


def without_the_last_column(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A tail that is computed otherwise where D is odd."""
    result = modulate(x, scale, shift)
    if result.shape[-1] % 2:
        result[..., -1] = unrounded_product(x, scale, shift)[..., -1]
    return result


@pytest.mark.parametrize(
    "kernel, stage",
    [
        (unrounded_scale, "product"),
        (unrounded_product, "residue"),
        (unrounded_where_subnormal, "tie"),
        (flushed_sum, "sum"),
        (without_the_last_column, "lanes"),
    ],
)
def test_each_fault_is_found_by_the_stage_that_is_there_for_it(kernel: Callable[..., Tensor], stage: str) -> None:
    assert stage == found_in(kernel, sample=64)


def test_a_counterexample_names_the_operands_and_their_bits() -> None:
    fusion = Fusion("modulate", reference=modulate, fused=lambda x, scale, shift: modulate(x, scale, shift) * 0)
    found = counterexample("modulate", fusion, CPU, sample=1)
    assert (
        "scale: modulate(x=1.0 (0x3f80), scale=0.0 (0x0000), shift=-0.0 (0x8000)) is 0.0 (0x0000), and eager gives "
        "1.0 (0x3f80)"
    ) == str(found)


def test_the_md5_is_of_the_values_and_not_of_a_nans_payload() -> None:
    def digest(values: list[int]) -> str:
        x = torch.tensor(values, dtype=torch.int16).view(torch.bfloat16)
        fusion = Fusion("modulate", reference=lambda x: x.clone(), fused=lambda x: x.clone())
        return Trials("modulate", fusion).run("stage", "", [(x.view(2, -1),)], complete=True).md5

    nan, another_nan, one = 0x7FC0, 0x7FC1, 0x3F80
    rest = [1, 2, 3, 4, 5, 6, 7]
    assert digest([nan, *rest]) == digest([another_nan, *rest])
    assert digest([nan, *rest]) != digest([one, *rest])
    assert digest([one, *rest]) != digest([*rest, one])


# Claims and files ---------------------------------------------------------------------------------------------------


def certificate(*, is_sample: bool = False) -> Certificate:
    return Certificate("modulate", "bf16", "exact", True, ("an assumption",), "hash", environment("cpu"), is_sample, ())


def test_a_certificate_is_a_file_that_says_what_it_assumes(tmp_path: Path) -> None:
    path = certificate().write(tmp_path)
    record = json.loads(path.read_text())
    assert tmp_path / record["environment"]["platform"] / "certificates" / "modulate-bf16.json" == path
    assert ("exact", ["an assumption"], "hash") == (record["claim"], record["assumptions"], record["sources"])


def test_the_same_trial_gives_the_same_file(tmp_path: Path) -> None:
    before = certificate().write(tmp_path).read_bytes()
    assert before == certificate().write(tmp_path).read_bytes()


def test_a_sample_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a sample is no certificate and is not written; run without --sample"):
        certificate(is_sample=True).write(tmp_path)
    assert [] == list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be written: .*; name another folder with --folder$"):
        certificate().write(tmp_path / "file")


def test_a_sample_proves_nothing() -> None:
    fusion = Fusion("modulate", reference=modulate, fused=modulate)
    sampled = certify("modulate", "bf16", CPU, sample=1, fusion=fusion)
    assert (True, False) == (sampled.is_sample, sampled.is_proof)
    assert not any(stage.complete for stage in sampled.stages)


def test_a_stage_of_random_operands_is_never_complete() -> None:
    def fp32(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return (x.float() * (1 + scale.float()) + shift.float()).to(x.dtype)

    fusion = Fusion("modulate_fp32", reference=fp32, fused=fp32)
    sampled = certify("modulate_fp32", "fp16", CPU, sample=1, fusion=fusion)
    assert not replace(sampled, is_sample=False).is_proof
    assert "random" == sampled.stages[-1].name


@pytest.mark.parametrize(
    "kernel, dtype, sample, line",
    [
        ("nonsense", "bf16", 1, f"no kernel 'nonsense' can be certified: expected {', '.join(KERNELS)}"),
        ("rms_norm_modulate_high", "bf16", 1, "no kernel 'rms_norm_modulate_high' can be certified"),
        ("modulate", "fp64", 1, "dtype 'fp64': expected bf16 or fp16"),
        ("modulate", "bf16", 0, "sample 0: expected a number from 1 to 65536"),
        ("modulate", "bf16", 65537, "sample 65537: expected a number from 1 to 65536"),
    ],
)
def test_what_cannot_be_certified_is_one_line(kernel: str, dtype: str, sample: int, line: str) -> None:
    with pytest.raises(UsageError) as raised:
        certify(kernel, dtype, CPU, sample=sample)
    assert str(raised.value).startswith(line)
    assert 1 == len(str(raised.value).splitlines())


def test_a_kernel_that_declines_the_operands_is_not_tried() -> None:
    fusion = Fusion("modulate", reference=modulate, fused=modulate, declines=lambda *args: "dtype")
    with pytest.raises(UsageError, match=r"modulate cannot be certified here: it declines its operands \(dtype\)"):
        certify("modulate", "bf16", CPU, sample=1, fusion=fusion)


def test_a_norm_without_a_witness_shows_nothing_but_outputs() -> None:
    fusion = Fusion("norm", reference=modulate, fused=modulate)
    with pytest.raises(UsageError, match="norm names no witness, so there is nothing to compare but outputs"):
        evidence("norm", fusion, torch.bfloat16, CPU, 1)


def test_a_norm_that_declines_the_rows_is_not_tried() -> None:
    fusion = Fusion(
        "norm", reference=modulate, fused=modulate, declines=lambda *_: "dtype", witness=(modulate, modulate)
    )
    with pytest.raises(UsageError, match=r"norm cannot be tried here: it declines its operands \(dtype\)"):
        evidence("norm", fusion, torch.bfloat16, CPU, 1)


# The device ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gpus", "expected"),
    [
        ("host", 2, "cpu"),
        ("auto", 0, "cpu"),
        ("auto", 2, "cuda:0"),
        ("cuda", 1, "cuda:0"),
        ("cuda:1", 2, "cuda:1"),
    ],
)
def test_a_device_is_named_as_the_plugin_names_it(
    name: str, gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert torch.device(expected) == device_named(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpu", "device 'gpu': expected auto, host, cuda or cuda:<number>"),
        ("auto:0", "device 'auto:0': expected auto, host, cuda or cuda:<number>"),
        ("cuda:1", f"device cuda:1: torch {torch.__version__} sees 1 GPUs here; --device=host takes the CPU"),
    ],
)
def test_a_device_that_is_not_here_is_one_line(name: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError) as raised:
        device_named(name)
    assert expected == str(raised.value)
