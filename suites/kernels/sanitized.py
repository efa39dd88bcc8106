"""Launches every kernel on a small matrix of shapes, dtypes and layouts, for a tool that watches: nothing is compared.

``test_sanitizer.py`` runs it under compute-sanitizer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusiongate import kernels

__all__ = ["main"]

SHAPES = ((1, 1, 8), (2, 5, 132), (1, 17, 130), (2, 33, 512), (3, 65, 516), (2, 9, 4100))
"""Vectors of each width, tails in both directions, several blocks."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def operands(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x, and two rows that are strided views of one table; made on the host, so that only our kernels are watched."""
    batch, _, columns = shape
    x = torch.randn(shape).to(dtype).to(device)
    table = torch.randn(batch, 1, 3, columns).to(dtype).to(device)
    return x, table[:, :, 0], table[:, :, 2]


def main() -> None:
    """Launch them all."""
    device = torch.device("cuda")
    launches = 0
    for shape in SHAPES:
        for dtype in DTYPES:
            rows = operands(shape, dtype, device)
            weight = torch.ones(shape[2]).to(dtype).to(device)
            calls = (
                (kernels.modulate, rows),
                (kernels.modulate_fp32, rows),
                (kernels.rms_norm_modulate, (*rows, 1e-6)),
                (kernels.rms_norm_modulate, (*rows, 1e-6, weight)),
                (kernels.composite_rms_norm_modulate, (*rows, 1e-6)),
                (kernels.composite_rms_norm_modulate, (*rows, 1e-6, weight)),
                (kernels.rms_norm_modulate_high, (*rows, 1e-6)),
            )
            for fusion, args in calls:
                if fusion.declines(*args) is None:
                    fusion.fused(*args)
                    launches += 1
    torch.cuda.synchronize(device)
    if launches < len(SHAPES) * len(DTYPES):
        raise SystemExit(f"only {launches} kernels were launched: expected at least one for each shape and dtype")


if __name__ == "__main__":
    main()
