"""What one signature of a kernel leads to: one template, and of each branch what first sight has seen run.

A host build tells what it would launch, and launches nothing: the choice is the GPU's, line for line.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from fusiongate.gate.fusion import Fusion
from fusiongate.gate.probes import redrawn, sharing
from fusiongate.gate.signatures import signature_of
from fusiongate.jit import Target, library
from fusiongate.kernels import FUSIONS
from fusiongate.kernels.launching import Launcher

HOST = Target.of(torch.device("cpu"))
KERNELS = [op.host for op in FUSIONS if op.host is not None and isinstance(op.host.fused, Launcher)]
BUCKETS = {"a few rows": range(1, 8), "some": range(28, 36), "a bucket": range(64, 128)}
TEMPLATE = re.compile(r"Modulate<(?P<type>.*), (?P<width>\d+), (?P<part>\d+)>")


def launcher(op: Fusion) -> Launcher:
    assert isinstance(op.fused, Launcher)
    return op.fused


@functools.cache
def telling(op: Fusion) -> Any:
    """The library of a host build that tells its launches."""
    source = launcher(op).entry.source.with_defines("FUSIONGATE_TOLD_LAUNCHES")
    return library(dataclasses.replace(source, quick=True), HOST)


def told(op: Fusion, args: tuple[Any, ...]) -> str:
    """The template that a call would launch, with its types."""
    module, fused = telling(op), launcher(op)
    module[fused.entry.name](torch.empty_like(args[0]), *fused.operands(*args))
    launches = module["take_told_launches"]().splitlines()
    assert 1 == len(launches), launches
    return str(launches[0])


def operands(op: Fusion, batch: int, tokens: int, columns: int, dtype: torch.dtype, offset: int) -> tuple[Any, ...]:
    """x (B, S, D) and strided rows (B, 1, D) so many elements off a cache line; then what the op takes more."""
    x = torch.empty(batch, tokens, columns, dtype=dtype)
    table = torch.empty(batch * 6 * columns + 8, dtype=dtype)[offset : offset + batch * 6 * columns]
    rows = table.view(batch, 1, 6, columns)
    names = [name for name in op.spec.names if name not in ("x", "scale", "shift", "residual", "update", "gate")]
    more = {"eps": 1e-6, "weight": None, "bias": None}
    given = {"x": x, "residual": x, "update": x, "scale": rows[:, :, 1], "shift": rows[:, :, 2], "gate": rows[:, :, 1]}
    return tuple(
        given[name] if name in given else more[name] for name in op.spec.names if name in given or name in names
    )


def calls(op: Fusion, tokens: range) -> Iterator[tuple[Any, ...]]:
    """Calls that differ in what may choose a launch, those that the kernel takes."""
    widths, dtypes = (4, 7, 132, 1536), (torch.bfloat16, torch.float32)
    for columns, dtype, batch, offset, rows in itertools.product(widths, dtypes, (1, 2, 3), (0, 4), tokens):
        args = operands(op, batch, rows, columns, dtype, offset)
        if op.declines(*args) is None:
            yield args


def branches(template: str, args: tuple[Any, ...]) -> set[str]:
    """The branches that a launch of a flat line takes: of a vector, of a part of one, and past the end of the line."""
    found = TEMPLATE.search(template)
    if found is None:
        # A norm takes one block a row, whatever the number of rows.
        return {"a row"}
    x: Tensor = args[0]
    width, part = int(found["width"]), int(found["part"])
    in_flight = {16: 1, 8: 2}.get(width * x.element_size(), 4)
    taken = {"a vector"} if x.numel() >= width else set()
    taken |= {"past the end"} if x.numel() % (128 * in_flight * width) else set()
    return taken | ({"a part of a vector"} if x.numel() // part % (width // part) else set())


@pytest.mark.parametrize("rows", BUCKETS)
@pytest.mark.parametrize("op", KERNELS, ids=lambda op: op.name)
def test_a_signature_leads_to_one_template(op: Fusion, rows: str) -> None:
    templates: dict[Any, set[str]] = defaultdict(set)
    for args in calls(op, BUCKETS[rows]):
        templates[signature_of(args, op.spec.signature)].add(told(op, args))

    assert len(templates) > 3
    assert [] == [found for found in templates.values() if len(found) != 1]


@pytest.mark.parametrize("op", KERNELS, ids=lambda op: op.name)
def test_first_sight_runs_every_branch_that_its_signature_leads_to(op: Fusion) -> None:
    """Whichever call of the signature comes first."""
    members: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    for args in calls(op, BUCKETS["a bucket"]):
        members[signature_of(args, op.spec.signature)].append(args)

    for alike in members.values():
        taken = set[str]().union(*(branches(told(op, args), args) for args in alike))
        for live in (alike[0], alike[len(alike) // 2], alike[-1]):
            layouts = sharing(op.spec.signature, live, live[0]) if op.spec.signature is not None else []
            probes = [redrawn(live, Random(0), layout).args for layout in layouts]
            tried = [args for args in (live, *probes) if op.declines(*args) is None]
            missed = taken.difference(*(branches(told(op, args), args) for args in tried))
            assert not missed, f"{live[0].shape}: {missed} of {[tuple(args[0].shape) for args in alike]}"
