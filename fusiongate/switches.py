"""The settings of torch and of the process that change arithmetic."""

from __future__ import annotations

import os
import sys
from typing import Any

__all__ = ["VARIABLES", "switches"]

VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDNN_CONV_WSCAP_DBG",
    "DISABLE_ADDMM_CUDA_LT",
    "FUSIONGATE_DISABLE",
    "MIOPEN_FIND_MODE",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "ROCBLAS_INTERNAL_FP16_ALT_IMPL",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_BLAS_PREFER_HIPBLASLT",
)
"""Environment variables that move bits."""


def switches() -> dict[str, str]:
    """What is set now: torch's settings as ``on``, ``off`` or their own word, and the variables that are set."""
    import torch

    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    settings = {
        # Torch refuses to read the older names of a precision once the newer ones have been written.
        "cuda.matmul.fp32_precision": matmul.fp32_precision,
        "cudnn.conv.fp32_precision": cudnn.conv.fp32_precision,
        "cudnn.rnn.fp32_precision": cudnn.rnn.fp32_precision,
        "cuda.matmul.bf16_reduced_precision": matmul.allow_bf16_reduced_precision_reduction,
        "cuda.matmul.fp16_reduced_precision": matmul.allow_fp16_reduced_precision_reduction,
        "cudnn.benchmark": cudnn.benchmark,
        "cudnn.deterministic": cudnn.deterministic,
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        # Torch can set this mode but not tell it; a halved smallest normal number shows it.
        "flush_denormal": sys.float_info.min / 2 == 0,
    }
    words = {name: _word(value) for name, value in settings.items()}
    return words | {name: os.environ[name] for name in VARIABLES if name in os.environ}


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
