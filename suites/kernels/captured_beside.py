"""A first sight in one thread while another captures in torch's global mode: run as a program, by ``test_gpu.py``.

It can break the capture, which is what ``warm_up`` is for; but no kernel is refused for it, and no device is called
unusable. A process of its own, because a broken capture leaves torch's random state behind as if it went on.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from fusiongate import State, kernels, warm_up

__all__ = ["main"]


def operands(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """x of (2, 33, 512), scale and shift of (2, 1, 512), bf16."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x, scale, shift = (
        torch.randn(2, rows, 512, generator=generator, device="cuda").to(torch.bfloat16) for rows in (33, 1, 1)
    )
    return x, scale, shift


def main() -> None:
    """Exit with an AssertionError where a kernel is blamed."""
    with kernels.modulate.isolated() as op, kernels.modulate_fp32.isolated() as cold:
        args, others = operands(0), operands(1)
        warm_up(op, args)
        broken: list[BaseException] = []

        def first_sight() -> None:
            try:
                cold(*others)
            except RuntimeError as error:
                broken.append(error)

        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="global"):
                op(*args)
                thread = threading.Thread(target=first_sight)
                thread.start()
                thread.join()
        except RuntimeError as error:
            broken.append(error)
        torch.cuda.synchronize()

        assert all("captur" in str(error) for error in broken), broken
        assert State.REFUSED not in (op.standing(*args), cold.standing(*others)), cold.gate.events
        cold(*others)
        result, expected = cold(*others), cold.reference(*others)
        assert torch.equal(result.view(torch.int16), expected.view(torch.int16))
        assert State.VERIFIED == cold.standing(*others)


if __name__ == "__main__":
    main()
