import pytest
import torch
import torch.nn.functional as F

import fusiongate as fg


def chain(x, residual, weight, eps):
    residual.add_(x)
    return F.rms_norm(residual, weight.shape, weight, eps)


def kernel(x, residual, weight, eps):
    torch.add(residual, x, out=residual)
    return F.rms_norm(residual, weight.shape, weight, eps)


op = fg.Fusion("add_rms_norm", reference=chain, fused=kernel, mutates_args=("residual",))
INPUTS = {"x": "B S D", "residual": "B S D", "weight": "D", "eps": 1e-6}


@pytest.mark.fusion_matrix(op, inputs=INPUTS, sizes=[{"B": 2, "S": 33, "D": 64}], pairs=False)
def test_add_rms_norm(fusion_case):
    fusion_case.check()
