import pytest
import torch.nn.functional as F

import fusiongate as fg


def kernel(x, y):
    return F.silu(x).mul(y)


op = fg.Fusion("silu_mul", reference=lambda x, y: F.silu(x) * y, fused=kernel)


@pytest.mark.fusion_matrix(op, inputs={"x": "B S D", "y": "B S D"}, sizes=[{"B": 2, "S": 33, "D": 64}])
def test_silu_mul(fusion_case):
    fusion_case.check()
