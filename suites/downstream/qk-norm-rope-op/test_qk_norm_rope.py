import pytest
import torch
import torch.nn.functional as F

import fusiongate as fg


def rope(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def chain(q, k, cos, sin, eps):
    return tuple(rope(F.rms_norm(x, x.shape[-1:], eps=eps), cos, sin) for x in (q, k))


def kernel(q, k, cos, sin, eps):
    normed = (F.rms_norm(x, x.shape[-1:], eps=eps) for x in (q, k))
    return tuple(x.mul(cos).add(torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1).mul(sin)) for x in normed)


op = fg.Fusion("qk_norm_rope", reference=chain, fused=kernel)
INPUTS = {"q": "B S D", "k": "B S D", "cos": "S D", "sin": "S D", "eps": 1e-6}


@pytest.mark.fusion_matrix(op, inputs=INPUTS, sizes=[{"B": 2, "S": 33, "D": 64}], pairs=False)
def test_qk_norm_rope(fusion_case):
    fusion_case.check()
