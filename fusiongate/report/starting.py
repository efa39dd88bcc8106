"""The first files of a repository that gates its kernels: a matrix, a preset, and a nightly workflow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fusiongate.errors import UsageError
from fusiongate.io import write_text

__all__ = ["started"]

_TESTS: Final = '''"""Our fused kernels against the eager chains that they replace."""

import pytest
import torch.nn.functional as F

import fusiongate as fg


def kernel(x, y):  # put your launcher here: the same arguments, returns a new tensor
    return F.silu(x).mul(y)


op = fg.Fusion("silu_mul", reference=lambda x, y: F.silu(x) * y, fused=kernel)


@pytest.mark.fusion_matrix(op, inputs={"x": "B S D", "y": "B S D"}, sizes=[{"B": 2, "S": 33, "D": 64}])
def test_silu_mul(fusion_case):
    fusion_case.check()


@fg.preset("first-model")
def first_model(run):
    call = op if run.arm == "fused" else op.reference  # put your model here, with its kernels mounted in one arm
    x = run.normal("x", 2, 64, 512)
    for step in range(3):
        x = call(x, run.normal("y", 2, 64, 512))
        yield f"step {step}", {"x": x}


def test_digests(md5_snapshot):  # record with pytest --snapshot-update, and commit snapshots/
    md5_snapshot.check(first_model)
'''

_NIGHTLY: Final = """name: nightly
on:
  schedule: [{cron: "17 3 * * *"}]
  workflow_dispatch:
permissions:
  contents: read
jobs:
  kernels:
    runs-on: ubuntu-latest # a runner with a GPU of yours: its cells are not run here
    timeout-minutes: 60
    steps:
      - uses: actions/checkout@v5
        with: {persist-credentials: false}
      - uses: actions/setup-python@v6
        with: {python-version: "3.12"}
      - run: python -m pip install path/to/fusiongate pytest-xdist # and what your kernels need
      - run: python -m pytest -n auto --fusiongate-ledger=ledger.jsonl
      - run: fusiongate report ledger.jsonl
        if: always()
      - uses: actions/upload-artifact@v5
        if: always()
        with:
          name: fusiongate
          path: |
            ledger.jsonl
            fusiongate-report.html
"""

FILES: Final = {"tests/test_fused_kernels.py": _TESTS, ".github/workflows/fusiongate-nightly.yml": _NIGHTLY}


def started(folder: Path) -> Iterator[Path]:
    """Write the first files below a folder, each given when it is there.

    Raises
    ------
    UsageError
        One of them is there already; nothing is written then.
    OSError
        It cannot be written.
    """
    standing = [name for name in FILES if (folder / name).exists()]
    if standing:
        raise UsageError(
            f"{folder / standing[0]} is there already, and nothing was written: move it, or start elsewhere"
        )
    for name, text in FILES.items():
        write_text(folder / name, text)
        yield folder / name
