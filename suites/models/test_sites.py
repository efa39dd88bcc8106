"""Every site of every family: mounted, or listed with its reason; and each of them counts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import fusiongate as fg
from fusiongate import presets

from .atomics import atomic_pooling
from .catalogue import ALL

if TYPE_CHECKING:
    from fusiongate.presets import Preset

_MISSING = presets.missing_for(ALL[-1], "tiny", torch.device("cpu"))

pytestmark = pytest.mark.skipif(_MISSING is not None, reason=f"not run: {_MISSING}")

NOT_FUSED = {
    ("ideogram4", "transformer_ideogram4.py"): "no op of the kind scale was given",
    ("minimax-h3", "transformer_minimax_h3.py"): "reference (rank)",
}
"""Why a family's sites take the reference: Ideogram 4 has no shift, and MiniMax-H3 modulates row by row."""

SITES = {
    "atomic-pooling": 1,
    "ernie-image": 3,
    "flux1": 5,
    "flux2": 6,
    "ideogram4": 3,
    "ltx2": 14,
    "ltx23-one-stage": 14,
    "ltx23-two-stage": 14,
    "minimax-h3": 3,
    "qwen-image": 2,
    "sana": 3,
    "wan": 3,
}
"""The lines of source with a modulation in each family; gated residuals are listed, and have no kernel."""

UNUSED = {"ltx2": 4}
"""Sites that a configuration leaves out: LTX-2 does not modulate its text."""


def repeats(preset: Preset, device: torch.device) -> bool:
    """Whether two runs give the same bits: on a GPU, atomic additions do not."""
    return preset is not atomic_pooling or device.type == "cpu"


@pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)
def test_every_site_is_fused_or_says_why_not(preset: Preset, fusion_device: torch.device) -> None:
    run = presets.run_preset(preset, device=fusion_device)

    lines: dict[str, list[Any]] = defaultdict(list)
    for site in run.fused.sites:
        if site.kind == "gated_residual":
            assert site.reason is not None
            assert re.search("no op of the kind gated_residual was given|bind that to a name before", site.reason)
            continue
        lines[site.name.partition(":")[2]].append(site)
    idle = 0
    for line, sites in lines.items():
        for site in sites:
            known = NOT_FUSED.get((preset.name, line.partition(":")[0]))
            if site.calls.get("fused (verified)"):
                assert site.reason is None
                # The first step is first sight; a second stage has shapes of its own.
                assert site.calls["fused (verified)"] >= site.calls["reference (first-sight)"]
                assert {"fused (verified)", "reference (first-sight)"} == site.calls.keys()
            elif site.calls or site.reason:
                assert known in {site.reason, *site.calls}, site
        idle += not any(site.calls or site.reason for site in sites)
    assert SITES[preset.name] == len(lines)
    assert UNUSED.get(preset.name, 0) == idle
    if repeats(preset, fusion_device):
        assert presets.first_difference(run.record.reference, run.record.fused) is None
        assert [] == run.record.faults()


@pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)
def test_another_seed_gives_another_digest_of_every_tensor(preset: Preset, fusion_device: torch.device) -> None:
    one, other = (presets.run_arm(preset, "reference", seed=seed, device=fusion_device).steps for seed in (0, 1))

    found = presets.first_difference(one, other)
    assert found is not None
    assert found.total == found.differing


def nudged(gate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A gate whose result is one bf16 ULP off, everywhere; where it is in fp32, the model rounds it to bf16 next."""

    def faulty(*operands: Any) -> Tensor:
        result = gate(*operands)
        width = result.element_size()
        bits = result.view({2: torch.int16, 4: torch.int32}[width])
        return (bits + (1 << 8 * (width - 2))).view(result.dtype)

    return faulty


def digested(preset: Preset, device: torch.device, fault: int | None) -> Iterator[dict[str, str]]:
    """Digests of a run's steps; a fault is planted at the site of that number once the first step is over."""
    run = presets.Run(size="tiny", seed=0, device=device, arm="fused", ops=presets.usual_ops(device))
    for number, (_, tensors) in enumerate(presets.steps_of(preset, run)):
        if number == 0 and fault is not None:
            site = [site for report in run.reports for site in report.mounted][fault]
            assert site.place is not None
            site.place.call = nudged(site.place.call)
        yield {name: fg.md5(tensor) for name, tensor in tensors.items()}


FUSED = [preset for preset in ALL if preset.name not in {family for family, _ in NOT_FUSED}]


@pytest.mark.parametrize("preset", FUSED, ids=lambda preset: preset.name)
def test_one_ulp_at_any_single_site_changes_the_digest(preset: Preset, fusion_device: torch.device) -> None:
    """Each line of source once, in the first module that runs it."""
    if not repeats(preset, fusion_device):
        pytest.skip("not run: its digests change without a fault too")
    run = presets.run_preset(preset, device=fusion_device)
    mounted = [site for site in run.fused.sites if site.reason is None]
    firsts: dict[str, int] = {}
    for number, site in enumerate(mounted):
        if site.calls:
            firsts.setdefault(site.name.partition(":")[2], number)
    right = list(digested(preset, fusion_device, None))

    for line, number in firsts.items():
        changed = any(one != other for one, other in zip(right, digested(preset, fusion_device, number), strict=True))
        assert changed, line
