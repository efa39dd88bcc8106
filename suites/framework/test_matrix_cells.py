"""A cell's id is what away from the base it is; a result is basic types."""

from __future__ import annotations

import json

import pytest

from fusiongate.errors import UsageError
from fusiongate.matrix.cells import Cell, CellResult, Selected

BASE = Cell("modulate", "row-broadcast", "bf16", "B2S33D512", base_size="B2S33D512")


def test_the_base_cell_is_called_base() -> None:
    assert ("base", ()) == (BASE.id, BASE.away)


def test_an_id_names_what_is_away_from_the_base_in_the_order_of_the_axes() -> None:
    cell = Cell("modulate", "permuted", "fp16", "B1S7D4100", mode="grad", base_size="B2S33D512")
    assert "permuted-fp16-B1S7D4100-grad" == cell.id


def test_a_size_that_is_no_base_is_always_named() -> None:
    assert "B2S33D512" == Cell("modulate", "row-broadcast", "bf16", "B2S33D512").id


def test_a_result_survives_json() -> None:
    result = CellResult(BASE, "fused", "verified", launches=7, checks=3, seconds=0.25)
    row = json.loads(json.dumps(result.to_json()))
    assert {
        "id": "base",
        "subject": "modulate",
        "layout": "row-broadcast",
        "dtype": "bf16",
        "size": "B2S33D512",
        "device": "current",
        "mode": "eager",
        "data": "normal",
        "lifecycle": "verified",
        "outcome": "fused",
        "reason": "verified",
        "launches": 7,
        "checks": 3,
        "seconds": 0.25,
    } == row


def test_a_selected_device_becomes_torchs() -> None:
    assert ["cpu", "cuda:1"] == [str(Selected("host").torch_device), str(Selected("cuda", 1).torch_device)]


@pytest.mark.parametrize("kind, index", [("host", 0), ("cuda", None)])
def test_a_selected_device_has_an_index_exactly_if_it_is_a_gpu(kind: str, index: int | None) -> None:
    with pytest.raises(UsageError, match="the host, or cuda with an index"):
        Selected(kind, index)  # type: ignore[arg-type]
