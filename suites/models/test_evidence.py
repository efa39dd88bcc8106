"""Evidence from GPUs that this machine may not have: it holds for the kernels that it was made from."""

from __future__ import annotations

import pytest

from .evidence import stale_records


def test_evidence_was_made_from_the_kernels_in_the_tree(pytestconfig: pytest.Config) -> None:
    """A kernel's source may have changed since somebody ran it on a GPU."""
    stale = stale_records(pytestconfig.rootpath / "snapshots")

    assert not stale, (
        "these records were made from other kernel sources: " + ", ".join(stale) + "; renew them on a machine with the "
        "GPU: python -m fusiongate.suites.models.evidence"
    )
