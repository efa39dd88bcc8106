import pytest

import fusiongate as fg


def kernel(residual, update, gate):
    return residual.add(update.mul(gate))


op = fg.Fusion("residual_gate", reference=lambda residual, update, gate: residual + update * gate, fused=kernel)
INPUTS = {"residual": "B S D", "update": "B S D", "gate": "B 1 D"}


@pytest.mark.fusion_matrix(op, inputs=INPUTS, sizes=[{"B": 2, "S": 33, "D": 64}])
def test_residual_gate(fusion_case):
    fusion_case.check()
