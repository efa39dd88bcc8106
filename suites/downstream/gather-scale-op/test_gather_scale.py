import pytest
import torch

import fusiongate as fg


def kernel(table, index, factor):
    return table.index_select(0, index.flatten()).unflatten(0, index.shape).mul(factor)


op = fg.Fusion("gather_scale", reference=lambda table, index, factor: table[index] * factor, fused=kernel)
INPUTS = {"table": "V D", "index": fg.operand("B S", dtype=torch.int64, high="V"), "factor": 0.3}


@pytest.mark.fusion_matrix(op, inputs=INPUTS, sizes=[{"V": 50, "B": 2, "S": 33, "D": 64}], pairs=False)
def test_gather_scale(fusion_case):
    fusion_case.check()
