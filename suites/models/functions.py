"""A preset of functions: what torch and NumPy leave to libraries that pick their code by the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

import fusiongate as fg

if TYPE_CHECKING:
    from torch import Tensor

    from fusiongate.presets import Run, Steps

__all__ = ["functions"]

_ELEMENTWISE = (
    *("exp", "exp2", "expm1", "sin", "cos", "tan", "tanh", "sinh", "cosh", "asinh", "atan", "erf", "sigmoid"),
    *("lgamma", "digamma", "i0"),
)
_POSITIVE = ("log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal")
_BOUNDED = ("asin", "acos", "erfinv")
_ACTIVATIONS = ("gelu", "silu", "softplus", "mish", "elu", "selu", "logsigmoid")
_NUMPY = ("exp", "exp2", "expm1", "log1p", "sin", "cos", "tanh", "arctan", "cbrt", "sinh")


@fg.preset("functions", fused=False)
def functions(run: Run) -> Steps:
    """Functions, reductions and products in every dtype; no kernel of ours is in it."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = run.normal("x", 256, 64, dtype=dtype) * 8
        name = str(dtype).removeprefix("torch.")
        yield (
            f"{name}: functions",
            {
                **{f: getattr(torch, f)(x) for f in _ELEMENTWISE},
                **{f: getattr(torch, f)(x.abs() + 0.01) for f in _POSITIVE},
                **{f: getattr(torch, f)(x / 32) for f in _BOUNDED},
                **{f: getattr(F, f)(x) for f in _ACTIVATIONS},
                "gelu by tanh": F.gelu(x, approximate="tanh"),
                "pow": (x.abs() + 0.01).pow(x / 8),
                "exp of every second": x[:, ::2].exp(),
            },
        )
        yield f"{name}: rows", _rows(x)
    for number, dtype in enumerate((torch.float32, torch.float64)):
        array = run.normal("array", 4096, dtype=dtype).numpy(force=True)
        tensors = {f: torch.from_numpy(getattr(np, f)(np.abs(array))) for f in _NUMPY}
        square = array.reshape(64, 64)
        yield f"NumPy {number}", {**tensors, "product": torch.from_numpy(square @ square)}


def _rows(x: Tensor) -> dict[str, Tensor]:
    heads, image = x.view(1, 8, 32, 64), x.view(1, 8, 32, 64)
    return {
        "softmax": x.softmax(-1),
        "log_softmax": x.log_softmax(-1),
        "layer_norm": F.layer_norm(x, (64,)),
        "rms_norm": F.rms_norm(x, (64,)),
        "group_norm": F.group_norm(image, 4),
        "sum": x.sum(0),
        "var": x.var(1),
        "cumsum": x.cumsum(0),
        "product": x @ x.T,
        "linear": F.linear(x, x[:32], x[0, :32]),
        "batched product": heads[0] @ heads[0].transpose(1, 2),
        "attention": F.scaled_dot_product_attention(heads, heads, heads),
        "convolution": F.conv2d(image, x[:9].view(-1)[: 8 * 8 * 9].view(8, 8, 3, 3)),
        "interpolate": F.interpolate(image, scale_factor=2, mode="bilinear"),
        "fft": torch.view_as_real(torch.fft.rfft(x.double())),
        "randn": torch.randn(64, generator=torch.Generator().manual_seed(0), dtype=x.dtype),
    }
