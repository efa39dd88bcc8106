import pytest

import fusiongate as fg


def reference(x, scale, shift):
    return x * (1 + scale) + shift


def kernel(x, scale, shift):
    return x.mul(1 + scale).add(shift)


@pytest.mark.fusion_matrix(fg.Fusion("adaln", reference=reference, fused=kernel), sizes=[{"B": 2, "S": 33, "D": 64}])
def test_adaln(fusion_case):
    fusion_case.check()
