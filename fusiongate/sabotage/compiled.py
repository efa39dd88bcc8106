"""Saboteurs that are variants of the shipped sources: the faults of ``kernels/common/faults.cuh``, one a build."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from fusiongate.errors import UsageError
from fusiongate.gate.fusion import Fusion
from fusiongate.jit import Target, prebuild
from fusiongate.kernels import FUSIONS
from fusiongate.kernels.launching import Entry, Launcher

from .saboteurs import SEEN, Detector, Saboteur, corrupted, declared

__all__ = ["COMPILED", "built", "planted"]


def planted(fusion: Fusion, fault: str) -> Fusion:
    """The fusion on its own source, built with a fault.

    Raises
    ------
    UsageError
        The fusion's launcher stands on no source of ours.
    """
    launcher = _on_faulty(fusion.fused, fault)
    if launcher is fusion.fused:
        raise UsageError(
            f"{fusion.name} is not built from fusiongate's sources, so no fault can be compiled into it: "
            f"take a generic saboteur"
        )
    if fusion.witness is None:
        return corrupted(fusion, launcher)
    of_reference, of_kernel = fusion.witness
    return corrupted(fusion, launcher, witness=(of_reference, _on_faulty(of_kernel, fault)))


def built(saboteurs: Iterable[Saboteur], device: torch.device) -> None:
    """Build the libraries of compiled saboteurs ahead of time, as many at once as there are cores.

    Whatever cannot be built is left to the detectors, which say so.
    """
    fusions = {fusion.name: fusion for fusion in FUSIONS}
    launchers = [one.apply(fusions[one.kernel]).fused for one in saboteurs if one.kind == "compiled"]
    sources = [launcher.entry.source for launcher in launchers if isinstance(launcher, Launcher)]
    for _ in prebuild(sources, [Target.of(device)]):
        pass


def _on_faulty(function: Callable[..., Any], fault: str) -> Callable[..., Any]:
    """The same function over entries of a faulty build; the function itself where it holds no entry.

    A function of the kernels is a closure over the entry of its library, and everything else in it is to stay as it is
    shipped.
    """
    if isinstance(function, Launcher):
        return Launcher(_faulty(function.entry, fault), function.operands)
    contents = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    if not any(isinstance(content, Entry) for content in contents):
        return function
    assert isinstance(function, types.FunctionType)
    closure = (_faulty(content, fault) if isinstance(content, Entry) else content for content in contents)
    return types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(map(types.CellType, closure)),
    )


def _faulty(entry: Entry, fault: str) -> Entry:
    faulty = entry.source.with_defines(f"FUSIONGATE_FAULT={fault}")
    return Entry(dataclasses.replace(faulty, quick=True), entry.name)


def _compiled(
    fault: str,
    story: str,
    detectors: Mapping[Detector, str],
    *,
    name: str | None = None,
    kernel: str = "modulate",
    cell: str = "base",
) -> Saboteur:
    return Saboteur(
        name or fault.replace("_", "-"),
        "compiled",
        story,
        lambda fusion: planted(fusion, fault),
        detectors,
        kernel=kernel,
        cell=cell,
    )


COMPILED: tuple[Saboteur, ...] = (
    _compiled("scale_unrounded", "1 + scale stays in fp32", declared("is not rounded", *SEEN, certificate="product")),
    _compiled(
        "product_unrounded",
        "the product stays in fp32 and is contracted into the sum (fused multiply-add)",
        declared("contracted into the following add", *SEEN, certificate="residue"),
    ),
    _compiled(
        "product_unrounded",
        "in fp32, the product is contracted into the sum (fused multiply-add)",
        declared("contracted into the following add", *SEEN),
        name="contracted-in-fp32",
        cell="fp32",
    ),
    _compiled(
        "all_fp32", "no intermediate is rounded", declared("no intermediate is rounded", *SEEN, certificate="product")
    ),
    _compiled(
        "truncated",
        "the result is truncated toward zero",
        declared("truncated toward zero", *SEEN, certificate="tie"),
    ),
    _compiled(
        "sign_of_zero_lost",
        "-0.0 is stored as +0.0",
        declared("sign of zero is lost", *SEEN, certificate="product"),
        cell="signed-zeros",
    ),
    _compiled(
        "nan_swallowed",
        "NaN is stored as 0",
        declared("NaN is swallowed", *SEEN, certificate="scale"),
        cell="nan-inf",
    ),
    _compiled(
        "nan_spread",
        "a NaN spoils the other elements of its vector",
        declared("NaN is spread", *SEEN, certificate="lanes"),
        cell="one-nan",
    ),
    _compiled(
        "overflow_clamped",
        "an infinite result is stored as the largest finite number",
        declared("overflow is 'improved'", *SEEN, certificate="scale"),
        cell="overflow",
    ),
    _compiled(
        "flushed_to_zero",
        "a subnormal result is stored as 0",
        declared("flush", *SEEN, certificate="product"),
        cell="subnormals",
    ),
    _compiled(
        "stride_ignored",
        "the rows are read as if they were packed",
        declared("the strides of", *SEEN),
        cell="strided-unbind-4d",
    ),
    _compiled(
        "batch_rows_mixed",
        "each batch entry takes its neighbour's rows",
        declared("read from another batch row", *SEEN),
    ),
    _compiled(
        "first_row_for_all",
        "every batch entry takes the first one's rows",
        declared("the first batch row", *SEEN),
    ),
    _compiled("tail_skipped", "the last token of each batch entry is not written", declared("unwritten", *SEEN)),
    _compiled("last_tile_skipped", "the last block does nothing", declared("unwritten", *SEEN)),
    _compiled("nothing_stored", "the kernel runs and writes nothing", declared("unwritten", *SEEN)),
    _compiled("one_element_off", "one element a launch is wrong", declared("1 of ", *SEEN)),
    _compiled(
        "narrow_unrounded",
        "the loads narrower than 16 bytes have an arithmetic of their own",
        declared("contracted into the following add", *SEEN, certificate="lanes"),
        cell="B2S131D132",
    ),
    _compiled(
        "rows_downcast",
        "fp32 rows are rounded to x's type before they are used",
        declared("rounded to bfloat16 before", *SEEN),
        kernel="modulate_fp32",
        cell="mixed",
    ),
    _compiled(
        "norm_unrounded",
        "the norm's result stays in fp32",
        declared("is not rounded", *SEEN),
        kernel="rms_norm_modulate",
    ),
    _compiled(
        "epsilon_ignored",
        "eps is taken as 0",
        declared("the witness differs", Detector.FIRST_SIGHT, matrix="`eps` is taken as 0", certificate="rstd"),
        kernel="rms_norm_modulate",
        cell="small",
    ),
    _compiled(
        "mean_subtracted",
        "LayerNorm's variance instead of the mean square",
        declared("elements", *SEEN, certificate="rstd"),
        kernel="rms_norm_modulate",
    ),
    _compiled(
        "reduction_reordered",
        "the same sum, the shuffles the other way round",
        declared("the witness differs", *SEEN, Detector.WITNESS, certificate="rstd"),
        kernel="rms_norm_modulate",
    ),
    _compiled(
        "does_not_compile",
        "the compiler refuses the source",
        declared("did not compile", Detector.FIRST_SIGHT, matrix="no launch"),
    ),
    _compiled(
        "aborts_when_loaded",
        "the library ends the process that loads it",
        declared("killed the process that first loaded it", Detector.FIRST_SIGHT, matrix="no launch"),
    ),
)
"""Every compiled saboteur. ``does_not_compile`` names no fault of the source's list, which is a compiler's error."""
